"""Builds the parts of a picker from settings; nothing else constructs them."""

from __future__ import annotations

import random
from collections.abc import Callable

import msgspec

from extproc.config import pool_sections, pools, profile_builder
from extproc.config.settings import ScrapeSection, Settings
from extproc.discovery import endpoint_list, static_discovery
from extproc.pool import outlier_detection
from extproc.pool.snapshot import Pool
from extproc.pool.store import PoolStore
from extproc.prefix_cache import cache_model
from extproc.prefix_cache.exact_prefixes import ExactPrefixes
from extproc.prefix_cache.index import IndexBudget, PrefixIndex
from extproc.protocol.exchange import ExchangeSettings
from extproc.routing import director
from extproc.routing.routing_config import RoutingConfig, RoutingSettings
from extproc.scheduling import plugin_guard
from extproc.scheduling.profile import SchedulerProfile
from extproc.scheduling.shadow import ShadowScheduler
from extproc.scrape import engines, model_list, schedule, scraper
from extproc.scrape.client_tls import ClientTls
from extproc.supervision import Supervisor


class PoolParts(msgspec.Struct, frozen=True):
    """The parts of a picker, without sockets and clocks.

    Attributes:
        settings: The settings that the parts were built from.
        rng: The only source of randomness, seeded with `settings.seed`.
        store: Endpoints with their loads and open requests; empty until discovery adds some.
        index: Estimated prefix blocks of each endpoint.
        cache_model: Keeps the index close to the KV caches of the engines.
        exact: What engines publish of their KV caches; None where they are not subscribed to.
        guards: Times and counts calls of external plugins; a new profile reuses it.
        profile: Filters, scorers and picker for models without rules of their own.
        profiles: `profile`, and the profiles of single models.
        director: Routes requests over the store.
        scraping: Settings of the scraper; unused while `settings.scrape.enabled` is false.
        flag_entries: Endpoints of the configuration and the command line.
        discovery: Settings of endpoints file and DNS names.
    """

    settings: Settings
    rng: random.Random
    store: PoolStore
    index: PrefixIndex
    cache_model: cache_model.CacheModel
    exact: ExactPrefixes | None
    guards: plugin_guard.GuardFactory
    profile: SchedulerProfile
    profiles: profile_builder.ResolvedProfiles
    director: director.Director
    scraping: scraper.ScraperSettings
    flag_entries: tuple[endpoint_list.EndpointListEntry, ...]
    discovery: static_discovery.StaticDiscoverySettings


def build(
    settings: Settings,
    *,
    where: str = "settings",
    on_changed: Callable[[Pool, Pool], None] = lambda _, __: None,
    guards: plugin_guard.GuardFactory | None = None,
    prefix_budget: IndexBudget | None = None,
    on_shadow_pending: Callable[[], None] = lambda: None,
) -> PoolParts:
    """Build the parts of a picker.

    Args:
        on_changed: Called with the snapshots before and after endpoints or their health changed.
        guards: Times and counts calls of external plugins; None times nothing, so that no plugin
            is bypassed.
        prefix_budget: Bound of the prefix indexes of all pools; None bounds each alone.
        on_shadow_pending: Called when the shadow has a first request to decide on.

    Raises:
        ConfigError: The profile cannot be built, see `profile_builder.build_profile`.
    """
    guards = guards or plugin_guard.GuardFactory(lambda: 0.0, plugin_guard.PluginCounters())
    resolved = profile_builder.resolve_all(settings, where=where, guards=guards)
    index, model, exact = _build_prefix_cache(settings, prefix_budget)
    rng = random.Random(settings.seed)
    store = _build_store(settings, model, rng, on_changed)
    shadow = build_shadow(settings, resolved, guards, on_shadow_pending)
    router = director.Director(
        store=store,
        routing=build_routing_config(settings, resolved, shadow=shadow),
        index=index,
        cache_model=model,
        schedule=settings.prefix.schedule,
        rng=rng,
        counts=guards.counts,
        exact=exact,
    )
    return PoolParts(
        settings=settings,
        rng=rng,
        store=store,
        index=index,
        cache_model=model,
        exact=exact,
        guards=guards,
        profile=resolved.profile,
        profiles=resolved,
        director=router,
        scraping=build_scraping(settings.scrape),
        flag_entries=pools.parse_entries(settings.pool, where=where),
        discovery=static_discovery.StaticDiscoverySettings(
            file=settings.pool.endpoints_file,
            refresh_s=settings.pool.dns_refresh_s,
            pool=settings.pool.name,
        ),
    )


