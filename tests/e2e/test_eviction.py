"""Requests that are evicted for others, through a real Envoy in every body mode and shipped profile."""

from __future__ import annotations

import asyncio
import contextlib
import json
from functools import partial

import pytest

from tests.e2e import backend, http1, http2, installation
from tests.e2e.test_modes import MODES, every_mode

BATCH_PATH, USER_PATH = "/v1/chat/completions", "/v1/completions"
OBJECTIVE = "x-llm-d-inference-objective"
BATCH, USER = [(OBJECTIVE, "batch")], [(OBJECTIVE, "user")]

CONFIG = """
apiVersion: extproc/v1alpha1
kind: ExtProcConfig
scheduling: {strategy: least-request}
scrape: {models: false, busy_interval_s: 0.1, idle_interval_s: 0.1}
flow_control: {enabled: true, eviction: true}
pool: {objectives: {user: 10, batch: -1}}
"""

#: A prompt that is expected to be computed for longer than any test takes.
LONG = json.dumps({"model": "m", "messages": [{"role": "user", "content": "word " * 180_000}]})
SHORT = b'{"model": "m", "prompt": "x"}'

#: The page of an engine with one request.
PAGE = b"""vllm:num_requests_running{model_name="m"} 1
vllm:num_requests_waiting{model_name="m"} 0
vllm:kv_cache_usage_perc{model_name="m"} 0.1
"""

#: Modes in which extproc sees prompts, and so knows what an engine has to do.
SEEING = [modes for modes in MODES if modes[0] in {"FULL_DUPLEX_STREAMED", "BUFFERED"}]

#: Modes in which Envoy has the response until its end: the client sees nothing of it before.
HOLDING = [
    ("FULL_DUPLEX_STREAMED", "BUFFERED"),
    ("FULL_DUPLEX_STREAMED", "BUFFERED_PARTIAL"),
]

#: Envoy's files, the first of them in every run.
FILES = ["original-dst.yaml", "original-dst-buffered.yaml", "override-host.yaml"]


class EvictedEngine:
    """An engine that answers users, and batches never.

    Attributes:
        says: What a batch is answered at first; empty for nothing.
        left: Set when the connection of a batch is closed.
    """

    def __init__(self, served: backend.Backend) -> None:
        self._served = served
        self.address = served.address
        self.says = b""
        self.left = asyncio.Event()
        served.plays[BATCH_PATH] = self._hang
        served.plays["/metrics"] = backend.saying(PAGE)

    async def _hang(self, _, peer):
        if self.says:
            await peer.say(self.says)
        await peer.gone()
        self.left.set()

    async def arrival(self):
        """Wait until a batch has arrived."""
        while True:
            await self._served.arrival()
            if self._served.asks[-1].path == BATCH_PATH:
                return


@pytest.fixture(scope="module")
def engine(live):
    @contextlib.asynccontextmanager
    async def serve():
        async with backend.backend() as served:
            yield EvictedEngine(served)

    with live.holding(serve()) as item:
        yield item


def installed(engine, change=lambda _: None, **options):
    """Envoy and an extproc that evicts; clients may name their objective."""

    def changed(config):
        change(config)
        installation.keep_headers(config, OBJECTIVE)

    arguments = ["--config-text", CONFIG]
    return installation.installed(engine.address, change=changed, arguments=arguments, **options)


@pytest.fixture(scope="module")
def listeners():
    return {}


@pytest.fixture(scope="module")
def place(live, engine, listeners, binary):
    change = partial(every_mode, listeners=listeners)
    with live.holding(installed(engine, change, binary=binary)) as item:
        yield item


def _without_served_host(config):
    """Envoy before 1.38 does not know the field; the first endpoint serves here."""
    for cluster in config["static_resources"]["clusters"]:
        for policy in cluster.get("load_balancing_policy", {}).get("policies", ()):
            policy["typed_extension_config"]["typed_config"].pop("selected_host_key", None)


@pytest.fixture(scope="module", params=installation.first_and_slow(FILES))
def shipped(request, live, engine, binary):
    change = _without_served_host if binary else lambda _: None
    options = {"template": request.param, "listed": [engine.address], "binary": binary}
    with live.holding(installed(engine, change, **options)) as item:
        yield item


