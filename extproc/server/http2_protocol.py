"""A connection of the native gRPC server: an asyncio protocol around `Http2Connection`."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, ClassVar, Final, TypeAlias, cast

from extproc.http2.connection import Http2Connection
from extproc.http2.frames import ErrorCode
from extproc.http2.messages import GrpcMessage, GrpcStatus, MessagePieces
from extproc.http2.stream import (
    CallHalfClosed,
    CallStarted,
    CallTerminated,
    Http2Event,
    MessageReceived,
)

if TYPE_CHECKING:
    from extproc.server.native_server import Http2Server

#: Bytes that the kernel has not taken, above which a peer is neither read nor written to any more.
_WRITE_BUFFER_BYTES = 256 * 1024

#: Seconds after which an answer that the peer gives no window for is dropped; Envoy gives none
#: while an engine does not read its request.
_STALL_S = 300.0

#: Events of one read that are handled before other connections are: one read may hold thousands of
#: messages of some bytes. Some milliseconds.
_MAX_EVENTS = 128

#: Bytes that a connection may deliver in a turn of the event loop: uvloop reads up to 32 times in one,
#: 256 KiB each, and others would wait for 20 ms. Reads of fewer bytes than the second are not counted.
_MAX_TURN_BYTES: Final = 1024 * 1024
_LARGE_READ_BYTES: Final = 64 * 1024

#: Turns of the event loop for which answers of queued requests wait for each other (count): while a
#: queue is released a turn takes some 6 ms and answers two calls of each of 20 connections.
_GATHER_TURNS: Final = 3


class ServerCall(ABC):
    """Call of a client, for handlers to inherit: what a server may do with it.

    Attributes:
        max_duration_s: Seconds after which the call ends, whatever the client waits; None for ever.
        deadline: Ends the call.
        traceparent: Trace context of the client; empty without one.
    """

    __slots__ = ("_connection", "_stream_id", "deadline", "traceparent")

    max_duration_s: ClassVar[float | None] = None

    def __init__(self, connection: Http2Protocol, stream_id: int) -> None:
        self._connection = connection
        self._stream_id = stream_id
        self.deadline: asyncio.TimerHandle | None = None
        self.traceparent = ""

    @abstractmethod
    def on_message(self, message: GrpcMessage) -> None:
        """Take a message of the client."""

    @abstractmethod
    def on_half_close(self) -> None:
        """Learn that the client sends no further message."""

    @abstractmethod
    def on_terminated(self) -> None:
        """Learn that the call is over: canceled, late, or its connection is lost."""

    def send(self, messages: Sequence[bytes]) -> None:
        """Send messages to the client."""
        self._connection.send(self._stream_id, messages)

    def send_lazily(self, source: Iterator[MessagePieces]) -> bool:
        """Send messages as the client takes them; see `ResponseSender.send_lazily`."""
        return self._connection.send_lazily(self._stream_id, source)

    def end(self, status: GrpcStatus = GrpcStatus.OK, message: str = "") -> None:
        """End the call; nothing more is heard of it."""
        self._connection.end(self._stream_id, status, message)

    def count_limit(self, limit: str) -> None:
        """Count a call that ends by a limit."""
        self._connection.count_limit(limit)

    def pause(self) -> None:
        """Let further messages wait at the client."""
        self._connection.core.pause_call(self._stream_id)

    def hold(self, message: GrpcMessage) -> bool:
        """Count a message that waits until the call is resumed; False where none may wait."""
        return self._connection.core.hold_message(self._stream_id, message)

    def gather_answers(self) -> None:
        """Let what is sent next leave with answers of other calls; see `Http2Protocol.flush_later`."""
        self._connection.flush_later()

    def resume(self) -> None:
        """Take messages again."""
        self._connection.core.resume_call(self._stream_id)
        self._connection.flush_soon()


#: Creates the handler of a call.
CallFactory: TypeAlias = "Callable[[Http2Protocol, int], ServerCall]"


class Http2Protocol(asyncio.Protocol):
    """One connection: calls handlers as bytes arrive, and writes their answers together.

    A peer that sends nothing more is closed, as asyncio does: it can give no window either.
    """

    def __init__(self, server: Http2Server) -> None:
        self._server = server
        self._loop = asyncio.get_running_loop()
        now = self._loop.time()
        self.core = Http2Connection(
            server.limits,
            server.budget,
            server.counts,
            now=now,
            send_budget=server.send_budget,
            holder=self,
        )
        self._send_budget = server.send_budget
        self._calls: dict[int, ServerCall] = {}
        self._transport: asyncio.Transport
        self._will_flush = True  # nothing before `connection_made` does
        self._is_pinged = self._is_write_paused = self._is_behind = False
        self._read_at = self._pinged_at = self._stalls_at = now
        self._turn_bytes = 0
        self._timer: asyncio.TimerHandle | None = None
        self._deferred: deque[Http2Event] = deque()

    # What asyncio calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin with our settings."""
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(high=_WRITE_BUFFER_BYTES)
        if not self._server.on_connected(self):
            self.close()
            return
        if self._server.is_stopping:
            self.core.start_drain()
        self._flush()
        self._timer = self._loop.call_later(self._server.keepalive.time_s, self._keep_alive)

    def data_received(self, data: bytes) -> None:
        """Handle bytes of the peer; all answers leave in one write."""
        self._will_flush, self._is_pinged = True, False
        self._read_at = now = self._loop.time()
        if len(data) >= _LARGE_READ_BYTES:
            self._count_turn(len(data))
        events = self.core.receive(data, now)
        if self._is_behind or self.core.has_unread or len(events) > _MAX_EVENTS:
            self._defer(events)
            return
        self._handle(events)
        self._flush()

    def connection_lost(self, _: Exception | None) -> None:
        """End all calls."""
        if self._timer is not None:
            self._timer.cancel()
        self._will_flush = True
        self._deferred.clear()
        self.core.close()
        # A flush that is scheduled already would write it to the closed transport.
        self.core.take_output()
        for stream_id in list(self._calls):
            self._terminate(stream_id)
        self._server.on_lost(self)

    def pause_writing(self) -> None:
        """Read nothing from a peer that does not read, and let its answers wait."""
        self._is_write_paused = True
        self._transport.pause_reading()

    def resume_writing(self) -> None:
        """Write what waits, and read again."""
        self._is_write_paused = False
        self.flush_soon()
        self._resume_reading()

    # What calls do

    def send(self, stream_id: int, messages: Sequence[bytes]) -> None:
        """Send messages of a call."""
        self.core.send_messages(stream_id, messages)
        if not self._will_flush:
            self.flush_soon()

    def send_lazily(self, stream_id: int, source: Iterator[MessagePieces]) -> bool:
        """Send messages of a call as the peer takes them; True if all were taken."""
        is_sent = self.core.send_lazily(stream_id, source)
        if not self._will_flush:
            self.flush_soon()
        return is_sent

    def end(self, stream_id: int, status: GrpcStatus, message: str) -> None:
        """End a call."""
        call = self._calls.pop(stream_id, None)
        if call is None:
            return
        if call.deadline is not None:
            call.deadline.cancel()
        self.core.end_call(stream_id, status, message)
        if not self._will_flush:
            self.flush_soon()

    def flush_soon(self) -> None:
        """Write what was sent once all that is ready now has been handled."""
        if not self._will_flush:
            self._will_flush = True
            self._loop.call_soon(self._flush)

    def flush_later(self, turns: int = _GATHER_TURNS) -> None:
        """Write what is sent from now on after a few turns of the loop, unless a read comes first.

        A queue that is released answers a few calls of each connection in a turn, and a write takes
        as long as half of such an answer.
        """
        if not turns:
            self._flush()
        elif turns < _GATHER_TURNS or not self._will_flush:
            self._will_flush = True
            self._loop.call_soon(self.flush_later, turns - 1)

    def count_limit(self, limit: str) -> None:
        """Count a call that ends by a limit."""
        self._server.counts[limit] += 1

    # What the server does

    def start_drain(self) -> None:
        """Tell the peer to open no further streams."""
        self.core.start_drain()
        self.flush_soon()

    def drop_answer(self, stream_id: int) -> None:
        """End a call whose answer waits for the longest time of all."""
        self.count_limit("unsent_answers")
        self.core.reset_call(stream_id, ErrorCode.CANCEL)
        self._terminate(stream_id)
        self.flush_soon()

    def close(self) -> None:
        """Close the connection after what is written already."""
        self.core.finish_drain()
        self._flush()
        self._transport.close()

    def abort(self) -> None:
        """Close the connection at once."""
        self._transport.abort()

    def _flush(self) -> None:
        self._will_flush = False
        core = self.core
        if self._is_write_paused and not core.is_terminated:
            return
        output = core.take_output()
        if output:
            self._transport.write(output)
        if core.has_output:
            self.flush_soon()
        if self._send_budget.held_bytes > self._send_budget.limit_bytes:
            self._send_budget.enforce()
        if core.is_terminated and not self._transport.is_closing():
            self._transport.close()

    def _count_turn(self, size: int) -> None:
        """Count bytes of this turn of the event loop, and read no more in it where they are many."""
        if not self._turn_bytes:
            self._loop.call_soon(self._end_turn)
        self._turn_bytes += size
        if self._turn_bytes >= _MAX_TURN_BYTES:
            self._transport.pause_reading()

    def _end_turn(self) -> None:
        if self._turn_bytes >= _MAX_TURN_BYTES:
            self._resume_reading()
        self._turn_bytes = 0

    def _resume_reading(self) -> None:
        """Read again, unless answers, frames or events wait."""
        if not (self._is_write_paused or self._is_behind or self._transport.is_closing()):
            self._transport.resume_reading()

    def _defer(self, events: Sequence[Http2Event]) -> None:
        """Handle many frames or events in turns with other connections; nothing is read meanwhile."""
        self._deferred += events
        if self._is_behind:
            self._flush()
            return
        self._is_behind = True
        self._transport.pause_reading()
        self._handle_deferred()

    def _handle_deferred(self) -> None:
        deferred, core = self._deferred, self.core
        if self._transport.is_closing():
            return
        self._will_flush = True
        if core.has_unread and not deferred:
            deferred += core.receive(b"", self._loop.time())
        self._handle([deferred.popleft() for _ in range(min(len(deferred), _MAX_EVENTS))])
        self._flush()
        if deferred or core.has_unread:
            self._loop.call_soon(self._handle_deferred)
        else:
            self._is_behind = False
            self._resume_reading()

    def _handle(self, events: Sequence[Http2Event]) -> None:
        calls = self._calls
        for event in events:
            if type(event) is MessageReceived:
                call = calls.get(event.stream_id)
                if call is not None:
                    call.on_message(event.message)
            elif isinstance(event, CallStarted):
                self._start_call(event)
            elif isinstance(event, CallHalfClosed):
                call = calls.get(event.stream_id)
                if call is not None:
                    call.on_half_close()
            elif isinstance(event, CallTerminated):
                self._terminate(event.stream_id)

    def _start_call(self, event: CallStarted) -> None:
        stream_id, factory = event.stream_id, self._server.routes.get(event.path)
        if factory is None:
            self.core.end_call(stream_id, GrpcStatus.UNIMPLEMENTED, "Method not found!")
            return
        call = self._calls[stream_id] = factory(self, stream_id)
        call.traceparent = event.traceparent
        timeout_s, max_s = event.timeout_s, call.max_duration_s
        if max_s is not None and (timeout_s is None or max_s < timeout_s):
            call.deadline = self._loop.call_later(max_s, self._on_deadline, stream_id, True)
        elif timeout_s is not None:
            call.deadline = self._loop.call_later(timeout_s, self._on_deadline, stream_id, False)

    def _on_deadline(self, stream_id: int, is_ours: bool) -> None:  # noqa: FBT001 - called by position
        if is_ours:
            self.count_limit("stalled_call")
        self.core.end_call(stream_id, GrpcStatus.DEADLINE_EXCEEDED, "Deadline Exceeded")
        self._terminate(stream_id)
        self.flush_soon()

    def _terminate(self, stream_id: int) -> None:
        call = self._calls.pop(stream_id, None)
        if call is None:
            return
        if call.deadline is not None:
            call.deadline.cancel()
        call.on_terminated()

    def _keep_alive(self) -> None:
        """Ping a silent peer, and close the connection of one that does not answer."""
        now, keepalive, counts = self._loop.time(), self._server.keepalive, self._server.counts
        if now - self._stalls_at >= _STALL_S:
            self._stalls_at = now
            for event in self.core.reset_stalled():
                self._terminate(event.stream_id)
        if not self.core.has_settings:
            # A byte now and then is no beginning either.
            counts["no_preface"] += 1
            self.abort()
            return
        if self._is_pinged:
            wait_s = self._pinged_at + keepalive.timeout_s - now
            if wait_s <= 0.0:
                counts["slow_reader" if self._is_write_paused else "keepalive"] += 1
                self.abort()
                return
        else:
            wait_s = self._read_at + keepalive.time_s - now
            if wait_s <= 0.0:
                self._is_pinged, self._pinged_at = True, now
                self.core.ping()
                wait_s = keepalive.timeout_s
        self.flush_soon()
        # Not later than the next ping is due if this one is answered.
        self._timer = self._loop.call_later(min(wait_s, keepalive.time_s), self._keep_alive)
