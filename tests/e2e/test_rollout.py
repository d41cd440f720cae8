"""Two pickers behind one Envoy, restarted one after the other under long streams."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import signal

import pytest

from extproc.demo import stack
from tests.e2e import backend, http1, installation
from tests.support import transport

PATH = "/v1/chat/completions"
CHAT = json.dumps(
    {"model": "demo", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8}
).encode()

SHORT = json.dumps({"model": "demo", "prompt": "hello", "max_tokens": 8}).encode()

#: More than Envoy keeps of a request to a picker for trying again (64 KiB).
LARGE = json.dumps({"model": "demo", "prompt": "hello " * 30_000, "max_tokens": 8}).encode()

TEMPLATES = ["original-dst.yaml", "original-dst-buffered.yaml", "override-host.yaml"]

#: Long streams, and clients that ask again and again beside them.
STREAMS, ASKING = 50, 4

#: Answers to a client between two events of every stream, and the seconds each client pauses: a load
#: that leaves pickers room to start.
EVERY, PAUSE_S = 10, 0.1

#: Seconds a fact may take to become visible on a page.
_VISIBLE_S = 300.0


class StreamingEngine:
    """Answers whose events and end the test decides."""

    def __init__(self) -> None:
        self._changed = asyncio.Condition()
        self.ticks = 0
        self.over = False

    async def tick(self) -> None:
        """Have every stream say one more event."""
        async with self._changed:
            self.ticks += 1
            self._changed.notify_all()

    async def end(self) -> None:
        """Have every stream end, once it has said everything."""
        async with self._changed:
            self.over = True
            self._changed.notify_all()

    async def play(self, _, peer) -> None:
        """One answer: events from the first to the last, none left out."""
        await peer.say(backend.EVENTS_HEAD)
        text = 0
        while True:
            async with self._changed:
                await self._changed.wait_for(lambda message=text: self.over or message < self.ticks)
                ticks, over = self.ticks, self.over
            for n in range(text, ticks):
                await peer.say(backend.framed(event(n)))
            text = ticks
            if over:
                return await peer.say(backend.framed(b""))


class RolloutSite:
    """Two pickers and one Envoy, as processes.

    Attributes:
        port: Where clients connect.
        pickers: The processes, in the order of `grpc`.
        lines: Everything any process said.
    """

    def __init__(self, children: stack.Stack, lines: list[str]) -> None:
        self._children = children
        self.lines = lines
        self.grpc = [stack.free_port(), stack.free_port()]
        self.pages = [stack.free_port(), stack.free_port()]
        self.ports = stack.EnvoyPorts(stack.free_port(), stack.free_port(), self.grpc[0])
        self.port = self.ports.listener
        self.pickers: list[stack.Child] = []
        self._words: list[str] = []

    async def start(self, addresses, *, template: str, drain: str, change) -> None:
        """Start everything, until Envoy finds both pickers healthy."""
        self._words = ["--endpoints", ",".join(addresses), "--drain-timeout", drain]
        self._words += ["--config-text", installation.UNSCRAPED, "--secure-serving=false"]
        self._words += transport.FLAGS
        self.pickers = await asyncio.gather(self.picker(0), self.picker(1))
        config = stack.envoy_config(
            installation.SHIPPED / template, self.ports, engines=addresses, plaintext=True
        )
        cluster = installation.cluster(config, "extproc")
        both = [f"127.0.0.1:{port}" for port in self.grpc]
        cluster["load_assignment"] = stack.assignment("extproc", both)
        change(config)
        await self._children.envoy(config)
        await self.healthy(2)

    async def picker(self, which: int) -> stack.Child:
        """Start a picker on the ports it has."""
        ports = ["--grpc-port", str(self.grpc[which]), "--metrics-port", str(self.pages[which])]
        return await self._children.extproc(
            *self._words, *ports, "--grpc-health-port", "0", "--host", "127.0.0.1"
        )

    async def stat(self, name: str) -> int:
        """A counter or gauge of Envoy."""
        page = (await http1.ask(self.ports.admin, f"/stats?filter=^{name}$")).body.decode()
        return int(page.partition(": ")[2] or 0)

    async def healthy(self, count: int) -> None:
        """Wait until Envoy finds so many pickers healthy; there is no event for it."""
        async with asyncio.timeout(_VISIBLE_S):
            while await self.stat("cluster.extproc.membership_healthy") != count:
                await asyncio.sleep(0.1)

    async def metric(self, which: int, name: str) -> float:
        """The sum of a picker's metric over its labels."""
        page = (await http1.ask(self.pages[which], "/metrics")).body.decode()
        lines = [line.rpartition(" ") for line in page.splitlines()]
        return sum(float(value) for key, _, value in lines if key.partition("{")[0] == name)

    async def left(self, which: int) -> None:
        """Wait until Envoy has no stream open on a picker that ended."""
        other = await self.metric(1 - which, "extproc_streams_open")
        async with asyncio.timeout(_VISIBLE_S):
            while await self.stat("cluster.extproc.upstream_rq_active") != other:
                await asyncio.sleep(0.1)

    async def restart(self, which: int) -> None:
        """Have a picker drain and end, and start another one in its place."""
        old = self.pickers[which].process
        old.send_signal(signal.SIGTERM)
        assert await old.wait() == 0
        self.pickers[which] = await self.picker(which)
        await self.healthy(2)


