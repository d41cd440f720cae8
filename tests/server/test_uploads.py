"""Streams whose request body stops arriving."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from extproc.wire import codec
from tests.support import ext_proc_script, peer, serving
from tests.support.pool_fixture import PoolFixture


async def begun(scene, *messages, count=1):
    """Streams that said their headers, and no end of their body."""
    streams = []
    for _ in range(count):
        stream = scene.stream()
        await stream.say(ext_proc_script.request_headers(), *messages)
        streams.append(stream)
    return streams


async def arrived(scene, count, size_bytes):
    """Wait until so many bodies are on their way, each with so many bytes."""
    while True:
        if scene.arriving() == [size_bytes] * count:
            return
        await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("messages", "size_bytes"), [((), 0), ((ext_proc_script.request_body(b"{"),), 1)]
)
async def test_servicer_answers_a_stalled_body_with_408(messages, size_bytes):
    """Headers alone, and a body that stops, end with an OpenAI error, and are given back."""
    pool_fixture = PoolFixture({ext_proc_script.ADDRESS: None})
    async with serving.serving(pool_fixture) as scene:
        (stream,) = await begun(scene, *messages)
        await arrived(scene, 1, size_bytes)
        for passed in (0.0, 59.0):
            pool_fixture.now = 100.0 + passed
            await scene.servicer.refuse_stalled()
        pool_fixture.now += 1.0
        refusing = asyncio.ensure_future(scene.servicer.refuse_stalled())
        (response,) = await stream.hear()
        await refusing
        assert response.status == 408
        assert response.error["error"]["code"] == 408
        assert await stream.end() is grpc.StatusCode.OK
        await scene.idle()
        shared = scene.servicer.shared
        assert shared.observer.counters.for_pool("").rejections == {(408, ""): 1}
        assert (shared.body_budget.held_bytes, shared.observer.counters.streams_open) == (0, 0)


async def test_servicer_releases_stalled_streams():
    """A crowd of headers without bodies turns others away for seconds, and not for ever."""
    pool_fixture = PoolFixture({ext_proc_script.ADDRESS: None})
    async with serving.serving(pool_fixture, max_streams=300) as scene:
        streams = await begun(scene, count=300)
        await arrived(scene, 300, 0)
        await scene.servicer.refuse_stalled()
        pool_fixture.now += 6.0
        await scene.servicer.refuse_stalled()
        for stream in streams:
            assert [response.status for response in await stream.hear()] == [408]
            await stream.end()
        await scene.idle()
        after = scene.stream()
        await after.say(ext_proc_script.request_headers(ends=True))
        assert await after.hear() == [ext_proc_script.route()]


async def silent(scene, count):
    """Wait until so many streams are open without a message."""
    while scene.silent() != [True] * count:
        await asyncio.sleep(0)


async def test_servicer_ends_a_stream_without_a_message():
    """It takes a place like any other, and there is no request that could be answered."""
    pool_fixture = PoolFixture({ext_proc_script.ADDRESS: None})
    async with serving.serving(pool_fixture) as scene:
        stream = scene.stream()
        await stream.call.wait_for_connection()
        await silent(scene, 1)
        for passed in (0.0, 59.0, 60.0):
            pool_fixture.now = 100.0 + passed
            await scene.servicer.refuse_stalled()
        assert await stream.call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert await stream.call.details() == "no message arrived"
        await scene.idle()
        counters = scene.servicer.shared.observer.counters
        assert (counters.streams_open, counters.streams) == (0, {"cancelled": 1})


async def test_servicer_hears_a_first_message_that_comes_late():
    """A second before its time is over."""
    pool_fixture = PoolFixture({ext_proc_script.ADDRESS: None})
    async with serving.serving(pool_fixture) as scene:
        stream = scene.stream()
        await stream.call.wait_for_connection()
        await silent(scene, 1)
        await scene.servicer.refuse_stalled()
        pool_fixture.now += 59.0
        await scene.servicer.refuse_stalled()
        await stream.say(ext_proc_script.request_headers(ends=True))
        assert await stream.hear() == [ext_proc_script.route()]
        pool_fixture.now += 3600.0
        await scene.servicer.refuse_stalled()
        assert await stream.end() is grpc.StatusCode.OK


async def test_servicer_ignores_streams_that_wait_for_no_body():
    """An answer that takes hours, and a body that came in time, are not ended."""
    pool_fixture = PoolFixture({ext_proc_script.ADDRESS: None})
    async with serving.serving(pool_fixture) as scene:
        stream = scene.stream()
        await stream.say(ext_proc_script.request_headers(ends=True))
        await stream.hear()
        for _ in range(3):
            pool_fixture.now += 3600.0
            await scene.servicer.refuse_stalled()
        await stream.say(ext_proc_script.response_headers())
        assert await stream.hear() == [ext_proc_script.answer_headers()]
        assert await stream.end() is grpc.StatusCode.OK


class Stubborn:
    """A call whose client sends headers, and then neither ends nor reads what it is sent."""

    def __init__(self):
        self.next_read = asyncio.get_running_loop().create_future()
        self.reads = 0
        self.written = []

    async def read(self):
        self.reads += 1
        if self.reads == 1:
            return codec.decode(ext_proc_script.request_headers().encode(ext_proc_script.DUPLEX))
        return await self.next_read

    async def write(self, data):
        self.written.append(peer.read(data))


async def test_servicer_ends_refused_streams_of_other_peers():
    """Envoy ends the stream of an immediate response; the place of another peer is taken back."""
    pool_fixture = PoolFixture({ext_proc_script.ADDRESS: None})
    async with serving.serving(pool_fixture, transport="grpcio") as scene:
        context = Stubborn()
        handler = asyncio.ensure_future(scene.servicer.process(None, context))
        await arrived(scene, 1, 0)
        await scene.servicer.refuse_stalled()
        pool_fixture.now += 60.0
        await scene.servicer.refuse_stalled()
        assert [response.status for response in context.written] == [408]
        assert not handler.done()
        await scene.servicer.refuse_stalled()
        await handler
        assert scene.servicer.shared.observer.counters.streams_open == 0
