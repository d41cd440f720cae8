"""Runtime of a pool: its parts, discovery, scraper and KV event loops."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping

import msgspec

from extproc.config import factory, pool_annotations, pools
from extproc.decision import NO_ENDPOINTS
from extproc.discovery import static_discovery
from extproc.discovery.endpoint_list import DiscoveredPool
from extproc.endpoint import Endpoint
from extproc.flow_control.queue import FlowControlSettings
from extproc.flow_control.rate_limit import TenantRateLimiter
from extproc.pool.snapshot import Pool
from extproc.prefix_cache.cache_model import index_key
from extproc.prefix_cache.exact_prefixes import ExactPrefixes
from extproc.prefix_cache.index import IndexBudget
from extproc.routing.pool_selector import PoolRoute
from extproc.scheduling import plugin_guard
from extproc.scrape import client, schedule, scraper
from extproc.scrape.kv_event_subscriber import KvEventSubscriber, SubscriberCallbacks
from extproc.scrape.kv_event_subscription import SubscriptionChange
from extproc.scrape.prompt_renderer import PromptRenderer
from extproc.server.flow_control_shell import AsyncFlowController
from extproc.supervision import ExceptionLog, Supervisor, run_forever
from extproc.telemetry.counters import ProcessCounters
from extproc.telemetry.kv_event_metrics import KvEventStats
from extproc.telemetry.pool_log import PoolLog
from extproc.telemetry.pool_state import MatchState, PoolView, PrefixCacheStats

_log = logging.getLogger("extproc.server")

#: Seconds after which the shadow looks at routed requests, and those of its turn.
_SHADOW_DELAY_S = 0.005
_SHADOW_TURN_S = 0.002

#: Seconds in which a change of one subscription is logged at most once for each direction.
_KV_EVENT_REPEAT_S = 60.0

#: Answer to requests that wait for a pool when it is removed.
_REMOVED = msgspec.structs.replace(NO_ENDPOINTS, message="the pool is no longer served")

#: Bounds of a pool without flow control.
_NO_QUEUE = FlowControlSettings(max_requests=0, max_bytes=0)


class RuntimeContext(msgspec.Struct, frozen=True):
    """Dependencies shared by all pools.

    Attributes:
        prefix_budget: Bound of the prefix indexes of all pools; None bounds each alone.
        rate_limiter: Limits of tenants over all pools, which flow control configures.
        is_standby: Returns True while another replica leads; False without an election.
    """

    counters: ProcessCounters
    guards: plugin_guard.GuardFactory
    http: client.ScrapeClient
    endpoint_counts: schedule.EndpointCounts
    clock: Callable[[], float]
    prefix_budget: IndexBudget | None = None
    rate_limiter: TenantRateLimiter = msgspec.field(default_factory=TenantRateLimiter)
    is_standby: Callable[[], bool] = lambda: False

    @property
    def supervisor(self) -> Supervisor:
        """Keeps loops alive."""
        return self.counters.supervisor


class KvEventLoops:
    """Subscriptions and mapping of a pool.

    Args:
        parts: Parts of the pool, whose director shows routed requests from now on.
        exact: What engines publish, and prompts by their tokens.
        may_listen: As of `SubscriberCallbacks`.
    """

    def __init__(
        self,
        pool: str,
        parts: factory.PoolParts,
        exact: ExactPrefixes,
        *,
        clock: Callable[[], float],
        supervisor: Supervisor,
        may_listen: Callable[[], bool],
    ) -> None:
        self._pool = pool
        self._exact = exact
        self._index = parts.index
        self._clock = clock
        self._logged: dict[tuple[str, int, bool], float] = {}
        settings, store = parts.settings, parts.store
        events = settings.kv_events
        self._subscriber = KvEventSubscriber(
            events,
            store,
            exact,
            clock=clock,
            rng=parts.rng,
            callbacks=SubscriberCallbacks(
                on_cleared=self._on_cleared, on_change=self._on_change, may_listen=may_listen
            ),
            supervisor=supervisor,
        )
        self._renderer = PromptRenderer(
            exact,
            adapters=lambda: store.pool.adapters,
            scheme=settings.scrape.scheme,
            tls=factory.build_scrape_tls(settings.scrape),
            clock=clock,
            supervisor=supervisor,
            instance=f"pool {pool}",
            settings=events,
        )
        parts.director.set_prompt_listener(self._renderer)

    def loops(self) -> Iterator[Callable[[], Awaitable[None]]]:
        """Loops that run until they are cancelled."""
        yield self._subscriber.run
        yield self._renderer.run

    @property
    def num_unmapped(self) -> int:
        """Routed prompts that are still to be mapped (count)."""
        return self._renderer.num_unmapped

    def stats(self) -> KvEventStats:
        """Counts for the metrics page."""
        subscriptions = [
            (subscription.endpoint.address, subscription.rank, subscription.state, engine)
            for subscription in self._subscriber.subscriptions
            for engine in (subscription.engine,)
        ]
        return KvEventStats(
            batches=self._subscriber.batches,
            prompts=self._renderer.results,
            waits=self._renderer.waits,
            usage_tokens=self._exact.usage_tokens,
            states=[(address, rank, state) for address, rank, state, _ in subscriptions],
            blocks=[(address, rank, engine.held) for address, rank, _, engine in subscriptions],
            lower_blocks=[
                (address, rank, len(engine.lower_keys), engine.lower_weights[0])
                for address, rank, _, engine in subscriptions
            ],
            received=[
                (subscription.endpoint, subscription.num_received)
                for subscription in self._subscriber.subscriptions
            ],
            refused_connections=self._subscriber.num_refused,
            dropped_blocks=sum(engine.dropped for *_, engine in subscriptions),
        )

    def _on_cleared(self, endpoint: Endpoint) -> None:
        """An engine says that its cache is empty: so is our estimate of it."""
        self._index.clear(index_key(endpoint))

    def _on_change(self, change: SubscriptionChange) -> None:
        is_lost, now = change.state == "lost", self._clock()
        key = (change.address, change.rank, is_lost)
        if now - self._logged.get(key, now - _KV_EVENT_REPEAT_S) < _KV_EVENT_REPEAT_S:
            return
        if len(self._logged) >= 4096:
            self._logged.clear()
        self._logged[key] = now
        prefix = f"pool {self._pool}: " if self._pool else ""
        rank = f" rank {change.rank}" if change.rank else ""
        if is_lost:
            text = "%sKV events of %s%s are lost, its cache is estimated: %s"
            _log.warning(text, prefix, change.address, rank, change.detail)
        else:
            text = "%sKV events of %s%s arrive: %s"
            _log.info(text, prefix, change.address, rank, change.detail)


class PoolRuntime:
    """Runtime of a pool.

    Attributes:
        exists: True while the object that defines the pool exists.
        app_protocol: Protocol of its engines; empty where not set.
        annotations: Annotations of the object that defines it.
        created: Creation time of that object, RFC 3339 in UTC; empty where unknown.
        match_rejection: Reason why the match of its annotations is ignored; empty where it is not.
        overlapped_by: Name of the pool that comes first where both match a request; empty for none.
        flow_controller: Flow control of its requests; None where disabled.
    """

    def __init__(self, plan: pools.PoolPlan, shared: RuntimeContext) -> None:
        self.name = plan.name
        self.match = plan.match
        self.exists = True
        self._existed = False
        self.app_protocol = ""
        self.annotations: Mapping[str, str] = {}
        self.created = ""
        self.match_rejection = ""
        self.overlapped_by = ""
        self._settings = plan.settings
        self._shared = shared
        self._counts = shared.counters.for_pool(plan.name)
        self._pool_log = PoolLog(plan.name, shared.clock)
        self.parts = factory.build(
            plan.settings,
            on_changed=self._on_pool_changed,
            guards=shared.guards,
            prefix_budget=shared.prefix_budget,
            on_shadow_pending=self._schedule_shadow,
        )
        store = self.parts.store
        director = self.parts.director
        self._counts.series.read_known_models(
            listed=lambda: store.pool.serving.names,
            configured=lambda: director.preparer.configured_models,
        )
        self._kv_events = self._build_kv_events()
        flow_control = plan.settings.flow_control
        self.flow_controller = (
            AsyncFlowController(
                self.parts.director,
                flow_control,
                clock=shared.clock,
                on_exception=ExceptionLog(shared.counters.exceptions, shared.clock).record,
                pool=plan.name,
                counters=self._counts.queue,
                rate_limiter=shared.rate_limiter,
            )
            if flow_control.enabled
            else None
        )
        self.scraper = self._build_scraper()
        self._discovery = factory.build_discovery(
            self.parts,
            clock=shared.clock,
            on_event=self._on_discovery_event,
            supervisor=shared.supervisor,
        )

    @property
    def profile(self) -> str:
        """Name of the scheduling profile in force."""
        return self.parts.profile.name

    @property
    def pool_route(self) -> PoolRoute:
        """Route of the pool for the pool selector."""
        return PoolRoute(self.name, self.parts.director, self.match)

    @property
    def synced(self) -> bool:
        """True if discovery is complete and the pool exists."""
        return self.exists and self.parts.store.synced

    @property
    def match_state(self) -> MatchState:
        """State of the match in the annotations of the InferencePool."""
        if self.match_rejection:
            return "rejected"
        if self.match.is_empty:
            return "none"
        return "overlapped" if self.overlapped_by else "in_force"

    @property
    def view(self) -> PoolView:
        """View of the pool for the metrics page."""
        store = self.parts.store
        flow_controller = self.flow_controller
        queue = None if flow_controller is None else flow_controller.queue
        bounds = _NO_QUEUE if queue is None else queue.settings
        return PoolView(
            store.pool,
            self._prefix_cache_stats,
            store.bytes_per_token.ratios,
            store.outlier_detector.ejections,
            store.outlier_detector.probes,
            queue=None if queue is None else (queue.count, queue.bytes),
            media_factors=store.bytes_per_token.media.factors,
            queue_outcomes={} if flow_controller is None else flow_controller.outcomes,
            evictions=({}, {}) if flow_controller is None else flow_controller.evictor.counts,
            conversations=self.parts.director.conversation_stats,
            match_state=self.match_state,
            dropped_addresses=0 if self._discovery is None else self._discovery.dropped_addresses,
            count_ejections=store.outlier_detector.count_ejections,
            queue_capacity=bounds.max_requests,
            queue_capacity_bytes=bounds.max_bytes,
            find_queue_bounds=bounds.find_bounds,
            stale_after_s=self.parts.director.routing.settings.stale_after_s,
            saturation=self.parts.director.routing.saturation,
            shadow=self.parts.director.routing.shadow,
            kv_events=None if self._kv_events is None else self._kv_events.stats(),
        )

    def grant_match(self, granted: pool_annotations.MatchGrant) -> None:
        """Apply the match of its annotations, or log its refusal, once for each reason."""
        self.match = granted.match
        if granted.rejection and granted.rejection != self.match_rejection:
            _log.warning("pool %s matches nothing: %s", self.name, granted.rejection)
        self.match_rejection = granted.rejection

    def note_overlap(self, earlier: str) -> None:
        """Record the pool that comes first where both match a request; empty for none."""
        if earlier and earlier != self.overlapped_by:
            _log.warning(
                "pool %s matches requests of pool %s, which is older or configured and takes them",
                self.name,
                earlier,
            )
        self.overlapped_by = earlier

    async def sync(self) -> None:
        """Load the endpoints of a static pool.

        Raises:
            ConfigError: The endpoints file cannot be read.
        """
        if self._discovery is not None:
            await self._discovery.start()

    async def run(self) -> None:
        """Follow and scrape the endpoints until cancelled."""
        keep = self._shared.supervisor.keep
        async with asyncio.TaskGroup() as tasks:
            if self._discovery is not None:
                supervised = keep("discovery", self._discovery.run, instance=self.name)
                tasks.create_task(supervised, name=f"discovery {self.name}")
            if self._settings.scrape.enabled:
                supervised = keep("scrape", self.scraper.run, instance=f"pool {self.name}")
                tasks.create_task(supervised, name=f"scrape {self.name}")
            if self._kv_events is not None:
                for loop in self._kv_events.loops():
                    supervised = keep("kv_events", loop, instance=f"pool {self.name}")
                    tasks.create_task(supervised, name=f"kv events {self.name}")
            await run_forever()

    def on_discovered(self, discovered: DiscoveredPool) -> None:
        """Apply a change from discovery."""
        if discovered.exists != self.exists:
            _log.warning("pool %s %s", self.name, self._existence_message(discovered))
        self.exists = discovered.exists
        self._existed = self._existed or discovered.exists
        self.app_protocol = discovered.app_protocol
        self.annotations = discovered.annotations
        self.created = discovered.created
        store = self.parts.store
        store.set_endpoints(discovered.endpoints, self._shared.clock())
        store.set_policy(discovered.policy)
        self._notify_capacity()

    def _existence_message(self, discovered: DiscoveredPool) -> str:
        if discovered.exists:
            return "is there"
        return "is gone" if self._existed else "is not there; see its name, namespace and group"

    def prepare_reload(self, plan: pools.PoolPlan) -> Callable[[], None]:
        """Validate and build other settings; the returned function applies them.

        Raises:
            ConfigError: A profile cannot be built; nothing was changed.
        """
        routing, profiles = factory.rebuild_routing(
            plan.settings,
            guards=self._shared.guards,
            before=self.parts.profiles,
            running=self.parts.director.routing.shadow,
            on_shadow_pending=self._schedule_shadow,
        )

        def adopt() -> None:
            # With them the plugins of before are freed, which remember sessions, media and more.
            self.parts = msgspec.structs.replace(
                self.parts, profile=routing.profile, profiles=profiles
            )
            self.parts.director.reconfigure(routing)
            self.parts.store.outlier_detector.reconfigure(
                plan.settings.health, self._shared.clock()
            )
            self.scraper.reconfigure(factory.build_scraping(plan.settings.scrape))
            self.match = plan.match
            if self.flow_controller is not None:
                self.flow_controller.reconfigure(plan.settings.flow_control)
            self._notify_capacity()

        return adopt

    def _schedule_shadow(self) -> None:
        """Run the shadow once Envoy has the answers of this turn."""
        asyncio.get_running_loop().call_later(_SHADOW_DELAY_S, self._run_shadow)

    def _run_shadow(self) -> None:
        shadow = self.parts.director.routing.shadow
        if shadow is not None and shadow.run_pending(_SHADOW_TURN_S):
            self._schedule_shadow()

    def close(self) -> None:
        """Reject queued requests, and drop metrics and cache of the pool, which is no longer served."""
        if self.flow_controller is not None:
            self.flow_controller.close(_REMOVED)
        if self._shared.prefix_budget is not None:
            self._shared.prefix_budget.remove(self.parts.index)
        self._shared.counters.pools.pop(self.name, None)

    def _build_scraper(self) -> scraper.Scraper:
        shared, parts = self._shared, self.parts
        return scraper.Scraper(
            parts.scraping,
            parts.store,
            client=shared.http,
            clock=shared.clock,
            rng=parts.rng,
            on_result=self._on_scrape_result,
            unlisted_models=lambda: self._counts.unknown_models,
            endpoint_counts=shared.endpoint_counts,
            supervisor=shared.supervisor,
        )

    def _build_kv_events(self) -> KvEventLoops | None:
        parts, shared = self.parts, self._shared
        if parts.exact is None:
            return None
        return KvEventLoops(
            self.name,
            parts,
            parts.exact,
            clock=shared.clock,
            supervisor=shared.supervisor,
            may_listen=lambda: not shared.is_standby(),
        )

    def _prefix_cache_stats(self, endpoint: Endpoint) -> PrefixCacheStats:
        state = self.parts.cache_model.state_of(endpoint)
        calibration = state.calibration
        return PrefixCacheStats(calibration.predicted, calibration.observed, state.capacity_tokens)

    def _notify_capacity(self) -> None:
        """Notify flow control after a change of endpoints or loads."""
        if self.flow_controller is not None:
            self.flow_controller.notify_capacity()

    def _on_pool_changed(self, before: Pool, after: Pool) -> None:
        """Log what changed, and drop the series of endpoints that left."""
        self._pool_log.on_changed(before, after)
        if before.positions is after.positions:
            return
        gone: set[str] = set()
        for member in before.members:
            endpoint = member.endpoint
            if endpoint.address in after.positions:
                continue
            is_gone = not after.ranks_at(endpoint.host_port)
            if is_gone or endpoint.rank is not None:
                gone.add(endpoint.address)
            if is_gone:
                gone.add(endpoint.host_port)  # of the engine, whose page is one
        if gone:
            self._counts.forget(*gone)

    def _on_discovery_event(self, event: static_discovery.DiscoveryEvent) -> None:
        level = logging.INFO if event.is_expected else logging.WARNING
        prefix = f"pool {self.name}: " if self.name else ""
        text = "%sendpoint discovery: %s: %s; endpoints in the pool: %d"
        _log.log(level, text, prefix, event.kind, event.detail, event.endpoints)
        self._notify_capacity()

    def _on_scrape_result(self, result: scraper.ScrapeResult) -> None:
        if not result.listing:
            self._notify_capacity()
            self._shared.counters.scrape_duration_s.add(result.seconds)
        if not self.parts.store.pool.ranks_at(result.address):
            return  # it left meanwhile, and its series with it
        counts = self._counts.model_list_polls if result.listing else self._counts.scrapes
        counts[result.address, result.outcome] += 1
        if result.outcome != "ok":
            source = "models-data-source" if result.listing else "metrics-data-source"
            self._counts.poll_errors[source] += 1
        self._pool_log.on_scrape(result.address, result.outcome, is_model_list=result.listing)
