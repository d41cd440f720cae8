"""Servers of xDS and of KEDA's external scaler: on ports of their own, always on grpcio."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

import grpc

from extproc.autoscaling.runtime import keda_scaler
from extproc.autoscaling.runtime.control_loop import ControlLoop
from extproc.config.settings import Settings
from extproc.server import grpcio_server, health, xds_servicer
from extproc.server.pool_registry import PoolRegistry
from extproc.supervision import LoopName
from extproc.telemetry.counters import ProcessCounters
from extproc.xds.resources import ClusterOptions


class ControlPlaneServers:
    """Servers of xDS and of KEDA's external scaler, where they are enabled.

    Args:
        pool_registry: Pools that xDS serves.
        counters: Counts requests and failures.
        loops: Returns the control loops that KEDA scales by, by name of the pool.

    Attributes:
        keda: KEDA's scaler; None where it is disabled.
        servers: The servers that `bind` bound.
        xds_port: Port of xDS; 0 where it is disabled.
        keda_port: Port of KEDA's scaler; 0 where it is disabled.
    """

    def __init__(
        self,
        settings: Settings,
        pool_registry: PoolRegistry,
        counters: ProcessCounters,
        *,
        loops: Callable[[], Mapping[str, ControlLoop]],
    ) -> None:
        self.servers: list[grpc.aio.Server] = []
        self.xds_port = self.keda_port = 0
        self._settings = settings
        self._supervisor = counters.supervisor
        self.keda: keda_scaler.KedaExternalScaler | None = None
        if settings.autoscaling.keda.enabled:
            self.keda = keda_scaler.KedaExternalScaler(loops)
        self._xds: xds_servicer.AggregatedDiscoveryServicer | None = None
        if settings.xds.enabled:
            self._xds = xds_servicer.AggregatedDiscoveryServicer(
                pool_registry.pools,
                h2c=lambda: pool_registry.h2c,
                synced=lambda: pool_registry.synced,
                options=ClusterOptions(settings.xds.health_check, settings.xds.outliers),
                counters=counters.xds,
                supervisor=counters.supervisor,
            )

    def bind(self, readiness: health.Readiness) -> None:
        """Bind the servers, each with gRPC health.

        Raises:
            ConfigError: A port is taken, or a certificate cannot be read.
        """
        xds, keda = self._xds, self.keda
        if xds is not None:
            self.xds_port = self._bind(
                readiness,
                lambda server: xds_servicer.register(server, xds),
                port=self._settings.xds.port,
                flag="--xds-port",
                tls=True,
            )
        if keda is not None:
            self.keda_port = self._bind(
                readiness,
                lambda server: keda_scaler.register(server, keda, self._supervisor),
                port=self._settings.autoscaling.keda.port,
                flag="autoscaling.keda.port",
                tls=self._settings.autoscaling.keda.tls,
            )

    def loops(self) -> Mapping[LoopName, Callable[[], Awaitable[None]]]:
        """Background loops by name."""
        return {} if self._xds is None else {"xds": self._xds.run}

    async def release(self) -> None:
        """End the streams of clients, which go to another replica."""
        if self.keda is not None:
            self._supervisor.call("drain", self.keda.release)
        if self._xds is not None:
            # At once: Envoy goes to another picker for news, and keeps what it holds.
            await self._supervisor.attempt("drain", self._xds.release())

    def _bind(
        self,
        readiness: health.Readiness,
        register: Callable[[grpc.aio.Server], None],
        *,
        port: int,
        flag: str,
        tls: bool,
    ) -> int:
        settings = self._settings
        listening = grpcio_server.build_server(settings.limits.max_message_bytes)
        register(listening)
        grpcio_server.register_health(listening, readiness)
        self.servers.append(listening)
        return grpcio_server.bind(
            listening,
            settings.server.grpc_address(port),
            flag=flag,
            credentials=grpcio_server.load_credentials(settings.server) if tls else None,
        )
