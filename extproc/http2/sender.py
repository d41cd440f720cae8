"""Sending side of a connection: responses as frames, within the windows of the peer."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from typing import Final, Protocol

import msgspec

from extproc.http2 import frames, messages
from extproc.http2.frames import ErrorCode, Http2Error
from extproc.http2.limits import FloodGuard
from extproc.http2.messages import GrpcStatus, MessagePieces, frame_messages, frame_pieces
from extproc.http2.stream import Http2Stream

#: DATA frames below this (bytes) that end inside of a message, because the peer's window does, cost
#: more than they bring.
_FRAGMENT_BYTES: Final = 1024

#: Data of one output (bytes): more waits for the transport to take it, and is not built before.
_OUTPUT_BYTES: Final = 256 * 1024

#: What a frame takes of it beside its data: thousands of streams may each have some bytes to send.
_FRAME_ROOM_BYTES: Final = 128

#: Largest payload of our frames (bytes), however large the peer allows them to be.
_MAX_FRAME_BYTES: Final = 64 * 1024


class AnswerHolder(Protocol):
    """Owner of a connection whose answers may wait."""

    def drop_answer(self, stream_id: int, /) -> None:
        """End a call whose answer is dropped."""


class SendBudget(msgspec.Struct):
    """Limit on answers that wait for the windows of peers, shared by connections.

    A peer that takes what it asked for is not ended for others: the answer that waits for the
    longest time goes first.

    Attributes:
        waiting: Streams whose answer waits, in the order in which that began, and their connections.
    """

    limit_bytes: int
    held_bytes: int = 0
    waiting: dict[Http2Stream, AnswerHolder] = {}

    def enforce(self) -> None:
        """Drop answers until the limit holds."""
        waiting = self.waiting
        while self.held_bytes > self.limit_bytes and waiting:
            stream = next(iter(waiting))
            waiting.pop(stream).drop_answer(stream.stream_id)


class ResponseSender:
    """Builds the frames of responses and holds back what the peer takes no window for.

    An output has a bounded size, so that a large response is not in memory twice, and leaves when
    the transport took what came before.

    Args:
        holder: Ends calls whose answer the budget drops; None drops none.

    Attributes:
        output: Frames to write, in order.
        unsent_bytes: Data of all streams that waits for a window or for the transport.
        initial_window_bytes: Window of a new stream.
    """

    def __init__(self, guard: FloodGuard, budget: SendBudget, holder: AnswerHolder | None) -> None:
        self.output: list[bytes | memoryview] = []
        self.unsent_bytes = 0
        self._num_fragments = 0
        self.initial_window_bytes = frames.DEFAULT_WINDOW_BYTES
        self.max_frame_bytes = frames.DEFAULT_FRAME_BYTES
        self._guard = guard
        self._budget = budget
        self._holder = holder
        self._room_bytes = _OUTPUT_BYTES
        self._window_bytes = frames.DEFAULT_WINDOW_BYTES
        self._blocked: dict[int, Http2Stream] = {}
        # Those that wait for the window of the connection or for the transport only, in turns.
        self._ready: OrderedDict[int, Http2Stream] = OrderedDict()
        self._is_first_block = True

    def take_output(self) -> bytes:
        """Return all frames since the last call, and make room for more."""
        output = self.output
        if not output:
            return b""
        self.output = []
        self._room_bytes = _OUTPUT_BYTES
        return b"".join(output)

    def take_fragments(self) -> int:
        """Return the number of small frames that the peer's windows cut since the last call."""
        num_fragments, self._num_fragments = self._num_fragments, 0
        return num_fragments

    def send(self, stream: Http2Stream, messages: Sequence[bytes]) -> None:
        """Send messages, after what waits already."""
        if not stream.has_responded:
            self._send_head(stream)
        data = frame_messages(messages)
        size = len(data)
        if (
            stream.unsent is None
            and size <= self.max_frame_bytes
            and size <= stream.send_window_bytes
            and size <= self._window_bytes
            and self._room_bytes > 0
        ):
            stream.send_window_bytes -= size
            self._window_bytes -= size
            self._room_bytes -= size + _FRAME_ROOM_BYTES
            self._guard.writes += 1
            output = self.output
            output.append(
                frames.pack_head(size >> 8, size & 0xFF, frames.DATA, 0, stream.stream_id)
            )
            output.append(data)
            return
        self._enqueue(stream, (data,))
        self._send_unsent(stream)

    def send_lazily(self, stream: Http2Stream, source: Iterator[MessagePieces]) -> bool:
        """Send messages as the peer takes them; nothing may follow before the last was taken.

        Args:
            source: Builds the messages, each in pieces. It must not raise, and is closed where the
                call ends.

        Returns:
            True if all were taken.
        """
        if not stream.has_responded:
            self._send_head(stream)
        self._enqueue(stream, ())
        stream.source = source
        self._send_unsent(stream)
        return stream.unsent is None

    def _send_head(self, stream: Http2Stream) -> None:
        stream.has_responded = True
        self.output.append(messages.build_head(stream.stream_id, is_first=self._is_first_block))
        self._is_first_block = False

    def finish(self, stream: Http2Stream, status: GrpcStatus, message: str) -> bool:
        """End a response; returns False if the end waits for data."""
        stream_id = stream.stream_id
        if not stream.has_responded:
            self.reject(stream, status, message)
            return True
        trailers = messages.build_trailers(stream_id, status, message)
        if stream.unsent is None:
            self.output.append(trailers)
            return True
        stream.trailers = trailers
        return False

    def reject(
        self, stream: Http2Stream, status: GrpcStatus, message: str, *, http_status: int = 200
    ) -> None:
        """Answer a request without messages."""
        stream.has_responded = True
        self.output.append(
            messages.build_trailers_only(
                stream.stream_id,
                status,
                message,
                http_status=http_status,
                is_first=self._is_first_block,
            )
        )
        self._is_first_block = False

    def drop(self, stream: Http2Stream) -> None:
        """Forget what a stream still has to send."""
        if stream.unsent is None:
            return
        size = stream.unsent_bytes
        self.unsent_bytes -= size
        self._budget.held_bytes -= size
        self._on_sent(stream)
        source, stream.source = stream.source, None
        if isinstance(source, Generator):
            source.close()

    def open_stream_window(self, stream: Http2Stream, more_bytes: int) -> bool:
        """Add to the window of a stream, within its limit; True if its response ended with that."""
        stream.send_window_bytes += more_bytes
        if stream.send_window_bytes > frames.MAX_WINDOW_BYTES:
            raise Http2Error(
                ErrorCode.FLOW_CONTROL_ERROR, "window too large", stream_id=stream.stream_id
            )
        return stream.unsent is not None and self._send_unsent(stream)

    def open_connection_window(self, more_bytes: int) -> list[Http2Stream]:
        """Add to the window of all, within its limit; returns streams that ended with that."""
        self._window_bytes += more_bytes
        if self._window_bytes > frames.MAX_WINDOW_BYTES:
            raise Http2Error(ErrorCode.FLOW_CONTROL_ERROR, "window of the connection too large")
        return self.send_ready()

    def resize_windows(
        self, streams: Iterable[Http2Stream], initial_bytes: int
    ) -> list[Http2Stream]:
        """Apply SETTINGS_INITIAL_WINDOW_SIZE, within limits; returns streams that ended so."""
        change = initial_bytes - self.initial_window_bytes
        self.initial_window_bytes = initial_bytes
        for stream in streams:
            stream.send_window_bytes += change
            if stream.send_window_bytes > frames.MAX_WINDOW_BYTES:
                raise Http2Error(ErrorCode.FLOW_CONTROL_ERROR, "window of a stream too large")
        for stream in self._blocked.values():
            if stream.send_window_bytes > 0:
                self._ready.setdefault(stream.stream_id, stream)
        return self.send_ready()

    def limit_frames(self, max_bytes: int) -> None:
        """Apply SETTINGS_MAX_FRAME_SIZE."""
        self.max_frame_bytes = min(max_bytes, _MAX_FRAME_BYTES)

    def find_stalled(self) -> list[Http2Stream]:
        """Return streams that sent nothing since the last call although they have data."""
        stalled = []
        for stream in self._blocked.values():
            if not stream.has_moved:
                stalled.append(stream)
            stream.has_moved = False
        return stalled

    @property
    def has_ready(self) -> bool:
        """True if data waits for the transport only."""
        return bool(self._ready) and self._window_bytes > 0

    def send_ready(self) -> list[Http2Stream]:
        """Send what the window of the connection allows; returns streams that ended with that."""
        ended, ready = [], self._ready
        while ready and self._window_bytes > 0 and self._room_bytes > 0:
            _, stream = ready.popitem(last=False)
            if self._send_unsent(stream):
                ended.append(stream)
        return ended

    def _enqueue(self, stream: Http2Stream, pieces: MessagePieces) -> None:
        """Let data wait behind what waits already."""
        if stream.unsent is None:
            stream.unsent = deque()
            stream.has_moved = True
            self._blocked[stream.stream_id] = stream
        size = sum(map(len, pieces))
        stream.unsent += pieces
        stream.unsent_bytes += size
        self.unsent_bytes += size
        self._budget.held_bytes += size

    def _has_unsent(self, stream: Http2Stream) -> bool:
        """Check if a stream has data to send; builds its next message where it has one."""
        if stream.unsent_bytes:
            return True
        pieces = None if stream.source is None else next(stream.source, None)
        if pieces is None:
            stream.source = None
            return False
        self._enqueue(stream, frame_pieces(pieces))
        return True

    def _send_unsent(self, stream: Http2Stream) -> bool:
        """Send what the windows allow; returns True if the response ended with that."""
        output, stream_id, max_bytes = self.output, stream.stream_id, self.max_frame_bytes
        while self._has_unsent(stream):
            left = unsent_bytes = stream.unsent_bytes
            window_bytes = min(stream.send_window_bytes, self._window_bytes)
            num_frames = 0
            while left and window_bytes > 0 and self._room_bytes > 0:
                size = min(left, max_bytes, window_bytes)
                left -= size
                window_bytes -= size
                self._room_bytes -= size + _FRAME_ROOM_BYTES
                num_frames += 1
                output.append(frames.pack_head(size >> 8, size & 0xFF, frames.DATA, 0, stream_id))
                self._take_unsent(stream, size)
            if num_frames:
                stream.has_moved = True
                if left and size < _FRAGMENT_BYTES:
                    self._num_fragments += 1
                    num_frames -= 1
                self._guard.writes += num_frames
                sent_bytes = unsent_bytes - left
                stream.unsent_bytes = left
                stream.send_window_bytes -= sent_bytes
                self._window_bytes -= sent_bytes
                self.unsent_bytes -= sent_bytes
                self._budget.held_bytes -= sent_bytes
            if left:
                self._wait(stream)
                return False
        self._on_sent(stream)
        if stream.trailers:
            output.append(stream.trailers)
            return True
        return False

    def _take_unsent(self, stream: Http2Stream, size: int) -> None:
        """Move bytes from what waits to the output."""
        unsent, at, output = stream.unsent, stream.unsent_at, self.output
        if unsent is None:
            raise RuntimeError("nothing is unsent")
        while True:
            data = unsent[0]
            left = len(data) - at
            if size < left:
                output.append(memoryview(data)[at : at + size])
                stream.unsent_at = at + size
                return
            output.append(memoryview(data)[at:] if at else data)
            unsent.popleft()
            size -= left
            at = 0
            if not size:
                stream.unsent_at = 0
                return

    def _wait(self, stream: Http2Stream) -> None:
        """Note that the data of a stream waits, and what for."""
        if stream.send_window_bytes > 0:
            self._ready[stream.stream_id] = stream
        if self._holder is not None:
            self._budget.waiting.setdefault(stream, self._holder)

    def _on_sent(self, stream: Http2Stream) -> None:
        """Note that a stream has nothing that waits."""
        stream.unsent = None
        stream.unsent_at = stream.unsent_bytes = 0
        self._blocked.pop(stream.stream_id, None)
        self._ready.pop(stream.stream_id, None)
        self._budget.waiting.pop(stream, None)
