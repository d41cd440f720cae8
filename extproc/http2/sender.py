"""Sending side of a connection: responses as frames, within the windows of the peer."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from typing import Final

from extproc.http2 import frames, responses
from extproc.http2.frames import ErrorCode, Http2Error
from extproc.http2.limits import FloodGuard
from extproc.http2.messages import frame_messages
from extproc.http2.responses import GrpcStatus
from extproc.http2.stream import Http2Stream

#: DATA frames below this (bytes) that end inside of a message, because the peer's window does, cost
#: more than they bring.
_FRAGMENT_BYTES: Final = 1024


class ResponseSender:
    """Builds the frames of responses and holds back what the peer takes no window for.

    Args:
        guard: Counts the frames of data that are sent.

    Attributes:
        output: Frames to write, in order.
        unsent_bytes: Data of all streams that waits for a window.
        initial_window_bytes: Window of a new stream.
        max_frame_bytes: Largest payload that the peer takes.
    """

    __slots__ = (
        "_blocked",
        "_guard",
        "_is_first_block",
        "_num_fragments",
        "_ready",
        "_window_bytes",
        "initial_window_bytes",
        "max_frame_bytes",
        "output",
        "unsent_bytes",
    )

    def __init__(self, guard: FloodGuard) -> None:
        self.output: list[bytes] = []
        self.unsent_bytes = 0
        self._num_fragments = 0
        self.initial_window_bytes = frames.DEFAULT_WINDOW_BYTES
        self.max_frame_bytes = frames.DEFAULT_FRAME_BYTES
        self._guard = guard
        self._window_bytes = frames.DEFAULT_WINDOW_BYTES
        self._blocked: dict[int, Http2Stream] = {}
        # Those that wait for the window of the connection only, in turns.
        self._ready: OrderedDict[int, Http2Stream] = OrderedDict()
        self._is_first_block = True

    def take_output(self) -> bytes:
        """Return all frames since the last call."""
        output = self.output
        if not output:
            return b""
        self.output = []
        return b"".join(output)

    def take_fragments(self) -> int:
        """Return the number of small frames that the peer's windows cut since the last call."""
        num_fragments, self._num_fragments = self._num_fragments, 0
        return num_fragments

    def send(self, stream: Http2Stream, messages: Sequence[bytes]) -> None:
        """Send messages, after what waits already."""
        output = self.output
        if not stream.has_responded:
            stream.has_responded = True
            output.append(responses.build_head(stream.stream_id, is_first=self._is_first_block))
            self._is_first_block = False
        data = frame_messages(messages)
        size = len(data)
        if (
            stream.unsent is None
            and size <= self.max_frame_bytes
            and size <= stream.send_window_bytes
            and size <= self._window_bytes
        ):
            stream.send_window_bytes -= size
            self._window_bytes -= size
            self._guard.writes += 1
            output.append(
                frames.pack_head(size >> 8, size & 0xFF, frames.DATA, 0, stream.stream_id)
            )
            output.append(data)
            return
        if stream.unsent is None:
            stream.unsent = deque()
            stream.has_moved = True
            self._blocked[stream.stream_id] = stream
        stream.unsent.append(data)
        self.unsent_bytes += size
        self._send_unsent(stream)

    def finish(self, stream: Http2Stream, status: GrpcStatus, message: str) -> bool:
        """End a response; returns False if the end waits for data."""
        stream_id = stream.stream_id
        if not stream.has_responded:
            self.reject(stream, status, message)
            return True
        trailers = responses.build_trailers(stream_id, status, message)
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
            responses.build_trailers_only(
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
        if stream.unsent is not None:
            self.unsent_bytes -= sum(map(len, stream.unsent)) - stream.unsent_at
            stream.unsent = None
            self._blocked.pop(stream.stream_id, None)
            self._ready.pop(stream.stream_id, None)

    def open_stream_window(self, stream: Http2Stream, more_bytes: int) -> bool:
        """Add to the window of a stream; returns True if its response ended with that.

        Raises:
            Http2Error: The window is larger than allowed.
        """
        stream.send_window_bytes += more_bytes
        if stream.send_window_bytes > frames.MAX_WINDOW_BYTES:
            raise Http2Error(
                ErrorCode.FLOW_CONTROL_ERROR, "window too large", stream_id=stream.stream_id
            )
        return stream.unsent is not None and self._send_unsent(stream)

    def open_connection_window(self, more_bytes: int) -> list[Http2Stream]:
        """Add to the window of the connection; returns streams whose response ended with that.

        Raises:
            Http2Error: The window is larger than allowed.
        """
        self._window_bytes += more_bytes
        if self._window_bytes > frames.MAX_WINDOW_BYTES:
            raise Http2Error(ErrorCode.FLOW_CONTROL_ERROR, "window of the connection too large")
        return self._send_ready()

    def resize_windows(
        self, streams: Iterable[Http2Stream], initial_bytes: int
    ) -> list[Http2Stream]:
        """Apply SETTINGS_INITIAL_WINDOW_SIZE; returns streams whose response ended with that.

        Raises:
            Http2Error: A window is larger than allowed.
        """
        change = initial_bytes - self.initial_window_bytes
        self.initial_window_bytes = initial_bytes
        for stream in streams:
            stream.send_window_bytes += change
            if stream.send_window_bytes > frames.MAX_WINDOW_BYTES:
                raise Http2Error(ErrorCode.FLOW_CONTROL_ERROR, "window of a stream too large")
        for stream in self._blocked.values():
            if stream.send_window_bytes > 0:
                self._ready.setdefault(stream.stream_id, stream)
        return self._send_ready()

    def find_stalled(self) -> list[Http2Stream]:
        """Return streams that sent nothing since the last call although they have data."""
        stalled = []
        for stream in self._blocked.values():
            if not stream.has_moved:
                stalled.append(stream)
            stream.has_moved = False
        return stalled

    def _send_ready(self) -> list[Http2Stream]:
        """Send what the window of the connection allows; returns streams that ended with that."""
        ended, ready = [], self._ready
        while ready and self._window_bytes > 0:
            _, stream = ready.popitem(last=False)
            if self._send_unsent(stream):
                ended.append(stream)
        return ended

    def _send_unsent(self, stream: Http2Stream) -> bool:
        """Send what the windows allow; returns True if the response ended with that."""
        unsent, output = stream.unsent, self.output
        if unsent is None:
            raise RuntimeError("nothing is unsent")
        while unsent:
            data, at = unsent[0], stream.unsent_at
            left = len(data) - at
            size = min(left, self.max_frame_bytes, stream.send_window_bytes, self._window_bytes)
            if size <= 0 < left:
                if stream.send_window_bytes > 0:
                    self._ready[stream.stream_id] = stream
                return False
            stream.send_window_bytes -= size
            self._window_bytes -= size
            self.unsent_bytes -= size
            if size < left and size < _FRAGMENT_BYTES:
                self._num_fragments += 1
            else:
                self._guard.writes += 1
            stream.has_moved = True
            output.append(
                frames.pack_head(size >> 8, size & 0xFF, frames.DATA, 0, stream.stream_id)
            )
            output.append(data if size == len(data) else data[at : at + size])
            if size == left:
                unsent.popleft()
                stream.unsent_at = 0
            else:
                stream.unsent_at = at + size
        stream.unsent = None
        del self._blocked[stream.stream_id]
        self._ready.pop(stream.stream_id, None)
        if stream.trailers:
            output.append(stream.trailers)
            return True
        return False
