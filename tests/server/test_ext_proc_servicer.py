from __future__ import annotations

import asyncio

import grpc
import pytest

from extproc.protocol.messages import MessageKind
from extproc.server import stream_handler
from extproc.wire import codec
from tests.support import ext_proc_script, serving
from tests.support.pool_fixture import PoolFixture

BODY = b'{"model":"m","messages":[{"role":"user","content":"x"}]}'


class SilentContext:
    """A call whose client says nothing until the test does."""

    def __init__(self):
        self.began = asyncio.Event()
        self.next_read = asyncio.get_running_loop().create_future()

    async def read(self):
        self.began.set()
        return await self.next_read


class WritingContext(SilentContext):
    """A call that is decided by its first message, and whose answer takes as long as the test wants."""

    def __init__(self):
        super().__init__()
        self.next_read.set_result(
            codec.decode(ext_proc_script.request_headers(ends=True).encode(ext_proc_script.DUPLEX))
        )
        self.writes = asyncio.Event()
        self.written = asyncio.get_running_loop().create_future()

    def peer(self):
        return "ipv4:127.0.0.1:1"

    async def write(self, _):
        self.writes.set()
        await self.written


async def test_a_write_in_progress_completes_before_the_end():
    """A call of which a write was cancelled is never ended by gRPC."""
    async with serving.serving(
        PoolFixture({ext_proc_script.ADDRESS: None}), transport="grpcio"
    ) as scene:
        context = WritingContext()
        handler = asyncio.ensure_future(scene.servicer.process(None, context))
        await context.writes.wait()
        released = asyncio.ensure_future(scene.drain(5.0, apart_s=0.0))
        await asyncio.wait([handler, released], timeout=0.01)
        assert not context.written.cancelled()
        context.written.set_result(None)
        await released
        await handler
        counters = scene.servicer.shared.observer.counters
        assert (counters.streams["ok"], counters.streams_open) == (1, 0)


async def test_a_write_in_progress_is_not_cancelled():
    """When the client leaves, gRPC would lose memory for good with each write that is cancelled."""
    async with serving.serving(
        PoolFixture({ext_proc_script.ADDRESS: None}), transport="grpcio"
    ) as scene:
        context = WritingContext()
        handler = asyncio.ensure_future(scene.servicer.process(None, context))
        await context.writes.wait()
        handler.cancel()
        await asyncio.wait([handler], timeout=0.01)
        assert not handler.done()
        assert not context.written.cancelled()
        context.written.set_result(None)
        with pytest.raises(asyncio.CancelledError):
            await handler
        counters = scene.servicer.shared.observer.counters
        assert (counters.streams["cancelled"], counters.streams_open) == (1, 0)


async def test_a_reset_after_the_last_message_cancels_the_handler():
    """A status that is sent to a client that left would cost memory in gRPC for good."""
    async with serving.serving(PoolFixture({}), transport="grpcio") as scene:
        context = SilentContext()
        handler = asyncio.ensure_future(scene.servicer.process(None, context))
        await context.began.wait()
        context.next_read.set_result(grpc.aio.EOF)
        await asyncio.sleep(0)
        handler.cancel()
        with pytest.raises(asyncio.CancelledError):
            await handler
        counters = scene.servicer.shared.observer.counters
        assert (counters.streams["cancelled"], counters.streams_open) == (1, 0)


async def test_a_read_in_progress_is_not_cancelled():
    """When the client leaves: gRPC would lose memory for good with each that is cancelled."""
    async with serving.serving(PoolFixture({}), transport="grpcio") as scene:
        context = SilentContext()
        handler = asyncio.ensure_future(scene.servicer.process(None, context))
        await context.began.wait()
        handler.cancel()
        await asyncio.wait([handler], timeout=0.01)
        assert not handler.done()
        assert not context.next_read.cancelled()
        context.next_read.set_result(grpc.aio.EOF)
        with pytest.raises(asyncio.CancelledError):
            await handler
        counters = scene.servicer.shared.observer.counters
        assert (counters.streams["cancelled"], counters.streams_open) == (1, 0)


async def open_streams(scene, count):
    """Streams on one connection whose requests were decided, the oldest first."""
    streams = []
    for _ in range(count):
        streams.append(scene.stream())
        await streams[-1].say(ext_proc_script.request_headers(ends=True))
        await streams[-1].hear()
    return streams


async def test_the_last_stream_of_a_connection_ends_last():
    """After GOAWAY gRPC ends the connection with its last stream, and with it what is unread."""
    pool_fixture = PoolFixture({ext_proc_script.ADDRESS: None})
    async with serving.serving(pool_fixture, transport="grpcio") as scene:
        undecided, *others = await open_streams(scene, 3)
        released = asyncio.ensure_future(scene.drain(5.0, apart_s=3600.0))
        for stream in others:
            assert await stream.call.code() is grpc.StatusCode.OK
        await undecided.say(ext_proc_script.response_headers())
        assert await undecided.hear() == [ext_proc_script.answer_headers()]
        assert not released.done()
        assert await undecided.end() is grpc.StatusCode.OK
        await released


