"""Floods: each ends the connection with ENHANCE_YOUR_CALM, and is counted by its name."""

from __future__ import annotations

import msgspec
import pytest

from extproc.http2 import limits
from extproc.http2.frames import ErrorCode, Http2Error
from extproc.http2.limits import FloodGuard
from tests.support.http2_frames import (
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    PING,
    PRIORITY,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    RawClient,
    frame,
    message,
    number,
    setting,
)


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch):
    """Buckets of 50, which fill as the real ones do."""
    small = {
        kind: msgspec.structs.replace(allowance, burst=50.0)
        for kind, allowance in limits.ALLOWANCES.items()
    }
    monkeypatch.setattr(limits, "ALLOWANCES", small)


SINGLE = {
    "ping_flood": frame(PING, 0, 0, bytes(8)),
    "settings_flood": frame(SETTINGS),
    "priority_flood": frame(PRIORITY, 0, 9, bytes(5)),
    "window_update_flood": frame(WINDOW_UPDATE, 0, 1, number(1)),
    "empty_frame_flood": frame(DATA, 0, 1),
    "unknown_frame_flood": frame(0x20),
    "closed_stream_flood": frame(WINDOW_UPDATE, 0, 1, number(1)),
}


@pytest.mark.parametrize("limit", SINGLE)
def test_a_flood_of_frames_ends_the_connection(limit):
    client = RawClient()
    client.call()
    if limit == "closed_stream_flood":
        client.core.end_call(1)
        SINGLE[limit] = frame(DATA, 0, 1)
    client.send(SINGLE[limit] * 100)
    assert client.ended_with == ErrorCode.ENHANCE_YOUR_CALM
    assert client.counts == {limit: 1}


def test_a_slow_peer_may_send_any_of_them_for_ever():
    client = RawClient()
    client.call()
    for second in range(300):
        client.now = float(second)
        client.send(*(data for limit, data in SINGLE.items() if limit != "closed_stream_flood"))
    assert client.ended_with is None


def call_and_reset(client, stream_id):
    block = client.encoder.encode([*CALL_FIELDS])
    return frame(HEADERS, END_HEADERS, stream_id, block) + frame(
        RST_STREAM, 0, stream_id, number(8)
    )


CALL_FIELDS = (
    (":method", "POST"),
    (":scheme", "http"),
    (":path", "/a/b"),
    ("content-type", "application/grpc"),
)


def test_rapid_resets_end_the_connection():
    client = RawClient()
    for stream_id in range(1, 1001, 2):
        client.send(call_and_reset(client, stream_id))
        if client.core.is_terminated:
            break
    assert client.ended_with == ErrorCode.ENHANCE_YOUR_CALM
    assert client.counts == {"rapid_reset": 1}


def test_calls_that_are_answered_may_be_reset_for_ever():
    """Most data planes end most streams with a reset."""
    client = RawClient()
    for stream_id in range(1, 1001, 2):
        client.call(stream_id, fields=CALL_FIELDS)
        client.core.send_messages(stream_id, [b"x"])
        client.send(
            frame(RST_STREAM, 0, stream_id, number(8)), frame(WINDOW_UPDATE, 0, 0, number(6))
        )
    assert client.ended_with is None
    assert client.counts == {}


def test_refused_streams_end_the_connection_at_last():
    client = RawClient(max_streams=1)
    for stream_id in range(1, 201, 2):
        client.call(stream_id)
        if client.core.is_terminated:
            break
    assert client.ended_with == ErrorCode.ENHANCE_YOUR_CALM
    assert client.counts["stream_error_flood"] == 1


@pytest.mark.parametrize("fragment", [b"", bytes(4000)])
def test_a_header_block_without_end_ends_the_connection(fragment):
    client = RawClient()
    client.send(frame(HEADERS, 0, 1, b"\x83"))
    for _ in range(20):
        client.send(frame(CONTINUATION, 0, 1, fragment))
    assert client.ended_with == ErrorCode.ENHANCE_YOUR_CALM
    assert client.counts == {"continuation_flood": 1}


def test_frames_after_the_end_of_a_connection_cost_nothing():
    client = RawClient()
    client.send(frame(SETTINGS, 0, 1))
    assert client.core.receive(bytes(1 << 20), 1.0) == []
    assert client.core.take_output() == b""


def test_window_updates_follow_what_was_sent():
    """A peer that takes many frames may send many windows."""
    client = RawClient()
    client.call(flags=END_HEADERS | END_STREAM)
    for _ in range(300):
        client.core.send_messages(1, [b"x"])
        client.send(frame(WINDOW_UPDATE, 0, 1, number(6)), frame(WINDOW_UPDATE, 0, 0, number(6)))
    assert client.ended_with is None
    assert sum(answer.kind == DATA for answer in client.frames) == 300


