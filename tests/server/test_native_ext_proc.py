"""Native ext_proc calls without a network: messages that come while a request waits."""

from __future__ import annotations

import asyncio
import json

import pytest

from extproc.http2.limits import ReceiveBudget
from extproc.http2.messages import GrpcStatus, MessageAssembler
from extproc.protocol import body_buffer
from extproc.server.native_ext_proc import NativeExternalProcessor
from tests.server.test_stream_flow_control import WaitingStreamFixture
from tests.support import ext_proc_script, peer

A = "10.0.0.1:8000"


class ConnectionFake:
    """A connection of one stream, without HTTP/2.

    Attributes:
        replies: Kinds of the replies, in order.
        log: Ends, limits and resumptions, in order.
    """

    def __init__(self, budget):
        self.core = self
        self.replies = []
        self.log = []
        self._assembler = MessageAssembler(1 << 20, budget)

    def send(self, _, messages):
        self.replies += [peer.read(message).part for message in messages]

    def send_lazily(self, stream_id, source):
        for pieces in source:
            self.send(stream_id, [b"".join(pieces)])
        return True

    def end(self, _, status, __):
        self._assembler.release()
        self.log.append(status)

    def count_limit(self, limit):
        self.log.append(limit)

    def pause_call(self, _):
        self.log.append("paused")

    def hold_message(self, _, message):
        return self._assembler.hold(message)

    def resume_call(self, _):
        self._assembler.release_waiting()
        self.log.append("resumed")

    def flush_soon(self):
        """Does nothing: replies are written where they are sent."""

    flush_later = flush_soon


class NativeScene:
    """A pool of one endpoint, for one request at a time, and calls on connections of their own."""

    def __init__(self, *, budget_bytes=1 << 20):
        self.fixture = WaitingStreamFixture(A)
        self.servicer = NativeExternalProcessor(self.fixture.shared)
        self.budget = ReceiveBudget(budget_bytes)

    def call(self, name, *before):
        """A call whose request keeps the endpoint busy, after other messages."""
        connection = ConnectionFake(self.budget)
        call = self.servicer.open(connection, 1)
        for message in before:
            call.on_message(message)
        headers = {
            ":method": "POST",
            ":path": "/v1/completions",
            "x-request-id": name,
        }
        body = json.dumps({"model": "m", "prompt": f"{name} " + "word " * 4800}).encode()
        call.on_message(
            ext_proc_script.request_headers(headers).encode(("DUPLEX", "BUFFERED")),
        )
        call.on_message(ext_proc_script.request_body(body, ends=True).encode(None))
        return call, connection


async def turned(happened):
    """Let the loop turn until something happened."""
    for _ in range(1000):
        if happened():
            return
        await asyncio.sleep(0)
    raise AssertionError("it did not happen")


ANSWER_OF_ENVOY = ext_proc_script.response_headers({":status": "504"}, ends=True).encode(None)
LATE = ext_proc_script.request_body(b"").encode(None)


async def test_an_answer_of_envoy_takes_a_request_out_of_the_queue():
    """Its headers are answered at once, the request is not, and no engine is charged or blamed."""
    scene = NativeScene()
    first, _ = scene.call("first")
    call, connection = scene.call("second")
    assert scene.fixture.flow_controller.queue.count == 1
    call.on_message(ANSWER_OF_ENVOY)
    assert connection.replies == ["response_headers"]
    assert scene.fixture.flow_controller.outcomes == {"cancelled": 1}
    first.on_terminated()
    await turned(lambda: connection.log == ["paused", "resumed"])
    call.on_half_close()
    assert connection.replies == ["response_headers"]
    assert connection.log[-1] is GrpcStatus.OK
    assert scene.fixture.decisions.find("second").rejection.cause == "answered-by-envoy"
    assert scene.fixture.decisions.find("second").rejection.status == 504
    assert not scene.fixture.counters.for_pool("").responses
    assert scene.fixture.pool_fixture.in_flight == 0


async def test_an_admission_on_its_way_is_taken_back_with_the_answer_of_envoy():
    """The reservation of a request that was just admitted is released."""
    scene = NativeScene()
    first, _ = scene.call("first")
    call, connection = scene.call("second")
    first.on_terminated()
    scene.fixture.flow_controller.pump()
    assert scene.fixture.pool_fixture.in_flight == 1
    call.on_message(ANSWER_OF_ENVOY)
    assert scene.fixture.pool_fixture.in_flight == 0
    await asyncio.sleep(0)
    assert connection.replies == ["response_headers"]


async def test_more_of_an_ended_response_takes_a_request_out_of_the_queue_for_good():
    """Its body ended before the request began: the next message does not queue the request again."""
    scene = NativeScene()
    first, _ = scene.call("first")
    ended = ext_proc_script.response_body(b"", ends=True)
    call, connection = scene.call("second", ended.encode(("DUPLEX", "BUFFERED")))
    assert scene.fixture.flow_controller.queue.count == 1
    call.on_message(ended.encode(None))
    call.on_message(LATE)
    assert scene.fixture.flow_controller.queue.count == 0
    first.on_terminated()
    call.on_half_close()
    assert connection.replies == ["response_body", "response_body"]
    assert connection.log == ["paused", "resumed", GrpcStatus.OK]


async def test_messages_that_waited_are_taken_in_turns():
    """Other callbacks run between them, and the call is resumed after the last."""
    scene = NativeScene()
    first, _ = scene.call("first")
    call, connection = scene.call("second")
    for _ in range(200):
        call.on_message(LATE)
    assert scene.budget.held_bytes >= 200 * 64
    first.on_terminated()
    await turned(lambda: connection.replies)
    asyncio.get_running_loop().call_soon(connection.log.append, "other")
    await turned(lambda: "resumed" in connection.log)
    assert connection.log == ["paused", "other", "resumed"]
    assert scene.budget.held_bytes == 0
    call.on_message(ANSWER_OF_ENVOY)
    assert connection.replies[-1] == "response_headers"
    call.on_terminated()


