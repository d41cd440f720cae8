"""A running picker whose loops raise: it serves on, and says so."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import re
import types

import aiohttp
import msgspec
import pytest

from extproc import supervision
from extproc.config.settings import XdsSection
from extproc.discovery import static_discovery
from extproc.election import ElectionSettings, LeaseRecord
from extproc.errors import ConfigError
from extproc.routing import peer_sync
from extproc.server import app, leader_elector, lifecycle, redis_peer_channel, reload
from extproc.server.transport import ListenAddresses
from extproc.supervision import Supervisor
from tests.support import serving
from tests.support.canary import CANARY
from tests.support.waiting import until


class ServeTask:
    """`serve` in a task, and the handles that signals would turn."""

    def __init__(self, monkeypatch, settings):
        self.settings = settings
        self.ready = asyncio.Event()
        self.stop = self.hurry = self.addresses = self.picker = None
        monkeypatch.setattr(lifecycle, "install_signal_handlers", self.follow)
        collector = types.SimpleNamespace(
            collect=lambda: None, freeze=lambda: None, set_threshold=lambda *_: None
        )
        monkeypatch.setattr(lifecycle, "gc", collector)
        monkeypatch.setattr(supervision, "FIRST_PAUSE_S", 0.01)
        real = app.EndpointPickerProcess

        def build(settings):
            self.picker = real(settings)
            return self.picker

        monkeypatch.setattr(lifecycle, "EndpointPickerProcess", build)

    def follow(self, stop, skip_drain, again):
        self.stop, self.hurry = stop, skip_drain

    def announce(self, line):
        named = {what: int(port) for what, port in re.findall(r"(\w+) on (\d+)", line)}
        self.addresses = ListenAddresses(grpc=0, health=named["health"], pages=named["metrics"])
        if " is ready" in line:
            self.ready.set()

    async def page(self, path):
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"http://{serving.LOCAL}:{self.addresses.pages}{path}") as answer,
        ):
            return answer.status, await answer.text()

    @contextlib.asynccontextmanager
    async def running(self):
        source = reload.ConfigSource(lambda _: [], lambda: reload.ReadConfiguration(self.settings))
        task = asyncio.ensure_future(lifecycle.serve(self.settings, source, announce=self.announce))
        waiting = asyncio.ensure_future(self.ready.wait())
        await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        try:
            assert not task.done(), task.exception()
            yield task
        finally:
            self.hurry.set()
            self.stop.set()
            await task


def raising_at_first(run, ran):
    """A loop that raises once, and then runs."""
    raised = []

    async def started():
        if not raised:
            raised.append(1)
            raise LookupError(CANARY)
        ran()
        await run()

    return started


async def test_no_loop_ends_the_process(monkeypatch, caplog):
    """Every loop of the composition root raises: all go on, each is counted, requests are served."""
    ran = set()
    loops, run = app.EndpointPickerProcess.loops, reload.Reloader.run

    def raising(picker):
        return {
            name: raising_at_first(loop, lambda name=name: ran.add(name))
            for name, loop in loops(picker).items()
        }

    reloading = {}

    async def reload_run(subject):
        started = reloading.setdefault(
            subject, raising_at_first(lambda: run(subject), lambda: ran.add("reload"))
        )
        await started()

    monkeypatch.setattr(app.EndpointPickerProcess, "loops", raising)
    monkeypatch.setattr(reload.Reloader, "run", reload_run)
    settings = msgspec.structs.replace(
        serving.settings("127.0.0.11:9"), xds=XdsSection(enabled=True, port=0)
    )
    scene = ServeTask(monkeypatch, settings)
    async with scene.running() as task:
        names = {*loops(scene.picker), "reload"}
        assert {"pools", "autoscaling", "xds", "reload"} <= names <= set(supervision.LOOPS)
        async with asyncio.timeout(300):
            while ran != names:
                await asyncio.sleep(0.01)
        assert not task.done()
        failures = scene.picker.counters.supervisor.failures
        assert {name for name, count in failures.items() if count} == names
        status, text = await scene.page("/readyz")
        assert (status, text.splitlines()[0]) == (200, "ok")
        assert any(line.startswith("degraded: ") for line in text.splitlines())
        running = serving.Running(scene.picker, scene.addresses)
        assert await running.health("") == "SERVING"
        _, page = await scene.page("/metrics")
        for name in names:
            assert f'extproc_loop_failures_total{{loop="{name}"}} 1.0' in page
            assert f'extproc_loop_degraded{{loop="{name}"}}' in page
    assert CANARY not in caplog.text
    assert "LookupError at test_loops.py:" in caplog.text


async def test_a_callback_that_raises_does_not_end_the_process(monkeypatch, caplog):
    """An exception in a timer or in a task without an owner is logged and counted once."""
    scene = ServeTask(monkeypatch, serving.settings("127.0.0.11:9"))
    async with scene.running() as task:
        asyncio.get_running_loop().call_later(0.0, {}.__getitem__, CANARY)
        failures = scene.picker.counters.supervisor.failures
        await until(lambda: failures["callback"])
        assert not task.done()
    assert CANARY not in caplog.text
    assert "loop callback failed and goes on: KeyError" in caplog.text
    asyncio.get_running_loop().set_exception_handler(None)


@pytest.mark.parametrize("stage", ["start", "sync"])
async def test_an_error_at_the_start_ends_the_process(monkeypatch, stage):
    """A port that is taken, a file that is wrong: on the short list of what is not survived."""
    scene = ServeTask(monkeypatch, serving.settings("127.0.0.11:9"))

    async def wrong(_):
        raise ConfigError("x", wanted="a", got="b", fix="c")

    scene.picker = None
    build = app.EndpointPickerProcess

    def broken(settings):
        picker = build(settings)
        monkeypatch.setattr(picker, stage, lambda: wrong(None))
        return picker

    monkeypatch.setattr(lifecycle, "EndpointPickerProcess", broken)
    source = reload.ConfigSource(lambda _: [], lambda: reload.ReadConfiguration(scene.settings))
    with pytest.raises(ConfigError):
        await lifecycle.serve(scene.settings, source, announce=scene.announce)


async def test_a_signal_ends_a_start_that_waits(monkeypatch, caplog):
    """An API server that does not answer at the start keeps neither SIGTERM nor SIGINT waiting."""
    entered, answered = asyncio.Event(), asyncio.Event()
    ends = []

    async def sync(_):
        entered.set()
        try:
            await answered.wait()
            ends.append("answered")
        except asyncio.CancelledError:
            ends.append("cancelled")
            raise

    monkeypatch.setattr(app.EndpointPickerProcess, "sync", sync)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")  # a drain takes all of its time
    settings = serving.settings("127.0.0.11:9", drain_timeout_s=300.0)
    scene = ServeTask(monkeypatch, settings)
    source = reload.ConfigSource(lambda _: [], lambda: reload.ReadConfiguration(settings))
    task = asyncio.ensure_future(lifecycle.serve(settings, source, announce=scene.announce))
    await entered.wait()
    scene.stop.set()
    for _ in range(100):
        await asyncio.sleep(0)
    is_hurried = scene.hurry.is_set()
    answered.set()
    scene.hurry.set()
    await task
    assert (ends, is_hurried) == (["cancelled"], True)
    assert "drain is over" in caplog.text


async def test_the_garbage_collector_frees_endpoints_that_the_start_brings(monkeypatch):
    """They and their pools may be removed: the collector is kept from what lives before them only."""
    frozen = []
    scene = ServeTask(monkeypatch, serving.settings("127.0.0.11:9"))

    def count_endpoints():
        return [len(pool.members) for pool in scene.picker.pool_registry.pools().values()]

    monkeypatch.setattr(lifecycle.gc, "freeze", lambda: frozen.append(count_endpoints()))
    async with scene.running():
        assert (frozen, count_endpoints()) == ([[0]], [1])


async def test_an_exit_ends_the_process(monkeypatch):
    """An exit that a loop raises ends the process."""

    class LoopExitError(BaseException):
        """As SystemExit, which asyncio would also raise out of the test's own loop."""

    async def leaving(_):
        raise LoopExitError

    monkeypatch.setattr(reload.Reloader, "run", leaving)
    scene = ServeTask(monkeypatch, serving.settings("127.0.0.11:9"))
    source = reload.ConfigSource(lambda _: [], lambda: reload.ReadConfiguration(scene.settings))
    with pytest.raises(BaseExceptionGroup) as raised:
        await lifecycle.serve(scene.settings, source, announce=scene.announce)
    assert raised.value.subgroup(LoopExitError) is not None


