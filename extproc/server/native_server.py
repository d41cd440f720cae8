"""The native gRPC server: its addresses and connections, and ext_proc and health without grpcio."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import math
import resource
import socket
import ssl
from collections import Counter
from collections.abc import Callable, Mapping

from grpc_health.v1 import health_pb2

from extproc.config.settings import LimitsSection, ServerSection, Settings
from extproc.errors import ConfigError
from extproc.http2.limits import Http2Limits, ReceiveBudget
from extproc.http2.messages import GrpcMessage, GrpcStatus
from extproc.http2.sender import SendBudget
from extproc.server import health, transport
from extproc.server.http2_protocol import CallFactory, Http2Protocol, ServerCall
from extproc.server.native_ext_proc import NativeExternalProcessor
from extproc.server.stream_context import StreamContext
from extproc.server.transport import BoundServers, Keepalive

_log = logging.getLogger("extproc.server")

#: Returns the TLS context of a new connection.
TlsSource = Callable[[], ssl.SSLContext]

#: Seconds of a TLS handshake, after which its connection is closed.
_HANDSHAKE_S = 10.0

#: Seconds after which accepting is tried again where it failed, as without open files.
_ACCEPT_RETRY_S = 1.0

#: Seconds between two log lines about connections that are refused.
_LOG_S = 60.0


class Http2Server:
    """Native gRPC server on any number of addresses.

    Args:
        counts: Calls and connections that ended by a limit or a violation; updated here.

    Attributes:
        send_budget: Limit on the answers that wait on all connections.
    """

    def __init__(
        self,
        routes: Mapping[str, CallFactory],
        *,
        limits: Http2Limits,
        budget: ReceiveBudget,
        counts: Counter[str],
        keepalive: Keepalive,
        max_connections: int,
    ) -> None:
        self.routes = routes
        self.limits = limits
        self.budget = budget
        self.counts = counts
        self.keepalive = keepalive
        self.connections: set[Http2Protocol] = set()
        self.send_budget = SendBudget(limits.max_total_unsent_bytes)
        self.is_stopping = False
        self._max_connections = max_connections
        self._logged_at = -math.inf
        self._sockets: list[tuple[socket.socket, TlsSource | None]] = []
        self._listeners: list[asyncio.Server | _TlsListener] = []
        self._gone: asyncio.Event = asyncio.Event()

    def bind(self, address: str, tls: TlsSource | None) -> int:
        """Bind to a further address; returns the port.

        Args:
            address: `host:port` or `[host]:port`; `[::]` is every address of both families.
            tls: None serves plaintext.

        Raises:
            OSError: The address cannot be bound.
        """
        host, _, port = address.rpartition(":")
        bound = transport.bind_socket(host.strip("[]"), int(port))
        self._sockets.append((bound, tls))
        return int(bound.getsockname()[1])

    async def start(self) -> None:
        """Accept connections."""
        loop = asyncio.get_running_loop()
        for bound, tls in self._sockets:
            self._listeners.append(
                await loop.create_server(
                    lambda: Http2Protocol(self), sock=bound, backlog=transport.BACKLOG
                )
                if tls is None
                else _TlsListener(self, bound, tls)
            )
        self._sockets = []

    def release_sockets(self) -> None:
        """Close the sockets of a server that was not started."""
        for bound, _ in self._sockets:
            bound.close()
        self._sockets = []

    async def stop(self, grace_s: float | None) -> None:
        """Stop accepting, announce the end, and close connections that are open after `grace_s`.

        Peers close their connections once their streams ended: closing them from here could cut
        what they have not read.

        Args:
            grace_s: None closes them at once.
        """
        self.is_stopping = True
        self.release_sockets()
        for listener in self._listeners:
            listener.close()
        for connection in self.connections:
            connection.start_drain()
        if self.connections:
            try:
                async with asyncio.timeout(grace_s or 0.0):
                    await self._gone.wait()
            except TimeoutError:
                for connection in list(self.connections):
                    connection.close()

    def on_connected(self, connection: Http2Protocol) -> bool:
        """Take a connection; False if it is to be closed, because there are too many."""
        if self.has_room():
            self.connections.add(connection)
            return True
        return False

    def has_room(self, num_pending: int = 0) -> bool:
        """Check if a connection may open; counts and logs it where there are too many.

        Args:
            num_pending: Connections that are not taken yet, which count too.
        """
        if len(self.connections) + num_pending < self._max_connections:
            return True
        self.counts["connections"] += 1
        now = asyncio.get_running_loop().time()
        if now - self._logged_at >= _LOG_S:
            self._logged_at = now
            _log.warning(
                "a connection is refused: wanted fewer than %d, the most that the limit of open "
                "files allows; raise it (ulimit -n), or look who holds them",
                self._max_connections,
            )
        return False

    def on_lost(self, connection: Http2Protocol) -> None:
        """Forget a connection."""
        self.connections.discard(connection)
        if self.is_stopping and not self.connections:
            self._gone.set()


class _TlsListener:
    """Accepts TLS connections; those whose handshake goes on count to the limit.

    A server of asyncio calls nothing before the handshake, so peers that send no byte of it could
    take all open files.
    """

    def __init__(self, server: Http2Server, bound: socket.socket, tls: TlsSource) -> None:
        self._server = server
        self._socket = bound
        self._tls = tls
        self._handshakes: set[asyncio.Task[None]] = set()
        bound.setblocking(False)
        bound.listen(transport.BACKLOG)
        self._retry: asyncio.TimerHandle | None = None
        self._read()

    def close(self) -> None:
        """Accept no more; idempotent."""
        if self._socket.fileno() < 0:
            return
        if self._retry is not None:
            self._retry.cancel()
        asyncio.get_running_loop().remove_reader(self._socket)
        self._socket.close()

    def _read(self) -> None:
        asyncio.get_running_loop().add_reader(self._socket, self._accept)

    def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            accepted, _ = self._socket.accept()
        except (BlockingIOError, ConnectionError):
            return  # the peer left
        except OSError as error:
            _log.warning("a connection cannot be accepted: %s", error.strerror)
            loop.remove_reader(self._socket)
            self._retry = loop.call_later(_ACCEPT_RETRY_S, self._read)
            return
        if not self._server.has_room(len(self._handshakes)):
            accepted.close()
            return
        accepted.setblocking(False)
        handshake = loop.create_task(self._shake_hands(accepted))
        self._handshakes.add(handshake)
        handshake.add_done_callback(self._handshakes.discard)

    async def _shake_hands(self, accepted: socket.socket) -> None:
        with contextlib.suppress(OSError):  # the peer left, is late, or speaks no TLS
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: Http2Protocol(self._server),
                accepted,
                ssl=self._tls(),
                ssl_handshake_timeout=_HANDSHAKE_S,
            )


#: Streams of a connection beyond those that are answered with 429, so that many can be at once.
_SPARE_STREAMS = 10_000

#: Connections of a port (count): Envoy opens one for each of its worker threads. As many that do
#: nothing take some 200 MB.
_MAX_CONNECTIONS = 10_000

#: Shares of the open files that the port of ext_proc and that of health may have; the others are for
#: the metrics port, engines and files.
_FILE_SHARE = 5 / 8
_HEALTH_FILE_SHARE = 1 / 8

#: Seconds that a unary call may take: its answer takes none, so it waits for its message.
_UNARY_S = 60.0

_TOO_LARGE = f"a request of health has at most {health.MAX_REQUEST_BYTES} bytes"

#: Open calls on a connection of the health port (count), the least that RFC 9113 recommends (section
#: 6.5.2): probes make one at a time.
_HEALTH_STREAMS = 100

#: Bytes of incomplete requests on the health port: its clients must not use up what bodies need.
_HEALTH_BUDGET_BYTES = 4 * 1024 * 1024

_KEEPALIVE = Keepalive()


class NativeTransport:
    """Serves ext_proc and gRPC health on the native server.

    Args:
        counts: Calls and connections that ended by a limit or a violation, by its name; updated.
    """

    def __init__(self, shared: StreamContext, counts: Counter[str]) -> None:
        self.servicer = NativeExternalProcessor(shared)
        self._counts = counts
        self._servers: tuple[Http2Server, ...] = ()

    def bind(self, settings: Settings, readiness: health.Readiness) -> BoundServers:
        """See `Transport`."""
        server = settings.server
        checks = health_routes(readiness)
        routes = {**self.servicer.routes(), **(checks if server.health_checking else {})}
        main = build_server(
            routes,
            settings.limits,
            budget=ReceiveBudget(settings.limits.max_assembly_bytes),
            counts=self._counts,
        )
        probes = _build_health_server(checks, self._counts)
        try:
            grpc_port = bind(
                main,
                server.grpc_address(server.grpc_port),
                flag="--grpc-port",
                tls=load_tls_context(server),
            )
            health_port = bind(
                probes, server.grpc_address(server.grpc_health_port), flag="--grpc-health-port"
            )
        except ConfigError:
            main.release_sockets()
            raise
        self._servers = (main, probes)
        return BoundServers(self._servers, grpc_port, health_port)

    @property
    def num_connections(self) -> int:
        """Open connections of gRPC clients."""
        return sum(len(server.connections) for server in self._servers)

    def gauges(self) -> Mapping[str, Callable[[], float]]:
        """Gauges of the process by name."""
        return {
            "extproc_http2_connections_open": lambda: self.num_connections,
            "extproc_http2_unsent_bytes": lambda: sum(
                server.send_budget.held_bytes for server in self._servers
            ),
        }


def build_server(
    routes: Mapping[str, CallFactory],
    limits: LimitsSection,
    *,
    budget: ReceiveBudget,
    counts: Counter[str],
    keepalive: Keepalive = _KEEPALIVE,
) -> Http2Server:
    """Build a server that does not listen anywhere yet."""
    return Http2Server(
        routes,
        limits=Http2Limits(
            max_message_bytes=limits.max_message_bytes,
            max_streams=2 * limits.max_streams + _SPARE_STREAMS,
        ),
        budget=budget,
        counts=counts,
        keepalive=keepalive,
        max_connections=_find_max_connections(_FILE_SHARE),
    )


def _build_health_server(routes: Mapping[str, CallFactory], counts: Counter[str]) -> Http2Server:
    """Build the server of the health port, which every address may reach."""
    return Http2Server(
        routes,
        limits=Http2Limits(max_message_bytes=health.MAX_REQUEST_BYTES, max_streams=_HEALTH_STREAMS),
        budget=ReceiveBudget(_HEALTH_BUDGET_BYTES),
        counts=counts,
        keepalive=_KEEPALIVE,
        max_connections=_find_max_connections(_HEALTH_FILE_SHARE),
    )


def _find_max_connections(file_share: float) -> int:
    """Return the connections that a port may have, by the limit of open files."""
    max_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if max_files == resource.RLIM_INFINITY:
        return _MAX_CONNECTIONS
    return min(_MAX_CONNECTIONS, int(max_files * file_share))


def bind(server: Http2Server, address: str, *, flag: str, tls: TlsSource | None = None) -> int:
    """Bind a server to a further address.

    Args:
        address: `host:port`; port 0 takes a free one.
        flag: Name of the option that set the port, for errors.
        tls: None serves plaintext.

    Returns:
        The port.

    Raises:
        ConfigError: The port is taken, or the host is none of this machine.
    """
    try:
        return server.bind(address, tls)
    except (OSError, UnicodeError) as error:
        host, _, port = address.rpartition(":")
        raise transport.bind_error(flag, host.strip("[]"), int(port), error) from error


def load_tls_context(server: ServerSection) -> TlsSource | None:
    """Load TLS contexts by the settings of TLS; None serves plaintext.

    Raises:
        ConfigError: A certificate cannot be read, or a cipher suite is unknown.
    """
    if not server.secure_serving:
        return None
    from extproc.server import tls  # noqa: PLC0415 - what it signs with is heavy, and not for everybody

    options = tls.TlsOptions(server.tls_min_version, server.tls_cipher_suites)
    if not server.cert_path:
        context = tls.build_context(tls.self_signed_pair(), options)
        return lambda: context
    return tls.load_context(server.cert_path, reload=server.enable_cert_reload, options=options)


class UnaryCall(ServerCall):
    """Call with one message each way.

    Args:
        answer: Message to answer; what it raises ends the call with INTERNAL.
    """

    __slots__ = ("_answer", "_messages")

    max_duration_s = _UNARY_S

    def __init__(
        self, connection: Http2Protocol, stream_id: int, answer: Callable[[bytes], bytes]
    ) -> None:
        super().__init__(connection, stream_id)
        self._answer = answer
        self._messages: list[bytes] = []

    def on_message(self, message: GrpcMessage) -> None:
        """Keep the message until the client is done; no budget counts it, so it must be small."""
        if len(message) > health.MAX_REQUEST_BYTES:
            self.count_limit("message_bytes")
            self.end(GrpcStatus.RESOURCE_EXHAUSTED, _TOO_LARGE)
            return
        self._messages.append(bytes(message))
        if len(self._messages) > 1:
            self.end(GrpcStatus.UNIMPLEMENTED, "a unary call has one message")

    def on_half_close(self) -> None:
        """Answer."""
        if not self._messages:
            self.end(GrpcStatus.UNIMPLEMENTED, "a unary call has one message")
            return
        try:
            answer = self._answer(self._messages[0])
        except Exception:  # noqa: BLE001 - what came is no message, for all that is known
            self.end(GrpcStatus.INTERNAL, "the message cannot be read")
            return
        self.send((answer,))
        self.end()

    def on_terminated(self) -> None:
        """Nothing is open."""


def health_routes(readiness: health.Readiness) -> Mapping[str, CallFactory]:
    """Handlers of the health service by path."""
    servicer = health.HealthServicer(readiness)

    def check(message: bytes) -> bytes:
        request = health_pb2.HealthCheckRequest.FromString(message)
        encoded: bytes = servicer.check(request).SerializeToString()
        return encoded

    def list_all(_: bytes) -> bytes:
        encoded: bytes = servicer.list().SerializeToString()
        return encoded

    return {
        f"/{health.SERVICE}/{method}": functools.partial(UnaryCall, answer=answer)
        for method, answer in (("Check", check), ("List", list_all))
    }
