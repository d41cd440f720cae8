"""Hostile clients of the HTTP/2 core: valid sessions with damage, and what must hold beside them."""

from __future__ import annotations

import random
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

import hpack

from extproc.http2.connection import Http2Connection
from extproc.http2.frames import ErrorCode
from extproc.http2.limits import Http2Limits, ReceiveBudget
from extproc.http2.messages import BUDGET_EXCEEDED, BUDGET_LIMIT, GrpcStatus, MessagePieces
from extproc.http2.sender import SendBudget
from extproc.http2.stream import (
    CallHalfClosed,
    CallStarted,
    CallTerminated,
    ConnectionTerminated,
    Http2Event,
    MessageReceived,
)
from tests.support.http2_frames import (
    ACK,
    CALL,
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HAS_PRIORITY,
    HEADERS,
    PADDED,
    PING,
    PREFACE,
    PRIORITY,
    PUSH_PROMISE,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    frame,
    message,
    number,
    setting,
)

#: Small limits, so that sessions of some hundred frames reach them.
LIMITS: Final = Http2Limits(
    max_message_bytes=3000,
    max_streams=8,
    stream_window_bytes=5000,
    connection_window_bytes=80_000,
    max_header_list_bytes=1000,
    max_header_fields=20,
    max_header_block_bytes=2000,
    max_continuations=4,
    max_unsent_bytes=20_000,
    max_total_unsent_bytes=24_000,
)

#: Incomplete messages of all sessions (bytes).
BUDGET_BYTES: Final = 4_000

#: The largest frame with its head (bytes): more than that is never buffered.
_LARGEST_FRAME: Final = 16_384 + 9

_HEAD = struct.Struct(">HBBBI")


def _build_blocks() -> tuple[list[bytes], list[bytes]]:
    """Header blocks: those of calls or that a server refuses, and those that end a connection."""
    encoder = hpack.Encoder()
    encoder.header_table_size = 0
    base = dict(CALL)
    variants = [
        CALL,
        CALL,
        CALL,
        [*CALL, ("grpc-timeout", "5S")],
        [*CALL, ("content-length", "30")],
        [*CALL, ("x-long", "y" * 900)],
        [*CALL, *(("a", str(i)) for i in range(30))],
        list({**base, "content-type": "text/plain"}.items()),
        list({**base, "grpc-encoding": "gzip"}.items()),
        list({**base, ":method": "GET"}.items()),
        list({**base, ":path": ""}.items()),
        list({**base, "connection": "close"}.items()),
    ]
    stateful = hpack.Encoder()
    broken = [stateful.encode(list(CALL)) for _ in range(2)]
    broken += [
        b"\xc0",
        b"\x3f\xe1\x1f",
        b"\xff\xff\xff\xff\x0f",
        encoder.encode([("x", "y" * 5000)]),
    ]
    # Blocks come in any order, so each begins with the table that the server announces.
    blocks = [b"\x20" + encoder.encode(list(fields)).removeprefix(b"\x20") for fields in variants]
    return blocks, broken


