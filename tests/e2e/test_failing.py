"""Engines that fail, and who meets them: failing fast, killed under load, the last one, and back."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
from collections import Counter, defaultdict

import pytest

from extproc.demo import stack
from tests.e2e import backend, http1, installation

PATH = "/v1/chat/completions"
CHAT = json.dumps(
    {"model": "demo", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 64}
).encode()

CLIENTS = 12

#: A simulated engine. One that stood still longer than it keeps connections closes them when it goes
#: on, those with a request that it has not read yet among them.
ENGINE = ("--speed", "20", "--keepalive-s", "600")

#: Seconds each client pauses: what is waited for takes as long at a tenth of the requests.
PAUSE_S = 0.05

#: Tried again soon, so that tests need not wait for it.
SOON = installation.UNSCRAPED[:-1] + ", health: {base_s: 0.3}}"


#: Everything as it comes, metrics included.
SCRAPED = (
    "{apiVersion: extproc/v1alpha1, kind: ExtProcConfig, scheduling: {strategy: least-request}}"
)


def named(config, strategy):
    """A configuration text with another strategy."""
    return config.replace("least-request", strategy)


class ClientLoad:
    """Clients that ask again and again.

    Attributes:
        statuses: How often each status came.
        phase: Name of what goes on; a test may change it.
        by_phase: How often each status came for requests that began in a phase.
    """

    def __init__(self, fixture) -> None:
        self._place = fixture
        self._stop = False
        self.statuses = Counter()
        self.phase = ""
        self.by_phase = defaultdict(Counter)

    async def send_until_stopped(self):
        while not self._stop:
            began = self.by_phase[self.phase]
            status = (await http1.ask(self._place.port, PATH, CHAT)).status
            self.statuses[status] += 1
            began[status] += 1
            await asyncio.sleep(PAUSE_S)

    @contextlib.asynccontextmanager
    async def running(self, clients=CLIENTS):
        """The load while the block runs, and to the end of its last requests."""
        async with asyncio.TaskGroup() as tasks:
            for _ in range(clients):
                tasks.create_task(self.send_until_stopped())
            yield self
            self._stop = True

    async def more(self, count):
        """Wait for so many further answers."""
        wanted = self.statuses.total() + count
        async with asyncio.timeout(300):
            while self.statuses.total() < wanted:
                await asyncio.sleep(0.005)


def counted(page, name, **labels):
    """A counter of the picker by name and some of its labels."""
    wanted = [f'{key}="{value}"' for key, value in labels.items()]
    return sum(
        value
        for key, value in page.items()
        if key.partition("{")[0] == name and all(label in key for label in wanted)
    )


@contextlib.asynccontextmanager
async def backends(count):
    """So many backends."""
    async with contextlib.AsyncExitStack() as stack_:
        yield [await stack_.enter_async_context(backend.backend()) for _ in range(count)]


@pytest.mark.parametrize(
    "strategy", ["least-request", pytest.param("round-robin", marks=pytest.mark.slow)]
)
async def test_121_an_engine_that_answers_503_at_once(strategy):
    """It gets no more than a few requests, is tried now and then, and serves again once it can."""
    async with (
        backends(4) as served,
        installation.installed(
            *(item.address for item in served), arguments=["--config-text", named(SOON, strategy)]
        ) as fixture,
    ):
        bad = served[1]
        bad.plays[PATH] = backend.saying(b"{}", status="503 Service Unavailable")
        load = ClientLoad(fixture)
        async with load.running():
            await load.more(400)
            tried = await fixture.until(lambda result: counted(result, "extproc_probes_total") >= 2)
            # Those of the row of three, those on their way by then, and the trials.
            probes = counted(tried, "extproc_probes_total")
            assert 3 <= len(bad.asks) <= 3 + CLIENTS + probes + 1
            assert load.statuses[503] == pytest.approx(len(bad.asks), abs=CLIENTS)
            assert counted(tried, "extproc_ejections_total", cause="errors") >= 1
            bad.plays.clear()
            values = await fixture.until(
                lambda matches: counted(matches, "extproc_probes_total", result="ok") == 1
            )
            assert counted(values, "extproc_endpoint_ejected") == 0, (
                bad.address,
                {key: value for key, value in values.items() if "eject" in key or "probe" in key},
            )
            before = len(bad.asks)
            await load.more(100)
            assert len(bad.asks) > before


async def test_121_an_engine_that_never_answers_is_not_blamed_for_clients_that_leave():
    """Envoy says nothing when a client leaves: the endpoint stays in."""
    async with (
        backends(2) as served,
        installation.installed(
            *(item.address for item in served), arguments=["--config-text", SOON]
        ) as fixture,
    ):

        async def hang(_, peer):
            await peer.gone()

        for entry in served:
            entry.plays["/hang"] = hang
        for _ in range(8):
            arrivals = [single.arrival() for single in served]
            async with http1.calling(fixture.port) as call:
                await call.start("POST", "/hang", [("content-length", str(len(CHAT)))])
                await call.send(CHAT)
                await asyncio.wait(arrivals, return_when=asyncio.FIRST_COMPLETED)
        result = await fixture.until(
            lambda values: counted(values, "extproc_requests_without_response_total") == 8
        )
        assert counted(result, "extproc_endpoint_ejected") == 0
        assert counted(result, "extproc_ejections_total") == 0


async def test_121_the_last_endpoint_is_always_tried():
    """A pool of one that fails is asked again and again, and its answers are passed on."""
    async with (
        backends(1) as served,
        installation.installed(served[0].address, arguments=["--config-text", SOON]) as fixture,
    ):
        served[0].plays[PATH] = backend.saying(b"{}", status="503 Service Unavailable")
        statuses = [(await http1.ask(fixture.port, PATH, CHAT)).status for _ in range(10)]
        assert statuses == [503] * 10
        assert len(served[0].asks) == 10
        served[0].plays.clear()
        assert (await http1.ask(fixture.port, PATH, CHAT)).status == 200


@pytest.fixture(scope="module")
def children(live):
    with live.holding(stack.stack()) as item:
        yield item


@pytest.fixture(scope="module")
def engines(live, children):
    """Four simulated engines by address, each answering in some tenths of a second.

    Who ends one starts it again.
    """

    async def start():
        started = [children.engine(*ENGINE) for _ in range(4)]
        return {address: child for child, address in await asyncio.gather(*started)}

    return live.run(start())


async def killed_under_load(fixture, engines):
    """Kill an engine under load; how many requests it had, and what the clients got."""
    victim = next(iter(engines))
    load = ClientLoad(fixture)
    async with load.running():
        await load.more(60)
        await fixture.until(
            lambda result: counted(result, "extproc_endpoint_inflight_requests", endpoint=victim)
        )
        engines[victim].process.kill()
        await engines[victim].process.wait()
        gone = await fixture.until(
            lambda values: counted(values, "extproc_endpoint_ejected", endpoint=victim)
        )
        load.phase = "known to be gone"
        await load.more(100)
        # No request meets it from then on; the answer to an earlier one may still be under way.
        assert load.by_phase[load.phase].keys() == {200}
        picks = counted(gone, "extproc_routed_requests_total", endpoint=victim)
        later = counted(await fixture.metrics(), "extproc_routed_requests_total", endpoint=victim)
        assert later - picks <= CLIENTS
    assert set(load.statuses) <= {200, 503}
    return victim, load.statuses[503]


async def revived(fixture, children, engines, victim):
    """Start an engine again where it was, and see it serve."""
    child, _ = await children.engine(*ENGINE, "--port", victim.rpartition(":")[2])
    engines[victim] = child
    await fixture.until(
        lambda result: counted(result, "extproc_endpoint_ejected", endpoint=victim) == 0
    )
    before = counted(await fixture.metrics(), "extproc_routed_requests_total", endpoint=victim)
    load = ClientLoad(fixture)
    async with load.running():
        await load.more(60)
    assert load.statuses.keys() == {200}
    assert (
        counted(await fixture.metrics(), "extproc_routed_requests_total", endpoint=victim) > before
    )


@pytest.mark.slow
async def test_121_killed_under_load_over_original_dst(engines, children):
    """Only what was on the engine fails; it is left out until it is back, and then it serves."""
    async with installation.installed(*engines, arguments=["--config-text", SCRAPED]) as fixture:
        victim, failed = await killed_under_load(fixture, engines)
        # A quarter of the clients is on it, a client can have moved there since, and one request
        # can have been on its way to it when the first failure came.
        assert failed <= CLIENTS // 4 + 2
        await revived(fixture, children, engines, victim)


@pytest.mark.slow
async def test_121_killed_under_load_with_retries(engines, children):
    """With fallbacks and Envoy's retry clients do not notice; the served endpoint is charged."""
    async with installation.installed(
        *engines,
        template="override-host.yaml",
        arguments=["--config-text", SCRAPED, "--fallback-endpoints", "1"],
    ) as fixture:
        victim, failed = await killed_under_load(fixture, engines)
        assert failed == 0
        await revived(fixture, children, engines, victim)


