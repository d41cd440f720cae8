"""A thousand streams at once, and what is left after clients, engines or Envoy go away."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import resource

import pytest

from tests.e2e import backend, http1, installation

STREAMS = 1_000
PATH = "/v1/chat/completions"
CHAT = json.dumps({"model": "m", "messages": [{"role": "user", "content": "x" * 2_000}]}).encode()
LENGTH = [("content-length", str(len(CHAT)))]
HALF = len(CHAT) // 2

#: The client's and the backend's end of each stream are in this process.
FILES = 3 * STREAMS


@pytest.fixture(scope="module", autouse=True)
def files():
    """Enough files, or a reason not to run."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < FILES:
        pytest.skip(f"{FILES} open files are needed, {hard} are allowed")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, FILES), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture(scope="module")
def engines(live):
    async def start():
        context = contextlib.AsyncExitStack()
        started = [await context.enter_async_context(backend.backend()) for _ in range(3)]
        return context, started

    context, started = live.run(start())
    yield started
    live.run(context.aclose())


@pytest.fixture(scope="module")
def place(live, engines):
    with live.holding(installation.installed(*(engine.address for engine in engines))) as item:
        yield item


@pytest.fixture
def end_of_streams(engines):
    """Streams of one event, which end when this is set."""
    over = asyncio.Event()

    async def play(_, peer):
        await peer.say(backend.EVENTS_HEAD + backend.framed(b"data: 1\n\n"))
        await over.wait()
        await peer.say(backend.framed(b"data: 2\n\n") + backend.framed(b""))

    for engine in engines:
        engine.plays[PATH] = play
    yield over
    for engine in engines:
        engine.plays.clear()


@contextlib.asynccontextmanager
async def opened(fixture, count=STREAMS):
    """So many requests, each with half of its body sent."""
    async with contextlib.AsyncExitStack() as context:
        calls = []
        for _ in range(count):
            call = await context.enter_async_context(http1.calling(fixture.port))
            await call.start("POST", PATH, LENGTH)
            await call.send(CHAT[:HALF])
            calls.append(call)
        await fixture.until(
            lambda result: (
                result["extproc_streams_open"] == count
                and result["extproc_body_buffer_bytes"] == count * HALF
            )
        )
        yield calls


async def streaming(calls):
    """Send the rest of every body and wait for every first event."""

    async def item(call):
        await call.send(CHAT[HALF:])
        await call.begun()
        assert await call.body.piece() == b"data: 1\n\n"

    await asyncio.gather(*(item(call) for call in calls))


@pytest.mark.slow
async def test_123_slow_bodies(place, engines):
    """Of 1,000 requests with half a body none keeps another waiting, in whatever order they end."""
    names = ("extproc_responses_total", "extproc_requests_without_response_total")
    before = [await place.total(name) for name in names]
    async with opened(place) as calls:
        assert (await http1.ask(place.port, PATH, CHAT)).status == 200
        random.Random(1).shuffle(calls)
        for call in calls:
            await call.send(CHAT[HALF:])
            answer = await call.answer()
            assert answer.status == 200
            assert answer.json()["bytes"] == len(CHAT)
    await place.settled()
    answered, lost = [await place.total(name) for name in names]
    assert (answered - before[0], lost - before[1]) == (STREAMS + 1, 0)


async def test_123_streams_end_together(place, end_of_streams):
    """1,000 streams at once are all charged, all end well and leave nothing."""
    async with opened(place) as calls:
        await streaming(calls)
        assert await place.total("extproc_endpoint_inflight_requests") == STREAMS
        end_of_streams.set()
        bodies = await asyncio.gather(*(call.body.rest() for call in calls))
    assert bodies == [b"data: 2\n\n"] * STREAMS
    await place.settled()


async def test_123_clients_are_killed(place, end_of_streams):
    """Half of 1,000 clients cut within their bodies, half within their answers: all is freed."""
    async with opened(place) as calls:
        await streaming(calls[::2])
        assert await place.total("extproc_endpoint_inflight_requests") == STREAMS / 2
        for call in calls:
            call.cut()
        await place.settled()
        end_of_streams.set()
    assert (await http1.ask(place.port, PATH, CHAT)).status == 200


@pytest.mark.slow
async def test_123_engine_is_killed(place, engines, end_of_streams):
    """An engine that resets every connection ends its streams and no others."""
    async with opened(place) as calls:
        await streaming(calls)
        result = await place.metrics()
        lost = result[f'extproc_endpoint_inflight_requests{{endpoint="{engines[0].address}"}}']
        assert 0 < lost < STREAMS
        engines[0].cut()
        await place.until(lambda values: values["extproc_streams_open"] == STREAMS - lost)
        end_of_streams.set()
        ended = await asyncio.gather(*(call.body.rest() for call in calls), return_exceptions=True)
    broken = [item for item in ended if isinstance(item, asyncio.IncompleteReadError)]
    assert len(broken) == lost
    assert ended.count(b"data: 2\n\n") == STREAMS - lost
    await place.settled()


async def test_123_envoy_is_killed(place, end_of_streams):
    """Envoy killed with 1,000 streams open, half of them mid-body: extproc frees everything."""
    async with opened(place) as calls:
        await streaming(calls[::2])
        place.envoy.process.kill()
        await place.envoy.process.wait()
        await place.settled()
        end_of_streams.set()
        for call in calls:
            await call.ended()
    await place.start_envoy()
    assert (await http1.ask(place.port, PATH, CHAT)).status == 200


async def test_123_extproc_is_killed(place, end_of_streams):
    """Extproc killed with streams open: Envoy ends them, and serves again after the restart."""
    async with opened(place, 100) as calls:
        await streaming(calls)
        place.extproc.process.kill()
        await place.extproc.process.wait()
        for call in calls:
            await call.ended()
        end_of_streams.set()
    await place.start_extproc()
    statuses = [(await http1.ask(place.port, PATH, CHAT)).status for _ in range(20)]
    assert statuses == [200] * 20
