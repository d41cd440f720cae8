"""RFC 7541, RFC 9113 section 8, and gRPC's rules of request headers."""

from __future__ import annotations

import pytest

from extproc.http2.frames import ErrorCode
from extproc.http2.stream import CallHalfClosed, CallStarted
from tests.support.http2_frames import (
    CALL,
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    PATH,
    PREFACE,
    RST_STREAM,
    SETTINGS,
    RawClient,
    frame,
    message,
)

BASE = dict(CALL)


def changed(**fields):
    """Fields of a call with others in their place; None leaves one out."""
    names = {name.replace("_", "-").replace("P-", ":"): value for name, value in fields.items()}
    return [(name, value) for name, value in {**BASE, **names}.items() if value is not None]


@pytest.mark.parametrize(
    "fields",
    [
        changed(P_method=None),
        changed(P_scheme=None),
        changed(P_path=None),
        changed(P_path=""),
        changed(P_method="CONNECT"),
        changed(P_status="200"),
        changed(connection="close"),
        changed(te="gzip"),
        changed(Upper="x"),
        changed(content_length="many"),
        [*CALL, (":path", "/again")],
        [*CALL, ("te", "trailers"), (":authority", "late")],
        [("a", "b"), *CALL],
        [*CALL, ("a", " space")],
        [*CALL, ("a", "line\r\nbreak")],
        [*CALL, ("a b", "x")],
        [*CALL, ("a:b", "x")],
        [*CALL, ("", "x")],
    ],
)
def test_section_8_a_malformed_request_ends_its_stream(fields):
    client = RawClient()
    (answer,) = client.call(fields=fields)
    assert (answer.kind, answer.number) == (RST_STREAM, ErrorCode.PROTOCOL_ERROR)
    assert client.events == []
    client.call(3)
    assert client.events == [CallStarted(3, PATH, None)]


@pytest.mark.parametrize(
    ("fields", "answer"),
    [
        (changed(content_type="text/html"), {":status": "415", "grpc-status": "2"}),
        (changed(content_type="application/grpcx"), {":status": "415", "grpc-status": "2"}),
        (changed(content_type=None), {":status": "415", "grpc-status": "2"}),
        (changed(P_method="GET"), {":status": "405", "grpc-status": "13"}),
        (
            changed(grpc_encoding="gzip"),
            {":status": "200", "grpc-status": "12", "grpc-accept-encoding": "identity"},
        ),
        (changed(grpc_timeout="soon"), {":status": "200", "grpc-status": "13"}),
        (changed(grpc_timeout="123456789S"), {":status": "200", "grpc-status": "13"}),
        (changed(big="x" * 20_000), {":status": "431", "grpc-status": "8"}),
        ([*CALL, *(("a", str(i)) for i in range(130))], {":status": "431", "grpc-status": "8"}),
    ],
)
def test_a_request_that_grpc_does_not_allow_is_answered(fields, answer):
    client = RawClient()
    block = client.encoder.encode(fields)
    client.send(frame(HEADERS, 0, 1, block[:16_000]), frame(9, END_HEADERS, 1, block[16_000:]))
    head, reset = client.frames[-2:]
    assert answer.items() <= client.fields(head).items()
    assert head.flags == END_HEADERS | END_STREAM
    assert (reset.kind, reset.number) == (RST_STREAM, ErrorCode.NO_ERROR)
    assert client.events == []
    assert client.send(frame(DATA, END_STREAM, 1, message(b"x"))) == []


@pytest.mark.parametrize(
    "content_type", ["application/grpc", "application/grpc+proto", "application/grpc;x=y"]
)
def test_all_content_types_of_grpc_are_served(content_type):
    client = RawClient()
    client.call(fields=changed(content_type=content_type, grpc_encoding="identity"))
    assert client.events == [CallStarted(1, PATH, None)]


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("1H", 3600), ("2M", 120), ("3S", 3), ("4m", 0.004), ("5u", 5e-6), ("6n", 6e-9)],
)
def test_timeouts_have_a_unit(text, seconds):
    client = RawClient()
    client.call(fields=changed(grpc_timeout=text))
    assert client.events == [CallStarted(1, PATH, pytest.approx(seconds))]


@pytest.mark.parametrize(("announced", "is_right"), [("6", True), ("5", False), ("7", False)])
def test_section_8_1_1_content_length_counts(announced, is_right):
    client = RawClient()
    client.call(fields=changed(content_length=announced))
    client.send(frame(DATA, END_STREAM, 1, message(b"x")))
    assert (client.events[-1] == CallHalfClosed(1)) is is_right
    if not is_right:
        assert client.frames[-1].number == ErrorCode.PROTOCOL_ERROR


def test_fields_are_indexed_until_our_settings_are_acknowledged():
    """A client may use a table of 4096 bytes until it knows that there is none."""
    client = RawClient(begin=False)
    client.send(PREFACE + frame(SETTINGS))
    for stream_id in (1, 3, 5):
        client.call(stream_id)
    assert [event.path for event in client.events] == [PATH] * 3
    client.encoder.header_table_size = 0
    client.send(frame(SETTINGS, 1))
    for stream_id in (7, 9, 11):
        client.call(stream_id)
    assert [event.path for event in client.events] == [PATH] * 6
    assert client.ended_with is None


def test_a_table_after_the_acknowledgement_ends_the_connection():
    client = RawClient(begin=False)
    client.send(PREFACE + frame(SETTINGS))
    client.call(1)
    client.send(frame(SETTINGS, 1))
    client.call(3)
    assert client.ended_with == ErrorCode.COMPRESSION_ERROR


def test_a_client_without_a_table_need_not_announce_its_size():
    """It sends literals before and after it acknowledged our settings."""
    client = RawClient(begin=False)
    client.send(PREFACE + frame(SETTINGS) + frame(SETTINGS, 1))
    for stream_id in (1, 3):
        client.call(stream_id, fields=[(name, value, True) for name, value in CALL])
    assert [event.path for event in client.events] == [PATH] * 2
    assert client.ended_with is None


def test_repeated_blocks_mean_the_same():
    client = RawClient()
    for stream_id in range(1, 401, 2):
        client.call(stream_id, fields=changed(P_path=f"/s/{stream_id % 70}"))
    assert [event.path for event in client.events] == [f"/s/{i % 70}" for i in range(1, 401, 2)]


def test_a_header_list_that_expands_ends_the_connection():
    """A table entry of 4 kB, referred to a thousand times in 1 kB."""
    client = RawClient(begin=False)
    client.send(PREFACE + frame(SETTINGS))
    client.call(fields=[*CALL, ("x", "y" * 4000)])
    client.send(frame(HEADERS, END_HEADERS, 3, b"\xbe" * 1000))
    assert client.ended_with == ErrorCode.ENHANCE_YOUR_CALM
    assert client.counts == {"header_list": 1}
