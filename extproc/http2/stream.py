"""Streams: their state, the frames that it allows (RFC 9113, section 5.1), and events of calls."""

from __future__ import annotations

import enum
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping
from typing import Final, TypeAlias

import msgspec

from extproc.http2 import frames
from extproc.http2.frames import ErrorCode, Http2Error
from extproc.http2.messages import GrpcMessage, MessageAssembler, MessagePieces

#: Least number of streams that we ended before the peer did, and whose late frames are ignored.
_MIN_RESET: Final = 4096


class Http2Stream(msgspec.Struct, eq=False):
    """Open stream.

    Attributes:
        content_left_bytes: Bytes that its request announced and that did not come; None if it announced
            none.
        is_remote_closed: True once the peer sent END_STREAM.
        is_paused: True while its messages wait, so that it gets no more window.
        received_bytes: Received since its window was opened the last time.
        has_responded: True once the head of the response was sent.
        unsent: Data that waits for a window, or for the transport, in pieces.
        unsent_at: Offset in the first of them.
        unsent_bytes: Bytes of them that are not sent.
        source: Messages after that in pieces, built as the peer takes them; None if there are none.
        trailers: Frame that ends the response after the data; empty while it goes on.
        has_moved: True if data was sent since the last check for stalled streams.
    """

    stream_id: int
    send_window_bytes: int
    assembler: MessageAssembler
    content_left_bytes: int | None
    is_remote_closed: bool = False
    is_paused: bool = False
    received_bytes: int = 0
    has_responded: bool = False
    unsent: deque[bytes | memoryview] | None = None
    unsent_at: int = 0
    unsent_bytes: int = 0
    source: Iterator[MessagePieces] | None = None
    trailers: bytes = b""
    has_moved: bool = True

    def count_content(self, size: int, *, is_end: bool) -> None:
        """Raise where what arrived differs from `content-length` (RFC 9113, section 8.1.1)."""
        left = self.content_left_bytes
        if left is None:
            return
        self.content_left_bytes = left = left - size
        if left < 0 or (is_end and left):
            raise Http2Error(
                ErrorCode.PROTOCOL_ERROR,
                "data differs from content-length",
                stream_id=self.stream_id,
            )


class StreamState(enum.IntEnum):
    """State of a stream that is not open both ways.

    RESET is closed by us, possibly before the peer noticed: its frames are ignored for a while.
    """

    IDLE = 0
    HALF_CLOSED_REMOTE = 1
    RESET = 2
    CLOSED = 3


#: Types of frames that are not allowed, by state, and the error; it ends the stream where that is half
#: closed, else the connection.
_FORBIDDEN: Final[Mapping[StreamState, tuple[frozenset[int], ErrorCode]]] = {
    StreamState.IDLE: (
        frozenset({frames.DATA, frames.RST_STREAM, frames.WINDOW_UPDATE}),
        ErrorCode.PROTOCOL_ERROR,
    ),
    StreamState.HALF_CLOSED_REMOTE: (
        frozenset({frames.DATA, frames.HEADERS}),
        ErrorCode.STREAM_CLOSED,
    ),
    StreamState.RESET: (frozenset(), ErrorCode.NO_ERROR),
    StreamState.CLOSED: (frozenset({frames.DATA, frames.HEADERS}), ErrorCode.STREAM_CLOSED),
}


class StreamTable:
    """Streams of a connection: those that are open, and how the others ended.

    Args:
        max_streams: Open streams, all of which we may end at once (count).

    Attributes:
        last_id: The highest identifier that the peer used.
    """

    __slots__ = ("_max_reset", "_reset", "last_id", "open")

    def __init__(self, max_streams: int) -> None:
        self.open: dict[int, Http2Stream] = {}
        self.last_id = 0
        self._max_reset = max(_MIN_RESET, max_streams)
        self._reset: OrderedDict[int, None] = OrderedDict()

    def note_reset(self, stream_id: int) -> None:
        """Record that we ended a stream, possibly before the peer notices."""
        reset = self._reset
        reset[stream_id] = None
        if len(reset) > self._max_reset:
            reset.popitem(last=False)

    def check(self, kind: int, stream_id: int) -> None:
        """Raise for a frame that is not allowed on a stream that is not open both ways."""
        state = self._state(stream_id)
        kinds, code = _FORBIDDEN[state]
        if kind in kinds:
            ends_stream = state is StreamState.HALF_CLOSED_REMOTE
            raise Http2Error(
                code,
                f"frame of type {kind} in state {state.name}",
                stream_id=stream_id if ends_stream else 0,
            )

    def _state(self, stream_id: int) -> StreamState:
        if stream_id in self.open:
            return StreamState.HALF_CLOSED_REMOTE
        if stream_id > self.last_id or not stream_id % 2:
            return StreamState.IDLE
        return StreamState.RESET if stream_id in self._reset else StreamState.CLOSED


class CallStarted(msgspec.Struct, frozen=True, gc=False):
    """The peer calls a method.

    Attributes:
        stream_id: Names the call until it ends.
        path: `/package.Service/Method`.
        timeout_s: Seconds that the client waits for the end; None for ever.
        traceparent: Trace context of the client; empty without one.
    """

    stream_id: int
    path: str
    timeout_s: float | None
    traceparent: str = ""


class MessageReceived(msgspec.Struct, frozen=True, gc=False):
    """A message of a call is complete."""

    stream_id: int
    message: GrpcMessage


class CallHalfClosed(msgspec.Struct, frozen=True, gc=False):
    """The peer sends no further message of a call."""

    stream_id: int


class CallTerminated(msgspec.Struct, frozen=True, gc=False):
    """A call ended without the server having ended it: canceled, or it broke a rule or a limit."""

    stream_id: int


class ConnectionTerminated(msgspec.Struct, frozen=True, gc=False):
    """The connection ends because the peer broke a rule or a limit; no event follows."""

    code: ErrorCode
    detail: str


Http2Event: TypeAlias = (
    CallStarted | MessageReceived | CallHalfClosed | CallTerminated | ConnectionTerminated
)
