"""Servers of xDS and of KEDA's external scaler: on ports of their own, always on grpcio.

xDS sends clusters and endpoints of all pools to Envoy.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping

import grpc

from extproc.autoscaling.runtime import keda_scaler
from extproc.autoscaling.runtime.control_loop import ControlLoop
from extproc.config.settings import Settings
from extproc.pool.snapshot import Pool
from extproc.server import ext_proc_servicer, health
from extproc.server.pool_registry import PoolRegistry
from extproc.supervision import LoopName, Supervisor
from extproc.telemetry.control_plane_metrics import XdsCounters
from extproc.telemetry.counters import ProcessCounters
from extproc.xds import resources, sessions
from extproc.xds.resources import ClusterOptions, XdsSnapshot
from extproc.xds.sessions import EncodedResponse, RequestResult, SessionCodec
from extproc.xds.snapshot_cache import SnapshotCache

SERVICE = "envoy.service.discovery.v3.AggregatedDiscoveryService"
SOTW = "StreamAggregatedResources"
DELTA = "DeltaAggregatedResources"

#: Types as metrics name them.
KINDS = {resources.CLUSTER: "clusters", resources.ASSIGNMENT: "endpoints"}

#: Seconds between two looks at the pools. A change waits half of it on average, and what changes
#: together goes out together; a look at twenty pools takes microseconds.
_PUBLISH_INTERVAL_S = 0.05

#: Largest request of xDS and of KEDA's scaler (bytes). Envoy sends names of pools and what its node
#: is: a megabyte has 10,000 names, and takes some 50 ms of the event loop.
_MAX_REQUEST_BYTES = 1024 * 1024

#: Requests of one stream that may wait; Envoy has two or three under way.
_MAX_QUEUED_REQUESTS = 4

#: Seconds after the last request until the stream is ended. An Envoy that is gone shows as the end
#: of its requests, and as a cancellation right after; to end the stream in between is an error.
_CANCELLATION_GRACE_S = 0.1

#: Seconds in which an Envoy reads a response; a stream is not cancelled in the middle of a write,
#: for gRPC ends no call of which a write was cancelled.
_RELEASE_S = 2.0

#: Refusals remembered, so that each is logged once however many Envoys and streams repeat it.
_MAX_LOGGED_NACKS = 256

_log = logging.getLogger("extproc.server")

Context = grpc.aio.ServicerContext[bytes, bytes]


class _Stream:
    """Open xDS stream."""

    def __init__(self, codec: SessionCodec, task: asyncio.Task[None]) -> None:
        self.codec = codec
        self.task = task
        self.node = ""
        #: Requests of Envoy; None says that something else is to be looked at.
        self.inbox: asyncio.Queue[bytes | None] = asyncio.Queue(_MAX_QUEUED_REQUESTS)
        self.is_over = False

    async def read(self, context: Context) -> None:
        """Put the requests of Envoy into the inbox."""
        with contextlib.suppress(grpc.aio.BaseError):
            while isinstance(data := await context.read(), bytes):
                await self.inbox.put(data)
        self.is_over = True
        await self.inbox.put(None)

    def wake(self) -> None:
        """Wake the stream for a new snapshot or the end; a full inbox wakes it anyway."""
        if not self.inbox.full():
            self.inbox.put_nowait(None)


class AggregatedDiscoveryServicer:
    """Servicer of the Aggregated Discovery Service (ADS).

    Nothing is sent before `synced`: a process that has just started knows no endpoints yet, and an
    Envoy that connected to another replica before must not lose its endpoints. Nor is anything sent
    while no pool at all can be encoded.

    Args:
        h2c: Returns the names of pools whose engines speak HTTP/2 without TLS.
        supervisor: Counts exceptions; None creates a new supervisor.

    Raises:
        ConfigError: The types of Envoy are not installed.
    """

    def __init__(
        self,
        pools: Callable[[], Mapping[str, Pool]],
        *,
        h2c: Callable[[], Collection[str]],
        synced: Callable[[], bool],
        options: ClusterOptions,
        counters: XdsCounters,
        supervisor: Supervisor | None = None,
    ) -> None:
        self._snapshot_cache = SnapshotCache(options)
        self._pools = pools
        self._h2c = h2c
        self._synced = synced
        self._counters = counters
        self._supervisor = supervisor or Supervisor()
        self._snapshot: XdsSnapshot | None = None
        self._streams: set[_Stream] = set()
        self._has_subscribers = asyncio.Event()
        self._logged_nacks: set[tuple[str, str]] = set()
        self._closing = False
        #: Endpoints with which a pool could not be posted, by its name.
        self._faulty_positions: dict[str, Mapping[str, int]] = {}

    async def run(self) -> None:
        """Publish changes of the pools while streams are open, until cancelled."""
        while True:
            await self._has_subscribers.wait()
            self.step()
            self._supervisor.record_success("xds")
            await asyncio.sleep(_PUBLISH_INTERVAL_S)

    def step(self) -> None:
        """Update the snapshot, and wake every stream if it changed."""
        if not self._synced():
            return
        pools, h2c = self._pools(), self._h2c()
        if self._snapshot is not None and not self._snapshot_cache.is_stale(pools, h2c):
            return
        cache = self._snapshot_cache
        is_changed = cache.update(pools, h2c)
        if self._snapshot is None:
            # Of faulty pools alone it is empty, and Envoys would lose what another replica sent.
            is_changed = bool(cache.snapshot[resources.CLUSTER]) or not cache.faults
        if is_changed:
            self._snapshot = cache.snapshot
            for stream in self._streams:
                stream.wake()
        for name, fault in cache.faults.items():
            # Pools are new objects after every scrape; a list of endpoints is not.
            if self._faulty_positions.get(name) is not pools[name].positions:
                self._supervisor.record_error("xds", fault, instance=name)
        self._faulty_positions = {name: pools[name].positions for name in cache.faults}

    async def stream_sotw(self, _: AsyncIterator[bytes], context: Context) -> None:
        """Serve `StreamAggregatedResources`."""
        await self._serve(sessions.sotw_codec(), context)

    async def stream_delta(self, _: AsyncIterator[bytes], context: Context) -> None:
        """Serve `DeltaAggregatedResources`."""
        await self._serve(sessions.delta_codec(), context)

    async def release(self) -> None:
        """End every stream with OK and take no more: Envoys keep what they hold, and go on."""
        self._closing = True
        tasks = [stream.task for stream in self._streams]
        for stream in self._streams:
            stream.wake()
        if tasks:
            await asyncio.wait(tasks, timeout=_RELEASE_S)

    async def _serve(self, codec: SessionCodec, context: Context) -> None:
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("streams run inside a task of the gRPC server")
        if self._closing:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "draining; ask another picker")
        stream = _Stream(codec, task)
        self._streams.add(stream)
        self._has_subscribers.set()
        self._counters.on_stream_opened()
        readable, failed = True, False
        try:
            async with asyncio.TaskGroup() as tasks:
                reading = tasks.create_task(stream.read(context), name="xds reading")
                readable = await self._exchange_messages(stream, context)
                reading.cancel()
        except Exception as error:  # noqa: BLE001 - gRPC would log what may quote Envoy's message
            self._supervisor.record_error("xds", error, instance=stream.node)
            failed = True
        finally:
            self._streams.discard(stream)
            self._counters.on_stream_ended()
            if not self._streams:
                # Without streams no step updates the snapshot, so it gets stale.
                self._snapshot = None
                self._has_subscribers.clear()
        if failed:
            await context.abort(grpc.StatusCode.INTERNAL, "the stream failed; open another one")
        if not readable:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "a request cannot be read")

    async def _exchange_messages(self, stream: _Stream, context: Context) -> bool:
        """Answer until Envoy is done or we are closing; False for a malformed request."""
        published: XdsSnapshot | None = None
        while not self._closing:
            if self._snapshot is not None and self._snapshot is not published:
                published = self._snapshot
                await self._send(stream.codec.publish(published), context)
            data = await stream.inbox.get()
            if data is None:
                if stream.is_over:
                    await asyncio.sleep(_CANCELLATION_GRACE_S)
                    return True
                continue
            result = stream.codec.handle_request(data)
            if result is None:
                return False
            self._record_result(stream, result)
            await self._send(result.responses, context)
        return True

    async def _send(self, responses: tuple[EncodedResponse, ...], context: Context) -> None:
        # Envoy may have left; then the end of what it says is next.
        with contextlib.suppress(grpc.aio.BaseError):
            for response in responses:
                self._counters.responses[KINDS[response.type_url]] += 1
                await context.write(response.data)

    def _record_result(self, stream: _Stream, result: RequestResult) -> None:
        if result.node and not stream.node:
            stream.node = result.node
            _log.info("xDS: Envoy with node id %s subscribed", result.node)
        nack = result.nack
        if nack is None:
            return
        kind = KINDS[nack.type_url]
        self._counters.nacks[kind] += 1
        key = (kind, nack.error)
        if key not in self._logged_nacks and len(self._logged_nacks) < _MAX_LOGGED_NACKS:
            self._logged_nacks.add(key)
            _log.error("xDS: Envoy %s refused %s: %s", stream.node, kind, nack.error)


def register(server: grpc.aio.Server, discovery: AggregatedDiscoveryServicer) -> None:
    """Register the service on a gRPC server; `extproc.xds` encodes and decodes."""
    handlers: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {
        SOTW: grpc.stream_stream_rpc_method_handler(discovery.stream_sotw),
        DELTA: grpc.stream_stream_rpc_method_handler(discovery.stream_delta),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))


class ControlPlaneServers:
    """Servers of xDS and of KEDA's external scaler, where they are enabled.

    Attributes:
        keda: KEDA's scaler; None where it is disabled.
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
        self._xds: AggregatedDiscoveryServicer | None = None
        if settings.xds.enabled:
            self._xds = AggregatedDiscoveryServicer(
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
                lambda server: register(server, xds),
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
        listening = ext_proc_servicer.build_server(_MAX_REQUEST_BYTES)
        register(listening)
        ext_proc_servicer.register_health(listening, readiness)
        self.servers.append(listening)
        return ext_proc_servicer.bind(
            listening,
            settings.server.grpc_address(port),
            flag=flag,
            credentials=ext_proc_servicer.load_credentials(settings.server) if tls else None,
        )