class Leases:
    """A Lease that is read as a bug of ours for a while."""

    def __init__(self, wrong):
        self.wrong = wrong
        self.closed = False
        self.stored = None

    async def open(self):
        """Nothing."""

    async def close(self):
        self.closed = True

    async def read(self):
        if self.wrong:
            self.wrong -= 1
            raise TypeError(CANARY)
        return self.stored

    async def write(self, put):
        self.stored = LeaseRecord(put.holder, put.duration_s, put.transitions, "1")
        return self.stored


async def test_a_candidate_that_raises_competes_again(caplog):
    """A Lease that makes us raise is read again; the candidate leads once that ends."""
    leases = Leases(wrong=2)
    now = 0.0
    supervisor = Supervisor(clock=lambda: now, rng=random.Random(1))
    subject = leader_elector.LeaderElector(
        "me",
        ElectionSettings(),
        leases,
        clock=lambda: now,
        rng=random.Random(1),
        supervisor=supervisor,
    )
    for _ in range(2):
        assert await subject._attempt_supervised() <= supervision.LONGEST_PAUSE_S
        assert not subject.is_leader
        assert supervisor.degraded == ["election"]
    await subject._attempt_supervised()
    assert subject.is_leader
    assert supervisor.degraded == []
    assert supervisor.failures["election"] == 2
    assert CANARY not in caplog.text
    assert not leases.closed


