"""The core against `h2` as a client: whatever both may do, both agree on what was sent."""

from __future__ import annotations

from collections import Counter

import h2.config
import h2.connection
import h2.events
import h2.exceptions
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from extproc.http2.connection import Http2Connection
from extproc.http2.limits import Http2Limits, ReceiveBudget
from extproc.http2.messages import GrpcStatus
from extproc.http2.stream import (
    CallHalfClosed,
    CallStarted,
    CallTerminated,
    ConnectionTerminated,
    MessageReceived,
)
from tests.support.http2_frames import CALL, PREFACE, SETTINGS, RawClient, frame, message

#: A first run imports lazily; time is not what is tested.
calm = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


class Pair:
    """An `h2` client and the core, with bytes that travel in pieces of any size."""

    def __init__(self, cuts):
        self.client = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True))
        self.core = Http2Connection(
            Http2Limits(stream_window_bytes=5000, connection_window_bytes=70_000),
            ReceiveBudget(1 << 20),
            Counter(),
            now=0.0,
        )
        self.cuts = cuts
        self.received = {}
        self.answered = {}
        self.ended = {}
        self.half_closed = set()
        self.client.initiate_connection()
        self.exchange()

    def cut(self, data):
        while data:
            size = self.cuts.draw(st.integers(1, max(1, len(data))))
            yield data[:size]
            data = data[size:]

    def exchange(self):
        """Carry bytes until both sides have nothing to send."""
        moved = True
        while moved:
            moved = False
            for piece in self.cut(self.client.data_to_send()):
                moved = True
                for event in self.core.receive(piece, 0.0):
                    self.on_server(event)
            for piece in self.cut(self.core.take_output()):
                moved = True
                for event in self.client.receive_data(piece):
                    self.on_client(event)

    def on_server(self, event):
        assert not isinstance(event, (ConnectionTerminated, CallTerminated)), event
        if isinstance(event, CallStarted):
            self.received[event.stream_id] = []
        elif isinstance(event, MessageReceived):
            self.received[event.stream_id].append(event.message)
        elif isinstance(event, CallHalfClosed):
            self.half_closed.add(event.stream_id)

    def on_client(self, event):
        if isinstance(event, h2.events.DataReceived):
            self.answered.setdefault(event.stream_id, bytearray()).extend(event.data)
            self.client.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
        elif isinstance(event, h2.events.TrailersReceived):
            self.ended[event.stream_id] = dict(event.headers)[b"grpc-status"]
        elif isinstance(event, h2.events.StreamReset):
            assert event.error_code == 0


@calm
@given(st.data())
def test_both_agree_on_every_message(data):
    pair = Pair(data)
    texts = st.lists(st.integers(0, 9000).map(bytes), max_size=3)
    calls = data.draw(st.lists(st.tuples(texts, texts, st.booleans()), min_size=1, max_size=4))
    for number, (requests, answers, closes) in enumerate(calls):
        stream_id = 2 * number + 1
        pair.client.send_headers(stream_id, list(CALL))
        body = b"".join(map(message, requests))
        while body:
            window = min(pair.client.local_flow_control_window(stream_id), 16_384)
            size = data.draw(st.integers(1, min(window, len(body))))
            pair.client.send_data(stream_id, body[:size])
            body = body[size:]
            pair.exchange()
        if closes:
            pair.client.end_stream(stream_id)
        pair.exchange()
        assert pair.received[stream_id] == requests
        assert (stream_id in pair.half_closed) is closes
        if answers:
            pair.core.send_messages(stream_id, answers)
        else:
            pair.core.send_messages(stream_id, [b""])
        pair.core.end_call(stream_id, GrpcStatus.OK)
        pair.exchange()
        expected = b"".join(map(message, answers or [b""]))
        assert bytes(pair.answered[stream_id]) == expected
        assert pair.ended[stream_id] == b"0"
    assert pair.core.num_streams == 0


START = PREFACE + frame(SETTINGS)

FRAMES = st.builds(
    frame,
    st.integers(0, 10),
    st.integers(0, 255),
    st.sampled_from([0, 1, 1, 3, 2, 0x7FFF_FFFF]),
    st.binary(max_size=40),
)


@calm
@given(st.lists(FRAMES, max_size=30), st.data())
def test_any_frames_have_an_answer_that_a_client_understands(sequence, data):
    """No exception, and what is answered is HTTP/2; cut anyhow, the answer is the same."""
    client = RawClient()
    block = client.encoder.encode(list(CALL))
    stream = frame(1, 4, 1, block) + b"".join(sequence)
    client.send(stream)
    again = RawClient()
    at = 0
    while at < len(stream):
        size = data.draw(st.integers(1, len(stream) - at))
        again.send(stream[at : at + size])
        at += size
    assert again.events == client.events
    assert again.frames == client.frames
    for answer in client.frames:
        assert answer.kind in {0, 1, 3, 4, 6, 7, 8}


@calm
@given(st.binary(max_size=300))
def test_any_bytes_have_an_answer(data):
    client = RawClient()
    client.send(data)
    client.core.close()
    assert client.budget.held_bytes == 0


@pytest.mark.parametrize("size", [0, 1, 4, 5, 6, 100])
def test_messages_are_the_same_however_they_are_cut(size):
    """Payloads of any size give the same messages."""
    client = RawClient()
    client.call()
    stream = b"".join(message(bytes([i]) * i) for i in range(20))
    step = size or len(stream)
    client.send(*(frame(0, 0, 1, stream[at : at + step]) for at in range(0, len(stream), step)))
    texts = [event.message for event in client.events if isinstance(event, MessageReceived)]
    assert texts == [bytes([i]) * i for i in range(20)]


@pytest.mark.parametrize("size", [4097, 5000, 9999, 16_384 + 9, 40_000])
def test_large_messages_are_the_same_however_they_are_read(size):
    """A frame that a long read cuts is completed by the next, with what is around it."""
    client = RawClient()
    client.call()
    texts = [bytes([i]) * (i * 3001) for i in range(20)]
    stream = b"".join(map(message, texts))
    data = b"".join(
        frame(0, 0, 1, stream[at : at + 16_384]) for at in range(0, len(stream), 16_384)
    )
    for at in range(0, len(data), size):
        client.send(data[at : at + size])
    events = [event.message for event in client.events if isinstance(event, MessageReceived)]
    assert events == texts
    assert {type(event) for event in events} == {bytes, bytearray}
