"""Checks the machine before `serve` starts: extras, files and ports.

`extproc check` looks at the same.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from extproc.config.settings import Settings
from extproc.errors import ConfigError
from extproc.server import admin_access, listeners, redis_peer_channel

#: Environment variable of gRPC's C core.
_CIPHER_SUITES = "GRPC_SSL_CIPHER_SUITES"


def find_problems(settings: Settings) -> Sequence[ConfigError]:
    """Collect the errors for which an endpoint picker with these settings would not start."""
    steps: list[Callable[[], object]] = [
        lambda: admin_access.read_token(settings.server.admin_token_file),
        lambda: redis_peer_channel.require(settings.peer_sync),
    ]
    if settings.server.cert_path and settings.server.secure_serving:
        steps.append(lambda: _read_certificate(settings.server.cert_path))
    if settings.server.transport == "native" and settings.server.secure_serving:
        steps.append(lambda: _refuse_cipher_suites(os.environ.get(_CIPHER_SUITES, "")))
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


def _refuse_cipher_suites(cipher_suites: str) -> None:
    """Refuse a choice of cipher suites that only grpcio reads."""
    if cipher_suites:
        raise ConfigError(
            "server.transport",
            wanted=f"no {_CIPHER_SUITES} beside the native transport, which does not read it",
            got=cipher_suites,
            fix="unset it, or set server.transport to grpcio",
        )


def _read_certificate(folder: str) -> None:
    from extproc.server import tls  # noqa: PLC0415 - what it signs with is heavy, and not for everybody

    tls.KeyPair(Path(folder)).read()
