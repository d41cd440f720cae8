"""ext_proc and health on grpcio: a coroutine per stream handles its events in order.

`control_plane_servers` builds its gRPC servers with functions of this module.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple, cast

import grpc
from grpc_health.v1 import health_pb2

from extproc.config.settings import ServerSection, Settings
from extproc.errors import ProtocolError
from extproc.protocol.messages import MessageKind, ProcessingRequest, ProcessingResponse
from extproc.protocol.trace_context import TRACEPARENT
from extproc.protocol.transitions import RequestState, ResponseState
from extproc.server import grpc_workarounds, health, transport
from extproc.server.stream_context import StreamContext, StreamResult
from extproc.server.stream_handler import StreamHandler, open_stream
from extproc.server.transport import BoundServers, ExtProcServicer, Keepalive
from extproc.wire import codec

Context = grpc.aio.ServicerContext[ProcessingRequest, bytes]

#: Seconds in which a data plane reads that streams ended; busy ones take some ms.
_DRAIN_SPREAD_S = 0.5

#: Refusals written at once (count), and seconds they may take: some milliseconds of the event loop,
#: and a data plane that reads nothing does not hold up the next.
_BATCH = 100
_WRITE_S = 1.0

#: Stands for a message that is not decoded, because it has a large head.
_LARGE_HEAD = ProcessingRequest(MessageKind.GARBAGE)


class _OpenStream(NamedTuple):
    """Open stream with its gRPC context."""

    stream: StreamHandler
    context: Context
    reads: grpc_workarounds.UncancelledOperations
    writes: grpc_workarounds.UncancelledOperations

    @property
    def arriving_bytes(self) -> int | None:
        """Bytes received of a request body still arriving; None where none is."""
        return self.stream.exchange.arriving_bytes if self.reads.waits else None

    @property
    def is_silent(self) -> bool:
        """True while its first message is awaited."""
        exchange = self.stream.exchange
        has_begun = (
            exchange.request_state is not RequestState.IDLE
            or exchange.response_state is not ResponseState.IDLE
        )
        return self.reads.waits and not has_begun

    def give_up(self) -> None:
        """Let cancelling the task end what it waits for."""
        self.reads.give_up()
        self.writes.give_up()

    async def read(self) -> ProcessingRequest | None:
        """Read a message; None at the end of the stream."""
        event = await self.reads.run(self.context.read())
        if event is _LARGE_HEAD:
            await self.context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, codec.LARGE_HEAD)
        if isinstance(event, ProcessingRequest):
            return event
        await grpc_workarounds.let_reset_arrive()
        return None

    async def write(self, replies: Iterable[ProcessingResponse]) -> None:
        """Write replies, of which a client that leaves cancels none."""
        for reply in replies:
            await self.writes.run(self.context.write(codec.encode(reply)))

    def end(self, task: asyncio.Task[None]) -> None:
        """End the stream at once if it waits for a message, else after its current write.

        gRPC ends no call of which a write was cancelled: it tries to begin the answer again
        (GRPC_CALL_ERROR_TOO_MANY_OPERATIONS), and the client waits for an end that never comes.
        """
        self.stream.end()
        if self.reads.waits:
            task.cancel()


class ExternalProcessorServicer(ExtProcServicer[asyncio.Task[None]]):
    """gRPC servicer of ext_proc: runs a `StreamHandler` per stream."""

    def __init__(self, shared: StreamContext) -> None:
        super().__init__(shared)
        self._streams: dict[asyncio.Task[None], _OpenStream] = {}
        self._refused: dict[asyncio.Task[None], asyncio.Task[None]] = {}
        #: The same of evictions since `refuse_stalled` was called.
        self._evicted: dict[asyncio.Task[None], asyncio.Task[None]] = {}

    async def process(self, _: AsyncIterator[ProcessingRequest], context: Context) -> None:
        """Serve a stream to its end."""
        task = _own_task()
        observer = self.shared.observer
        observer.on_stream_opened()
        self.shared.on_opened()
        stream = self._open_stream(context)
        reads = grpc_workarounds.UncancelledOperations(self._ends)
        # A drain waits for writes: gRPC ends no call of which a write was cancelled.
        writes = grpc_workarounds.UncancelledOperations(_never)
        entry = self._streams[task] = _OpenStream(stream, context, reads, writes)
        overloaded = len(self._streams) > self.shared.settings.max_streams
        handle = stream.reject_overload if overloaded else stream.handle
        result: StreamResult = "error"
        try:
            while not stream.is_over:
                event = await entry.read()
                if event is None:
                    break
                # No await beyond this point, until the answers are written.
                for reply in handle(event):
                    await writes.run(context.write(codec.encode(reply)))
                await self._go_on(task, entry)
            await self._refusal(task)
            result = "ok"
        except asyncio.CancelledError:
            # The client left, or we are closing: then the stream ends with OK, and the data
            # plane goes on without us instead of cutting the answer.
            result = "cancelled"
            if not self.shared.is_draining and not reads.given_up:
                raise
            task.uncancel()
        except ProtocolError as error:
            result = "protocol"
            self.log_violation(error)
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except grpc.aio.BaseError:
            # A write after the peer left; the end arrives as an error instead of a cancellation.
            result = "cancelled"
        except Exception as error:  # noqa: BLE001 - a bug of ours: counted, logged and answered
            await self._fail(stream, context, error)
        finally:
            del self._streams[task]
            observer.on_stream_ended(result)
            stream.finish(result)

    def _open_stream(self, context: Context) -> StreamHandler:
        if self.shared.trace_sampler is None:
            return open_stream(self.shared)
        return open_stream(self.shared, functools.partial(_read_traceparent, context))

    async def _fail(self, stream: StreamHandler, context: Context, error: Exception) -> None:
        """Answer an unexpected exception: 500, or INTERNAL once the response began."""
        self.shared.observer.on_exception(error)
        replies = stream.fail()
        if not replies:
            await context.abort(grpc.StatusCode.INTERNAL, "the picker ran into a bug")
        await _write(context, replies)

    async def _go_on(self, task: asyncio.Task[None], entry: _OpenStream) -> None:
        """Do what the stream demands after a message."""
        stream = entry.stream
        if stream.is_waiting:
            await self._finish_request(entry)
        if stream.evictable is not None:
            stream.evictable.allow(functools.partial(self._evict, task))

    async def _finish_request(self, entry: _OpenStream) -> None:
        """Wait for the parse of a large body, for tokens or for admission, and answer."""
        await self._read_body(entry)
        unrendered = entry.stream.unrendered
        if unrendered is not None:
            await unrendered.wait
            del unrendered  # its prompt must not wait for the peer
            await entry.write(entry.stream.resume_rendered())
        await _resume(entry)

    async def _read_body(self, entry: _OpenStream) -> None:
        """Parse a large body in the worker, and answer its request."""
        stream = entry.stream
        raw, large_bodies = stream.unparsed, self.shared.large_bodies
        if raw is None or large_bodies is None:
            return
        try:
            parsed = await large_bodies.read(raw)
        except Exception as error:  # noqa: BLE001 - counted and logged, and the request is answered
            replies = stream.resume_unparsed(error)
        else:
            replies = stream.resume_parsed(parsed)
            del parsed
        del raw  # its prompt must not wait for the peer
        await entry.write(replies)

    async def refuse_stalled(self) -> None:
        """Check all arriving requests, and answer stalled ones with 408.

        A stream without a message ends with DEADLINE_EXCEEDED: it has no request to answer.
        """
        for task in self._refused:
            # Envoy ends the stream of an immediate response at once; other clients are cut off.
            known = self._streams.get(task)
            if known is not None:
                known.give_up()
                task.cancel()
        self._refused, self._evicted = self._evicted, {}
        sizes = {
            task: 0 if entry.is_silent else entry.arriving_bytes
            for task, entry in self._streams.items()
        }
        stalled = self.find_stalled(sizes)
        for batch in (stalled[start : start + _BATCH] for start in range(0, len(stalled), _BATCH)):
            writes = []
            for task in batch:
                entry = self._streams.get(task)
                # While the batch before was written, the rest of the body may have come.
                if entry is None:
                    continue
                if entry.is_silent:
                    entry.context.set_code(grpc.StatusCode.DEADLINE_EXCEEDED)
                    entry.context.set_details("no message arrived")
                    entry.give_up()
                    task.cancel()
                elif entry.arriving_bytes is not None:
                    replies = entry.stream.stall()
                    writes.append(asyncio.ensure_future(_write(entry.context, replies)))
                    self._refused[task] = writes[-1]
            if writes:
                await asyncio.wait(writes, timeout=_WRITE_S)

    def _evict(self, task: asyncio.Task[None]) -> bool:
        """End a routed request for one of higher priority; False where that is not possible now.

        Not while a message is written: gRPC takes one at a time.
        """
        entry = self._streams.get(task)
        if entry is None or not entry.reads.waits or not entry.stream.can_evict:
            return False
        replies = entry.stream.evict()
        self._evicted[task] = asyncio.ensure_future(_write(entry.context, replies))
        return True

    def _ends(self) -> bool:
        """True while this process ends streams itself."""
        return self.shared.is_draining

    async def _refusal(self, task: asyncio.Task[None]) -> None:
        """Wait until a stream's refusal is written, where another task writes one."""
        write = self._refused.get(task) or self._evicted.get(task)
        if write is not None:
            await asyncio.wait([write], timeout=_WRITE_S)

    async def drain_streams(self, within_s: float, *, apart_s: float = _DRAIN_SPREAD_S) -> None:
        """End every open stream with OK: Envoy goes on without the processor.

        A stream whose request is not decided yet ends as soon as it is: without an answer Envoy
        would go on without an endpoint. After GOAWAY gRPC closes a connection at once with its last
        stream, and the data plane loses what it has not read yet if it writes to the connection
        then, as Envoy does for each end it reads. So its oldest stream ends last and alone.

        Args:
            within_s: Seconds that requests have to become complete.
            apart_s: Seconds between the ends on a connection and the last of them.
        """
        self.shared.start_draining()
        last: dict[str, asyncio.Task[None]] = {}
        others = 0
        for task, entry in list(self._streams.items()):
            if entry.stream.is_routed and last.setdefault(entry.context.peer(), task) is not task:
                entry.end(task)
                others += 1
        if others:
            await asyncio.wait(last.values(), timeout=apart_s)
        for task in last.values():
            if task in self._streams:
                self._streams[task].end(task)
        if self._streams:
            await asyncio.wait(self._streams, timeout=within_s)


