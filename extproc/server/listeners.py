"""Listening ports of the endpoint picker, and the error of a taken port."""

from __future__ import annotations

import contextlib
import errno
import logging
import socket
from pathlib import Path

import grpc
import msgspec

from extproc.config.settings import ServerSection
from extproc.errors import ConfigError

_log = logging.getLogger("extproc.server")


class ListenAddresses(msgspec.Struct, frozen=True):
    """TCP ports of a running endpoint picker; 0 where a server is disabled."""

    grpc: int
    health: int
    pages: int
    xds: int = 0
    keda: int = 0

    @property
    def ready_message(self) -> str:
        """All ports in a line."""
        more = f", xDS on {self.xds}" if self.xds else ""
        more += f", KEDA's scaler on {self.keda}" if self.keda else ""
        return (
            f"ext_proc on port {self.grpc}, gRPC health on {self.health}, "
            f"metrics on {self.pages}{more}"
        )


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


_KEEPALIVE = Keepalive()


def listener(max_message_bytes: int, *, keepalive: Keepalive = _KEEPALIVE) -> grpc.aio.Server:
    """A gRPC server that does not listen anywhere yet."""
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
            ("grpc.max_send_message_length", max_message_bytes),
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


def credentials(server: ServerSection) -> grpc.ServerCredentials | None:
    """Credentials by `secure_serving` and `cert_path`; None serves plaintext.

    Raises:
        ConfigError: A certificate cannot be read.
    """
    if not server.secure_serving:
        return None
    from extproc.server import tls  # noqa: PLC0415 - what it signs with is heavy, and not for everybody

    if not server.cert_path:
        return tls.self_signed()
    return tls.from_files(
        Path(server.cert_path),
        reload=server.enable_cert_reload,
        on_reload=lambda what: _log.info("certificate: %s", what),
    )


def bind(
    listening: grpc.aio.Server,
    address: str,
    *,
    flag: str,
    identity: grpc.ServerCredentials | None = None,
) -> int:
    """Listen on a further address.

    Args:
        listening: The gRPC server.
        address: `host:port`; port 0 takes a free one.
        flag: Name of the option that set the port, for errors.
        identity: For TLS; None serves plaintext.

    Returns:
        The port.

    Raises:
        ConfigError: The port is taken.
    """
    host, _, number = address.rpartition(":")
    if int(number) and is_taken(host.strip("[]"), int(number)):
        # Looked at first, because gRPC prints lines of its own about what it cannot bind.
        raise port_in_use_error(flag, int(number), why="something listens there")
    try:
        if identity is None:
            return listening.add_insecure_port(address)
        return listening.add_secure_port(address, identity)
    except RuntimeError as error:
        port = int(address.rpartition(":")[2])
        raise port_in_use_error(flag, port, why="cannot bind " + address) from error


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