class OfflineChannel(redis_peer_channel.RedisPeerChannel):
    """A line without a server."""

    def __init__(self, registry):
        self.supervisor = registry.supervisor
        self.settings = types.SimpleNamespace(stream="s")
        self.event_log = types.SimpleNamespace(picker="c")
        self.heard = []
        self._failing_tasks = set()

    async def wait_synced(self):
        """Endpoints are known."""

    def _apply_message(self, message):
        if message.picker == "poison":
            raise UnicodeDecodeError("utf-8", b"x", 0, 1, CANARY)
        self.heard.append(message.picker)


async def test_a_stream_entry_that_raises_is_skipped(caplog):
    """Any client with access may write anything to the stream; later entries are read."""
    messages = [peer_sync.encode(peer_sync.PeerMessage(name, [])) for name in ("a", "poison", "b")]
    entries = [(b"%d" % at, {b"m": data}) for at, data in enumerate([*messages, b"\x00"])]
    batches = [[(b"s", entries)]]

    class Reading:
        async def xrevrange(self, stream, count):
            return []

        async def xread(self, streams, count, block):
            if not batches:
                raise ConnectionResetError
            return batches.pop()

        async def aclose(self):
            pass

        connection_pool = types.SimpleNamespace(reset=lambda: None)

    supervisor = Supervisor()
    line = OfflineChannel(types.SimpleNamespace(supervisor=supervisor))
    line._reading = Reading()
    with pytest.raises(ConnectionResetError):
        await line.receive()
    assert line.heard == ["a", "b"]
    assert supervisor.failures["peer_sync"] == 1
    assert CANARY not in caplog.text


class Followed:
    """Discovery whose store raises for a while."""

    def __init__(self, path):
        self.wrong = 0
        self.published = []
        self.supervisor = Supervisor()
        self.subject = static_discovery.StaticDiscovery(
            static_discovery.StaticDiscoverySettings(file=str(path), poll_s=0.0, pool="p"),
            self,
            flag_entries=(),
            resolver=None,
            clock=lambda: 1.0,
            rng=random.Random(1),
            supervisor=self.supervisor,
        )

    def set_endpoints(self, endpoints, now):
        if self.wrong:
            self.wrong -= 1
            raise OverflowError(CANARY)
        self.published.append([endpoint.address for endpoint in endpoints])


async def test_endpoints_that_could_not_be_applied_are_applied_again(tmp_path):
    """A step that raises half-way loses nothing: the next one tells of the same list."""
    path = tmp_path / "endpoints.yaml"
    path.write_text("endpoints: ['10.0.0.1:8000']")
    scene = Followed(path)
    await scene.subject.start()
    path.write_text("endpoints: ['10.0.0.1:8000', '10.0.0.2:8000']")
    scene.wrong = 1
    with pytest.raises(OverflowError):
        await scene.subject.step()
    await scene.subject.step()
    assert scene.published == [["10.0.0.1:8000"], ["10.0.0.1:8000", "10.0.0.2:8000"]]
    await scene.subject.step()
    assert len(scene.published) == 2


async def test_endpoints_are_applied_after_a_start_that_raised(tmp_path, caplog):
    """Endpoints that could not be stored at the start are stored by the loop."""
    path = tmp_path / "endpoints.yaml"
    path.write_text("endpoints: ['10.0.0.1:8000']")
    scene = Followed(path)
    scene.wrong = 1
    await scene.subject.start()
    assert scene.published == []
    assert scene.supervisor.failures["discovery"] == 1
    await scene.subject.step()
    assert scene.published == [["10.0.0.1:8000"]]
    assert CANARY not in caplog.text


@pytest.fixture(autouse=True)
def logged(caplog):
    caplog.set_level(logging.INFO)
