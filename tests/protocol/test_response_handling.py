"""When an answer is shown, so that its usage can be read, and what it cost."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.protocol import response_handling
from extproc.protocol.messages import (
    BodyMode,
    BodyModes,
    ContinueResponse,
    MessageKind,
    ProcessingRequest,
    WithRequestCost,
)
from tests.support.seeded import examples

NONE, STREAMED, BUFFERED = BodyMode.NONE, BodyMode.STREAMED, BodyMode.BUFFERED
DUPLEX, PARTIAL = BodyMode.FULL_DUPLEX_STREAMED, BodyMode.BUFFERED_PARTIAL
EVENTS = {"content-type": "text/event-stream; charset=utf-8"}
SHORT = {"content-type": "application/json", "content-length": "100"}
LONG = {"content-length": str(response_handling.MAX_RESPONSE_BYTES + 1)}


@pytest.mark.parametrize(
    ("modes", "headers", "watch_stream", "mode"),
    [
        ((BUFFERED, NONE), SHORT, False, BUFFERED),
        ((BUFFERED, NONE), SHORT, True, BUFFERED),
        ((BUFFERED, NONE), LONG, False, None),
        ((BUFFERED, NONE), LONG, True, STREAMED),
        ((BUFFERED, NONE), {"content-length": "1e3"}, False, None),
        ((BUFFERED, NONE), {}, False, None),
        ((BUFFERED, NONE), {}, True, STREAMED),
        ((BUFFERED, NONE), EVENTS, True, STREAMED),
        ((BUFFERED, NONE), EVENTS, False, None),
        ((BUFFERED, NONE), {**EVENTS, "content-length": "100"}, False, None),
        ((BUFFERED, NONE), {**EVENTS, "content-length": "100"}, True, STREAMED),
        ((BUFFERED, BUFFERED), SHORT, False, STREAMED),
        ((BUFFERED, BUFFERED), EVENTS, False, NONE),
        ((BUFFERED, BUFFERED), EVENTS, True, STREAMED),
        ((BUFFERED, PARTIAL), LONG, False, STREAMED),
        ((BUFFERED, STREAMED), SHORT, True, None),
        ((DUPLEX, BUFFERED), SHORT, True, None),
        ((STREAMED, NONE), SHORT, True, None),
        ((DUPLEX, NONE), SHORT, True, None),
        ((NONE, NONE), SHORT, True, None),
    ],
)
def test_feedback_mode_buffers_short_answers_and_never_events(modes, headers, watch_stream, mode):
    """A whole answer is shown where its length is declared; a stream only where it is watched."""
    assert (
        response_handling.response_body_mode_override(
            BodyModes(*modes),
            headers,
            is_stream=EVENTS.items() <= headers.items(),
            is_read=True,
            watch_stream=watch_stream,
        )
        is mode
    )


@pytest.mark.parametrize(("response", "mode"), [(NONE, None), (BUFFERED, NONE)])
def test_without_feedback_no_answer_is_shown(response, mode):
    """No mode is asked for, unless Envoy would buffer every answer."""
    assert (
        response_handling.response_body_mode_override(
            BodyModes(BUFFERED, response), SHORT, is_stream=False, is_read=False, watch_stream=False
        )
        is mode
    )


@settings(max_examples=examples(50), deadline=None)
@given(st.lists(st.integers(0, 40_000), max_size=8), st.integers(1, 3000))
def test_the_beginning_and_the_end_of_a_body_are_kept(sizes, least):
    """A body that is not much longer is kept whole, and of any other a bounded part."""
    body = bytes(range(1, 251)) * (sum(sizes, least) // 250 + 1)
    tail, at = response_handling.TailBuffer(), 0
    for size in (*sizes, *[least] * 3):
        tail.add(body[at : at + size])
        at += size
    body, joined = body[:at], tail.joined()
    head_bytes, tail_bytes = response_handling.HEAD_BYTES, response_handling.TAIL_BYTES
    assert joined.endswith(body[-tail_bytes:])
    assert joined.startswith(body[:head_bytes])
    assert len(joined) <= head_bytes + 1 + tail_bytes + max([*sizes, least])
    if b"\0" not in joined:
        assert joined == body


def test_the_last_reply_carries_the_cost():
    """The cost is attached to the last of several replies, and to nothing where there is none."""
    body = ContinueResponse(MessageKind.RESPONSE_BODY)
    trailers = ContinueResponse(MessageKind.RESPONSE_TRAILERS)
    attach = response_handling.attach_request_cost
    assert attach((body, trailers), 1.5) == (body, WithRequestCost(trailers, 1.5))
    assert attach((), 1.5) == ()


@pytest.mark.parametrize(
    ("message", "is_last"),
    [
        (ProcessingRequest(MessageKind.RESPONSE_BODY, end_of_stream=True), True),
        (ProcessingRequest(MessageKind.RESPONSE_TRAILERS), True),
        (ProcessingRequest(MessageKind.RESPONSE_BODY), False),
        (ProcessingRequest(MessageKind.REQUEST_BODY, end_of_stream=True), False),
    ],
)
def test_the_last_message_of_a_body(message, is_last):
    """A body message that ends the stream, or trailers."""
    assert response_handling.is_last_response_message(message) is is_last


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({}, ""),
        ({":status": "503"}, "503"),
        ({":status": "200", "grpc-status": "0"}, "200"),
        ({":status": "200", "grpc-status": "3"}, "400"),
        ({":status": "200", "grpc-status": "8"}, "429"),
        ({":status": "200", "grpc-status": "12"}, "501"),
        ({":status": "200", "grpc-status": "14"}, "503"),
        ({":status": "200", "grpc-status": "2"}, "500"),
        ({":status": "200", "grpc-status": "x"}, "500"),
        ({":status": "502", "grpc-status": "14"}, "502"),
    ],
)
def test_failed_grpc_calls_have_the_http_status_of_the_same_meaning(fields, status):
    """A gRPC call that fails at once has HTTP status 200 and its own status in the headers."""
    assert response_handling.response_status(fields) == status
