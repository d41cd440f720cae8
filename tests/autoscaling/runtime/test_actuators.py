from __future__ import annotations

import asyncio
import contextlib
import pkgutil
import sys

import msgspec
import pytest

from extproc.autoscaling.interface import ScalingDecision, ScalingReason
from extproc.autoscaling.runtime import actuator
from extproc.autoscaling.runtime.actuator import ActuatorError, AdvisoryActuator, ExecActuator
from extproc.config.autoscaling import ACTUATORS, ScalingSection, actuator_type
from tests.support import serving

#: Values of the fields that select an actuator.
SETTINGS = {
    "target": {"target": {"name": "engines"}},
    "launch": {"launch": {"command": ["engine"]}},
    "exec": {"exec": ["scale", "{replicas}"]},
    "": {},
}


@pytest.mark.parametrize("row", ACTUATORS, ids=lambda row: row.key or "advisory")
def test_every_actuator_is_selected_by_its_setting_and_has_a_class(row):
    """Each key selects its row, and the class of the row has the members of the protocol."""
    section = msgspec.convert(SETTINGS[row.key], ScalingSection)
    assert actuator_type(section) is row
    assert row.describe(section)
    kind = pkgutil.resolve_name(row.implementation)
    members = {name for name in vars(actuator.Actuator) if not name.startswith("_")}
    assert members <= {*dir(kind), "scales"}
    assert isinstance(kind.scales, bool)


UP = ScalingDecision(3, ScalingReason.UP)


def record_processes(monkeypatch):
    """Processes that are started from now on."""
    started = []

    class RecordedProcess(actuator.ChildProcess):
        def connection_made(self, transport):
            super().connection_made(transport)
            started.append(self)

    monkeypatch.setattr(actuator, "ChildProcess", RecordedProcess)
    return started


async def test_the_program_receives_the_number_of_replicas(tmp_path, monkeypatch):
    """It is run with the number in its place, which is then what is asked for."""
    started = record_processes(monkeypatch)
    note = tmp_path / "note"
    hook = ExecActuator(["sh", "-c", f"echo replicas={{replicas}} > {note}"], timeout_s=300.0)
    assert hook.can_scale
    assert await hook.current_replicas(1) == 1
    assert await hook.scale(UP, 1) is None
    assert note.read_text() == "replicas=3\n"
    await started[0].is_read.wait()
    assert await hook.current_replicas(1) == 3


async def test_the_next_leader_keeps_the_requested_replicas():
    """Engines that are still starting were requested, though none is visible."""
    for subject in (ExecActuator(["true", "{replicas}"], timeout_s=300.0), AdvisoryActuator()):
        subject.restore(3)
        assert await subject.current_replicas(1) == 3


async def test_a_program_that_fails_changes_nothing():
    """Its status and last output are logged, and the number is requested again."""
    hook = ExecActuator(["sh", "-c", "echo no quota {replicas}; exit 4"], timeout_s=300.0)
    failed = await hook.scale(UP, 1)
    assert failed == ActuatorError("sh ended with 4: no quota 3")
    assert await hook.current_replicas(1) == 1


async def test_a_program_that_hangs_is_ended(monkeypatch):
    """After its time."""
    started = record_processes(monkeypatch)
    wait = "import signal; signal.pause()  # {replicas}"
    failed = await ExecActuator([sys.executable, "-c", wait], timeout_s=0.2).scale(UP, 1)
    assert "did not end within 0.2 s" in failed.message
    await started[0].is_read.wait()


#: A process that connects to a socket, and prints a lot once it gets an answer there.
CHILD = """
import socket, sys
with socket.socket(socket.AF_UNIX) as line:
    line.connect(sys.argv[1])
    if line.recv(1):
        print("x" * 1_000_000, flush=True)
        line.send(b"printed")
"""


@contextlib.asynccontextmanager
async def child_of_a_program(directory, script):
    """Actuator whose program runs `script` with the child as `"$@"`; the connections of children."""
    connections = asyncio.Queue()
    path = str(directory / "line")
    server = await asyncio.start_unix_server(
        lambda *streams: connections.put_nowait(streams), path=path
    )
    async with server:
        command = ["sh", "-c", script, "{replicas}", sys.executable, "-c", CHILD, path]
        yield ExecActuator(command, timeout_s=300.0), connections


async def test_a_program_may_leave_a_process_in_the_background(tmp_path, monkeypatch):
    """The change succeeds as soon as the program ends, and the process may go on to print."""
    started = record_processes(monkeypatch)
    async with asyncio.timeout(serving.LIMIT_S), child_of_a_program(tmp_path, '"$@" &') as child:
        hook, connections = child
        assert await hook.scale(UP, 1) is None
        reader, writer = await connections.get()
        writer.write(b"!")
        assert await reader.read() == b"printed"
        writer.close()
        await started[0].is_read.wait()


async def test_a_program_that_hangs_is_ended_with_its_processes(tmp_path, monkeypatch):
    """A shell alone would leave the process for which it waits."""
    started = record_processes(monkeypatch)
    async with asyncio.timeout(serving.LIMIT_S), child_of_a_program(tmp_path, '"$@"; :') as child:
        hook, connections = child
        scaling = asyncio.ensure_future(hook.scale(UP, 1))
        reader, writer = await connections.get()
        scaling.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await scaling
        assert await reader.read() == b""
        writer.close()
        await started[0].is_read.wait()


async def test_a_missing_program_is_reported():
    """With what the system says."""
    failed = await ExecActuator(["/no/such/program", "{replicas}"], timeout_s=300.0).scale(UP, 1)
    assert "No such file" in failed.message


async def test_advisory_actuator_returns_the_requested_replicas():
    """Before the first change it returns the most replicas that were ready at a time."""
    subject = AdvisoryActuator()
    assert [await subject.current_replicas(available) for available in (1, 2, 0)] == [1, 2, 2]
    assert (subject.can_scale, await subject.current_replicas(2)) == (True, 2)
    await subject.scale(UP, 2)
    assert await subject.current_replicas(2) == 3
