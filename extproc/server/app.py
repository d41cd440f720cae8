"""Composition root: builds the servers and loops, and drains and stops them in order."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec

from extproc.autoscaling.runtime import autoscaler
from extproc.config import factory, kubernetes_plan, pools, tracing
from extproc.config.settings import Settings
from extproc.decision import Decision, DirectResponse, Outcome, Rejection
from extproc.discovery.kubernetes import controller, watch_plan
from extproc.discovery.static_discovery import DiscoveryEvent
from extproc.prefix_cache.index import IndexBudget
from extproc.protocol.body_buffer import BufferBudget
from extproc.request import HttpRequest
from extproc.scheduling import plugin_guard
from extproc.scrape import client, schedule
from extproc.server import (
    admin,
    admin_access,
    console,
    grpc_workarounds,
    health,
    leader_elector,
    reload,
    stream_context,
    transport,
)
from extproc.server.decision_recording import DecisionRecorder
from extproc.server.health import StallMeter
from extproc.server.http_peer_channel import HttpPeerChannel
from extproc.server.large_bodies import LargeBodies, free_in_turns
from extproc.server.peer_addresses import PeerDirectory
from extproc.server.pool_registry import PoolRegistry
from extproc.server.pool_runtime import RuntimeContext
from extproc.server.redis_peer_channel import RedisPeerChannel
from extproc.supervision import Loop, LoopName, sleep_to_tick
from extproc.telemetry import explanation, pool_log
from extproc.telemetry.control_plane_metrics import WatchMetrics
from extproc.telemetry.counters import ProcessCounters
from extproc.telemetry.decision_log import DecisionLog
from extproc.telemetry.exposition import Exposition
from extproc.telemetry.pool_log import RequestFailureLog
from extproc.telemetry.stream_recorder import StreamRecorder
from extproc.telemetry.traffic_history import INTERVAL_S, TrafficHistory

if TYPE_CHECKING:
    from extproc.server.control_plane_servers import ControlPlaneServers

_log = logging.getLogger("extproc.server")

#: Seconds between two looks for refused and failed requests to log.
_FAILURE_LOG_S = 1.0

#: Seconds that streams have to end in a drain, and that spans have to leave behind it.
_STREAM_END_S, _SPAN_END_S = 2.0, 2.0


class EndpointPickerProcess:
    """Servers, loops and shared parts of the process."""

    def __init__(self, settings: Settings, clock: Callable[[], float] = time.monotonic) -> None:
        self._settings = settings
        self._clock = clock
        self.counters = ProcessCounters(has_llmd_names=pools.serves_llmd_metrics(settings))
        self.decisions = DecisionLog(settings.decisions.decisions)
        self._traces = tracing.build_traces(
            settings.tracing, os.environ, clock=clock, counts=self.counters.trace_spans
        )
        self._recorder = StreamRecorder(
            self.counters,
            self.decisions,
            clock,
            pool_log.recorder_type(settings.log.requests),
            self._traces.tracer,
        )
        self.decision_recorder = DecisionRecorder(
            settings,
            self.counters.recorded_rows,
            clock=clock,
            settle=self.counters.settle,
            on_change=self._recorder.set_recordings,
        )
        self._failure_log = RequestFailureLog(lambda: self.counters.open_pools)
        self.reloads = reload.ReloadHistory(settings, clock, self.counters)
        self.history = TrafficHistory()
        self.budget = BufferBudget(settings.limits.max_assembly_bytes, free=free_in_turns)
        self._http = client.ScrapeClient(
            timeout_s=settings.scrape.timeout_s,
            cap_bytes=settings.scrape.max_page_bytes,
            tls=factory.build_scrape_tls(settings.scrape),
        )
        plan = kubernetes_plan.plan_kubernetes(
            settings, where="the configuration", environment=os.environ
        )
        self.pool_registry = PoolRegistry(
            settings,
            self._build_runtime_context(),
            configured=plan.pools if plan else {},
            is_discovery_synced=lambda: (
                self._kubernetes_discovery is None or self._kubernetes_discovery.synced
            ),
            on_change=lambda: self.autoscaler.sync_pools(),  # noqa: PLW0108 - it is built later
        )
        self._kubernetes_discovery = self._build_kubernetes_discovery(plan)
        self.readiness = self._build_readiness()
        memory_trimmer = grpc_workarounds.IdleMemoryTrimmer(grpc_workarounds.trimmer())
        self._stall_meter = StallMeter(self.counters, count_streams=memory_trimmer.count)
        self._elector = leader_elector.build_elector(
            settings, can_lead=lambda: self.readiness.can_serve, supervisor=self.counters.supervisor
        )
        self.admin_token = admin_access.AdminToken(settings.server.admin_token_file)
        self.control_planes = self._build_control_planes()
        self._peers = PeerDirectory(settings, self._current_token)
        self.autoscaler = self._build_autoscaler()
        self._large_bodies = LargeBodies(
            self.counters, max_prompt_bytes=lambda: self.pool_registry.max_prompt_bytes
        )
        self._transport = self._build_transport()
        self.servicer = self._transport.servicer
        self._peer_channel = self._build_peer_channel()
        self._servers: list[transport.RpcServer] = []
        self.admin_server = admin.AdminServer()

    def _build_runtime_context(self) -> RuntimeContext:
        return RuntimeContext(
            counters=self.counters,
            guards=plugin_guard.GuardFactory(time.perf_counter, self.counters.plugins),
            http=self._http,
            endpoint_counts=schedule.EndpointCounts(),
            clock=self._clock,
            prefix_budget=IndexBudget(self._settings.prefix.max_bytes),
            is_standby=lambda: self._settings.cluster.leader_election and not self._is_leader,
        )

    def _build_kubernetes_discovery(
        self, plan: kubernetes_plan.KubernetesPlan | None
    ) -> controller.KubernetesDiscovery | None:
        """Build Kubernetes discovery; None where it is not used."""
        if plan is None:
            return None
        return controller.KubernetesDiscovery(
            plan.settings,
            clock=self._clock,
            rng=random.Random(self._settings.seed),
            on_pools=self.pool_registry.on_pools_changed,
            on_event=_log_discovery_event,
            supervisor=self.counters.supervisor,
        )

    def _build_readiness(self) -> health.Readiness:
        scrape = self._settings.scrape
        return health.Readiness(
            lambda: self.pool_registry.synced,
            is_scraped=health.InitialScrapeGate(
                self.pool_registry.pools,
                self._clock,
                scrape.initial_scrape_timeout_s if scrape.enabled else 0.0,
            ),
            is_protocol_supported=lambda: self.pool_registry.protocols_supported,
            is_leader=(lambda: self._is_leader) if self._settings.cluster.leader_election else None,
            notes=self._readiness_notes,
        )

    def _build_autoscaler(self) -> autoscaler.Autoscaler:
        keda = None if self.control_planes is None else self.control_planes.keda
        listeners = {} if keda is None else {"on_step": keda.notify, "on_removed": keda.gone}
        return autoscaler.Autoscaler(
            self._settings,
            self.pool_registry,
            self.counters,
            is_leader=lambda: self._is_leader,
            clock=self._clock,
            addresses=self._peers.counters,
            **listeners,
        )

    def _build_peer_channel(self) -> RedisPeerChannel | HttpPeerChannel | None:
        """Build the channel of peer synchronization; None where it is off."""
        settings = self._settings.peer_sync
        if settings.url:
            return RedisPeerChannel(settings, self.pool_registry, self._clock)
        if not settings.peers:
            return None
        return HttpPeerChannel(
            settings,
            self.pool_registry,
            self._clock,
            addresses=self._peers.requests,
            failures=self.counters.peer_sync_failures,
        )

    def _build_transport(self) -> transport.Transport:
        shared = stream_context.StreamContext(
            pool_selector=self.pool_registry.pool_selector,
            exchange_settings=factory.build_exchange_settings(self._settings),
            body_budget=self.budget,
            observer=self._recorder,
            clock=self._clock,
            rng=random.Random(self._settings.seed),
            settings=_stream_settings(self._settings),
            flow_controllers=self.pool_registry.flow_controllers,
            large_bodies=self._large_bodies,
            trace_sampler=self._traces.sampler,
            on_opened=self._stall_meter.wake,
        )
        return transport.build_transport(
            self._settings.server.transport, shared, self.counters.http2_limits
        )

    def _build_control_planes(self) -> ControlPlaneServers | None:
        """Build the servers of xDS and KEDA; None where both are disabled."""
        settings = self._settings
        if not (settings.xds.enabled or settings.autoscaling.keda.enabled):
            return None
        from extproc.server.control_plane_servers import ControlPlaneServers  # noqa: PLC0415 - loads grpcio

        return ControlPlaneServers(
            settings, self.pool_registry, self.counters, loops=lambda: self.autoscaler.loops
        )

    async def start(self) -> transport.ListenAddresses:
        """Listen on all ports; not ready before `sync`.

        Raises:
            ConfigError: A port is taken, or a certificate cannot be read.
        """
        bound = self._transport.bind(self._settings, self.readiness)
        self._servers = [*bound.servers]
        xds_port = keda_port = 0
        planes = self.control_planes
        if planes is not None:
            try:
                planes.bind(self.readiness)
            finally:
                self._servers += planes.servers
            xds_port, keda_port = planes.xds_port, planes.keda_port
        pages_port = await self.start_admin()
        for rpc_server in self._servers:
            await rpc_server.start()
        return transport.ListenAddresses(
            bound.grpc_port,
            bound.health_port,
            pages_port,
            xds_port,
            keda_port,
            transport=self._settings.server.transport,
        )

    async def sync(self) -> None:
        """Load endpoints, and start discovery, election and autoscaling.

        Raises:
            ConfigError: The endpoints file cannot be read, or the API server is unknown.
        """
        await self.pool_registry.sync()
        self._stall_meter.start()
        await self.autoscaler.start()
        if self._elector is not None:
            await self._elector.start()
        if self._kubernetes_discovery is not None:
            await self._kubernetes_discovery.start()

    @property
    def _watch_statuses(self) -> Sequence[watch_plan.WatchStatus]:
        """Status of all Kubernetes watches; empty where there are none."""
        return () if self._kubernetes_discovery is None else self._kubernetes_discovery.statuses

    def _readiness_notes(self) -> Iterator[str]:
        """Lines about failing loops, watches and pools, for the readiness page."""
        if degraded := self.counters.supervisor.degraded:
            yield f"degraded: {', '.join(degraded)}"
        yield from watch_plan.describe_statuses(self._watch_statuses, self._clock())
        yield from health.lines(self.pool_registry.pools())

    def _watch_metrics(self) -> Iterator[WatchMetrics]:
        now = self._clock()
        for status in self._watch_statuses:
            collection, since = status.collection, status.unsynced_since
            yield WatchMetrics(
                collection.resource.title,
                collection.namespace,
                collection.labels or collection.fields,
                "synced" if status.state == watch_plan.CONNECTED else status.state,
                ["synced" if name == watch_plan.CONNECTED else name for name in watch_plan.STATES],
                now - since if status.is_unsynced and since is not None else 0.0,
            )

    @property
    def _is_leader(self) -> bool:
        """True while this replica leads; False without an election."""
        return self._elector is not None and self._elector.is_leader

    def loops(self) -> dict[LoopName, Loop]:
        """Background loops by name."""
        loops: dict[LoopName, Loop] = {
            "pools": self.pool_registry.run,
            "autoscaling": self.autoscaler.run,
            "uploads": self.servicer.follow_uploads,
            "log": self._log_failures,
            "history": self._sample_traffic,
        }
        if self._settings.decisions.record is not None:
            loops["recording"] = self.decision_recorder.run
        if self._kubernetes_discovery is not None:
            loops["kubernetes"] = self._kubernetes_discovery.run
        if self.control_planes is not None:
            loops.update(self.control_planes.loops())
        if self._elector is not None:
            loops["election"] = self._elector.run
        if self._peer_channel is not None:
            loops["peer_sync"] = self._peer_channel.run
        return loops

    async def _log_failures(self) -> None:
        while True:
            await sleep_to_tick(_FAILURE_LOG_S)
            self._failure_log.step(self._clock())

    async def _sample_traffic(self) -> None:
        while True:
            self.history.sample(self.counters, self.pool_registry.views(), self._clock())
            await asyncio.sleep(INTERVAL_S)

    def apply_settings(self, settings: Settings) -> None:
        """Apply other settings.

        Args:
            settings: New settings; fields that need a restart have their old value, see
                `reloading.apply_live_fields`.

        Raises:
            ConfigError: A profile cannot be built, or there is no admin token in its file; nothing was
            changed.
        """
        apply_pools = self.pool_registry.prepare_reload(settings)
        token = self.admin_token
        if settings.server.admin_token_file != token.path:
            token = admin_access.AdminToken(settings.server.admin_token_file)
        exchange, streams = factory.build_exchange_settings(settings), _stream_settings(settings)
        apply_pools()
        self.admin_token = token
        self.servicer.shared.reconfigure(exchange, streams)
        self.decisions.resize(settings.decisions.decisions)
        self._recorder.reconfigure(pool_log.recorder_type(settings.log.requests))
        self.decision_recorder.reconfigure(settings)
        logging.getLogger("extproc").setLevel(settings.log.level.upper())

    @property
    def _is_reachable(self) -> bool:
        """True if a data plane may still open streams here: it is connected, or a Service leads here."""
        if kubernetes_plan.is_pod(os.environ):
            return True
        num_connections = self._transport.num_connections
        if num_connections is None:
            counters = self.counters
            return bool(counters.streams_open or counters.streams or self.readiness.is_probed)
        return num_connections > 0

    async def drain(self, skip_drain: asyncio.Event) -> None:
        """Turn unready, serve while it can be reached or for the drain time, then end every stream."""
        supervisor = self.counters.supervisor
        self.readiness.start_draining()
        # What raises on the way must not cut the streams short that are still served.
        await supervisor.attempt("drain", self.autoscaler.hand_over())
        if self._elector is not None:
            # Another replica is to be ready while this one serves what is left.
            supervisor.call("drain", self._elector.resign)
        if self.control_planes is not None:
            await self.control_planes.release()
        _log.info("draining, %d streams are open", self.counters.streams_open)
        drain_s = self._settings.server.drain_timeout_s
        await transport.wait_unreachable(lambda: self._is_reachable, skip_drain, timeout_s=drain_s)
        _log.info("drain is over, %d streams are open", self.counters.streams_open)
        # Envoy must know first (GOAWAY), or it would go on opening streams here.
        stopping = [asyncio.ensure_future(server.stop(_STREAM_END_S)) for server in self._servers]
        await asyncio.sleep(0)
        for name, flow_controller in self.pool_registry.flow_controllers.items():
            supervisor.call("drain", flow_controller.close, instance=name)
        await supervisor.attempt("drain", self.servicer.drain_streams(_STREAM_END_S))
        for ending in stopping:
            await supervisor.attempt("drain", ending)
        if self._elector is not None:
            await supervisor.attempt("drain", self._elector.wait_ended(_STREAM_END_S))

    async def stop(self) -> None:
        """Close everything; last the pages, which wait for clients that read slowly."""
        self._stall_meter.stop()
        self.decision_recorder.close()
        attempt = self.counters.supervisor.attempt
        for rpc_server in self._servers:
            await attempt("drain", rpc_server.stop(_STREAM_END_S))
        if self._peer_channel is not None:
            await attempt("drain", self._peer_channel.close())
        await attempt("drain", self.autoscaler.close())
        if self._traces.tracer is not None:
            await attempt("drain", asyncio.to_thread(self._traces.tracer.close, _SPAN_END_S))
        self.counters.settle()
        self._failure_log.step(self._clock(), is_last=True)
        await attempt("drain", self.admin_server.close())
        self._http.close()
        await attempt("drain", self._large_bodies.close())

    async def start_admin(self) -> int:
        """Listen on the metrics port only; returns it.

        Raises:
            ConfigError: The port is taken.
        """
        settings = self._settings
        pages = admin.AdminPages(
            exposition=Exposition(
                self.counters,
                self.pool_registry.views,
                clock=self._clock,
                gauges=self._gauges(),
                about=self.pool_registry.labels,
                scaling=self.autoscaler.metrics,
                watches=self._watch_metrics,
            ),
            readiness=self.readiness,
            pools=self.pool_registry.pools,
            dry_run=self._dry_run,
            decisions=self.decisions,
            decision_recorder=self.decision_recorder,
            clock=self._clock,
            access=admin_access.build_access(settings, self._current_token, self._peers.is_peer),
            max_body_bytes=lambda: self.servicer.shared.exchange_settings.max_body_bytes,
            shadows=self.pool_registry.shadows,
        )
        application = pages.application()
        application.add_routes(self.autoscaler.peers.routes())
        if self._peer_channel is not None:
            application.add_routes(self._peer_channel.routes())
        console_pages = console.ConsolePages(
            counters=self.counters,
            views=self.pool_registry.views,
            history=self.history,
            decisions=self.decisions,
            reloads=self.reloads,
            readiness=self.readiness,
            recording_error=lambda: self.decision_recorder.error,
            scaling=self.autoscaler.metrics,
            about=self.pool_registry.labels,
            clock=self._clock,
        )
        application.add_routes(console_pages.routes())
        return await self.admin_server.start(
            application, host=settings.server.host, port=settings.server.metrics_port
        )

    def _current_token(self) -> str:
        """Bearer token for debug pages; empty for none."""
        return self.admin_token.current()

    async def _dry_run(self, raw: HttpRequest) -> Outcome | DirectResponse:
        """Route a request without a reservation; raises as `LargeBodies.read`."""
        selector = self.pool_registry.pool_selector
        read = await self._large_bodies.read_if_large(raw) if selector.parses_bodies else raw
        if isinstance(read, Rejection):
            return read
        routed = selector.route(read, self._clock())
        if isinstance(routed.outcome, Decision):
            return msgspec.structs.replace(routed.outcome, pool=routed.pool)
        return routed.outcome

    def _gauges(self) -> dict[str, Callable[[], float]]:
        leader = {"extproc_leader": lambda: float(self._is_leader)}
        return {
            **(leader if self._elector is not None else {}),
            **(self._peer_channel.gauges() if self._peer_channel is not None else {}),
            **self._transport.gauges(),
            "extproc_body_buffer_bytes": lambda: self.budget.held_bytes,
            **self.pool_registry.gauges(),
        }


def _log_discovery_event(event: DiscoveryEvent) -> None:
    level = logging.INFO if event.is_expected else logging.WARNING
    _log.log(level, "kubernetes: %s: %s, %d endpoints", event.kind, event.detail, event.endpoints)


def _stream_settings(settings: Settings) -> stream_context.StreamSettings:
    return stream_context.StreamSettings(
        max_streams=settings.limits.max_streams,
        body_idle_s=settings.limits.body_idle_s,
        stream_sample_ratio=settings.responses.stream_sample_ratio,
        request_cost=settings.responses.request_cost,
        flow_headers=settings.flow_control.headers,
        format_decision=explanation.format_short if settings.decisions.header else None,
        describe_decision=explanation.format_short if settings.decisions.metadata else None,
    )