def _read_traceparent(context: Context) -> str:
    """Read the span that the data plane names for the call; empty without one."""
    for name, value in context.invocation_metadata() or ():
        if name == TRACEPARENT:
            return value if isinstance(value, str) else ""
    return ""


def _never() -> bool:
    return False


def _own_task() -> asyncio.Task[None]:
    task = asyncio.current_task()
    if task is None:
        raise RuntimeError("process runs inside a task of the gRPC server")
    return task


async def _write(context: Context, replies: Iterable[ProcessingResponse]) -> None:
    """Write responses while the handler of the stream reads."""
    with contextlib.suppress(grpc.aio.BaseError):  # the client left meanwhile
        for reply in replies:
            await context.write(codec.encode(reply))


async def _resume(entry: _OpenStream) -> None:
    """Wait for the admission of a queued request, and answer it."""
    queued = entry.stream.queued
    if queued is None:
        return
    answer = await queued.admission
    del queued  # its prompt must not wait for the peer
    await entry.write(entry.stream.resume(answer))


def _decode(data: bytes) -> ProcessingRequest:
    return _LARGE_HEAD if codec.has_large_head(data) else codec.decode(data)


def register(server: grpc.aio.Server, servicer: ExternalProcessorServicer) -> None:
    """Register ext_proc on a gRPC server; the codec functions are the (de)serializers."""
    handler: grpc.RpcMethodHandler[ProcessingRequest, bytes] = (
        grpc.stream_stream_rpc_method_handler(
            servicer.process, request_deserializer=_decode, response_serializer=None
        )
    )
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(codec.SERVICE, {codec.METHOD: handler}),)
    )


