"""Envoy gets the engines from two pickers over xDS, and continues whichever of them dies."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import json
import signal
from pathlib import Path

import pytest

from extproc.demo import stack
from tests.e2e import backend, http1, installation
from tests.support import transport

PATH = "/v1/chat/completions"
CHAT = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hello"}]}).encode()
DESTINATION = "x-gateway-destination-endpoint"

#: Endpoints stay what they are, and the pick goes round, so that each comes first in turn. Checks
#: are quick, since tests wait for them.
CONFIG = (
    "{apiVersion: extproc/v1alpha1, kind: ExtProcConfig, scrape: {enabled: false}, "
    "scheduling: {strategy: round-robin}, "
    "xds: {enabled: true, health_check: {interval_s: 0.2}, outliers: {ejection_s: 2}}}"
)

#: Seconds a fact may take to become visible on a page.
_VISIBLE_S = 300.0

#: Clients that ask again and again, and the seconds each pauses: a load that leaves a busy machine
#: room to start processes.
ASKING, PAUSE_S = 8, 0.1


class XdsSite:
    """Two pickers that follow one file of endpoints, and an Envoy that follows them.

    Attributes:
        pickers: Their processes.
        lines: Everything any process said.
    """

    def __init__(self, folder: Path, binary: str) -> None:
        self.lines: list[str] = []
        self.children = stack.Stack(log=self.lines.append)
        self._file = folder / "endpoints.json"
        self._binary = binary
        self._numbers = [[stack.free_port() for _ in range(4)] for _ in range(2)]
        self.ports = stack.EnvoyPorts(stack.free_port(), stack.free_port(), 0)
        self.pickers: list[stack.Child] = []

    @property
    def port(self) -> int:
        return self.ports.listener

    def list(self, *addresses: str) -> None:
        """Change the endpoints, at once for both."""
        installation.replace_file(self._file, json.dumps({"endpoints": list(addresses)}))

    async def picker(self, at: int) -> stack.Child:
        """Start one, on the ports it had before."""
        flags = ("--grpc-port", "--xds-port", "--grpc-health-port", "--metrics-port")
        pairs = zip(flags, self._numbers[at], strict=True)
        return await self.children.extproc(
            *(word for flag, port in pairs for word in (flag, str(port))),
            *("--host", "127.0.0.1", "--drain-timeout", "0s"),
            *("--config-text", CONFIG, "--endpoints-file", str(self._file)),
            *("--fallback-endpoints", "2", *transport.FLAGS),
        )

    async def start(self) -> None:
        self.pickers = [await self.picker(0), await self.picker(1)]
        named = [
            [f"127.0.0.1:{port}" for port in ports] for ports in zip(*self._numbers, strict=True)
        ]
        config = stack.envoy_config(
            installation.SHIPPED / "override-host-eds.yaml",
            self.ports,
            pickers={"extproc": named[0], "extproc-xds": named[1]},
        )
        await self.children.envoy(config, binary=self._binary)

    async def stats(self, part: str = "cluster.engines.") -> dict[str, int]:
        """Envoy's counters and gauges of the engines' cluster, by the rest of the name."""
        page = (await http1.ask(self.ports.admin, f"/stats?filter=^{part}")).body.decode()
        split = [line.partition(": ") for line in page.splitlines()]
        return {
            name.removeprefix(part): int(value)
            for name, _, value in split
            if name.startswith(part) and value.isdigit()
        }

    async def until(self, holds, part: str = "cluster.engines.") -> dict[str, int]:
        """Read Envoy's stats until a fact shows; there is no event for it."""
        result: dict[str, int] = {}
        try:
            async with asyncio.timeout(_VISIBLE_S):
                while not holds(result := await self.stats(part)):
                    await asyncio.sleep(0.1)
        except TimeoutError:
            shown = {name: value for name, value in result.items() if value}
            raise AssertionError(f"it did not become so; at last: {shown}") from None
        return result

    async def healthy(self, count: int, *, total: int) -> None:
        """Envoy knows so many engines, and holds so many for healthy."""
        await self.until(
            lambda result: (
                result.get("membership_total") == total and result["membership_healthy"] == count
            )
        )

    async def agree(self, *addresses: str) -> None:
        """Change the endpoints; both pickers and Envoy know."""
        self.list(*addresses)
        wanted = {f'extproc_endpoint_up{{endpoint="{address}"' for address in addresses}
        async with asyncio.timeout(_VISIBLE_S):
            for at in range(2):
                result = None
                while result != wanted:
                    names = await self.metrics(at)
                    result = {
                        name.partition(",")[0].removesuffix("}")
                        for name in names
                        if name.startswith("extproc_endpoint_up{")
                    }
                    await asyncio.sleep(0.1)
        await self.until(lambda values: values.get("membership_total") == len(addresses))

    async def metrics(self, at: int) -> dict[str, float]:
        """A picker's metrics."""
        page = (await http1.ask(self._numbers[at][3], "/metrics")).body.decode()
        split = [line.rpartition(" ") for line in page.splitlines() if line[:1] not in {"#", ""}]
        return {name: float(value) for name, _, value in split}

    async def ask(self) -> http1.HttpAnswer:
        return await http1.ask(self.port, PATH, CHAT)