class HostileClient:
    """Frames of a client: mostly valid ones, of which some are damaged.

    Args:
        rng: Seeded chance.
        damage: Share of damaged frames.
    """

    def __init__(self, rng: random.Random, damage: float) -> None:
        self._rng = rng
        self._damage = damage
        self._next_id = 1
        self._streams: list[int] = []
        self._kinds: Sequence[Callable[[], bytes]] = (
            *[self._open] * 6,
            *[self._data] * 16,
            *[self._window] * 6,
            self._reset,
            self._trailers,
            self._settings,
            self._ping,
            self._priority,
            self._continued,
            self._goaway,
        )

    def frames(self, count: int) -> bytes:
        """Build so many frames."""
        rng, kinds = self._rng, self._kinds
        built = []
        for _ in range(count):
            data = rng.choice(kinds)()
            if rng.random() < self._damage:
                data = self._random() if rng.random() < 0.2 else self._damaged(data)
            built.append(data)
        return b"".join(built)

    def _stream(self) -> int:
        """A stream that is open for the client, or any other; 0 if there is none."""
        rng = self._rng
        if rng.random() < 0.1 * self._damage:
            return rng.choice((1, 2, 3, self._next_id, self._next_id + 8, 0x7FFF_FFFF))
        return rng.choice(self._streams) if self._streams else 0

    def _begin(self, *, ends: bool) -> int:
        """A new stream."""
        stream_id, self._next_id = self._next_id, self._next_id + 2
        if not ends:
            self._streams.append(stream_id)
            del self._streams[:-40]
        return stream_id

    def _end(self, stream_id: int) -> None:
        if stream_id in self._streams:
            self._streams.remove(stream_id)

    def _block(self) -> bytes:
        is_broken = self._rng.random() < 0.1 * self._damage
        return self._rng.choice(_BROKEN_BLOCKS if is_broken else _BLOCKS)

    def _open(self) -> bytes:
        rng = self._rng
        ends = rng.random() < 0.2
        block, flags = self._block(), END_HEADERS | END_STREAM * ends
        if rng.random() < 0.1:
            flags |= HAS_PRIORITY
            block = number(0) + b"\x10" + block
        return frame(HEADERS, flags, self._begin(ends=ends), block)

    def _continued(self) -> bytes:
        rng = self._rng
        stream_id = self._begin(ends=False)
        block = self._block()
        cut = rng.randint(0, len(block))
        most = 6 if rng.random() < self._damage else 2
        pieces = [frame(HEADERS, 0, stream_id, block[:cut])]
        pieces += [frame(CONTINUATION, 0, stream_id) for _ in range(rng.randrange(most))]
        pieces.append(frame(CONTINUATION, END_HEADERS, stream_id, block[cut:]))
        return b"".join(pieces)

    def _data(self) -> bytes:
        rng = self._rng
        stream_id = self._stream()
        if not stream_id:
            return self._open()
        flags = 0
        size = rng.choice((0, 1, 20, 20, 300, 2000, 2900, 3100))
        choice = rng.random()
        if choice < 0.7:
            payload = message(bytes(size)) * rng.choice((1, 1, 1, 2))
        elif choice < 0.8:
            payload = message(bytes(size))[: rng.randrange(size + 5)]
        elif choice < 0.95:
            payload = bytes(rng.choice((0, 1, 3, 700)))
        else:
            payload = rng.randbytes(rng.randrange(40))
        if rng.random() < 0.1:
            flags |= PADDED
            payload = b"\x04" + payload + bytes(4)
        if rng.random() < 0.1:
            flags |= END_STREAM
            self._end(stream_id)
        return frame(DATA, flags, stream_id, payload)

    def _window(self) -> bytes:
        rng = self._rng
        stream_id = 0 if rng.random() < 0.4 else self._stream()
        return frame(WINDOW_UPDATE, 0, stream_id, number(rng.choice((1, 10, 500, 9000))))

    def _reset(self) -> bytes:
        stream_id = self._stream()
        self._end(stream_id)
        return (
            frame(RST_STREAM, 0, stream_id, number(self._rng.randrange(16))) if stream_id else b""
        )

    def _trailers(self) -> bytes:
        stream_id = self._stream()
        self._end(stream_id)
        block = self._rng.choice((b"\x20\x00\x01a\x01b", b"\x20", self._block()))
        return frame(HEADERS, END_HEADERS | END_STREAM, stream_id, block) if stream_id else b""

    def _settings(self) -> bytes:
        rng = self._rng
        if rng.random() < 0.3:
            return frame(SETTINGS, ACK)
        pairs = ((4, 0), (4, 100), (4, 65_535), (5, 16_384), (5, 20_000), (1, 0), (3, 1), (9, 9))
        return frame(SETTINGS, 0, 0, b"".join(setting(*pair) for pair in rng.sample(pairs, 2)))

    def _ping(self) -> bytes:
        rng = self._rng
        payload = b"extprocD" if rng.random() < 0.01 else rng.choice((b"extprocK", bytes(8)))
        return frame(PING, rng.choice((0, ACK)), 0, payload)

    def _priority(self) -> bytes:
        return frame(PRIORITY, 0, self._stream() or 1, number(0) + b"\x10")

    def _goaway(self) -> bytes:
        return frame(GOAWAY, 0, 0, number(0) + number(0))

    def _random(self) -> bytes:
        rng = self._rng
        kind = rng.choice((PUSH_PROMISE, rng.randrange(256), rng.randrange(10)))
        flags, stream_id = rng.randrange(256), self._stream()
        return frame(kind, flags, stream_id, rng.randbytes(rng.randrange(30)))

    def _damaged(self, data: bytes) -> bytes:
        rng = self._rng
        choice = rng.randrange(6)
        at = rng.randrange(len(data)) if data else 0
        if not data:
            return data
        if choice == 0:
            return data + data
        if choice == 1:
            return data[:at]
        if choice == 2:
            return data[:at] + data[at + 1 :]
        if choice == 3:
            return data[:at] + rng.randbytes(1) + data[at:]
        at = rng.randrange(9) if choice == 4 else at
        return data[:at] + bytes((data[at] ^ 1 << rng.randrange(8),)) + data[at + 1 :]