_KEEPALIVE = Keepalive()


class GrpcioTransport:
    """Serves ext_proc and gRPC health on grpcio."""

    def __init__(self, shared: StreamContext) -> None:
        self.servicer = ExternalProcessorServicer(shared)

    def bind(self, settings: Settings, readiness: health.Readiness) -> BoundServers:
        """See `Transport`."""
        server = settings.server
        main = build_server(settings.limits.max_message_bytes)
        register(main, self.servicer)
        if server.health_checking:
            register_health(main, readiness)
        probes = build_server(health.MAX_REQUEST_BYTES)
        register_health(probes, readiness)
        credentials = load_credentials(server)
        grpc_port = bind(
            main,
            server.grpc_address(server.grpc_port),
            flag="--grpc-port",
            credentials=credentials,
        )
        health_port = bind(
            probes, server.grpc_address(server.grpc_health_port), flag="--grpc-health-port"
        )
        return BoundServers((main, probes), grpc_port, health_port)

    @property
    def num_connections(self) -> int | None:
        """None: grpcio does not show its connections."""
        return None

    def gauges(self) -> Mapping[str, Callable[[], float]]:
        """No gauges: grpcio shows neither its connections nor what waits on them."""
        return {}


def build_server(max_message_bytes: int, *, keepalive: Keepalive = _KEEPALIVE) -> grpc.aio.Server:
    """Build a gRPC server that does not listen anywhere yet."""
    return grpc.aio.server(
        options=[
            ("grpc.keepalive_time_ms", round(keepalive.time_s * 1000)),
            ("grpc.keepalive_timeout_ms", round(keepalive.timeout_s * 1000)),
            # The larger of the two counts, and this one is a minute unless it is set.
            ("grpc.http2.ping_timeout_ms", round(keepalive.timeout_s * 1000)),
            # Responses take minutes without a message, and connections may have no stream.
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.max_pings_without_data", 0),
            ("grpc.max_receive_message_length", max_message_bytes),
            # A second process on the same port is a mistake, not a load-balancing group.
            ("grpc.so_reuseport", 0),
            # Envoys may ask every few seconds whether we live; the default of 5 minutes hangs up.
            ("grpc.http2.min_ping_interval_without_data_ms", 2_000),
            # Streams that begin while the loop is busy: beyond 1,000 gRPC cancels some, beyond
            # 3,000 all. `limits.max_streams` is what refuses, with an answer.
            ("grpc.server.max_pending_requests", 1_000_000),
            ("grpc.server.max_pending_requests_hard_limit", 1_000_000),
        ]
    )