@contextlib.asynccontextmanager
async def site(*addresses, template="original-dst.yaml", drain="3s", change=lambda config: None):
    """Two pickers behind Envoy, before the given engines."""
    lines = []
    async with stack.stack(log=lines.append) as children:
        item = RolloutSite(children, lines)
        await item.start(addresses, template=template, drain=drain, change=change)
        yield item
        # Without the drain time that their end would take otherwise.
        await asyncio.gather(*(picker.stop(signal.SIGINT) for picker in item.pickers))


@contextlib.asynccontextmanager
async def playing(engine: StreamingEngine):
    """Two backends whose streams say what the engine says; their addresses."""
    async with backend.backend() as item, backend.backend() as two:
        for served in (item, two):
            served.plays[PATH] = engine.play
        yield item.address, two.address


def event(n: int) -> bytes:
    """The n-th event of every stream."""
    return b"data: %d\n\n" % n


class LongStreams:
    """Long answers, read to whatever end they come to."""

    def __init__(self, fixture: RolloutSite, engine: StreamingEngine) -> None:
        self._place = fixture
        self._engine = engine
        self._begun = asyncio.Semaphore(0)
        self._tasks: list[asyncio.Task[bytes]] = []

    async def start(self, tasks: asyncio.TaskGroup, count: int = STREAMS) -> None:
        """Begin them, until every answer has begun."""
        self._tasks = [tasks.create_task(self._follow()) for _ in range(count)]
        for _ in range(count):
            await self._begun.acquire()

    @property
    def broken(self) -> list[bytes]:
        """The ends of those that are not, byte for byte, what the engine said."""
        complete = b"".join(event(n) for n in range(self._engine.ticks))
        return [task.result()[-80:] for task in self._tasks if task.result() != complete]

    async def _follow(self) -> bytes:
        async with http1.calling(self._place.port) as call:
            await call.start("POST", PATH, [("content-length", str(len(CHAT)))])
            await call.send(CHAT)
            assert (await call.begun()).status == 200
            self._begun.release()
            text = []
            try:
                while piece := await call.body.piece():
                    text.append(piece)
            except asyncio.IncompleteReadError:
                text.append(b"cut")
            return b"".join(text)


async def asking(
    fixture: RolloutSite, engine: StreamingEngine, stop: asyncio.Event, bodies
) -> list[int]:
    """Ask again and again, and every tenth answer makes every stream go on; the statuses."""
    statuses = []
    turns = itertools.cycle(bodies)
    while not stop.is_set():
        if not len(statuses) % EVERY:
            await engine.tick()
        body = next(turns)
        statuses.append((await http1.ask(fixture.port, "/v1/completions", body)).status)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(PAUSE_S):
                await stop.wait()
    return statuses