def complaints(lines):
    """Errors that pickers wrote; gRPC writes one itself where Envoy leaves while a stream ends."""
    theirs = {at for at, line in enumerate(lines) if "ExecuteBatchError raised in core" in line}
    return [
        line
        for at, line in enumerate(lines)
        if not theirs & {at, at - 1} and ("Traceback" in line or " ERROR " in line)
    ]


@contextlib.asynccontextmanager
async def sited(folder, binary, *addresses):
    runtime = XdsSite(folder, binary)
    try:
        runtime.list(*addresses)
        await runtime.start()
        await runtime.healthy(len(addresses), total=len(addresses))
        yield runtime
        for at in range(2):
            result = await runtime.metrics(at)
            assert not [name for name in result if name.startswith("extproc_xds_nacks_total")]
        for picker in runtime.pickers:
            assert await picker.stop(signal.SIGINT) == 0
        assert not complaints(runtime.lines)
    finally:
        await runtime.children.stop()


@contextlib.asynccontextmanager
async def asking(runtime, count=ASKING):
    """Clients that ask again and again until the block ends; yields the statuses so far."""
    statuses: collections.Counter[int | str] = collections.Counter()
    over = asyncio.Event()

    async def ask():
        while not over.is_set():
            try:
                statuses[(await runtime.ask()).status] += 1
            except (ConnectionError, asyncio.IncompleteReadError) as error:
                statuses[type(error).__name__] += 1
            await asyncio.sleep(PAUSE_S)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(count):
            tasks.create_task(ask())
        try:
            yield statuses
        finally:
            over.set()


async def more(statuses, count):
    """Wait until so many more requests are answered."""
    goal = statuses.total() + count
    async with asyncio.timeout(_VISIBLE_S):
        while statuses.total() < goal:
            await asyncio.sleep(0.01)


@pytest.fixture(scope="module")
def engines(live):
    async def start():
        context = contextlib.AsyncExitStack()
        return context, [await context.enter_async_context(backend.backend()) for _ in range(3)]

    context, started = live.run(start())
    yield started
    live.run(context.aclose())