class ResponseChecker:
    """Follows the frames of the server: each must be one that a client understands."""

    def __init__(self) -> None:
        self._begun: set[int] = set()
        self._ended: set[int] = set()
        self._reset: set[int] = set()
        self._is_over = False

    def take(self, output: bytes) -> None:
        """Check all frames of an output."""
        at = 0
        while at < len(output):
            high, low, kind, flags, stream_id = _HEAD.unpack_from(output, at)
            at += 9 + (high << 8 | low)
            assert at <= len(output), "frame cut short"
            assert not self._is_over, "frame after the last GOAWAY"
            if stream_id:
                self._take_stream(kind, flags, stream_id)
            else:
                assert kind in {SETTINGS, PING, GOAWAY, WINDOW_UPDATE}, kind
                if kind == GOAWAY:
                    self._is_over = (
                        struct.unpack_from(">I", output, at - (high << 8 | low) + 4)[0] != 0
                    )

    def _take_stream(self, kind: int, flags: int, stream_id: int) -> None:
        assert stream_id % 2, stream_id
        assert stream_id not in self._reset, ("frame on a stream that was reset", kind, stream_id)
        if kind == RST_STREAM:
            self._reset.add(stream_id)
            return
        assert stream_id not in self._ended or kind == WINDOW_UPDATE, (kind, stream_id)
        if kind == DATA:
            assert stream_id in self._begun, "DATA before HEADERS"
        elif kind == HEADERS:
            ends = bool(flags & END_STREAM)
            assert ends or stream_id not in self._begun, "two heads"
            self._begun.add(stream_id)
            if ends:
                self._ended.add(stream_id)
        else:
            assert kind == WINDOW_UPDATE, kind


