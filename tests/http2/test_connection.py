"""RFC 9113, sections 3 to 6: frames, states and errors of one connection."""

from __future__ import annotations

import pytest

from extproc.http2.frames import ErrorCode
from extproc.http2.messages import GrpcStatus
from extproc.http2.stream import (
    CallHalfClosed,
    CallStarted,
    CallTerminated,
    ConnectionTerminated,
    MessageReceived,
)
from tests.support.http2_frames import (
    ACK,
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HAS_PRIORITY,
    HEADERS,
    PADDED,
    PATH,
    PING,
    PREFACE,
    PRIORITY,
    PUSH_PROMISE,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    RawClient,
    frame,
    message,
    number,
    setting,
)


def test_section_3_4_server_begins_with_its_settings():
    client = RawClient(begin=False)
    first, window = client.read()
    assert (first.kind, first.flags, first.stream_id) == (SETTINGS, 0, 0)
    assert (window.kind, window.stream_id) == (WINDOW_UPDATE, 0)
    assert client.send(PREFACE + frame(SETTINGS)) == [(SETTINGS, ACK, 0, b"")]


@pytest.mark.parametrize("size", range(1, len(PREFACE) + 18))
def test_section_3_4_preface_may_come_in_pieces(size):
    client = RawClient(begin=False)
    client.read()
    start = PREFACE + frame(SETTINGS) + frame(PING, 0, 0, b"12345678")
    client.send(start[:size])
    client.send(start[size:])
    assert [answer.kind for answer in client.frames[2:]] == [SETTINGS, PING]


@pytest.mark.parametrize(
    "start",
    [
        b"GET / HTTP/1.1\r\n",
        b"PRI * HTTP/2.0\r\n\r\nXX",
        PREFACE + frame(PING, 0, 0, b"12345678"),
        PREFACE + frame(SETTINGS, ACK),
        PREFACE + frame(DATA, 0, 1, b"x"),
    ],
)
def test_section_3_4_another_start_ends_the_connection(start):
    client = RawClient(begin=False)
    client.send(start)
    assert client.ended_with == ErrorCode.PROTOCOL_ERROR
    assert isinstance(client.events[-1], ConnectionTerminated)
    assert client.send(frame(PING, 0, 0, b"12345678")) == []


def test_section_4_1_unknown_frames_are_ignored():
    client = RawClient()
    assert client.send(frame(0x16, 0xFF, 7, b"x")) == []
    assert client.ended_with is None


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (frame(DATA, 0, 0, b"x"), ErrorCode.PROTOCOL_ERROR),
        (frame(HEADERS, END_HEADERS, 0, b"\x88"), ErrorCode.PROTOCOL_ERROR),
        (frame(PRIORITY, 0, 0, bytes(5)), ErrorCode.PROTOCOL_ERROR),
        (frame(RST_STREAM, 0, 0, bytes(4)), ErrorCode.PROTOCOL_ERROR),
        (frame(RST_STREAM, 0, 1, bytes(3)), ErrorCode.FRAME_SIZE_ERROR),
        (frame(SETTINGS, 0, 1), ErrorCode.PROTOCOL_ERROR),
        (frame(SETTINGS, 0, 0, bytes(5)), ErrorCode.FRAME_SIZE_ERROR),
        (frame(SETTINGS, ACK, 0, setting(3, 1)), ErrorCode.FRAME_SIZE_ERROR),
        (frame(SETTINGS, 0, 0, setting(2, 2)), ErrorCode.PROTOCOL_ERROR),
        (frame(SETTINGS, 0, 0, setting(4, 1 << 31)), ErrorCode.FLOW_CONTROL_ERROR),
        (frame(SETTINGS, 0, 0, setting(5, 16_383)), ErrorCode.PROTOCOL_ERROR),
        (frame(SETTINGS, 0, 0, setting(5, 1 << 24)), ErrorCode.PROTOCOL_ERROR),
        (frame(PUSH_PROMISE, END_HEADERS, 1, bytes(4)), ErrorCode.PROTOCOL_ERROR),
        (frame(PING, 0, 1, bytes(8)), ErrorCode.PROTOCOL_ERROR),
        (frame(PING, 0, 0, bytes(7)), ErrorCode.FRAME_SIZE_ERROR),
        (frame(GOAWAY, 0, 1, bytes(8)), ErrorCode.PROTOCOL_ERROR),
        (frame(GOAWAY, 0, 0, bytes(7)), ErrorCode.FRAME_SIZE_ERROR),
        (frame(WINDOW_UPDATE, 0, 0, bytes(4)), ErrorCode.PROTOCOL_ERROR),
        (frame(WINDOW_UPDATE, 0, 0, bytes(3)), ErrorCode.FRAME_SIZE_ERROR),
        (frame(WINDOW_UPDATE, 0, 0, number(0x7FFF_FFFF)), ErrorCode.FLOW_CONTROL_ERROR),
        (frame(CONTINUATION, END_HEADERS, 1, b"\x88"), ErrorCode.PROTOCOL_ERROR),
        (frame(DATA, 0, 1, bytes(16_385)), ErrorCode.FRAME_SIZE_ERROR),
        (frame(HEADERS, END_HEADERS, 2, b"\x88"), ErrorCode.PROTOCOL_ERROR),
        # Section 5.1: idle streams
        (frame(DATA, 0, 1, b"x"), ErrorCode.PROTOCOL_ERROR),
        (frame(RST_STREAM, 0, 1, bytes(4)), ErrorCode.PROTOCOL_ERROR),
        (frame(WINDOW_UPDATE, 0, 1, number(1)), ErrorCode.PROTOCOL_ERROR),
        # Section 6.2: padding and priority
        (frame(HEADERS, END_HEADERS | PADDED, 1, b"\x09\x88"), ErrorCode.PROTOCOL_ERROR),
        (frame(HEADERS, END_HEADERS | PADDED, 1), ErrorCode.FRAME_SIZE_ERROR),
        (frame(HEADERS, END_HEADERS | HAS_PRIORITY, 1, b"\x88"), ErrorCode.FRAME_SIZE_ERROR),
        (frame(HEADERS, END_HEADERS | HAS_PRIORITY, 1, number(1) + b"\x00\x88"), 1),
        (frame(HEADERS, END_HEADERS, 1, b"\xff\xff\xff\xff\x0f"), ErrorCode.COMPRESSION_ERROR),
        (frame(HEADERS, END_HEADERS, 1, b"\xc0"), ErrorCode.COMPRESSION_ERROR),
    ],
)
def test_section_6_a_broken_frame_ends_the_connection(data, code):
    client = RawClient()
    client.send(data)
    assert client.ended_with == code


