"""What `serve` needs of its machine before it starts: extras, files and ports.

`extproc check` looks at the same.
"""

from __future__ import annotations

import contextlib
import errno
import socket
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from extproc.config.settings import Settings
from extproc.errors import ConfigError
from extproc.server import admin_access, sharing, xds


def find_problems(settings: Settings) -> Sequence[ConfigError]:
    """Everything on this machine for which a picker with these settings would not start."""
    steps: list[Callable[[], object]] = [
        lambda: admin_access.read_token(settings.server.admin_token_file),
        lambda: sharing.require(settings.sharing),
    ]
    if settings.server.cert_path and settings.server.secure_serving:
        steps.append(lambda: _read_certificate(settings.server.cert_path))
    if settings.xds.enabled:
        steps.append(xds.require)
    problems = []
    for step in steps:
        try:
            step()
        except ConfigError as error:
            problems.append(error)
    return problems


def find_taken_ports(settings: Settings) -> Iterator[str]:
    """A line for each port of these settings that another process listens on."""
    server = settings.server
    ports = {
        "--grpc-port": server.grpc_port,
        "--grpc-health-port": server.grpc_health_port,
        "--metrics-port": server.metrics_port,
    }
    if settings.xds.enabled:
        ports["--xds-port"] = settings.xds.port
    if settings.autoscaling.keda.enabled:
        ports["autoscaling.keda.port"] = settings.autoscaling.keda.port
    for flag, port in ports.items():
        if port and _is_taken(server.host, port):
            yield f"{flag}: something on this machine listens on port {port} already"


def _read_certificate(folder: str) -> None:
    from extproc.server import tls  # noqa: PLC0415 - what it signs with is heavy, and not for everybody

    tls.KeyPair(Path(folder)).read()


def _is_taken(host: str, port: int) -> bool:
    """Whether a server socket cannot be bound; a name that does not resolve is not taken."""
    try:
        found = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except OSError:
        return False
    for family, kind, protocol, _, address in found:
        with contextlib.closing(socket.socket(family, kind, protocol)) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            try:
                probe.bind(address)
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    return True
    return False