@pytest.fixture(scope="module")
def site(live, engines, binary, tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    with live.holding(sited(folder, binary, *(item.address for item in engines))) as entry:
        yield entry


@pytest.fixture(autouse=True)
def clean(live, engines, site):
    """Each test begins with all engines listed, healthy and without plays."""
    for engine in engines:
        engine.plays.clear()
    live.run(site.agree(*(engine.address for engine in engines)))
    live.run(site.healthy(3, total=3))
    for engine in engines:
        engine.asks.clear()


def served(engines):
    """Requests each engine served, without health checks."""
    return [sum(ask.path == PATH for ask in engine.asks) for engine in engines]


async def test_endpoints_come_and_go(site, engines):
    """Envoy learns of them as extproc does, and goes where extproc says."""
    async with backend.backend() as new:
        await site.agree(engines[0].address, new.address)
        await site.healthy(2, total=2)
        for _ in range(8):
            assert (await site.ask()).status == 200
        counts = served([*engines, new])
        assert counts[1:3] == [0, 0]
        # Two pickers, each of which goes round.
        assert all(3 <= count <= 5 for count in (counts[0], counts[3]))
        await site.agree(engines[0].address)
        await site.healthy(1, total=1)
    assert (await site.ask()).status == 200


async def test_the_pick_is_followed_and_has_fallbacks(site, engines):
    """The first of three named endpoints serves."""
    for _ in range(6):
        assert (await site.ask()).status == 200
    for engine in engines:
        for ask in engine.asks:
            if ask.path == PATH:
                named = ask.head.get(DESTINATION).split(",")
                assert named[0] == engine.address
                assert sorted(named) == sorted(item.address for item in engines)


async def test_an_engine_that_is_dead_when_picked(site, engines):
    """Every request is answered by the next of its list, before anybody found out and after."""
    dead = f"127.0.0.1:{stack.free_port()}"
    async with asking(site) as statuses:
        site.list(dead, *(engine.address for engine in engines))
        await site.healthy(3, total=4)
        await more(statuses, 100)
    assert statuses.keys() == {200}


async def test_a_503_is_retried_on_another_endpoint(site, engines):
    """An engine that refuses at once: others answer, and it does not attract requests."""
    engines[0].plays[PATH] = backend.saying(b"full", status="503 Service Unavailable")
    async with asking(site) as statuses:
        await more(statuses, 200)
    assert statuses.keys() == {200}
    counts = served(engines)
    # Its share at most, where Envoy before 1.38 does not say who served.
    assert 0 < counts[0] < statuses.total() / 2
    assert counts[1] + counts[2] == statuses.total()


@pytest.mark.slow
async def test_an_engine_is_killed_under_load(site, engines):
    """Requests in flight there that had no answer yet are answered by another engine."""
    async with stack.stack() as children:
        engine, address = await children.engine("--model", "m", "--speed", "4")
        site.list(address, *(item.address for item in engines))
        await site.healthy(4, total=4)
        async with asking(site, 16) as statuses:
            # Clients wait for the slow one at some time; then it dies.
            await more(statuses, 50)
            before = (await site.stats())["upstream_rq_retry_success"]
            engine.process.kill()
            await engine.process.wait()
            await more(statuses, 200)
        assert statuses.keys() == {200}
        assert (await site.stats())["upstream_rq_retry_success"] > before
        site.list(*(entry.address for entry in engines))


async def without_one(runtime, engines, statuses):
    """While Envoy chooses, it leaves out an engine that refuses, a moment after it found out."""
    engines[0].plays[PATH] = backend.saying(b"full", status="503 Service Unavailable")
    await runtime.until(lambda result: result["membership_healthy"] == 2)
    await more(statuses, 100)
    for engine in engines:
        engine.asks.clear()
    await more(statuses, 50)
    assert served(engines)[0] <= ASKING
    engines[0].plays.clear()


@pytest.mark.slow
async def test_both_replicas_restart(site, engines):
    """Not one request fails: Envoy goes on by least request, and by decisions again later."""
    async with asking(site) as statuses:
        await more(statuses, 100)
        for picker in site.pickers:
            picker.process.kill()
        for picker in site.pickers:
            await picker.process.wait()
        await more(statuses, 50)
        for engine in engines:
            engine.asks.clear()
        await more(statuses, 300)
        unpicked = [ask for item in engines for ask in item.asks if ask.path == PATH]
        assert not any(ask.head.all(DESTINATION) for ask in unpicked)
        assert min(served(engines)) > len(unpicked) / 6
        await without_one(site, engines, statuses)
    assert statuses.keys() == {200}
    # No request is sent while they start, for which they need the machine; Envoy takes them back later.
    site.pickers = list(await asyncio.gather(site.picker(0), site.picker(1)))
    async with asking(site) as statuses:
        await site.until(lambda result: result["membership_healthy"] == 2, "cluster.extproc.")
        await more(statuses, 2 * ASKING)
        for engine in engines:
            engine.asks.clear()
        await more(statuses, 100)
    assert statuses.keys() == {200}
    late = [ask for entry in engines for ask in entry.asks if ask.path == PATH]
    assert all(ask.head.all(DESTINATION) for ask in late)
    await site.until(lambda values: values["connected_state"] == 1, "control_plane.")


@pytest.mark.slow
async def test_updates_come_from_the_remaining_replica(site, engines):
    """A picker that drains ends its stream; Envoy keeps what it holds and asks the other one."""
    listening = [at for at in range(2) if (await site.metrics(at))["extproc_xds_streams_open"] == 1]
    (result,) = listening
    async with asking(site) as statuses:
        assert await site.pickers[result].stop(signal.SIGTERM) == 0
        # Until Envoy knows that it is gone, a busy machine may use up the tries of a stream on it.
        await site.until(lambda values: values["membership_healthy"] == 1, "cluster.extproc.")
        await more(statuses, 2 * ASKING)
        engines[1].asks.clear()
        site.list(engines[1].address)
        await site.healthy(1, total=1)
        await more(statuses, 50)
        late = [ask for ask in engines[1].asks if ask.path == PATH]
        assert late
        assert all(ask.head.get(DESTINATION) for ask in late)
        site.pickers[result] = await site.picker(result)
    assert statuses.keys() == {200}


@pytest.mark.slow
async def test_a_hanging_replica_does_not_stop_updates(site, engines):
    """News come from the other one, and what waits for an answer goes on without a pick."""
    pages = [await site.metrics(at) for at in range(2)]
    (result,) = [at for at in range(2) if pages[at]["extproc_xds_streams_open"] == 1]
    async with asking(site) as statuses:
        site.pickers[result].process.send_signal(signal.SIGSTOP)
        site.list(engines[1].address)
        await site.healthy(1, total=1)
        engines[1].asks.clear()
        await more(statuses, 50)
        late = [ask for ask in engines[1].asks if ask.path == PATH]
        assert sum(bool(ask.head.all(DESTINATION)) for ask in late) >= len(late) - ASKING
        site.pickers[result].process.send_signal(signal.SIGCONT)
        await site.until(lambda values: values["membership_healthy"] == 2, "cluster.extproc.")
    assert statuses.keys() == {200}


async def test_xds_responses_are_counted(site):
    """Open streams and answers by type stand on the metrics page; nothing was refused."""
    pages = [await site.metrics(at) for at in range(2)]
    assert sum(page["extproc_xds_streams_open"] for page in pages) == 1
    for kind in ("clusters", "endpoints"):
        name = f'extproc_xds_responses_total{{type="{kind}"}}'
        assert sum(page.get(name, 0) for page in pages) >= 1