def test_section_6_3_a_short_priority_ends_its_stream():
    client = RawClient()
    client.call()
    (answer,) = client.send(frame(PRIORITY, 0, 1, bytes(4)))
    assert (answer.kind, answer.number) == (RST_STREAM, ErrorCode.FRAME_SIZE_ERROR)
    assert client.events[-1] == CallTerminated(1)


def test_section_6_1_padding_is_left_out_and_counted():
    client = RawClient(stream_window_bytes=100, connection_window_bytes=1 << 20)
    client.call()
    answers = client.send(frame(DATA, PADDED, 1, b"\x32" + message(b"hi") + bytes(0x32)))
    assert client.events[-1] == MessageReceived(1, b"hi")
    assert answers == [(WINDOW_UPDATE, 0, 1, number(58))]


def test_section_6_10_header_block_may_be_cut_anywhere():
    client = RawClient()
    block = client.encoder.encode(
        [
            (":method", "POST"),
            (":scheme", "http"),
            (":path", PATH),
            ("content-type", "application/grpc"),
        ]
    )
    client.send(frame(HEADERS, END_STREAM, 1, block[:1]))
    client.send(frame(CONTINUATION, 0, 1, block[1:2]), frame(CONTINUATION, 0, 1))
    client.send(frame(CONTINUATION, END_HEADERS, 1, block[2:]))
    assert client.events == [CallStarted(1, PATH, None), CallHalfClosed(1)]


@pytest.mark.parametrize(
    "between",
    [
        frame(PING, 0, 0, bytes(8)),
        frame(CONTINUATION, END_HEADERS, 3),
        frame(DATA, 0, 1, b"x"),
        frame(0x16),
    ],
)
def test_section_6_10_nothing_may_come_between(between):
    client = RawClient()
    client.send(frame(HEADERS, 0, 1, b"\x83"), between)
    assert client.ended_with == ErrorCode.PROTOCOL_ERROR


def test_section_5_1_data_after_the_end_ends_the_stream():
    client = RawClient()
    client.call(flags=END_HEADERS | END_STREAM)
    (answer,) = client.send(frame(DATA, 0, 1, b"x"))
    assert (answer.kind, answer.stream_id, answer.number) == (
        RST_STREAM,
        1,
        ErrorCode.STREAM_CLOSED,
    )


@pytest.mark.parametrize(
    "late",
    [
        frame(DATA, END_STREAM, 1, b"x"),
        frame(WINDOW_UPDATE, 0, 1, number(1)),
        frame(RST_STREAM, 0, 1, number(8)),
        frame(PRIORITY, 0, 1, bytes(5)),
    ],
)
def test_section_5_1_frames_under_way_to_a_stream_that_we_ended_are_ignored(late):
    client = RawClient()
    client.call(data=message(b"x"))
    client.core.end_call(1)
    assert [(answer.kind, answer.flags) for answer in client.read()] == [
        (HEADERS, END_HEADERS | END_STREAM),
        (RST_STREAM, 0),
    ]
    assert client.frames[-1].number == ErrorCode.NO_ERROR
    events = list(client.events)
    assert client.send(late) == []
    assert client.ended_with is None
    assert client.events == events