def _build_store(
    settings: Settings,
    model: cache_model.CacheModel,
    rng: random.Random,
    on_changed: Callable[[Pool, Pool], None],
) -> PoolStore:
    return PoolStore(
        on_gone=model.forget,
        on_observed=lambda page: model.observe_load(
            page.before.endpoint,
            before=page.before.load,
            after=page.after,
            restarted=page.restarted,
        ),
        outlier_detector=outlier_detection.OutlierDetector(settings.health, rng),
        on_changed=on_changed,
    )


def _build_prefix_cache(
    settings: Settings, budget: IndexBudget | None
) -> tuple[PrefixIndex, cache_model.CacheModel, ExactPrefixes | None]:
    prefix, events = settings.prefix, settings.kv_events
    index = PrefixIndex(prefix.capacity_blocks, max_bytes=prefix.max_bytes, budget=budget)
    model = cache_model.CacheModel(
        index, prefix.schedule.tokens, most_blocks=prefix.capacity_blocks
    )
    weights = events.cpu_weight, events.storage_weight
    exact = (
        ExactPrefixes(prefix.schedule, max_blocks=events.max_blocks, lower_weights=weights)
        if events.enabled
        else None
    )
    return index, model, exact


def rebuild_routing(
    settings: Settings,
    *,
    guards: plugin_guard.GuardFactory,
    before: profile_builder.ResolvedProfiles | None = None,
    running: ShadowScheduler | None = None,
    on_shadow_pending: Callable[[], None] = lambda: None,
) -> tuple[RoutingConfig, profile_builder.ResolvedProfiles]:
    """Build the routing of new settings for a running director.

    Args:
        guards: Guards of the running picker: times and counts of external plugins continue.
        before: Profiles of the running picker; those with unchanged rules are reused with their
            state.
        running: Shadow of the running picker; it goes on with its counts if neither its rules nor
            those that it is compared with changed.
        on_shadow_pending: Called when the shadow has a first request to decide on.

    Raises:
        ConfigError: A profile cannot be built, see `profile_builder.build_profile`.
    """
    resolved = profile_builder.resolve_all(
        settings, where="the configuration", guards=guards, before=before
    )
    built = build_shadow(settings, resolved, guards, on_shadow_pending)
    is_compared_alike = before is not None and before.profile is resolved.profile
    if (
        is_compared_alike
        and built is not None
        and running is not None
        and running.profile is built.profile
        and running.sample_ratio == built.sample_ratio
    ):
        built = running
    return build_routing_config(settings, resolved, shadow=built), resolved


def build_shadow(
    settings: Settings,
    resolved: profile_builder.ResolvedProfiles,
    guards: plugin_guard.GuardFactory,
    on_pending: Callable[[], None],
) -> ShadowScheduler | None:
    """Build the shadow of a pool; None without one."""
    rules = settings.scheduling.shadow
    if rules is None or resolved.shadow is None:
        return None
    return ShadowScheduler(
        resolved.shadow,
        sample_ratio=rules.sample_ratio,
        rng=random.Random(settings.seed),
        stopwatch=guards.stopwatch,
        on_pending=on_pending,
    )


def build_exchange_settings(settings: Settings) -> ExchangeSettings:
    """Return the settings shared by all ext_proc exchanges."""
    return ExchangeSettings(
        max_body_bytes=settings.limits.max_body_bytes,
        response_marker=settings.responses.marker,
        conformance=settings.conformance,
        feedback=settings.responses.feedback,
        restore_model=settings.responses.restore_model,
        scores=settings.decisions.scores,
        request_id=settings.responses.request_id,
    )


