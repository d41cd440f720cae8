"""Checks the machine before `serve` starts: extras, files and ports.

`extproc check` looks at the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from extproc.config.settings import Settings
from extproc.errors import ConfigError
from extproc.server import admin_access, listeners, redis_peer_channel, xds_servicer


def find_problems(settings: Settings) -> Sequence[ConfigError]:
    """Collect the errors for which an endpoint picker with these settings would not start."""
    steps: list[Callable[[], object]] = [
        lambda: admin_access.read_token(settings.server.admin_token_file),
        lambda: redis_peer_channel.require(settings.peer_sync),
    ]
    if settings.server.cert_path and settings.server.secure_serving:
        steps.append(lambda: _read_certificate(settings.server.cert_path))
    if settings.xds.enabled:
        steps.append(xds_servicer.require)
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


def _read_certificate(folder: str) -> None:
    from extproc.server import tls  # noqa: PLC0415 - what it signs with is heavy, and not for everybody

    tls.KeyPair(Path(folder)).read()
