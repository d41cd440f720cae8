from __future__ import annotations

import asyncio
import contextlib
import errno
import sys

import aiohttp
import pytest

from extproc.autoscaling.interface import ScalingDecision, ScalingReason
from extproc.autoscaling.runtime import actuator, process_actuator
from tests.support import ext_proc_script, peer, serving
from tests.support.scaling import configured

#: An engine that starts fast: HTTP that answers 200 to everything, on the port it is given.
ENGINE = """
import http.server, sys
class Engine(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_GET(self):
        self.send_response(200); self.send_header("content-length", "0"); self.end_headers()
    def log_message(self, *_): pass
server = http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Engine)
print(f"listening on 127.0.0.1:{server.server_port}", flush=True)
server.serve_forever()
"""

REQUEST = {":method": "POST", ":path": "/v1/completions", "x-request-id": "r"}


@pytest.fixture
def published(monkeypatch):
    """Waits for a fact that the actuator changes, as it publishes its endpoints after each change."""
    publish, happened = process_actuator.ProcessActuator._publish, asyncio.Event()

    def publish_and_notify(engines):
        publish(engines)
        happened.set()

    async def until(holds):
        async with asyncio.timeout(serving.LIMIT_S):
            while not holds():
                happened.clear()
                await happened.wait()

    monkeypatch.setattr(process_actuator.ProcessActuator, "_publish", publish_and_notify)
    return until


@contextlib.asynccontextmanager
async def picker(command, **scaling):
    settings = configured(
        holding={"enabled": True},
        scaling={"launch": {"command": command, "stop_s": 1.0}, "max": 2, **scaling},
    )
    async with serving.running(settings) as running:
        await running.sync()
        yield running


async def pick(running):
    """Route a request, which waits until an endpoint is there."""
    async with running.channel() as channel:
        stream = serving.Stream(channel)
        await stream.say(ext_proc_script.request_headers(REQUEST, ends=True))
        (response,) = await stream.hear()
        stream.call.cancel()
    return dict(response.sets).get(peer.DESTINATION, str(response.status))


async def test_the_first_request_starts_an_engine():
    """It is held at zero, an engine is started, and it goes there once that answers."""
    async with picker([sys.executable, "-c", ENGINE, "{port}"]) as running:
        assert running.picker.pool_registry.synced
        assert not running.picker.pool_registry.pools()[""].members
        address = await pick(running)
        (member,) = running.picker.pool_registry.pools()[""].members
        assert member.endpoint.address == address
        async with (
            aiohttp.ClientSession() as http,
            http.get(f"http://127.0.0.1:{running.ports.pages}/metrics") as page,
        ):
            text = await page.text()
        assert 'extproc_scaling_changes_total{pool="",reason="wake"} 1.0' in text
        assert 'extproc_scaling_replicas{pool="",state="spec"}' in text
    with contextlib.suppress(ConnectionRefusedError):
        await asyncio.open_connection(*address.split(":"))
        raise AssertionError("the engine outlived the picker")


async def test_an_engine_may_print_its_address():
    """Without `{port}` the address is read from its output."""
    async with picker([sys.executable, "-c", ENGINE, "0"]) as running:
        assert (await pick(running)).startswith("127.0.0.1:")


@pytest.mark.parametrize(
    ("printed", "address"),
    [
        ("127.0.0.2:8000", "127.0.0.2:8000"),
        ("0.0.0.0:8000", "127.0.0.9:8000"),
        ("[::]:8000", "127.0.0.9:8000"),
        ("localhost:8000", "127.0.0.9:8000"),
        ("http://0.0.0.0:8000", "127.0.0.9:8000"),
        ("http://[::1]:8000", "[::1]:8000"),
        ("127.0.0.2:0", ""),
        ("127.0.0.2:65536", ""),
        ("127.0.0.2:" + "9" * 5000, ""),
        ("127.0.0.2:000001" + "9" * 5000, ""),
    ],
)
def test_launch_makes_an_address_that_can_be_connected_to(printed, address):
    """Every address and a name stand for the host of the endpoints; a wrong port is none."""
    assert process_actuator.connectable_address(printed, "127.0.0.9") == address


