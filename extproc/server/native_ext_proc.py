"""ext_proc on the native gRPC server: a message is answered where it arrives, without tasks."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from extproc.decision import Rejection
from extproc.errors import ProtocolError
from extproc.http2.messages import (
    BUDGET_EXCEEDED,
    BUDGET_LIMIT,
    GrpcMessage,
    GrpcStatus,
    MessagePieces,
)
from extproc.protocol.body_buffer import ALWAYS_TAKEN_BYTES
from extproc.protocol.messages import RESPONSE_KINDS, ProcessingRequest, ProcessingResponse
from extproc.request import HttpRequest
from extproc.server import grpc_workarounds
from extproc.server.flow_control_shell import Admission
from extproc.server.grpc_workarounds import APART_STREAMS
from extproc.server.http2_protocol import CallFactory, Http2Protocol, ServerCall
from extproc.server.stream_context import StreamContext, StreamResult
from extproc.server.stream_handler import open_stream
from extproc.server.transport import ExtProcServicer
from extproc.wire import codec

_encode, _decode = codec.encode, codec.decode

#: Path of the method.
PATH = f"/{codec.SERVICE}/{codec.METHOD}"

#: Refusals between which other streams are served (count).
_BATCH = 100

#: Messages that came while a call waited, and that are taken in one turn of the event loop (count):
#: Envoy sends a handful, and another peer may send a hundred thousand.
_TURN_MESSAGES = 16

#: What the objects of a header and of an endpoint in a hint take (bytes).
_HEADER_OVERHEAD = 128
_SUBSET_OVERHEAD = 64

#: What a message has besides its body costs no more than `ALWAYS_TAKEN_BYTES` up to this size (bytes):
#: an endpoint in a hint has two bytes at least, one of them the comma, and a header five.
_SMALL_BYTES = ALWAYS_TAKEN_BYTES // (1 + _SUBSET_OVERHEAD // 2)

ArgumentT = TypeVar("ArgumentT")


class ExtProcCall(ServerCall):
    """Stream of ext_proc: runs a `StreamHandler`.

    Attributes:
        is_waiting: True while its request waits for admission, for the parse of its body, or for
            the client to take the body, and while messages that came meanwhile wait.
    """

    __slots__ = (
        "_backlog",
        "_failure",
        "_head_bytes",
        "_is_closed",
        "_is_half_closed",
        "_is_overload",
        "_servicer",
        "has_begun",
        "is_waiting",
        "stream",
    )

    def __init__(
        self, connection: Http2Protocol, stream_id: int, servicer: NativeExternalProcessor
    ) -> None:
        super().__init__(connection, stream_id)
        shared = servicer.shared
        self._servicer = servicer
        self.stream = (
            open_stream(shared)
            if shared.trace_sampler is None
            else open_stream(shared, self._read_traceparent)
        )
        self._is_overload = servicer.num_streams >= shared.settings.max_streams
        # Ten thousand streams may wait: what few of them need is created when they need it.
        self._backlog: deque[GrpcMessage] | None = None
        self._failure: Exception | None = None
        self._head_bytes = 0  # held of the budget of bodies
        self.is_waiting = self.has_begun = False
        self._is_half_closed = self._is_closed = False

    def _read_traceparent(self) -> str:
        return self.traceparent

    @property
    def arriving_bytes(self) -> int | None:
        """Bytes received of a request that is still arriving; None where none is."""
        if self.is_waiting:
            return None
        return self.stream.exchange.arriving_bytes if self.has_begun else 0

    def on_message(self, message: GrpcMessage) -> None:
        """Answer a message, after those that wait."""
        stream, is_waiting = self.stream, self.is_waiting
        if is_waiting and not stream.is_waiting:
            self._keep(message)
            return
        self.has_begun = True
        size = len(message)
        if size > codec.MAX_HEAD_BYTES and codec.has_large_head(message):
            self._exhaust("message_bytes", codec.LARGE_HEAD)
            return
        try:
            # A body is cut out in place, and a message that waits is decoded again.
            event = _decode(bytes(message) if is_waiting else message)
        except Exception as error:  # noqa: BLE001 - a bug of ours must not end other streams
            self._fail(error)
            return
        head_bytes = size - len(event.body)
        if head_bytes > _SMALL_BYTES and not self._hold_head(event, head_bytes):
            self._exhaust(BUDGET_LIMIT, BUDGET_EXCEEDED)
            return
        if not is_waiting:
            self._run(stream.reject_overload if self._is_overload else stream.handle, event)
        elif event.kind in RESPONSE_KINDS:
            self._servicer.cancel_parse(self)
            self._resume(stream.abandon_request, event)
        else:
            self._keep(message)

    def _keep(self, message: GrpcMessage) -> None:
        """Keep a message until the call goes on, or end the call where too much waits."""
        if self._backlog is None:
            self._backlog = deque()
        self._backlog.append(message)
        if not self.hold(message):
            self._exhaust(BUDGET_LIMIT, BUDGET_EXCEEDED)

    def _hold_head(self, event: ProcessingRequest, head_bytes: int) -> bool:
        """Count what a message has besides its body to the budget of bodies; False without room.

        Headers and hints stay until the stream ends. Hints may come with each message, of which one
        stays, so that the largest message counts.
        """
        subset = None if event.hints is None else event.hints.subset
        cost = head_bytes + _HEADER_OVERHEAD * len(event.headers)
        cost += _SUBSET_OVERHEAD * len(subset or ())
        if cost <= max(ALWAYS_TAKEN_BYTES, self._head_bytes):
            return True
        if not self._servicer.shared.body_budget.hold(cost - self._head_bytes):
            return False
        self._head_bytes = cost
        return True

    def _exhaust(self, limit: str, message: str) -> None:
        """End the call because of a limit."""
        if self._release("cancelled"):
            self.count_limit(limit)
            self.end(GrpcStatus.RESOURCE_EXHAUSTED, message)

    def on_half_close(self) -> None:
        """End the stream, unless its request is still to be answered."""
        self._is_half_closed = True
        if not self.is_waiting:
            self.finish()

    def on_terminated(self) -> None:
        """Release all resources: the client left."""
        self._release("cancelled")

    def finish(self, result: StreamResult = "ok") -> None:
        """End the stream with OK."""
        if self._release(result):
            self.end()

    def stall(self) -> None:
        """Reject the request, because it stopped arriving."""
        if self.arriving_bytes is None or self._is_closed:
            return  # the rest came meanwhile
        if self.has_begun:
            self._run(_stall, self)
        elif self._release("cancelled"):
            self.count_limit("stalled_call")
            self.end(GrpcStatus.DEADLINE_EXCEEDED, "no message arrived")

    def evict(self) -> bool:
        """End the routed request for one of higher priority; False where that is not possible now."""
        if self.is_waiting or self._is_closed or not self.stream.can_evict:
            return False
        self._run(_evict, self)
        return True

    def _run(
        self, turn: Callable[[ArgumentT], Iterable[ProcessingResponse]], argument: ArgumentT
    ) -> None:
        """Send what a step of the stream answers, and go on with what it demands."""
        encoded: list[bytes] | None = None
        try:
            replies = turn(argument)
            if isinstance(replies, (tuple, list)):
                encoded = [_encode(reply) for reply in replies]
        except ProtocolError as error:
            self._servicer.log_violation(error)
            if self._release("protocol"):
                self.end(GrpcStatus.INVALID_ARGUMENT, str(error))
            return
        except Exception as error:  # noqa: BLE001 - a bug of ours: counted, logged and answered
            self._fail(error)
            return
        if encoded is not None:
            if encoded:
                self.send(encoded)
            self._go_on()
        elif self.send_lazily(self._encode_lazily(replies)):
            self._on_sent()
        else:
            self._wait()

    def _go_on(self) -> None:
        """Do what the stream demands next."""
        stream = self.stream
        if stream.unparsed is not None:
            self._wait()
            self._servicer.parse(self, stream.unparsed)
        elif stream.unrendered is not None:
            self._wait()
            stream.unrendered.wait.add_done_callback(
                self._on_rendered, context=self._servicer.context
            )
        elif stream.queued is not None:
            self._wait()
            stream.queued.admission.add_done_callback(
                self._on_admission, context=self._servicer.context
            )
        elif stream.is_over:
            self.finish()
        elif stream.evictable is not None:
            stream.evictable.allow(self.evict)

    def _encode_lazily(self, replies: Iterable[ProcessingResponse]) -> Iterator[MessagePieces]:
        """Encode the pieces of a body as the client takes them; the last lets the stream go on."""
        try:
            for reply in replies:
                yield codec.encode_pieces(reply)
        except Exception as error:  # noqa: BLE001 - a bug of ours, see `_on_sent`
            self._failure = error
        finally:
            if self.is_waiting:
                asyncio.get_running_loop().call_soon(self._on_body_taken)

    def _on_sent(self) -> None:
        """Go on after a body, or fail by what its pieces raised."""
        failure, self._failure = self._failure, None
        if failure is None:
            self._go_on()
        else:
            self._fail(failure)

    def _on_body_taken(self) -> None:
        if not self._is_closed:
            self.is_waiting = False
            self._on_sent()
            self._take_backlog()

    def _wait(self) -> None:
        self.is_waiting = True
        self.pause()

    def _fail(self, error: Exception) -> None:
        """Answer an unexpected exception: 500, or INTERNAL once the response began."""
        self._servicer.shared.observer.on_exception(error)
        replies = [_encode(reply) for reply in self.stream.fail()]
        if not self._release("error"):
            return
        if replies:
            self.send(replies)
            self.end()
        else:
            self.end(GrpcStatus.INTERNAL, "the picker ran into a bug")

    def _on_admission(self, answer: asyncio.Future[Admission | Rejection]) -> None:
        """Answer a queued request."""
        if not self._is_closed and self.stream.queued is not None:
            self.gather_answers()
            self._resume(self.stream.resume, answer.result())

    def _on_rendered(self, wait: asyncio.Future[None]) -> None:
        """Answer a request whose wait for tokens is over."""
        if not self._is_closed and self.stream.unrendered is not None:
            self._resume(self.stream.resume_rendered, wait)

    def on_parsed(self, read: HttpRequest | Rejection | Exception) -> None:
        """Answer a request whose large body was parsed, or could not be."""
        if self._is_closed:
            return
        if isinstance(read, Exception):
            self._resume(self.stream.resume_unparsed, read)
        else:
            self._resume(self.stream.resume_parsed, read)

    def _resume(
        self, turn: Callable[[ArgumentT], Iterable[ProcessingResponse]], argument: ArgumentT
    ) -> None:
        """Answer what waited, then the messages that came meanwhile."""
        self.is_waiting = False
        self._run(turn, argument)
        self._take_backlog()

    def _take_backlog(self) -> None:
        """Take the messages that came meanwhile, in turns with other calls."""
        backlog = self._backlog
        for _ in range(_TURN_MESSAGES):
            if not backlog or self.is_waiting or self._is_closed:
                break
            self.on_message(backlog.popleft())
        if self.is_waiting or self._is_closed:
            return
        if backlog:
            self.is_waiting = True
            asyncio.get_running_loop().call_soon(self._on_turn)
            return
        self._backlog = None
        self.resume()
        if self._is_half_closed:
            self.finish()

    def _on_turn(self) -> None:
        if not self._is_closed:
            self.is_waiting = False
            self._take_backlog()

    def _release(self, result: StreamResult) -> bool:
        """Release all resources; False if that was done before."""
        if self._is_closed:
            return False
        self._is_closed = True
        self._backlog = None
        if self._head_bytes:
            self._servicer.shared.body_budget.release(self._head_bytes)
        self._servicer.on_end(self, result)
        self.stream.finish(result)
        return True


def _stall(call: ExtProcCall) -> Iterable[ProcessingResponse]:
    return call.stream.stall()


def _evict(call: ExtProcCall) -> Iterable[ProcessingResponse]:
    return call.stream.evict()


class NativeExternalProcessor(ExtProcServicer[ExtProcCall]):
    """Servicer of ext_proc on the native server."""

    def __init__(self, shared: StreamContext) -> None:
        super().__init__(shared)
        self._apart_allocator = grpc_workarounds.build_apart_allocator()
        self._calls: dict[ExtProcCall, None] = {}
        self._parses: dict[ExtProcCall, asyncio.Task[None]] = {}
        self._all_ended: asyncio.Event | None = None
        #: Of callbacks of admissions, which would copy a context for each request that waits.
        self.context = contextvars.copy_context()

    @property
    def num_streams(self) -> int:
        """Open streams."""
        return len(self._calls)

    def open(self, connection: Http2Protocol, stream_id: int) -> ExtProcCall:
        """Create the handler of a stream."""
        self.shared.observer.on_stream_opened()
        self.shared.on_opened()
        if len(self._calls) >= APART_STREAMS and self._apart_allocator is not None:
            controllers = self.shared.flow_controllers.values()
            self._apart_allocator.begin_turn(
                sum([controller.queue.count for controller in controllers])
            )
        call = ExtProcCall(connection, stream_id, self)
        self._calls[call] = None
        return call

    def routes(self) -> dict[str, CallFactory]:
        """Handlers by path, for the server."""
        return {PATH: self.open}

    def parse(self, call: ExtProcCall, raw: HttpRequest) -> None:
        """Parse a large body in the worker."""
        self._parses[call] = asyncio.ensure_future(self._parse(call, raw))

    def cancel_parse(self, call: ExtProcCall) -> None:
        """Let the parse of a body go, if there is one."""
        parse = self._parses.pop(call, None)
        if parse is not None:
            parse.cancel()

    async def _parse(self, call: ExtProcCall, raw: HttpRequest) -> None:
        large_bodies = self.shared.large_bodies
        if large_bodies is None:
            raise RuntimeError("a body is unread only where there is a worker")
        read: HttpRequest | Rejection | Exception
        try:
            read = await large_bodies.read(raw)
        except Exception as error:  # noqa: BLE001 - counted and logged, and the request is answered
            read = error
        del raw  # its prompt must not wait for the peer
        self._parses.pop(call, None)
        call.on_parsed(read)

    def on_end(self, call: ExtProcCall, result: StreamResult) -> None:
        """Count the end of a stream."""
        del self._calls[call]
        self.cancel_parse(call)
        self.shared.observer.on_stream_ended(result)
        if not self._calls:
            self._calls.clear()  # its empty table stays as large as it was
            if self._all_ended is not None:
                self._all_ended.set()

    async def refuse_stalled(self) -> None:
        """Check all arriving bodies, and answer stalled requests with 408."""
        stalled = self.find_stalled({call: call.arriving_bytes for call in self._calls})
        for number, call in enumerate(stalled, 1):
            call.stall()
            if not number % _BATCH:
                await asyncio.sleep(0)

    async def drain_streams(self, within_s: float) -> None:
        """End every open stream with OK: Envoy goes on without the processor.

        A stream whose request is not decided yet ends as soon as it is: without an answer Envoy
        would go on without an endpoint.

        Args:
            within_s: Seconds that requests have to become complete.
        """
        self.shared.start_draining()
        for call in list(self._calls):
            if call.stream.is_routed:
                call.finish("cancelled")
        if self._calls:
            self._all_ended = asyncio.Event()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(within_s):
                    await self._all_ended.wait()
