"""Transports of ext_proc: their ports, what they have in common, and the choice of one."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import math
import os
import socket
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Generic, Literal, Protocol, TypeVar

import msgspec

from extproc.config.settings import Settings
from extproc.errors import ConfigError, ProtocolError
from extproc.protocol.body_buffer import UploadMonitor
from extproc.server.health import Readiness
from extproc.server.stream_context import StreamContext
from extproc.supervision import sleep_to_tick

#: Connections that wait to be accepted (count).
BACKLOG: Final = 1024

#: Share of `body_idle_s` between two looks at the bodies on their way.
_UPLOAD_LOOK: Final = 1 / 12

#: Longest time between two such looks (seconds), after which a lower `body_idle_s` counts at the latest.
_MAX_UPLOAD_LOOK_S: Final = 1.0

StreamT = TypeVar("StreamT")

#: Seconds between two looks of a drain whether a data plane is still connected.
_LOOK_S = 0.1

#: Seconds between two log lines about streams that broke the protocol.
_VIOLATION_LOG_S: Final = 60.0

_log = logging.getLogger("extproc.server")


class Keepalive(msgspec.Struct, frozen=True):
    """Keepalive intervals after which the connection of a vanished peer ends, in seconds.

    A lost node and a cut network close nothing. Without pings the kernel waits hours for what was
    sent, and for ever where nothing was: the streams stay open, and their requests in flight.

    Attributes:
        time_s: Between what was read last and a ping. 10 leaves `timeout_s` its share of the half
            minute in which a lost node is noticed; Envoy answers pings itself, and load balancers
            and NAT forget idle connections after a minute or more.
        timeout_s: Between a ping and the end of a connection that did not answer. 20 is gRPC's own:
            a peer that is starved of processor time answers late, and the end of its connection is
            the end of all requests on it.
    """

    time_s: float = 10.0
    timeout_s: float = 20.0


class ListenAddresses(msgspec.Struct, frozen=True):
    """TCP ports of a running endpoint picker, 0 where a server is disabled, and its transport."""

    grpc: int
    health: int
    pages: int
    xds: int = 0
    keda: int = 0
    transport: str = "native"

    @property
    def ready_message(self) -> str:
        """All ports in a line, and the transport unless it is the native one."""
        more = f", xDS on {self.xds}" if self.xds else ""
        more += f", KEDA's scaler on {self.keda}" if self.keda else ""
        more += f"; {self.transport} transport" if self.transport != "native" else ""
        return (
            f"ext_proc on port {self.grpc}, gRPC health on {self.health}, "
            f"metrics on {self.pages}{more}"
        )


def bind_socket(host: str, port: int) -> socket.socket:
    """Bind a TCP socket; `::` takes both families, and is IPv4 where there is no IPv6."""
    if host in ("", "::") and not socket.has_dualstack_ipv6():
        host = "0.0.0.0"  # noqa: S104 - every address, as configured
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    if ":" not in host:
        family, _, _, _, _ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    return socket.create_server(
        (host, port), family=family, backlog=BACKLOG, dualstack_ipv6=host == "::"
    )


def is_taken(host: str, port: int) -> bool:
    """Check if a TCP port is in use; False for a name that does not resolve."""
    error = find_bind_error(host, port)
    return error is not None and error.errno == errno.EADDRINUSE


def find_bind_error(host: str, port: int) -> OSError | None:
    """Error of a TCP port in use at one address of a host, or of a host without a usable address."""
    if host == "::" and not socket.has_dualstack_ipv6():
        host = "0.0.0.0"  # noqa: S104 - as `bind_socket`
    try:
        addresses = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except OSError as error:
        return error
    except UnicodeError:
        return socket.gaierror(socket.EAI_NONAME, "no name of a host")
    failed = []
    for family, kind, protocol, _, address in addresses:
        try:
            with contextlib.closing(socket.socket(family, kind, protocol)) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6 and not host:
                    probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                probe.bind(address)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return error
            failed.append(error)
    return failed[0] if len(failed) == len(addresses) else None


def bind_error(flag: str, host: str, port: int, error: OSError | UnicodeError) -> ConfigError:
    """Build the error of an address that cannot be bound: of its port or of its host.

    Args:
        flag: Name of the option that set the port.
        host: Value of `--host`.
    """
    number = error.errno if isinstance(error, OSError) else None
    if number in {errno.EADDRINUSE, errno.EACCES}:
        return ConfigError(
            flag,
            wanted=f"port {port} to be free",
            got=os.strerror(number),
            fix="stop what listens there, or name another port (0 picks a free one)",
        )
    return ConfigError(
        "--host",
        wanted="an address of this machine, or a name of one",
        got=f"{host!r}: {getattr(error, 'strerror', None) or error}",
        fix="name one that `ip addr` shows, or leave it out to listen on every address",
    )


class RpcServer(Protocol):
    """Bound server of gRPC."""

    async def start(self) -> None:
        """Accept connections."""

    async def stop(self, grace: float | None, /) -> None:
        """Accept no more, and end what is open after so many seconds."""


class ExtProcServicer(ABC, Generic[StreamT]):
    """Base of the servicers of ext_proc streams: follows request bodies that are arriving."""

    def __init__(self, shared: StreamContext) -> None:
        self.shared = shared
        self._uploads: UploadMonitor[StreamT] = UploadMonitor()
        self._num_unlogged, self._logged_at = 0, -math.inf

    async def follow_uploads(self) -> None:
        """Reject requests whose body stopped arriving, until cancelled."""
        while True:
            look_s = self.shared.settings.body_idle_s * _UPLOAD_LOOK
            await sleep_to_tick(min(look_s, _MAX_UPLOAD_LOOK_S))
            await self.refuse_stalled()

    @abstractmethod
    async def refuse_stalled(self) -> None:
        """Check all arriving bodies, and answer stalled requests with 408."""

    @abstractmethod
    async def drain_streams(self, within_s: float) -> None:
        """End every open stream with OK, those that are not decided yet once they are."""

    def log_violation(self, error: ProtocolError) -> None:
        """Log a stream that broke the protocol; once a minute, because each request may do so."""
        now = self.shared.clock()
        if now - self._logged_at < _VIOLATION_LOG_S:
            self._num_unlogged += 1
            return
        others = f" ({self._num_unlogged} more since the last line)" if self._num_unlogged else ""
        self._num_unlogged, self._logged_at = 0, now
        _log.warning("stream ended: %s%s", error, others)

    def find_stalled(self, arriving: Mapping[StreamT, int | None]) -> list[StreamT]:
        """Find the streams whose body stopped arriving, by bytes received; None where none arrives."""
        return self._uploads.find_stalled(
            {stream: size for stream, size in arriving.items() if size is not None},
            self.shared.clock(),
            idle_s=self.shared.settings.body_idle_s,
            max_streams=self.shared.settings.max_streams,
            max_bytes=self.shared.body_budget.limit_bytes,
        )


class BoundServers(msgspec.Struct, frozen=True):
    """Servers that are bound but not started, and their ports."""

    servers: Sequence[RpcServer]
    grpc_port: int
    health_port: int


class Transport(Protocol):
    """Implementation of gRPC on the ports of ext_proc and of health."""

    @property
    def servicer(self) -> ExtProcServicer[Any]:
        """The servicer of ext_proc."""

    def bind(self, settings: Settings, readiness: Readiness) -> BoundServers:
        """Bind the servers of ext_proc and of health.

        Raises:
            ConfigError: A port is taken, or a certificate cannot be read.
        """

    @property
    def num_connections(self) -> int | None:
        """Open connections of gRPC clients; None where the implementation does not show them."""

    def gauges(self) -> Mapping[str, Callable[[], float]]:
        """Gauges of the process by name."""


async def wait_unreachable(
    is_reachable: Callable[[], bool], skip: asyncio.Event, *, timeout_s: float
) -> None:
    """Wait until no data plane can open streams here, `skip` is set or the time is over."""
    clock = asyncio.get_running_loop().time
    ends = clock() + timeout_s
    while is_reachable() and (left_s := ends - clock()) > 0.0:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(left_s, _LOOK_S)):
                await skip.wait()
                return


def build_transport(
    name: Literal["native", "grpcio"], shared: StreamContext, counts: Counter[str]
) -> Transport:
    """Build a transport; only its own libraries are loaded.

    Args:
        counts: Calls and connections that the native transport ended, by limit or violation.
    """
    if name == "native":
        from extproc.server import native_server  # noqa: PLC0415 - see above

        return native_server.NativeTransport(shared, counts)
    from extproc.server import ext_proc_servicer  # noqa: PLC0415 - see above

    return ext_proc_servicer.GrpcioTransport(shared)