def bind(
    listening: grpc.aio.Server,
    address: str,
    *,
    flag: str,
    credentials: grpc.ServerCredentials | None = None,
) -> int:
    """Listen on a further address.

    Args:
        address: `host:port`; port 0 takes a free one.
        flag: Name of the option that set the port, for errors.
        credentials: For TLS; None serves plaintext.

    Returns:
        The port.

    Raises:
        ConfigError: The port is taken, or the host is none of this machine.
    """
    host, _, number = address.rpartition(":")
    # A single pair of brackets: those of `--host [::1]` are no part of a name.
    host, port = host.removeprefix("[").removesuffix("]"), int(number)
    # Looked at first, because gRPC prints lines of its own about what it cannot bind.
    failed = transport.find_bind_error(host, port)
    if failed is not None:
        raise transport.bind_error(flag, host, port, failed)
    try:
        if credentials is None:
            return listening.add_insecure_port(address)
        return listening.add_secure_port(address, credentials)
    except RuntimeError as error:
        taken = OSError(errno.EADDRINUSE, "something listens there")
        raise transport.bind_error(flag, host, port, taken) from error


def load_credentials(server: ServerSection) -> grpc.ServerCredentials | None:
    """Load the credentials by `secure_serving` and `cert_path`; None serves plaintext.

    Raises:
        ConfigError: A certificate cannot be read.
    """
    if not server.secure_serving:
        return None
    from extproc.server import tls  # noqa: PLC0415 - what it signs with is heavy, and not for everybody

    if not server.cert_path:
        return grpc.ssl_server_credentials([tls.self_signed_pair()])
    folder = Path(server.cert_path)
    if not server.enable_cert_reload:
        return tls.KeyPair(folder, lambda pair: grpc.ssl_server_credentials([pair])).read()
    files = tls.KeyPair(folder, lambda pair: grpc.ssl_server_certificate_configuration([pair]))
    # gRPC takes None for "no change"; its stubs do not say so.
    fetch = cast("Callable[[], grpc.ServerCertificateConfiguration]", files.changed)
    return grpc.dynamic_ssl_server_credentials(files.read(), fetch)


def register_health(server: grpc.aio.Server, readiness: health.Readiness) -> None:
    """Register the health service on a gRPC server."""
    servicer = health.HealthServicer(readiness)

    async def check(
        request: health_pb2.HealthCheckRequest, _: object
    ) -> health_pb2.HealthCheckResponse:
        return servicer.check(request)

    async def list_all(
        _: health_pb2.HealthListRequest, __: object
    ) -> health_pb2.HealthListResponse:
        return servicer.list()

    methods = {
        "Check": grpc.unary_unary_rpc_method_handler(
            check,
            request_deserializer=health_pb2.HealthCheckRequest.FromString,
            response_serializer=health_pb2.HealthCheckResponse.SerializeToString,
        ),
        "List": grpc.unary_unary_rpc_method_handler(
            list_all,
            request_deserializer=health_pb2.HealthListRequest.FromString,
            response_serializer=health_pb2.HealthListResponse.SerializeToString,
        ),
    }
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(health.SERVICE, methods),)
    )
