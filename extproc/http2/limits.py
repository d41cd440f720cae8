"""Limits of a connection: what a peer may cost before its stream or connection ends."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from extproc.http2 import frames
from extproc.http2.frames import ErrorCode, Http2Error

_KIB: Final = 1024
_MIB: Final = 1024 * 1024


class Http2Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits that a peer receives in settings, or that end its stream or connection.

    Attributes:
        max_message_bytes: Largest gRPC message; above it RESOURCE_EXHAUSTED.
        max_streams: Open streams on a connection; further ones are refused.
        stream_window_bytes: Bytes on their way on one stream. 1 MiB is the largest piece of a body
            that Envoy sends at once.
        connection_window_bytes: The same on the connection.
        header_table_bytes: Table of fields that the peer may refer to (RFC 7541, section 2.3.2). With
            0, the same fields are the same bytes, and are decoded once.
        max_header_list_bytes: Size of a header list as RFC 9113 counts it; above it status 431.
            16 KiB is what gRPC servers take.
        max_header_fields: Fields of a header list; above it status 431.
        max_header_block_bytes: Compressed size of a header block, and size of the list that it
            expands to; above it the connection ends, because its compression state is lost.
        max_continuations: CONTINUATION frames of one header block.
        max_unsent_bytes: Answers that wait for the peer's windows on one connection, above which
            it gets no more window for its own data.
        max_total_unsent_bytes: The same on all connections together, above which the answer that
            waits for the longest time is dropped, and its call ends.
    """

    max_message_bytes: int = 4 * _MIB
    max_streams: int = 20_000
    stream_window_bytes: int = _MIB
    connection_window_bytes: int = 16 * _MIB
    header_table_bytes: int = 0
    max_header_list_bytes: int = 16 * _KIB
    max_header_fields: int = 128
    max_header_block_bytes: int = 32 * _KIB
    max_continuations: int = 16
    max_unsent_bytes: int = 64 * _MIB
    max_total_unsent_bytes: int = 256 * _MIB

    def build_announcement(self) -> tuple[bytes, bytes]:
        """Build the first frames of a connection, by which the peer learns its limits."""
        more_bytes = self.connection_window_bytes - frames.DEFAULT_WINDOW_BYTES
        return (
            frames.build_settings(
                (
                    (frames.HEADER_TABLE_SIZE, self.header_table_bytes),
                    (frames.MAX_CONCURRENT_STREAMS, self.max_streams),
                    (frames.INITIAL_WINDOW_SIZE, self.stream_window_bytes),
                    (frames.MAX_HEADER_LIST_SIZE, self.max_header_list_bytes),
                )
            ),
            frames.build_window_update(0, more_bytes),
        )


class ReceiveBudget(msgspec.Struct, gc=False):
    """Limit on the bytes of messages that are not complete, or wait for their stream.

    Shared by connections, so that a peer cannot raise it by opening more.
    """

    limit_bytes: int
    held_bytes: int = 0

    def hold(self, size: int) -> bool:
        """Count bytes; False where they are beyond the limit."""
        self.held_bytes += size
        return self.held_bytes <= self.limit_bytes


class _Allowance(msgspec.Struct, frozen=True):
    """Frames of one kind that a peer may send.

    Attributes:
        burst: At once (count).
        per_s: Refill per second (count).
        per_write: Refill per frame of data that was sent to the peer (count).
    """

    burst: float
    per_s: float
    per_write: float = 0.0


#: Kinds of frames that cost more than they bring, with what is usual and a wide margin.
ALLOWANCES: Final[Mapping[str, _Allowance]] = {
    # A gateway that loses its clients cancels all their requests at once: as many as may be open.
    "rapid_reset": _Allowance(20_000.0, 200.0, 1.0),
    # Clients that measure bandwidth ping with their reads.
    "ping_flood": _Allowance(1_000.0, 20.0, 1.0),
    # Clients change their window with what they measured.
    "settings_flood": _Allowance(100.0, 10.0),
    "priority_flood": _Allowance(1_000.0, 20.0),
    # Envoy allows a peer of its own ten for each frame of data too.
    "window_update_flood": _Allowance(5_000.0, 100.0, 10.0),
    # Answers that a peer takes in pieces of some bytes; windows of any use end few messages so.
    "window_starvation": _Allowance(2_000.0, 100.0, 0.1),
    "empty_frame_flood": _Allowance(1_000.0, 100.0),
    "unknown_frame_flood": _Allowance(1_000.0, 20.0),
    # Frames that were on their way when their stream ended.
    "closed_stream_flood": _Allowance(20_000.0, 200.0, 10.0),
    # Streams that are refused or malformed.
    "stream_error_flood": _Allowance(1_000.0, 20.0),
}


class FloodGuard:
    """Token buckets of one connection, by kind of frame.

    A bucket fills with time and with useful work, so that busy connections may send more.
    """

    __slots__ = ("_began", "_levels", "_refills", "writes")

    def __init__(self, now: float) -> None:
        self.writes = 0
        self._began = now
        self._levels = {kind: allowance.burst for kind, allowance in ALLOWANCES.items()}
        self._refills: dict[str, tuple[float, int]] = {}

    def spend(self, kind: str, now: float, count: int = 1) -> None:
        """Take tokens; an empty bucket raises the `Http2Error` that ends the connection."""
        level = self._levels[kind]
        if level < count:
            level = self._refill(kind, now)
            if level < count:
                raise Http2Error(ErrorCode.ENHANCE_YOUR_CALM, f"limit: {kind}", limit=kind)
        self._levels[kind] = level - count

    def _refill(self, kind: str, now: float) -> float:
        """Add what time and work brought since the last refill, and return the level."""
        allowance, writes = ALLOWANCES[kind], self.writes
        since, writes_then = self._refills.get(kind, (self._began, 0))
        self._refills[kind] = (now, writes)
        earned = (now - since) * allowance.per_s + (writes - writes_then) * allowance.per_write
        return min(allowance.burst, self._levels[kind] + earned)
