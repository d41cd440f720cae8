"""The one place that builds the parts of a picker."""

from __future__ import annotations

import random
import ssl
from collections.abc import Callable, Mapping

import msgspec

from extproc.config import load, policies, profiles
from extproc.config import settings as sections
from extproc.discovery import dns, entries, follow
from extproc.dispatch import beliefs
from extproc.dispatch import dispatcher as dispatching
from extproc.dispatch import routing as routes
from extproc.endpoint import Endpoint
from extproc.pool import health
from extproc.pool.fleet import Fleet
from extproc.prefix.index import PrefixIndex
from extproc.protocol.gathering import Budget
from extproc.protocol.settings import ExchangeSettings
from extproc.scheduling import guard
from extproc.scheduling.profile import Profile
from extproc.scrape import pace, roll, scraper
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
    belief: beliefs.Beliefs
    guards: guard.Guards
    profile: Profile
    profiles: profiles.Profiles
    dispatcher: dispatching.Dispatcher
    exchange: ExchangeSettings
    budget: Budget
    scraping: scraper.Settings
    listed: tuple[entries.Entry, ...]
    following: follow.Settings


def _nobody(_: Endpoint) -> None:
    """Nobody else wants to know who left."""


def _untimed() -> guard.Guards:
    """Guards whose clock stands still."""
    return guard.Guards(lambda: 0.0, guard.Counts())


def build(
    settings: sections.Settings,
    *,
    where: str = "settings",
    on_gone: Callable[[Endpoint], None] = _nobody,
    guards: guard.Guards | None = None,
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
    belief = beliefs.Beliefs(index, prefix.schedule.tokens, most_blocks=prefix.capacity_blocks)

    def forget(endpoint: Endpoint) -> None:
        belief.forget(endpoint)
        on_gone(endpoint)

    rng = random.Random(settings.seed)
    wellbeing = health.Health(settings.health, rng)
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
        dispatcher=dispatching.Dispatcher(
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
        listed=load.entries(settings.pool, where=where),
        following=follow.Settings(
            file=settings.pool.endpoints_file,
            refresh_s=settings.pool.dns_refresh_s,
            pool=settings.pool.name,
        ),
    )


def reroute(
    settings: sections.Settings,
    *,
    where: str,
    guards: guard.Guards,
    before: profiles.Profiles | None = None,
) -> tuple[routes.Routing, profiles.Profiles]:
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
) -> routes.Routing:
    """What a dispatcher routes by."""
    return routes.Routing(
        profile=profile,
        by_model=by_model,
        settings=routes.DispatchSettings(
            stale_after_s=settings.scrape.stale_after_s,
            fallbacks=settings.scheduling.fallbacks,
            honour_subset=settings.scheduling.honour_subset,
            reject_unlisted=settings.scheduling.unknown_model == "reject",
            kubeai_names=settings.scheduling.kubeai_names,
            busy_s=settings.holding.busy_s if settings.holding.enabled else None,
        ),
        policy=policies.policy(settings.pool.objectives, settings.pool.rewrites),
    )


def discovery(
    parts: Parts,
    *,
    clock: Callable[[], float],
    on_fact: Callable[[follow.DiscoveryFact], None],
    supervisor: Supervisor,
) -> follow.Discovery:
    """Build what keeps the fleet's endpoint list true.

    Args:
        parts: Whose fleet is told.
        clock: Monotonic seconds.
        on_fact: Told when something happened.
        supervisor: Hears of steps that went well.
    """
    return follow.Discovery(
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
        pace=pace.Pace(
            fast_s=scrape.busy_interval_s,
            slow_s=scrape.idle_interval_s,
            scrapes_per_s=scrape.max_scrapes_per_s,
            backoff_cap_s=scrape.backoff_cap_s,
        ),
        models=roll.Settings(interval_s=scrape.models_interval_s if scrape.models else None),
    )