async def test_launch_reads_an_engine_that_listens_on_every_address():
    """As engines print it, with words behind the port."""
    engine = ENGINE.replace("listening on 127.0.0.1:", "listening on http://0.0.0.0:")
    engine = engine.replace("{server.server_port}", "{server.server_port} (Press CTRL+C to quit)")
    async with picker([sys.executable, "-c", engine, "0"]) as running:
        assert (await pick(running)).startswith("127.0.0.1:")


async def test_launch_reads_output_without_ends_of_lines():
    """An engine that prints more than a pipe holds, such as a progress bar, goes on."""
    bar = "print('x' * 300_000 + 'shards |##|\\r' * 30_000, end='', flush=True)\n"
    async with picker([sys.executable, "-c", bar + ENGINE, "0"]) as running:
        assert (await pick(running)).startswith("127.0.0.1:")


async def test_launch_replaces_an_engine_that_leaves_a_process(
    monkeypatch, caplog, published, tmp_path
):
    """The end of the engine counts, though a process that it started holds its output open."""
    monkeypatch.setattr(process_actuator, "_RESTART_PAUSE_S", 0.1)
    monkeypatch.setattr(actuator, "_LAST_OUTPUT_S", 0.1)
    caplog.set_level("INFO", "extproc.server")
    path, lines = str(tmp_path / "line"), []
    child = (
        "import socket, sys; s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]); s.recv(1)"
    )
    command = ["sh", "-c", '"$@" & exit 3', "{port}", sys.executable, "-c", child, path]
    async with await asyncio.start_unix_server(lambda *line: lines.append(line), path=path):
        async with picker(command, min=1):
            await published(lambda: sum("ended:" in text for text in caplog.messages) >= 2)
        for _ in range(10):  # connections that children made just before their end
            await asyncio.sleep(0)
        for _, writer in lines:
            writer.close()


async def test_launch_replaces_an_engine_whose_health_check_raises(monkeypatch, caplog):
    """Such an engine gets no request, and the log says why it was ended."""
    monkeypatch.setattr(process_actuator, "_RESTART_PAUSE_S", 0.1)
    caplog.set_level("INFO", "extproc.server")
    before = process_actuator.ProcessActuator._is_healthy

    async def broken(self, engine):
        if engine.number == 1:
            raise ValueError("a port that is none")
        await before(self, engine)

    monkeypatch.setattr(process_actuator.ProcessActuator, "_is_healthy", broken)
    async with picker([sys.executable, "-c", ENGINE, "{port}"]) as running:
        await pick(running)
        (member,) = running.picker.pool_registry.pools()[""].members
        assert member.endpoint.name == "engine-2"
    assert any("ValueError at" in text for text in caplog.messages)
    assert not any("a port that is none" in text for text in caplog.messages)


async def test_an_engine_that_fails_is_replaced(monkeypatch, caplog, published):
    """Its last words are in the log, and another one is tried after a while."""
    monkeypatch.setattr(process_actuator, "_RESTART_PAUSE_S", 0.1)
    caplog.set_level("INFO", "extproc.server")
    command = [sys.executable, "-c", "print('no GPU'); raise SystemExit(1)", "{port}"]
    async with picker(command, min=1):
        await published(lambda: sum("ended: no GPU" in message for message in caplog.messages) >= 2)


@pytest.mark.parametrize(
    ("fault", "reported"),
    [(OSError(errno.EMFILE, "too many open files"), "too many open files"), (OverflowError(), "")],
)
async def test_an_engine_without_a_port_is_replaced(
    monkeypatch, caplog, published, fault, reported
):
    """Another one is tried, which finds a port; the log says why the first one had none."""
    monkeypatch.setattr(process_actuator, "_RESTART_PAUSE_S", 0.1)
    free_port, faults = process_actuator._free_port, [fault]

    def find_port(host):
        if faults:
            raise faults.pop()
        return free_port(host)

    monkeypatch.setattr(process_actuator, "_free_port", find_port)
    async with picker([sys.executable, "-c", ENGINE, "{port}"], min=1) as running:
        await published(lambda: running.picker.pool_registry.pools()[""].members)
        (member,) = running.picker.pool_registry.pools()[""].members
        assert member.endpoint.name == "engine-2"
    assert any("engine 1 ended: " in text and reported in text for text in caplog.messages)


