"""The one place that builds the parts of a picker."""

from __future__ import annotations

import random
import ssl
from collections.abc import Callable, Mapping

import msgspec

from extproc.config import loader, policy_schema, profiles
from extproc.config import settings as sections
from extproc.discovery import dns, endpoint_list, static_discovery
from extproc.endpoint import Endpoint
from extproc.pool import outlier_detection
from extproc.pool.store import Fleet
from extproc.prefix_cache import cache_model
from extproc.prefix_cache.index import PrefixIndex
from extproc.protocol.body_buffer import Budget
from extproc.protocol.settings import ExchangeSettings
from extproc.routing import director, routing_config
from extproc.scheduling import plugin_guard
from extproc.scheduling.profile import Profile
from extproc.scrape import model_list_poller, schedule, scraper
from extproc.supervision import Supervisor


class Parts(msgspec.Struct, frozen=True):
    """What a picker is made of; shells add sockets and clocks.

    Attributes:
        settings: What they were built from.
        rng: All chance there is.
        fleet: Endpoints, loads and accounts; empty until discovery speaks.
        index: Who is believed to hold which prefix block.
        belief: Keeps the index near what engines hold.
        guards: What times and counts plugins of others; a new profile takes it over.
        profile: Filters, scorers and the picker.
        profiles: That one, and those of single models.
        dispatcher: Routes over the fleet.
        exchange: What all exchanges have in common.
        budget: Bytes all exchanges may gather.
        scraping: How pages are fetched; not used while `settings.scrape.enabled` is false.
        listed: Endpoints of the configuration and the command line.
        following: How the endpoints file and names are followed.
    """

    settings: sections.Settings
    rng: random.Random
    fleet: Fleet
    index: PrefixIndex
    belief: cache_model.Beliefs
    guards: plugin_guard.Guards
    profile: Profile
    profiles: profiles.Profiles
    dispatcher: director.Dispatcher
    exchange: ExchangeSettings
    budget: Budget
    scraping: scraper.Settings
    listed: tuple[endpoint_list.Entry, ...]
    following: static_discovery.Settings


def _nobody(_: Endpoint) -> None:
    """Nobody else wants to know who left."""


def _untimed() -> plugin_guard.Guards:
    """Guards whose clock stands still."""
    return plugin_guard.Guards(lambda: 0.0, plugin_guard.Counts())


def build(
    settings: sections.Settings,
    *,
    where: str = "settings",
    on_gone: Callable[[Endpoint], None] = _nobody,
    guards: plugin_guard.Guards | None = None,
) -> Parts:
    """Build the parts.

    Args:
        settings: What to build.
        where: The file or flags the settings came from, for errors.
        on_gone: Told of every endpoint incarnation that left, after its beliefs were dropped.
        guards: Times and counts plugins of others; None times nothing, so nobody is bypassed.

    Raises:
        ConfigError: The profile cannot be built, see `profiles.resolve`.
    """
    guards = guards or _untimed()
    resolved = profiles.resolve_all(settings, where=where, guards=guards)
    prefix = settings.prefix
    index = PrefixIndex(prefix.capacity_blocks, max_bytes=prefix.max_bytes)
    belief = cache_model.Beliefs(index, prefix.schedule.tokens, most_blocks=prefix.capacity_blocks)

    def forget(endpoint: Endpoint) -> None:
        belief.forget(endpoint)
        on_gone(endpoint)

    rng = random.Random(settings.seed)
    wellbeing = outlier_detection.Health(settings.health, rng)
    fleet = Fleet(on_gone=forget, on_observed=belief.observed, wellbeing=wellbeing)
    return Parts(
        settings=settings,
        rng=rng,
        fleet=fleet,
        index=index,
        belief=belief,
        guards=guards,
        profile=resolved.profile,
        profiles=resolved,
        dispatcher=director.Dispatcher(
            fleet=fleet,
            routing=routing(settings, resolved.profile, resolved.by_model),
            index=index,
            belief=belief,
            schedule=settings.prefix.schedule,
            rng=rng,
            counts=guards.counts,
        ),
        exchange=exchange(settings),
        budget=Budget(settings.limits.max_assembly_bytes),
        scraping=_scraping(settings.scrape),
        listed=loader.entries(settings.pool, where=where),
        following=static_discovery.Settings(
            file=settings.pool.endpoints_file,
            refresh_s=settings.pool.dns_refresh_s,
            pool=settings.pool.name,
        ),
    )


