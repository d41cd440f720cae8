"""ext_proc and health on grpcio, and the parts of its servers that xDS and KEDA share."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import cast

import grpc
from grpc_health.v1 import health_pb2

from extproc.config.settings import ServerSection, Settings
from extproc.server import ext_proc_servicer, health, listeners
from extproc.server.listeners import Keepalive
from extproc.server.stream_context import StreamContext
from extproc.server.transport import BoundServers

_log = logging.getLogger("extproc.server")

_KEEPALIVE = Keepalive()


class GrpcioTransport:
    """Serves ext_proc and gRPC health on grpcio."""

    def __init__(self, shared: StreamContext) -> None:
        self.servicer = ext_proc_servicer.ExternalProcessorServicer(shared)

    def bind(self, settings: Settings, readiness: health.Readiness) -> BoundServers:
        """Bind the servers of ext_proc and of health.

        Raises:
            ConfigError: A port is taken, or a certificate cannot be read.
        """
        server = settings.server
        main = build_server(settings.limits.max_message_bytes)
        ext_proc_servicer.register(main, self.servicer)
        if server.health_checking:
            register_health(main, readiness)
        probes = build_server(settings.limits.max_message_bytes)
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
        ConfigError: The port is taken.
    """
    host, _, number = address.rpartition(":")
    if int(number) and listeners.is_taken(host.strip("[]"), int(number)):
        # Looked at first, because gRPC prints lines of its own about what it cannot bind.
        raise listeners.port_in_use_error(flag, int(number), why="something listens there")
    try:
        if credentials is None:
            return listening.add_insecure_port(address)
        return listening.add_secure_port(address, credentials)
    except RuntimeError as error:
        port = int(address.rpartition(":")[2])
        raise listeners.port_in_use_error(flag, port, why="cannot bind " + address) from error


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
    files = tls.KeyPair(Path(server.cert_path))
    first = files.read()
    if not server.enable_cert_reload:
        return grpc.ssl_server_credentials([first])

    def fetch_changed() -> grpc.ServerCertificateConfiguration | None:
        pair = files.changed(tls.log_reload)
        return None if pair is None else grpc.ssl_server_certificate_configuration([pair])

    # gRPC takes None for "no change"; its stubs do not say so.
    fetch = cast("Callable[[], grpc.ServerCertificateConfiguration]", fetch_changed)
    return grpc.dynamic_ssl_server_credentials(
        grpc.ssl_server_certificate_configuration([first]), fetch
    )


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