async def evict(fixture, engine, port, *, says=b"", is_shown=True):
    """Send a batch, and a user who makes it end; returns everything that its client gets."""
    engine.says = says
    engine.left.clear()
    before = await fixture.total("extproc_rejections_total")
    async with http1.calling(port) as call:
        arrived = asyncio.ensure_future(engine.arrival())
        await asyncio.sleep(0)
        length = ("content-length", str(len(LONG)))
        await call.start("POST", BATCH_PATH, [*BATCH, length], body=LONG.encode())
        await arrived
        if says and is_shown:
            begun = await call.begun()
            assert begun.status == 200
        else:
            begun = None
        answer = await http1.ask(port, USER_PATH, SHORT, headers=USER)
        assert answer.status == 200
        async with asyncio.timeout(30.0):
            await engine.left.wait()
        await fixture.until(lambda result: _rejections(result) == before + 1)
        await fixture.settled()
        if begun is None:
            return await call.answer()
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError, AssertionError):
            return await call.body.rest()
        return None


def _rejections(metrics):
    return sum(
        value for name, value in metrics.items() if name.startswith("extproc_rejections_total")
    )


def check_refusal(answer):
    """429 with the reason of an eviction."""
    assert answer.status == 429
    assert answer.head.get("x-llm-d-request-dropped-reason") == "evicted"
    assert "higher priority" in answer.json()["error"]["message"]


STREAM = backend.EVENTS_HEAD + backend.framed(b"data: 1\n\n")


@pytest.mark.parametrize("modes", SEEING, ids="-".join)
async def test_074_a_silent_request_is_answered_with_429(place, engine, listeners, modes):
    """Its engine loses the connection, and the request of higher priority is served."""
    check_refusal(await evict(place, engine, listeners[modes]))
    metrics = await place.metrics()
    assert metrics['extproc_flow_control_evictions_total{outcome="confirmed"}'] >= 1
    assert 'extproc_flow_control_evictions_total{outcome="timed_out"}' not in metrics


@pytest.mark.parametrize("modes", SEEING, ids="-".join)
async def test_074_a_response_that_began_is_cut(place, engine, listeners, modes):
    """Or answered with 429 while Envoy holds all of it."""
    is_shown = modes not in HOLDING
    answer = await evict(place, engine, listeners[modes], says=STREAM, is_shown=is_shown)
    if is_shown:
        assert answer is None
    else:
        check_refusal(answer)


async def test_074_shipped_files_allow_evictions(shipped, engine):
    """Before the response and during it."""
    check_refusal(await evict(shipped, engine, shipped.port))
    assert await evict(shipped, engine, shipped.port, says=STREAM) is None


async def test_074_http2_streams_are_reset(place, engine, listeners):
    """A response over HTTP/2 that began ends with a reset of its stream alone."""
    port = listeners[MODES[0]]
    engine.says = STREAM
    engine.left.clear()
    arrived = asyncio.ensure_future(engine.arrival())
    batch = asyncio.ensure_future(http2.ask(port, BATCH_PATH, LONG.encode(), headers=BATCH))
    await arrived
    assert (await http1.ask(port, USER_PATH, SHORT, headers=USER)).status == 200
    with pytest.raises(ConnectionResetError):
        await batch
    await place.settled()


def _unwatched(config):
    """The response is not shown: the stream ends after the request."""
    installation.processor(config)["processing_mode"].update(
        response_header_mode="SKIP", response_trailer_mode="SKIP"
    )


async def test_074_requests_of_ended_streams_are_not_evicted(live, engine):
    """No stream is left to answer on; as their end is unknown, such requests fill no engine either."""
    async with installed(engine, _unwatched) as fixture:
        engine.says = STREAM
        engine.left.clear()
        async with http1.calling(fixture.port) as call:
            arrived = asyncio.ensure_future(engine.arrival())
            await asyncio.sleep(0)
            length = ("content-length", str(len(LONG)))
            await call.start("POST", BATCH_PATH, [*BATCH, length], body=LONG.encode())
            await arrived
            await call.begun()
            await fixture.until(lambda result: result["extproc_streams_open"] == 0)
            answer = await http1.ask(fixture.port, USER_PATH, SHORT, headers=USER)
            assert answer.status == 200
            assert not engine.left.is_set()
        assert not _rejections(await fixture.metrics())