def reroute(
    settings: sections.Settings,
    *,
    where: str,
    guards: plugin_guard.Guards,
    before: profiles.Profiles | None = None,
) -> tuple[routing_config.Routing, profiles.Profiles]:
    """What a running dispatcher is to route by under other settings, and the profiles in it.

    Args:
        settings: The settings to come.
        where: The file or flags they came from, for errors.
        guards: Of the running picker: times and counts of plugins of others go on.
        before: Its profiles; those whose rules are the same go on with what they remember.

    Raises:
        ConfigError: A profile cannot be built, see `profiles.resolve`.
    """
    resolved = profiles.resolve_all(settings, where=where, guards=guards, before=before)
    return routing(settings, resolved.profile, resolved.by_model), resolved


def exchange(settings: sections.Settings) -> ExchangeSettings:
    """What all exchanges have in common."""
    return ExchangeSettings(
        max_body_bytes=settings.limits.max_body_bytes,
        response_marker=settings.answers.marker,
        conformance=settings.conformance,
        feedback=settings.answers.feedback,
        restore_model=settings.answers.restore_model,
        scores=settings.explain.scores,
    )


def routing(
    settings: sections.Settings, profile: Profile, by_model: Mapping[str, Profile]
) -> routing_config.Routing:
    """What a dispatcher routes by."""
    return routing_config.Routing(
        profile=profile,
        by_model=by_model,
        settings=routing_config.DispatchSettings(
            stale_after_s=settings.scrape.stale_after_s,
            fallbacks=settings.scheduling.fallbacks,
            honour_subset=settings.scheduling.honour_subset,
            reject_unlisted=settings.scheduling.unknown_model == "reject",
            kubeai_names=settings.scheduling.kubeai_names,
            busy_s=settings.holding.busy_s if settings.holding.enabled else None,
        ),
        policy=policy_schema.policy(settings.pool.objectives, settings.pool.rewrites),
    )


def discovery(
    parts: Parts,
    *,
    clock: Callable[[], float],
    on_fact: Callable[[static_discovery.DiscoveryFact], None],
    supervisor: Supervisor,
) -> static_discovery.Discovery:
    """Build what keeps the fleet's endpoint list true.

    Args:
        parts: Whose fleet is told.
        clock: Monotonic seconds.
        on_fact: Told when something happened.
        supervisor: Hears of steps that went well.
    """
    return static_discovery.Discovery(
        parts.following,
        parts.fleet,
        listed=parts.listed,
        resolver=dns.Resolver(),
        clock=clock,
        rng=parts.rng,
        on_fact=on_fact,
        supervisor=supervisor,
    )


def scrape_tls(scrape: sections.Scrape) -> ssl.SSLContext | None:
    """The TLS context of the scraper's client; None for plain HTTP."""
    if scrape.scheme == "http":
        return None
    context = ssl.create_default_context()
    if not scrape.verify_tls:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def _scraping(scrape: sections.Scrape) -> scraper.Settings:
    return scraper.Settings(
        path=scrape.path,
        timeout_s=scrape.timeout_s,
        cap_bytes=scrape.max_page_bytes,
        pace=schedule.Pace(
            fast_s=scrape.busy_interval_s,
            slow_s=scrape.idle_interval_s,
            scrapes_per_s=scrape.max_scrapes_per_s,
            backoff_cap_s=scrape.backoff_cap_s,
        ),
        models=model_list_poller.Settings(
            interval_s=scrape.models_interval_s if scrape.models else None
        ),
    )
