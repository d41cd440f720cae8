"""Listening ports of the endpoint picker, and the error of a taken port."""

from __future__ import annotations

import contextlib
import errno
import socket
from typing import Final

import msgspec

from extproc.errors import ConfigError

#: Connections that wait to be accepted (count).
BACKLOG: Final = 1024


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
    try:
        addresses = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except OSError:
        return False
    for family, kind, protocol, _, address in addresses:
        with contextlib.closing(socket.socket(family, kind, protocol)) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6 and not host:
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            try:
                probe.bind(address)
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    return True
    return False


def port_in_use_error(flag: str, port: int, *, why: str) -> ConfigError:
    """Build the error of a port that cannot be bound."""
    return ConfigError(
        flag,
        wanted=f"port {port} to be free",
        got=why,
        fix="stop what listens there, or name another port (0 picks a free one)",
    )