async def test_a_missing_program_is_reported(caplog, published):
    """The picker goes on."""
    async with picker(["/no/such/engine"], min=1) as running:
        await published(
            lambda: any(
                "there is no program /no/such/engine" in message for message in caplog.messages
            )
        )
        assert not running.picker.pool_registry.pools()[""].members


async def test_a_stopped_engine_finishes_its_requests(caplog, published):
    """It gets nothing new, and ends when what it does is done."""
    caplog.set_level("INFO", "extproc.server")
    async with picker([sys.executable, "-c", ENGINE, "{port}"], min=1) as running:
        engines = running.picker.autoscaler.loops[""].actuator
        async with running.channel() as channel:
            stream = serving.Stream(channel)
            await stream.say(ext_proc_script.request_headers(REQUEST, ends=True))
            (response,) = await stream.hear()
            address = dict(response.sets)[peer.DESTINATION]
            await engines.scale(ScalingDecision(0, ScalingReason.IDLE), 1)
            await published(lambda: not running.picker.pool_registry.pools()[""].members)
            # It still answers: a request of ours is open there.
            _, writer = await asyncio.open_connection(*address.split(":"))
            writer.close()
            assert len(engines._engines) == 1
            stream.call.cancel()
            await published(lambda: not engines._engines)
    assert not any("ended:" in message for message in caplog.messages)


async def test_a_stopped_engine_leaves_the_pool_though_none_may_start(published):
    """As after an engine that ended by itself: it finishes its requests and gets no others."""
    command = [sys.executable, "-c", ENGINE, "{port}"]
    async with (
        picker(command, params={"interval_s": 500.0}) as running,
        running.channel() as channel,
    ):
        pools = running.picker.pool_registry.pools
        engines = running.picker.autoscaler.loops[""].actuator
        await engines.scale(ScalingDecision(2, ScalingReason.UP), 0)
        await published(lambda: len(pools()[""].members) == 2)
        streams = []
        while not all(member.account.in_flight for member in pools()[""].members):
            streams.append(serving.Stream(channel))
            await streams[-1].say(ext_proc_script.request_headers(REQUEST, ends=True))
            await streams[-1].hear()
        engines._not_before = engines._clock() + 3600.0
        await engines.scale(ScalingDecision(1, ScalingReason.DOWN), 2)
        await published(lambda: len(pools()[""].members) == 1)
        assert len(engines._engines) == 2
        for stream in streams:
            stream.call.cancel()


async def test_an_exception_for_an_engine_ends_no_other_engine(monkeypatch, published):
    """An exception about one engine is counted; the others serve, and another engine is started."""
    real, wrong = process_actuator.ProcessActuator._serve, [1]

    async def serve(engines, engine, process):
        if engine.number > 1 and wrong[0]:
            wrong[0] -= 1
            raise OverflowError
        await real(engines, engine, process)

    monkeypatch.setattr(process_actuator.ProcessActuator, "_serve", serve)
    monkeypatch.setattr(process_actuator, "_RESTART_PAUSE_S", 0.0)
    async with picker([sys.executable, "-c", ENGINE, "{port}"], min=1) as running:
        first = await pick(running)
        supervisor = running.picker.counters.supervisor
        engines = running.picker.autoscaler.loops[""].actuator
        await engines.scale(ScalingDecision(2, ScalingReason.UP), 1)
        await published(lambda: len(running.picker.pool_registry.pools()[""].members) == 2)
        assert supervisor.failures["autoscaling"] >= 1
        members = running.picker.pool_registry.pools()[""].members
        assert first in [member.endpoint.address for member in members]
