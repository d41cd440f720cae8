"""Transports of ext_proc: what they have in common, and their choice by `server.transport`."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, Protocol

import msgspec

from extproc.config.settings import Settings
from extproc.server.health import Readiness
from extproc.server.stream_context import StreamContext

#: Seconds between two looks of a drain whether a data plane is still connected.
_LOOK_S = 0.1


class RpcServer(Protocol):
    """Bound server of gRPC."""

    async def start(self) -> None:
        """Accept connections."""

    async def stop(self, grace: float | None, /) -> None:
        """Accept no more, and end what is open after so many seconds."""


class ExtProcServicer(Protocol):
    """Servicer of ext_proc streams."""

    shared: StreamContext

    async def follow_uploads(self) -> None:
        """Reject requests whose body stopped arriving, until cancelled."""

    async def drain_streams(self, within_s: float) -> None:
        """End every open stream with OK, those that are not decided yet once they are."""


class BoundServers(msgspec.Struct, frozen=True):
    """Servers that are bound but not started, and their ports."""

    servers: Sequence[RpcServer]
    grpc_port: int
    health_port: int


class Transport(Protocol):
    """Implementation of gRPC on the ports of ext_proc and of health."""

    @property
    def servicer(self) -> ExtProcServicer:
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
            await asyncio.wait_for(skip.wait(), min(left_s, _LOOK_S))
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