def build_routing_config(
    settings: Settings,
    resolved: profile_builder.ResolvedProfiles,
    *,
    shadow: ShadowScheduler | None = None,
) -> RoutingConfig:
    """Return the routing configuration of a director."""
    return RoutingConfig(
        profile=resolved.profile,
        by_model=resolved.by_model,
        by_header=resolved.by_header,
        stages=resolved.stages,
        shadow=shadow,
        settings=RoutingSettings(
            stale_after_s=settings.scrape.stale_after_s,
            fallbacks=settings.scheduling.fallbacks,
            respect_subset=settings.scheduling.respect_subset,
            reject_unlisted=settings.scheduling.unknown_model == "reject",
            kubeai_names=settings.scheduling.kubeai_names,
            busy_s=settings.flow_control.busy_s if settings.flow_control.enabled else None,
            usage_limit=settings.flow_control.usage_limit,
            banded_priorities=tuple([band.priority for band in settings.flow_control.bands]),
        ),
        kv_cache_source=settings.scheduling.kv_cache_source,
        saturation=settings.scheduling.saturation,
        policy=pool_sections.build_policy(settings.pool.objectives, settings.pool.rewrites),
    )


def build_discovery(
    parts: PoolParts,
    *,
    clock: Callable[[], float],
    on_event: Callable[[static_discovery.DiscoveryEvent], None],
    supervisor: Supervisor,
) -> static_discovery.StaticDiscovery | None:
    """Build the discovery of a pool; None where another component sets its endpoints."""
    if not any(source.is_static for source in pools.configured_sources(parts.settings.pool)):
        return None
    return static_discovery.StaticDiscovery(
        parts.discovery,
        parts.store,
        flag_entries=parts.flag_entries,
        resolver=static_discovery.DnsResolver(),
        clock=clock,
        rng=parts.rng,
        on_event=on_event,
        supervisor=supervisor,
    )


def build_scrape_tls(scrape: ScrapeSection) -> ClientTls | None:
    """Return the source of TLS contexts of the scraper's client; None for plain HTTP.

    Raises:
        ConfigError: A file of certificates cannot be read.
    """
    return None if scrape.scheme == "http" else ClientTls(scrape.tls, verify=scrape.verify_tls)


#: Longest interval at which an engine keeps the connection of a scrape: vLLM closes it after 5 s.
_KEPT_ALIVE_S = 4.0


def _known_interval_s(scrape: ScrapeSection) -> float:
    """Return the longest interval, with its jitter and a time-out, at which loads stay known."""
    return (scrape.stale_after_s - scrape.timeout_s) / 1.1


def _rest_interval_s(scrape: ScrapeSection) -> float:
    """Return twice the idle interval, as far as loads do not turn unknown and connections stay."""
    longest = min(_known_interval_s(scrape), _KEPT_ALIVE_S)
    return max(scrape.idle_interval_s, min(2.0 * scrape.idle_interval_s, longest))


def build_scraping(scrape: ScrapeSection) -> scraper.ScraperSettings:
    """Return the settings of the scraper of a pool."""
    return scraper.ScraperSettings(
        path=scrape.path,
        port=scrape.port,
        timeout_s=scrape.timeout_s,
        cap_bytes=scrape.max_page_bytes,
        schedule=schedule.ScrapeSchedule(
            fast_s=scrape.busy_interval_s,
            slow_s=scrape.idle_interval_s,
            rest_s=_rest_interval_s(scrape),
            known_s=max(scrape.idle_interval_s, _known_interval_s(scrape)),
            scrapes_per_s=scrape.max_scrapes_per_s,
            backoff_cap_s=scrape.backoff_cap_s,
        ),
        models=model_list.ModelListSettings(
            interval_s=scrape.models_interval_s if scrape.models else None
        ),
        ranks=scrape.data_parallel_ranks,
        extra={name: engines.series(text) for name, text in scrape.extra_metrics.items()} or None,
    )
