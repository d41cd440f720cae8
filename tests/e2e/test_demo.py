"""`extproc demo`: it ends well, shows what it promises and leaves no process behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import sys
from pathlib import Path

import pytest

from tests.e2e import installation

ROOT = installation.SHIPPED.parent


def session_of(leader):
    """Processes of a session that are not zombies."""
    result = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == leader and fields[0] != "Z":
            result.append(int(stat.parent.name))
    return result


async def start(folder, *words, stdout=asyncio.subprocess.PIPE):
    """Start the demo as the leader of a session of its own."""
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "extproc", *(words or ["demo"])),
        cwd=ROOT,
        env={**os.environ, "PYTHONUNBUFFERED": "1", "TMPDIR": str(folder)},
        stdout=stdout,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
    )


@contextlib.contextmanager
def ended(pid):
    """An awaitable for the end of a process that is not our child."""
    loop, over = asyncio.get_running_loop(), asyncio.Event()
    watched = os.pidfd_open(pid)

    def end():
        loop.remove_reader(watched)  # it stays readable
        over.set()

    loop.add_reader(watched, end)
    try:
        yield over
    finally:
        loop.remove_reader(watched)
        os.close(watched)


@pytest.mark.parametrize("command", ["demo", "demo-scale"])
@pytest.mark.parametrize(("how", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
async def test_an_interrupted_demo_has_the_status_of_its_signal(tmp_path, command, how, status):
    """A script does not take it for one that showed its result."""
    demo = await start(tmp_path, command)
    assert await demo.stdout.readline()  # which comes after the handlers of signals
    demo.send_signal(how)
    message, _ = await demo.communicate()
    assert demo.returncode == status, message.decode()
    assert b"Traceback" not in message
    assert session_of(demo.pid) == []


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.slow
async def test_a_demo_that_stays_ends_well(tmp_path, how):
    """Ctrl-C is the end that it names itself; a child that ends before is reported."""
    demo = await start(tmp_path, "demo", "--keep", "--conversations", "1")
    async for line in demo.stdout:
        if b"Running until Ctrl-C" in line:
            break
    (envoy, *_) = [
        pid
        for pid in session_of(demo.pid)
        if b"--use-dynamic-base-id" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    os.kill(envoy, signal.SIGKILL)
    async for line in demo.stdout:
        if b"envoy ended with SIGKILL" in line:
            break
    demo.send_signal(how)
    message, _ = await demo.communicate()
    assert demo.returncode == 0, message.decode()
    assert session_of(demo.pid) == []


@pytest.mark.slow
async def test_the_demo(tmp_path):
    """It exits 0, hits the prefix cache 1.5 times as often as round robin, and is gone."""
    demo = await start(tmp_path)
    message, _ = await demo.communicate()
    text = message.decode()
    assert demo.returncode == 0, text
    rows = dict(re.findall(r"^(\S.*?)\s{2,}(\S.*)$", text, re.MULTILINE))
    assert rows["failed"].split() == ["0", "0"]
    round_robin, default = rows["prefix cache hit ratio (engines)"].replace("%", "").split()
    assert float(default) >= 1.5 * float(round_robin)
    cached, prompt = re.search(r"One decision: (\d+) of (\d+) prompt tokens", text).groups()
    assert 0 < int(cached) <= int(prompt)
    assert "demo --keep" in text
    assert "curl" not in text  # what is stopped answers nothing
    assert session_of(demo.pid) == []


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
@pytest.mark.slow
async def test_the_demo_is_stopped(tmp_path, how):
    """Stopped in the middle, in any way, it takes its children along."""
    ours, theirs = os.openpty()  # on a terminal it shows its progress
    demo = await start(tmp_path, stdout=theirs)
    os.close(theirs)
    loop, read_on, shown = asyncio.get_running_loop(), asyncio.Event(), bytearray()

    def read():
        try:
            shown.extend(os.read(ours, 4096))
        except OSError:  # the other end of the terminal is closed
            read_on.set()
        if b"/200" in shown:
            read_on.set()

    loop.add_reader(ours, read)
    await read_on.wait()
    loop.remove_reader(ours)
    assert b"/200" in shown, shown.decode("utf-8", "replace")
    with contextlib.ExitStack() as watches:
        children = session_of(demo.pid)
        assert len(children) > 5
        ends = [watches.enter_context(ended(pid)) for pid in children]
        demo.send_signal(how)
        statuses = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGKILL: -signal.SIGKILL}
        assert await demo.wait() == statuses[how]
        for end in ends:
            await end.wait()
    os.close(ours)
    assert session_of(demo.pid) == []