def test_a_bucket_refills_with_time_up_to_its_burst():
    guard = FloodGuard(5.0)

    def spend_all(now):
        for count in range(1000):
            try:
                guard.spend("settings_flood", now)
            except Http2Error:
                return count
        return 1000

    assert spend_all(5.0) == 50
    assert spend_all(6.0) == 10
    assert spend_all(1000.0) == 50


def test_data_of_many_frames_is_no_flood():
    client = RawClient()
    client.call()
    for _ in range(20):
        client.send(frame(DATA, 0, 1, message(b"x")) * 100)
    assert client.ended_with is None


def test_windows_of_one_byte_for_many_streams_end_the_connection():
    client = RawClient()
    client.send(frame(SETTINGS, 0, 0, setting(4, 0)))
    for stream_id in range(1, 121, 2):
        client.call(stream_id)
        client.core.send_messages(stream_id, [bytes(100)])
    client.send(frame(SETTINGS, 0, 0, setting(4, 1)))
    assert client.ended_with == ErrorCode.ENHANCE_YOUR_CALM
    assert client.counts == {"window_starvation": 1}


@pytest.mark.parametrize(
    "late", [frame(PRIORITY, 0, 1, bytes(4)), frame(PRIORITY, 0, 99, bytes(4))]
)
def test_an_error_on_a_stream_that_is_not_open_ends_the_connection(late):
    """RST_STREAM is for streams that are open."""
    client = RawClient()
    client.call()
    client.core.end_call(1)
    client.read()
    client.send(late)
    assert client.ended_with == ErrorCode.FRAME_SIZE_ERROR


def test_all_streams_may_end_at_once_while_their_data_is_on_its_way():
    client = RawClient(max_streams=6000)
    block = client.encoder.encode([*CALL_FIELDS])
    client.send(
        *(frame(HEADERS, END_HEADERS, stream_id, block) for stream_id in range(1, 12_000, 2))
    )
    for stream_id in range(1, 12_000, 2):
        client.core.end_call(stream_id)
    client.read()
    assert client.send(frame(DATA, 0, 1, message(b"late"))) == []
    assert client.ended_with is None


def test_a_large_header_list_is_counted():
    client = RawClient()
    client.call(fields=[*CALL_FIELDS, *(("a", "b") for _ in range(130))])
    assert client.counts == {"header_list": 1}


def test_a_read_full_of_header_blocks_is_handled_in_turns():
    """Blocks that were never seen, in frames as large as they may be."""
    client = RawClient(max_header_list_bytes=1 << 20, max_header_block_bytes=1 << 20)
    data = b""
    for stream_id in range(1, 81, 2):
        block = client.encoder.encode([*CALL_FIELDS, ("x", f"{stream_id}" * 4000)], huffman=True)
        data += frame(HEADERS, END_HEADERS, stream_id, block)
    turns = [len(client.core.receive(data, 0.0))]
    while client.core.has_unread:
        turns.append(len(client.core.receive(b"", 0.0)))
    assert sum(turns) == 40
    assert len(turns) > 2
    assert client.core.receive(frame(PING, 0, 0, bytes(8)), 0.0) == []
    assert client.read()[-1].kind == PING


@pytest.mark.parametrize(
    ("data", "messages_of_a_turn"),
    [
        (frame(DATA, 0, 1, message(b"")) * 10_000, 1500),
        (frame(DATA, 0, 1, message(b"") * 3000) * 4, 6000),
    ],
    ids=["frames", "messages"],
)
def test_a_read_full_of_small_messages_is_handled_in_turns(data, messages_of_a_turn):
    client = RawClient()
    client.call()
    turns = [len(client.core.receive(data, 0.0))]
    while client.core.has_unread:
        turns.append(len(client.core.receive(b"", 0.0)))
    assert sum(turns) >= 10_000
    assert max(turns) <= messages_of_a_turn


def test_windows_of_many_streams_change_in_turns():
    """A frame of settings visits every stream."""
    client = RawClient()
    block = client.encoder.encode([*CALL_FIELDS])
    client.send(
        *(frame(HEADERS, END_HEADERS, stream_id, block) for stream_id in range(1, 16_000, 2))
    )
    client.core.receive(
        b"".join(frame(SETTINGS, 0, 0, setting(4, 100 + number)) for number in range(40)), 0.0
    )
    turns = [len(client.read())]
    while client.core.has_unread:
        client.core.receive(b"", 0.0)
        turns.append(len(client.read()))
    assert sum(turns) == 40
    assert max(turns) <= 5


def test_a_connection_that_ends_in_the_middle_of_a_read_leaves_nothing_unread():
    client = RawClient()
    client.call()
    client.core.receive(frame(DATA, 0, 1, message(b"")) * 10_000, 0.0)
    assert client.core.has_unread
    client.core.close()
    assert not client.core.has_unread
    assert client.core.receive(b"", 0.0) == []