async def test_a_large_message_waits_as_it_came():
    """Its body is not cut out of it before its turn."""
    scene = NativeScene()
    first, _ = scene.call("first")
    call, connection = scene.call("second")
    late = ext_proc_script.request_body(b'{"a":1}' * 3000).encode(None)
    call.on_message(bytearray(late))
    first.on_terminated()
    await turned(lambda: len(connection.log) > 1)
    assert connection.log == ["paused", "resumed"]
    call.on_terminated()


async def test_too_many_waiting_messages_end_their_call():
    """With their cost beside their bytes; the request leaves the queue."""
    scene = NativeScene(budget_bytes=10_000)
    scene.call("first")
    call, connection = scene.call("second")
    while connection.log == ["paused"]:
        call.on_message(LATE)
    assert connection.log == ["paused", "receive_budget", GrpcStatus.RESOURCE_EXHAUSTED]
    assert scene.budget.held_bytes == 0
    assert scene.fixture.flow_controller.queue.count == 0


async def test_streams_that_break_the_protocol_are_logged_once_a_minute(caplog):
    """A data plane whose processing modes do not fit does so with each request."""
    scene = NativeScene()

    def break_protocol():
        connection = ConnectionFake(scene.budget)
        call = scene.servicer.open(connection, 1)
        for message in (ANSWER_OF_ENVOY, ANSWER_OF_ENVOY):
            call.on_message(message)
        assert connection.log == [GrpcStatus.INVALID_ARGUMENT]

    for _ in range(3):
        break_protocol()
    scene.fixture.pool_fixture.now += 60.0
    break_protocol()
    lines = [line for line in caplog.messages if line.startswith("stream ended")]
    assert len(lines) == 2
    assert lines[1].endswith("(2 more since the last line)")


def headers_message(headers):
    """The message that opens a request with these headers."""
    headers = {":method": "POST", ":path": "/v1/completions", **headers}
    return ext_proc_script.request_headers(headers).encode(("DUPLEX", "BUFFERED"))


def many_headers(size):
    """Short headers that take so many bytes, and twenty times that once they are decoded."""
    return {f"h{at:06}": "x" for at in range(size // 14)}


async def test_a_message_of_large_headers_ends_its_call():
    """It is not decoded: that would hold the event loop, and the headers would stay."""
    scene = NativeScene()
    connection = ConnectionFake(scene.budget)
    scene.servicer.open(connection, 1).on_message(headers_message(many_headers(2 << 20)))
    assert connection.log == ["message_bytes", GrpcStatus.RESOURCE_EXHAUSTED]
    assert scene.fixture.shared.body_budget.held_bytes == 0
    assert scene.servicer.num_streams == 0


async def test_large_headers_count_to_the_budget_of_bodies():
    """With what their objects take, until the stream ends; small ones do not."""
    scene = NativeScene()
    budget = scene.fixture.shared.body_budget
    call, connection = scene.call("small")
    assert budget.held_bytes == 0
    call.on_terminated()
    connection = ConnectionFake(scene.budget)
    call = scene.servicer.open(connection, 1)
    call.on_message(headers_message(many_headers(40_000)))
    assert budget.held_bytes > 400_000
    assert connection.log == []
    call.on_terminated()
    assert budget.held_bytes == 0


@pytest.mark.parametrize(
    ("headers", "hint"),
    [({f"{at:x}": "" for at in range(520)}, ""), ({}, "a," * 1050)],
)
async def test_short_headers_and_endpoints_count_with_their_objects(headers, hint):
    """Thousands of them fit into a few kilobytes, and take more than is always taken."""
    scene = NativeScene()
    message = ext_proc_script.request_headers(headers, metadata=peer.hinted(hint))
    data = message.encode(("DUPLEX", "BUFFERED"))
    assert len(data) < 4096
    scene.servicer.open(ConnectionFake(scene.budget), 1).on_message(data)
    assert scene.fixture.shared.body_budget.held_bytes > body_buffer.ALWAYS_TAKEN_BYTES


async def test_large_headers_without_room_end_their_call():
    """They have a quarter of what others leave, as bodies have."""
    scene = NativeScene()
    budget = scene.fixture.shared.body_budget
    budget.limit_bytes = 2_000_000
    messages = headers_message(many_headers(40_000))
    first, second = ConnectionFake(scene.budget), ConnectionFake(scene.budget)
    scene.servicer.open(first, 1).on_message(messages)
    held_bytes = budget.held_bytes
    scene.servicer.open(second, 1).on_message(messages)
    assert (first.log, second.log) == ([], ["receive_budget", GrpcStatus.RESOURCE_EXHAUSTED])
    assert budget.held_bytes == held_bytes


async def test_hints_of_a_stream_count_once():
    """A data plane repeats them on each message, and one of them is kept."""
    scene = NativeScene()
    budget = scene.fixture.shared.body_budget
    hint = peer.hinted([f"10.0.{at >> 8}.{at & 255}:8000" for at in range(4000)])
    call = scene.servicer.open(ConnectionFake(scene.budget), 1)
    call.on_message(
        ext_proc_script.request_headers({}, metadata=hint).encode(("DUPLEX", "BUFFERED"))
    )
    held_bytes = budget.held_bytes
    assert held_bytes > 4000 * 64
    call.on_message(ext_proc_script.request_body(b"x", metadata=hint).encode(None))
    assert budget.held_bytes - held_bytes < 64
    call.on_terminated()
    assert budget.held_bytes == 0