@contextlib.asynccontextmanager
async def under_load(fixture: RolloutSite, engine: StreamingEngine, *bodies: bytes):
    """Requests keep coming while the block runs, and none may fail; then streams end."""
    stop = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        loads = [tasks.create_task(asking(fixture, engine, stop, bodies)) for _ in range(ASKING)]
        yield
        stop.set()
    await engine.end()
    assert {status for load in loads for status in load.result()} == {200}


@pytest.mark.slow
@pytest.mark.parametrize("template", TEMPLATES)
async def test_rolling_restart(template):
    """Both pickers are restarted, one after the other: no stream breaks and no request fails."""
    engine = StreamingEngine()
    async with playing(engine) as addresses, site(*addresses, template=template) as fixture:
        async with asyncio.TaskGroup() as tasks:
            streams = LongStreams(fixture, engine)
            await streams.start(tasks)
            open_on = [await fixture.metric(n, "extproc_streams_open") for n in range(2)]
            assert all(open_on)
            assert sum(open_on) == STREAMS
            async with under_load(fixture, engine, SHORT, LARGE, SHORT):
                for which in range(2):
                    await fixture.restart(which)
        assert streams.broken == []


async def cut_by_death(fixture: RolloutSite, engine: StreamingEngine) -> tuple[int, int]:
    """Kill the first picker; how many streams it watched, and how many broke."""
    async with asyncio.TaskGroup() as tasks:
        streams = LongStreams(fixture, engine)
        await streams.start(tasks)
        watched = int(await fixture.metric(0, "extproc_streams_open"))
        fixture.pickers[0].process.kill()
        await fixture.pickers[0].process.wait()
        async with under_load(fixture, engine, SHORT):
            await fixture.healthy(1)
    return watched, len(streams.broken)


@pytest.mark.parametrize("template", installation.first_and_slow(TEMPLATES))
async def test_picker_killed(template):
    """A picker is killed: no later request fails; streams it watched go on but in duplex mode."""
    engine = StreamingEngine()
    async with playing(engine) as addresses, site(*addresses, template=template) as fixture:
        watched, broken = await cut_by_death(fixture, engine)
    assert watched
    assert broken == (watched if template == "original-dst.yaml" else 0)


@pytest.mark.parametrize("template", installation.first_and_slow(TEMPLATES[1:]))
async def test_picker_killed_and_failing_closed(template):
    """Without failure_mode_allow, Envoy cuts the answers a killed picker watched, and no others."""
    engine = StreamingEngine()

    def closed(config):
        installation.processor(config)["failure_mode_allow"] = False

    async with (
        playing(engine) as addresses,
        site(*addresses, template=template, change=closed) as fixture,
    ):
        watched, broken = await cut_by_death(fixture, engine)
    assert broken == watched


@pytest.mark.slow
async def test_visible_answers():
    """Answers that pickers see are served during the drain; silent ones then continue without them."""
    engine = StreamingEngine()

    def visible(config):
        mode = installation.processor(config)["processing_mode"]
        mode["response_body_mode"] = "FULL_DUPLEX_STREAMED"

    async with playing(engine) as addresses, site(*addresses, change=visible) as fixture:
        async with asyncio.TaskGroup() as tasks:
            streams = LongStreams(fixture, engine)
            await streams.start(tasks)
            old = fixture.pickers[0].process
            assert await fixture.metric(0, "extproc_streams_open")
            draining = fixture.pickers[0].line("draining, ")
            old.send_signal(signal.SIGTERM)
            await draining
            await engine.tick()
            await fixture.healthy(1)
            assert await old.wait() == 0
            await fixture.left(0)
            await engine.tick()
            await engine.end()
        assert streams.broken == []
