"""Checks the machine before `serve` starts: extras, files and ports.

`extproc check` looks at the same.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from extproc.config.settings import Settings
from extproc.errors import ConfigError
from extproc.recording import parquet
from extproc.scrape import kv_event_subscriber
from extproc.server import admin_access, listeners, redis_peer_channel


def find_problems(settings: Settings) -> Sequence[ConfigError]:
    """Collect the errors for which an endpoint picker with these settings would not start."""
    steps: list[Callable[[], object]] = [
        lambda: admin_access.read_token(settings.server.admin_token_file),
        lambda: redis_peer_channel.require(settings.peer_sync),
        lambda: kv_event_subscriber.require(settings.kv_events),
    ]
    record = settings.decisions.record
    if record is not None:
        steps.append(lambda: parquet.require(record.file))
    if settings.server.cert_path and settings.server.secure_serving:
        steps.append(lambda: _read_certificate(settings.server.cert_path))
    if settings.server.transport == "native" and settings.server.secure_serving:
        steps.append(_check_cipher_suites)
    problems = []
    for step in steps:
        try:
            step()
        except ConfigError as error:
            problems.append(error)
    return problems


def find_taken_ports(settings: Settings) -> Iterator[str]:
    """A line per port of these settings that another process listens on."""
    server = settings.server
    numbers = {
        "--grpc-port": server.grpc_port,
        "--grpc-health-port": server.grpc_health_port,
        "--metrics-port": server.metrics_port,
    }
    if settings.xds.enabled:
        numbers["--xds-port"] = settings.xds.port
    if settings.autoscaling.keda.enabled:
        numbers["autoscaling.keda.port"] = settings.autoscaling.keda.port
    for flag, port in numbers.items():
        if port and listeners.is_taken(server.host, port):
            yield f"{flag}: something on this machine listens on port {port} already"


def _check_cipher_suites() -> None:
    """Check a choice of cipher suites that the native transport is to serve TLS with."""
    from extproc.server import tls  # noqa: PLC0415 - what it signs with is heavy, and not for everybody

    cipher_suites = tls.find_cipher_suites(os.environ)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).set_ciphers(cipher_suites)
    except ssl.SSLError as error:
        raise ConfigError(
            tls.CIPHER_SUITES,
            wanted="cipher suites of TLS 1.2, as OpenSSL names them",
            got=cipher_suites,
            fix="correct it, or unset it; grpcio (server.transport) may know other names",
        ) from error


def _read_certificate(folder: str) -> None:
    from extproc.server import tls  # noqa: PLC0415 - what it signs with is heavy, and not for everybody

    tls.KeyPair(Path(folder)).read()