@pytest.mark.parametrize("count", [0, 1, 3])
async def test_all_streams_are_released(count):
    async with serving.serving(PoolFixture({ext_proc_script.ADDRESS: None})) as scene:
        streams = await open_streams(scene, count)
        await scene.drain(5.0, apart_s=0.0 if count > 1 else 3600.0)
        for stream in streams:
            assert await stream.call.code() is grpc.StatusCode.OK
        assert scene.servicer.shared.observer.counters.streams_open == 0


def fail_at(monkeypatch, kind):
    """Let every stream run into a bug with messages of one kind."""
    turn = stream_handler.StreamHandler.handle

    def broken(stream, event):
        if event.kind is kind:
            raise ZeroDivisionError
        return turn(stream, event)

    monkeypatch.setattr(stream_handler.StreamHandler, "handle", broken)


@pytest.mark.parametrize(
    "kind", [MessageKind.REQUEST_HEADERS, MessageKind.REQUEST_BODY, MessageKind.RESPONSE_HEADERS]
)
async def test_servicer_answers_a_bug_with_500(monkeypatch, kind):
    """Until the response began the client hears of it, and the stream ends with OK."""
    fail_at(monkeypatch, kind)
    pool_fixture = PoolFixture({ext_proc_script.ADDRESS: None})
    script = {
        MessageKind.REQUEST_HEADERS: ext_proc_script.request_headers(),
        MessageKind.REQUEST_BODY: ext_proc_script.request_body(BODY, ends=True),
        MessageKind.RESPONSE_HEADERS: ext_proc_script.response_headers(),
    }
    # The stream ends with the answer, and gRPC refuses to send what comes later.
    messages = list(script.values())[: list(script).index(kind) + 1]
    async with serving.serving(pool_fixture) as scene:
        stream = scene.stream()
        await stream.say(*messages)
        rejections = [response for response in await stream.rest() if response.status]
        assert [response.status for response in rejections] == [500]
        assert rejections[0].error["error"]["code"] == 500
        assert await stream.call.code() is grpc.StatusCode.OK
        await scene.idle()
        assert pool_fixture.in_flight == 0
        assert scene.servicer.shared.observer.counters.exceptions.total() == 1


async def test_servicer_ends_a_stream_with_internal_during_the_response(monkeypatch):
    """A response that cannot be gone on with is broken off; its data plane decides what then."""
    fail_at(monkeypatch, MessageKind.RESPONSE_BODY)
    pool_fixture = PoolFixture({ext_proc_script.ADDRESS: None})
    async with serving.serving(pool_fixture) as scene:
        stream = scene.stream()
        await stream.say(
            ext_proc_script.request_headers(ends=True), ext_proc_script.response_headers()
        )
        await stream.hear(2)
        await stream.say(ext_proc_script.response_body(b"x"))
        assert await stream.call.code() is grpc.StatusCode.INTERNAL
        await scene.idle()
        assert pool_fixture.in_flight == 0


async def test_servicer_rejects_only_streams_above_max_streams():
    """With as many streams as are allowed all are served; the next gets 429 until a place is free."""
    pool_fixture = PoolFixture({ext_proc_script.ADDRESS: None})
    async with serving.serving(pool_fixture, max_streams=2) as scene:
        first, _ = await open_streams(scene, 2)
        crowded = scene.stream()
        await crowded.say(ext_proc_script.request_headers(ends=True))
        assert [response.status for response in await crowded.rest()] == [429]
        assert await crowded.call.code() is grpc.StatusCode.OK
        assert pool_fixture.in_flight == 2
        counters = scene.servicer.shared.observer.counters
        assert counters.for_pool("").rejections == {(429, "rejected-saturated"): 1}
        assert await first.end() is grpc.StatusCode.OK
        while counters.streams_open > 1:
            await asyncio.sleep(0)
        (after,) = await open_streams(scene, 1)
        assert await after.end() is grpc.StatusCode.OK


async def test_a_message_of_large_headers_ends_its_stream():
    """It is not decoded; others go on, as on the native transport."""
    async with serving.serving(
        PoolFixture({ext_proc_script.ADDRESS: None}), transport="grpcio"
    ) as scene:
        large, other = scene.stream(), scene.stream()
        await large.say(ext_proc_script.request_headers({"a": "x" * (1 << 20)}))
        assert await large.call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert await large.call.details() == codec.LARGE_HEAD
        await other.say(ext_proc_script.request_headers(ends=True))
        assert await other.hear() == [ext_proc_script.route(ext_proc_script.ADDRESS)]
        await other.end()
        await scene.idle()
        assert scene.servicer.shared.observer.counters.streams["cancelled"] == 1