class FuzzedSession:
    """A core under a hostile client, with an application that does anything it may.

    Args:
        rng: Seeded chance.
        budget: Shared by sessions.
        counts: Counts of limits.

    Attributes:
        core: The server.
    """

    def __init__(self, rng: random.Random, budget: ReceiveBudget, counts: Counter[str]) -> None:
        self._rng = rng
        self._budget = budget
        self._now = 0.0
        self._send_budget = SendBudget(LIMITS.max_total_unsent_bytes)
        self.core = Http2Connection(
            LIMITS, budget, counts, now=0.0, send_budget=self._send_budget, holder=self
        )
        self._counts = counts
        self._lazy: set[int] = set()
        self._paused: set[int] = set()
        self._responses = ResponseChecker()
        self._open: set[int] = set()
        self._half_closed: set[int] = set()
        self._is_over = False

    def receive(self, data: bytes) -> None:
        """Feed bytes, let the application act, and check everything."""
        rng = self._rng
        self._now += rng.choice((0.0, 0.0, 0.1, 2.0))
        self._follow(self.core.receive(data, self._now))
        while self.core.has_unread:
            self._follow(self.core.receive(b"", self._now))
        for stream_id in self._open - self._lazy:
            self._act(stream_id)
        self._send_budget.enforce()
        if rng.random() < 0.02:
            self._follow(self.core.reset_stalled())
        if rng.random() < 0.001:
            rng.choice((self.core.start_drain, self.core.finish_drain, self.core.ping))()
        if self.core.is_terminated:
            assert not self._send_budget.held_bytes
            assert not self._lazy, "a source is left open"
        else:
            self.check_bounds()
        while self.core.has_output:
            self._responses.take(self.core.take_output())

    def check_bounds(self) -> None:
        """Check that memory is bounded by the limits."""
        core = self.core
        assert len(core._buffer) < _LARGEST_FRAME
        assert core.num_streams <= LIMITS.max_streams
        table = core._decoder._hpack
        assert table.table_bytes <= table.max_table_bytes <= 4096
        assert len(core._streams._reset) <= 4096
        held_bytes = self._send_budget.held_bytes
        assert held_bytes == core._sender.unsent_bytes <= LIMITS.max_total_unsent_bytes
        assert bool(held_bytes) == bool(self._send_budget.waiting)
        assert self._budget.held_bytes <= BUDGET_BYTES + _LARGEST_FRAME + 64

    def _follow(self, events: Iterable[Http2Event]) -> None:
        """Check the order of events, and keep messages of calls that are paused."""
        refused: set[int] = set()
        for event in events:
            assert not self._is_over, "event after the end"
            if isinstance(event, CallStarted):
                assert event.stream_id not in self._open
                self._open.add(event.stream_id)
            elif isinstance(event, MessageReceived):
                assert event.stream_id in self._open
                assert event.stream_id not in self._half_closed
                assert len(event.message) <= LIMITS.max_message_bytes
                is_kept = event.stream_id in self._paused - refused
                if is_kept and not self.core.hold_message(event.stream_id, event.message):
                    refused.add(event.stream_id)
            elif isinstance(event, CallHalfClosed):
                assert event.stream_id in self._open
                assert event.stream_id not in self._half_closed
                self._half_closed.add(event.stream_id)
            elif isinstance(event, CallTerminated):
                self._open.remove(event.stream_id)
                self._half_closed.discard(event.stream_id)
            elif isinstance(event, ConnectionTerminated):
                assert event.code != ErrorCode.NO_ERROR
                self._is_over = True
        for stream_id in refused & self._open:
            self._counts[BUDGET_LIMIT] += 1
            self.core.end_call(stream_id, GrpcStatus.RESOURCE_EXHAUSTED, BUDGET_EXCEEDED)
            self._forget(stream_id)

    def _forget(self, stream_id: int) -> None:
        self._open.discard(stream_id)
        self._half_closed.discard(stream_id)
        self._paused.discard(stream_id)

    def drop_answer(self, stream_id: int) -> None:
        """End a call, as a server does."""
        self.core.reset_call(stream_id, ErrorCode.CANCEL)
        self._forget(stream_id)

    def _build_messages(self, stream_id: int) -> Iterator[MessagePieces]:
        """Messages that are built as the client takes them."""
        self._lazy.add(stream_id)
        try:
            for _ in range(self._rng.randrange(12)):
                yield bytes(1000), bytes(2000)
        finally:
            self._lazy.remove(stream_id)

    def _act(self, stream_id: int) -> None:
        rng, core = self._rng, self.core
        choice = rng.random()
        if choice < 0.05:
            core.send_lazily(stream_id, self._build_messages(stream_id))
            return
        if choice < 0.3:
            core.send_messages(
                stream_id, [bytes(rng.choice((0, 5, 400, 3000)))] * rng.choice((1, 3))
            )
        elif choice < 0.4:
            core.end_call(stream_id, rng.choice((GrpcStatus.OK, GrpcStatus.INTERNAL)), "a text")
            self._forget(stream_id)
        elif choice < 0.45:
            core.pause_call(stream_id)
            self._paused.add(stream_id)
        elif choice < 0.55:
            core.resume_call(stream_id)
            self._paused.discard(stream_id)
        elif choice < 0.57:
            core.reset_call(stream_id, ErrorCode.CANCEL)
            self._forget(stream_id)


def fuzz(rng: random.Random, num_frames: int, counts: Counter[str]) -> int:
    """Run sessions until so many frames were sent; returns the number of frames.

    Args:
        rng: Seeded chance.
        num_frames: Frames to send (count).
        counts: Takes the limits and violations that ended streams and connections.
    """
    budget = ReceiveBudget(BUDGET_BYTES)
    sent = 0
    while sent < num_frames:
        session = FuzzedSession(rng, budget, counts)
        client = HostileClient(rng, rng.choice((0.0, 0.002, 0.02, 0.2)))
        acknowledgement = frame(SETTINGS, ACK) if rng.random() < 0.9 else b""
        session.receive(PREFACE + frame(SETTINGS) + acknowledgement)
        left = rng.choice((50, 300, 2000))
        while left > 0 and not session.core.is_terminated:
            count = rng.randrange(1, 24)
            data = client.frames(count)
            sent, left = sent + count, left - count
            cut = rng.randrange(len(data) + 1)
            session.receive(data[:cut])
            session.receive(data[cut:])
        session.core.close()
        assert budget.held_bytes == 0, "a session that ended holds bytes"
    return sent


_BLOCKS, _BROKEN_BLOCKS = _build_blocks()
