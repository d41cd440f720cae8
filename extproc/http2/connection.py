"""Server side of an HTTP/2 connection that carries gRPC calls (RFC 9113)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import ClassVar, Final

from extproc.http2 import frames
from extproc.http2.frame_reader import FrameReader
from extproc.http2.frames import ErrorCode, Http2Error
from extproc.http2.limits import FloodGuard, Http2Limits, ReceiveBudget
from extproc.http2.messages import (
    GrpcMessage,
    GrpcStatus,
    MessageAssembler,
    MessageError,
    MessagePieces,
)
from extproc.http2.request_head import HeaderDecoder
from extproc.http2.sender import AnswerHolder, ResponseSender, SendBudget
from extproc.http2.stream import (
    CallHalfClosed,
    CallStarted,
    CallTerminated,
    ConnectionTerminated,
    Http2Event,
    Http2Stream,
    MessageReceived,
    StreamTable,
)

#: Payloads of pings: what is answered to the second confirms that the peer read GOAWAY.
_KEEPALIVE_PING: Final = b"extprocK"
_DRAIN_PING: Final = b"extprocD"


class Http2Connection(FrameReader):
    """Takes the bytes of a peer and returns events; takes answers and returns bytes.

    Methods that take a stream identifier do nothing once the call ended.

    Args:
        budget: Limit on incomplete messages, shared by connections.
        counts: Streams and connections that ended by a limit or a violation, by its name; shared.
        send_budget: Limit on answers that wait, shared by connections; None is one of its own.
        holder: Ends calls whose answer the budget drops; None drops none.

    Attributes:
        is_terminated: True once nothing more is read; the connection is to be closed.
    """

    def __init__(
        self,
        limits: Http2Limits,
        budget: ReceiveBudget,
        counts: Counter[str],
        *,
        now: float,
        send_budget: SendBudget | None = None,
        holder: AnswerHolder | None = None,
    ) -> None:
        super().__init__(limits)
        self.is_terminated = False
        self._budget = budget
        self._counts = counts
        self._guard = FloodGuard(now)
        send_budget = send_budget or SendBudget(limits.max_total_unsent_bytes)
        self._sender = ResponseSender(self._guard, send_budget, holder)
        self._decoder = HeaderDecoder(limits)
        self._streams = StreamTable(limits.max_streams)
        self._final_stream_id = frames.MAX_STREAM_ID
        self._received_bytes = 0
        # Half of a window may be used before the peer gets more.
        self._window_due_bytes = limits.connection_window_bytes // 2
        self._stream_window_due_bytes = limits.stream_window_bytes // 2
        self._now = now
        self._events: list[Http2Event] = []
        self._sender.output += limits.build_announcement()

    @property
    def num_streams(self) -> int:
        """Open streams."""
        return len(self._streams.open)

    def receive(self, data: bytes, now: float) -> list[Http2Event]:
        """Handle bytes of the peer; what it must be answered is output.

        While `has_unread` is true after a call, frames wait for the next, which needs no bytes.

        Args:
            data: Any part of what the peer sent.
        """
        if self.is_terminated:
            return []
        self._now = now
        events = self._events = []
        try:
            self._read(data)
        except Http2Error as error:
            self._terminate(error)
        return events

    @property
    def has_output(self) -> bool:
        """True if there are bytes to write."""
        return bool(self._sender.output)

    def take_output(self) -> bytes:
        """Return the bytes to write; of large answers those that the transport is to take next."""
        sender = self._sender
        output = sender.take_output()
        if sender.has_ready:
            for open_stream in sender.send_ready():
                self._close(open_stream)
            self._open_connection_window()
        return output

    def send_messages(self, stream_id: int, messages: Sequence[bytes]) -> None:
        """Send messages of a call."""
        open_stream = self._streams.open.get(stream_id)
        if open_stream is not None:
            self._sender.send(open_stream, messages)

    def send_lazily(self, stream_id: int, source: Iterator[MessagePieces]) -> bool:
        """Send messages of a call as the peer takes them; nothing may follow before the last was.

        Returns True if all were taken; see `ResponseSender.send_lazily`.
        """
        open_stream = self._streams.open.get(stream_id)
        return open_stream is None or self._sender.send_lazily(open_stream, source)

    def end_call(
        self, stream_id: int, status: GrpcStatus = GrpcStatus.OK, message: str = ""
    ) -> None:
        """End a call after the messages that were sent; no event follows for it.

        One that fails ends without the rest of messages that are built as the peer takes them: its
        handler has returned what they hold of shared limits.
        """
        open_stream = self._streams.open.get(stream_id)
        if open_stream is None or open_stream.trailers:
            return
        open_stream.assembler.release()
        if status is not GrpcStatus.OK and open_stream.source is not None:
            self._sender.drop(open_stream)
            self._open_connection_window()
        if self._sender.finish(open_stream, status, message):
            self._close(open_stream)

    def reset_call(self, stream_id: int, code: ErrorCode) -> None:
        """End a call at once, without what waits to be sent."""
        open_stream = self._streams.open.get(stream_id)
        if open_stream is not None:
            self._abandon(open_stream, code)

    def pause_call(self, stream_id: int) -> None:
        """Give the peer no more window for a call: its messages wait."""
        open_stream = self._streams.open.get(stream_id)
        if open_stream is not None:
            open_stream.is_paused = True

    def hold_message(self, stream_id: int, message: GrpcMessage) -> bool:
        """Count a message that waits until its call is resumed; False where none may wait."""
        open_stream = self._streams.open.get(stream_id)
        return open_stream is None or open_stream.assembler.hold(message)

    def resume_call(self, stream_id: int) -> None:
        """Take messages of a call again."""
        open_stream = self._streams.open.get(stream_id)
        if open_stream is not None and open_stream.is_paused:
            open_stream.is_paused = False
            open_stream.assembler.release_waiting()
            # Half of its window is left otherwise, as while the stream is not paused.
            if open_stream.received_bytes >= self._stream_window_due_bytes:
                self._open_window(open_stream)

    def reset_stalled(self) -> list[CallTerminated]:
        """Reset calls whose answers did not move since the last call of this method."""
        terminated = []
        for open_stream in self._sender.find_stalled():
            self._counts["stalled_answer"] += 1
            self._abandon(open_stream, ErrorCode.CANCEL)
            if not open_stream.trailers:
                terminated.append(CallTerminated(open_stream.stream_id))
        return terminated

    def ping(self) -> None:
        """Send a PING; whatever the peer sends next shows that it lives."""
        if not self.is_terminated:
            self._sender.output.append(frames.build_frame(frames.PING, 0, 0, _KEEPALIVE_PING))

    def start_drain(self) -> None:
        """Announce the end: calls on their way are served until the peer confirmed it."""
        if self.is_terminated:
            return
        self._sender.output += (
            frames.build_goaway(frames.MAX_STREAM_ID, ErrorCode.NO_ERROR),
            frames.build_frame(frames.PING, 0, 0, _DRAIN_PING),
        )

    def finish_drain(self) -> None:
        """Refuse calls from now on; idempotent. Follows by itself once the peer confirmed."""
        if self._final_stream_id == frames.MAX_STREAM_ID and not self.is_terminated:
            self._final_stream_id = self._streams.last_id
            goaway = frames.build_goaway(self._streams.last_id, ErrorCode.NO_ERROR)
            self._sender.output.append(goaway)

    def close(self) -> None:
        """Return what the connection holds of shared limits; nothing is read or sent any more."""
        self.is_terminated = True
        self._drop_unread()
        for open_stream in self._streams.open.values():
            open_stream.assembler.release()
            self._sender.drop(open_stream)
        self._streams.open.clear()

    # Frames

    def _on_frame(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        handler = self._HANDLERS.get(kind)
        if handler is None:
            self._guard.spend("unknown_frame_flood", self._now)
            return
        frames.check_head(kind, stream_id, len(payload))
        handler(self, flags, stream_id, payload)

    def _on_data(self, flags: int, stream_id: int, data: bytes, start: int, end: int) -> int:
        size = end - start
        self._received_bytes += size
        if self._received_bytes >= self._window_due_bytes:
            self._open_connection_window()
        open_stream = self._streams.open.get(stream_id)
        if open_stream is None or open_stream.is_remote_closed:
            frames.check_head(frames.DATA, stream_id, 0)
            self._check_closed(frames.DATA, stream_id)
            return 0
        is_end = flags & frames.END_STREAM != 0
        open_stream.received_bytes += size
        if flags & frames.PADDED:
            data = frames.without_padding(data[start:end], flags)
            start, end = 0, len(data)
        if start == end and not is_end:
            self._guard.spend("empty_frame_flood", self._now)
        if open_stream.received_bytes > self._limits.stream_window_bytes:
            raise Http2Error(
                ErrorCode.FLOW_CONTROL_ERROR, "more data than window", stream_id=stream_id
            )
        if open_stream.content_left_bytes is not None:
            open_stream.count_content(end - start, is_end=is_end)
        if open_stream.trailers:
            # Its answer is complete but for what waits for window; nothing more is read.
            open_stream.is_remote_closed = is_end
            return 0
        return self._take_payload(open_stream, data, start, end, is_end=is_end)

    def _take_payload(
        self, open_stream: Http2Stream, data: bytes, start: int, end: int, *, is_end: bool
    ) -> int:
        """Read the messages in a payload, and open the window of their stream; returns their number."""
        try:
            messages = open_stream.assembler.feed(data, start, end)
        except MessageError as error:
            open_stream.is_remote_closed = is_end
            self._reject_messages(open_stream, error)
            return 0
        for message in messages:
            self._events.append(MessageReceived(open_stream.stream_id, message))
        if is_end:
            self._on_half_close(open_stream)
        elif open_stream.received_bytes >= self._stream_window_due_bytes:
            self._open_window(open_stream)
        return len(messages)

    def _check_closed(self, kind: int, stream_id: int) -> None:
        """Check a frame of a stream from which none is expected."""
        self._streams.check(kind, stream_id)
        self._guard.spend("closed_stream_flood", self._now)

    def _on_half_close(self, open_stream: Http2Stream) -> None:
        open_stream.is_remote_closed = True
        if open_stream.trailers:
            return
        if not open_stream.assembler.is_between_messages:
            self._reject_messages(
                open_stream, MessageError(GrpcStatus.INTERNAL, "the last message is incomplete")
            )
            return
        self._events.append(CallHalfClosed(open_stream.stream_id))

    def _on_block(self, stream_id: int, block: bytes, *, is_end_of_stream: bool) -> None:
        """Handle a complete header block; it is decoded whatever becomes of its stream."""
        if stream_id > self._streams.last_id:
            self._on_request(stream_id, block, is_end_of_stream=is_end_of_stream)
            return
        malformed = self._decoder.read_trailers(block)
        open_stream = self._streams.open.get(stream_id)
        if open_stream is None or open_stream.is_remote_closed:
            self._check_closed(frames.HEADERS, stream_id)
            return
        if malformed or not is_end_of_stream:
            raise Http2Error(
                ErrorCode.PROTOCOL_ERROR, malformed or "trailers go on", stream_id=stream_id
            )
        open_stream.count_content(0, is_end=True)
        self._on_half_close(open_stream)

    def _on_request(self, stream_id: int, block: bytes, *, is_end_of_stream: bool) -> None:
        if not stream_id % 2:
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, "stream of a client with an even number")
        self._streams.last_id = stream_id
        head, limits = self._decoder.read_request(block), self._limits
        if stream_id > self._final_stream_id:
            self._refuse(stream_id, ErrorCode.REFUSED_STREAM, limit="draining")
            return
        if len(self._streams.open) >= limits.max_streams:
            self._refuse(stream_id, ErrorCode.REFUSED_STREAM, limit="streams")
            return
        if head.malformed:
            self._refuse(stream_id, ErrorCode.PROTOCOL_ERROR, limit="stream_error")
            return
        open_stream = self._streams.open[stream_id] = Http2Stream(
            stream_id,
            send_window_bytes=self._sender.initial_window_bytes,
            assembler=MessageAssembler(limits.max_message_bytes, self._budget),
            content_left_bytes=head.content_bytes,
        )
        rejection = head.rejection
        if rejection is not None:
            if rejection.limit:
                self._counts[rejection.limit] += 1
            self._guard.spend("stream_error_flood", self._now)
            open_stream.is_remote_closed = is_end_of_stream
            self._sender.reject(
                open_stream,
                rejection.grpc_status,
                rejection.message,
                http_status=rejection.http_status,
            )
            self._close(open_stream)
            return
        self._events.append(CallStarted(stream_id, head.path, head.timeout_s, head.traceparent))
        if is_end_of_stream:
            open_stream.count_content(0, is_end=True)
            self._on_half_close(open_stream)

    def _on_priority(self, _: int, stream_id: int, payload: bytes) -> None:
        self._guard.spend("priority_flood", self._now)
        frames.check_dependency(stream_id, payload)

    def _on_rst_stream(self, _: int, stream_id: int, __: bytes) -> None:
        open_stream = self._streams.open.get(stream_id)
        if open_stream is None:
            self._check_closed(frames.RST_STREAM, stream_id)
            return
        if not open_stream.has_responded:
            self._guard.spend("rapid_reset", self._now)
        self._forget(open_stream)
        if not open_stream.trailers:
            self._events.append(CallTerminated(stream_id))

    def _on_settings(self, flags: int, _: int, payload: bytes) -> None:
        self._guard.spend("settings_flood", self._now)
        if flags & frames.ACK:
            if payload:
                raise Http2Error(ErrorCode.FRAME_SIZE_ERROR, "acknowledgement with settings")
            self._decoder.limit_table()
            return
        sender = self._sender
        initial_bytes = sender.initial_window_bytes
        for name, value in frames.read_settings(payload):
            if name == frames.INITIAL_WINDOW_SIZE:
                initial_bytes = value
            elif name == frames.MAX_FRAME_SIZE:
                sender.limit_frames(value)
        # Before the data that a larger window lets go: the peer has that window once it reads this.
        sender.output.append(frames.build_frame(frames.SETTINGS, frames.ACK, 0))
        if initial_bytes != sender.initial_window_bytes:
            # Once for the frame, which may hold thousands of them: it visits all streams.
            self._close_all(sender.resize_windows(self._streams.open.values(), initial_bytes))

    def _on_push_promise(self, _: int, __: int, ___: bytes) -> None:
        raise Http2Error(ErrorCode.PROTOCOL_ERROR, "PUSH_PROMISE of a client")

    def _on_ping(self, flags: int, _: int, payload: bytes) -> None:
        self._guard.spend("ping_flood", self._now)
        if not flags & frames.ACK:
            self._sender.output.append(frames.build_frame(frames.PING, frames.ACK, 0, payload))
        elif payload == _DRAIN_PING:
            self.finish_drain()

    def _on_goaway(self, _: int, __: int, payload: bytes) -> None:
        self._guard.spend("settings_flood", self._now)
        if len(payload) < 8:
            raise Http2Error(ErrorCode.FRAME_SIZE_ERROR, "GOAWAY cut short")

    def _on_window_update(self, _: int, stream_id: int, payload: bytes) -> None:
        more_bytes = frames.read_number(payload) & frames.MAX_WINDOW_BYTES
        self._guard.spend("window_update_flood", self._now)
        open_stream = self._streams.open.get(stream_id)
        if stream_id and open_stream is None:
            self._streams.check(frames.WINDOW_UPDATE, stream_id)
        elif not more_bytes:
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, "window of 0", stream_id=stream_id)
        elif open_stream is None:
            self._close_all(self._sender.open_connection_window(more_bytes))
        else:
            is_ended = self._sender.open_stream_window(open_stream, more_bytes)
            self._close_all((open_stream,) if is_ended else ())

    # Windows and ends

    def _open_connection_window(self) -> None:
        """Let the peer send more, unless it does not take what it is answered."""
        if self._received_bytes < self._window_due_bytes:
            return
        if self._received_bytes > self._limits.connection_window_bytes:
            raise Http2Error(ErrorCode.FLOW_CONTROL_ERROR, "more data than window")
        if self._sender.unsent_bytes <= self._limits.max_unsent_bytes:
            self._sender.output.append(frames.build_window_update(0, self._received_bytes))
            self._received_bytes = 0

    def _open_window(self, open_stream: Http2Stream) -> None:
        """Let the peer send more on a stream."""
        stream_id, received_bytes = open_stream.stream_id, open_stream.received_bytes
        if not open_stream.is_paused and received_bytes:
            self._sender.output.append(frames.build_window_update(stream_id, received_bytes))
            open_stream.received_bytes = 0

    def _close_all(self, ended: Sequence[Http2Stream]) -> None:
        """Close streams whose responses new windows completed, and count what the windows cut."""
        for open_stream in ended:
            self._close(open_stream)
        num_fragments = self._sender.take_fragments()
        if num_fragments:
            self._guard.spend("window_starvation", self._now, num_fragments)
        self._open_connection_window()

    def _close(self, open_stream: Http2Stream) -> None:
        """Close a stream whose response is complete; the peer need not send the rest."""
        self._forget(open_stream)
        if not open_stream.is_remote_closed:
            self._reset_stream(open_stream.stream_id, ErrorCode.NO_ERROR)

    def _abandon(self, open_stream: Http2Stream, code: ErrorCode) -> None:
        self._forget(open_stream)
        self._reset_stream(open_stream.stream_id, code)

    def _forget(self, open_stream: Http2Stream) -> None:
        del self._streams.open[open_stream.stream_id]
        open_stream.assembler.release()
        if open_stream.unsent is not None:
            self._sender.drop(open_stream)
            self._open_connection_window()

    def _reset_stream(self, stream_id: int, code: ErrorCode) -> None:
        self._sender.output.append(frames.build_rst_stream(stream_id, code))
        self._streams.note_reset(stream_id)

    def _reject_messages(self, open_stream: Http2Stream, error: MessageError) -> None:
        """End a call whose messages the server does not take."""
        self._counts[error.limit or "grpc_message"] += 1
        self._guard.spend("stream_error_flood", self._now)
        self._events.append(CallTerminated(open_stream.stream_id))
        self.end_call(open_stream.stream_id, error.status, error.message)

    def _refuse(self, stream_id: int, code: ErrorCode, *, limit: str) -> None:
        """Reset a stream instead of opening it."""
        self._counts[limit] += 1
        self._guard.spend("stream_error_flood", self._now)
        self._reset_stream(stream_id, code)

    def _on_stream_error(self, error: Http2Error) -> None:
        self._counts[error.limit or "stream_error"] += 1
        self._guard.spend("stream_error_flood", self._now)
        open_stream = self._streams.open.get(error.stream_id)
        if open_stream is None:
            # RST_STREAM is for streams that are open (RFC 9113, section 6.4).
            raise Http2Error(error.code, error.detail)
        if not open_stream.trailers:
            self._events.append(CallTerminated(error.stream_id))
        self._abandon(open_stream, error.code)

    def _terminate(self, error: Http2Error) -> None:
        self._counts[error.limit or "connection_error"] += 1
        goaway = frames.build_goaway(self._streams.last_id, error.code, error.detail)
        self._sender.output.append(goaway)
        self._events.append(ConnectionTerminated(error.code, error.detail))
        self.close()

    #: By frame type; `FrameReader` handles the others.
    _HANDLERS: ClassVar[Mapping[int, Callable[[Http2Connection, int, int, bytes], None]]] = {
        frames.PRIORITY: _on_priority,
        frames.RST_STREAM: _on_rst_stream,
        frames.SETTINGS: _on_settings,
        frames.PUSH_PROMISE: _on_push_promise,
        frames.PING: _on_ping,
        frames.GOAWAY: _on_goaway,
        frames.WINDOW_UPDATE: _on_window_update,
    }