@pytest.mark.parametrize("kind", [DATA, HEADERS])
def test_section_5_1_frames_on_a_closed_stream_end_the_connection(kind):
    client = RawClient()
    client.call(flags=END_HEADERS | END_STREAM)
    client.core.end_call(1)
    client.read()
    client.send(frame(kind, END_HEADERS, 1, b"\x83"))
    assert client.ended_with == ErrorCode.STREAM_CLOSED


def test_section_5_1_1_an_older_stream_cannot_be_opened():
    client = RawClient()
    client.call(3)
    client.call(1)
    assert client.ended_with == ErrorCode.STREAM_CLOSED


def test_section_5_1_2_streams_beyond_the_limit_are_refused():
    client = RawClient(max_streams=2)
    client.call(1)
    client.call(3)
    (answer,) = client.call(5)
    assert (answer.kind, answer.stream_id, answer.number) == (
        RST_STREAM,
        5,
        ErrorCode.REFUSED_STREAM,
    )
    assert client.counts == {"streams": 1}
    client.core.end_call(1)
    client.call(7)
    assert client.events[-1] == CallStarted(7, PATH, None)


def test_section_6_4_reset_ends_a_call_once():
    client = RawClient()
    client.call()
    client.send(frame(RST_STREAM, 0, 1, number(8)), frame(RST_STREAM, 0, 1, number(8)))
    assert client.events == [CallStarted(1, PATH, None), CallTerminated(1)]
    client.core.send_messages(1, [b"late"])
    client.core.end_call(1)
    assert client.read() == []


def test_section_6_7_ping_is_answered_with_its_payload():
    client = RawClient()
    assert client.send(frame(PING, 0, 0, b"abcdefgh")) == [(PING, ACK, 0, b"abcdefgh")]
    assert client.send(frame(PING, ACK, 0, b"abcdefgh")) == []


def test_section_6_8_drain_has_two_steps():
    """Streams that were opened before the peer knew are served; later ones are refused."""
    client = RawClient()
    client.call(1)
    client.core.start_drain()
    first, ping = client.read()
    assert (first.kind, first.payload) == (GOAWAY, number(0x7FFF_FFFF) + number(0))
    client.call(3)
    (second,) = client.send(frame(PING, ACK, 0, ping.payload))
    assert (second.kind, second.payload) == (GOAWAY, number(3) + number(0))
    (refused,) = client.call(5)
    assert (refused.kind, refused.number) == (RST_STREAM, ErrorCode.REFUSED_STREAM)
    for stream_id in (1, 3):
        client.core.end_call(stream_id)
    assert client.core.num_streams == 0
    client.read()
    client.core.finish_drain()
    assert client.read() == []


def test_a_call_has_messages_both_ways_and_an_end():
    client = RawClient()
    client.call(data=message(b"one") + message(b""))
    client.send(frame(DATA, END_STREAM, 1, message(b"two")))
    assert client.events == [
        CallStarted(1, PATH, None),
        MessageReceived(1, b"one"),
        MessageReceived(1, b""),
        MessageReceived(1, b"two"),
        CallHalfClosed(1),
    ]
    client.core.send_messages(1, [b"a", b"bc"])
    client.core.send_messages(1, [b"d"])
    client.core.end_call(1, GrpcStatus.INTERNAL, "no: 100 % ä")
    head, first, second, trailers = client.read()
    assert client.fields(head) == {":status": "200", "content-type": "application/grpc"}
    assert first == (DATA, 0, 1, message(b"a") + message(b"bc"))
    assert second == (DATA, 0, 1, message(b"d"))
    assert trailers.flags == END_HEADERS | END_STREAM
    assert client.fields(trailers) == {"grpc-status": "13", "grpc-message": "no: 100 %25 %C3%A4"}
    assert client.core.num_streams == 0


def test_an_answer_without_messages_is_one_frame():
    client = RawClient()
    client.call(flags=END_HEADERS | END_STREAM)
    client.core.end_call(1, GrpcStatus.UNIMPLEMENTED, "Method not found!")
    (answer,) = client.read()
    assert client.fields(answer) == {
        ":status": "200",
        "content-type": "application/grpc",
        "grpc-accept-encoding": "identity",
        "grpc-status": "12",
        "grpc-message": "Method not found!",
    }


def test_trailers_of_a_client_end_its_request():
    client = RawClient()
    client.call(data=message(b"x"))
    client.send(frame(HEADERS, END_HEADERS | END_STREAM, 1, client.encoder.encode([("a", "b")])))
    assert client.events[-1] == CallHalfClosed(1)


@pytest.mark.parametrize("flags", [END_HEADERS, END_HEADERS | END_STREAM])
def test_section_8_1_bad_trailers_end_the_stream(flags):
    client = RawClient()
    client.call()
    fields = [("a", "b")] if flags == END_HEADERS else [(":path", "/")]
    (answer,) = client.send(frame(HEADERS, flags, 1, client.encoder.encode(fields)))
    assert (answer.kind, answer.number) == (RST_STREAM, ErrorCode.PROTOCOL_ERROR)