@pytest.mark.slow
async def test_121_a_stalled_engine_is_ejected(engines):
    """A silent engine is left out; its requests continue when it answers, and nothing fails."""
    async with installation.installed(*engines, arguments=["--config-text", SCRAPED]) as fixture:
        victim = next(iter(engines))
        process = engines[victim].process
        load = ClientLoad(fixture)
        async with load.running():
            await load.more(60)
            process.send_signal(signal.SIGSTOP)
            try:
                gone = await fixture.until(
                    lambda result: counted(result, "extproc_endpoint_ejected", endpoint=victim)
                )
                await load.more(60)
                values = await fixture.metrics()
                assert counted(values, "extproc_endpoint_up", endpoint=victim) == 0
                picks = [
                    counted(item, "extproc_routed_requests_total", endpoint=victim)
                    for item in (gone, values)
                ]
                assert picks[0] == picks[1]
            finally:
                process.send_signal(signal.SIGCONT)
            await fixture.until(
                lambda matches: not counted(matches, "extproc_endpoint_ejected", endpoint=victim)
            )
            await load.more(60)
        assert load.statuses.keys() == {200}


async def test_121_a_response_of_another_endpoint_ejects_the_first():
    """An endpoint that Envoy passes over is left out, though no answer ever showed a failure."""
    async with backends(2) as served:
        dead = f"127.0.0.1:{stack.free_port()}"
        async with installation.installed(
            dead,
            *(item.address for item in served),
            template="override-host.yaml",
            arguments=["--config-text", named(SOON, "round-robin")],
        ) as fixture:
            load = ClientLoad(fixture)
            async with load.running(clients=2):
                result = await fixture.until(
                    lambda values: counted(values, "extproc_ejections_total", cause="passed-over")
                )
            assert load.statuses.keys() == {200}
            assert counted(result, "extproc_responses_total", endpoint=dead) == 0
