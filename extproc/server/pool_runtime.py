"""One pool of a running picker: its parts, what follows its endpoints, what scrapes them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping

import msgspec

from extproc.config import factory, pools
from extproc.discovery import static_discovery
from extproc.discovery.discovered_pool import Found
from extproc.endpoint import Endpoint
from extproc.routing.pool_selector import Claimant
from extproc.scheduling import plugin_guard
from extproc.scrape import client, scraper
from extproc.server.bug_log import Bugs
from extproc.server.flow_control_shell import Gate
from extproc.supervision import Supervisor
from extproc.telemetry.counters import Tallies
from extproc.telemetry.pool_metrics import Cache, ClaimState, Watched

_log = logging.getLogger("extproc.server")

#: Facts of discovery that are as they should be.
_QUIET = frozenset({"replaced", "complete"})


class Shared(msgspec.Struct, frozen=True):
    """What all sites have in common.

    Attributes:
        tallies: Where facts go.
        guards: Times and counts plugins of others.
        http: Fetches pages of engines.
        census: How many endpoints are scraped.
        clock: Monotonic seconds.
    """

    tallies: Tallies
    guards: plugin_guard.Guards
    http: client.Client
    census: scraper.Census
    clock: Callable[[], float]

    @property
    def supervisor(self) -> Supervisor:
        """Keeps loops alive."""
        return self.tallies.supervisor


class Site:
    """One pool.

    Args:
        planned: What it is.
        shared: What all sites have in common.

    Attributes:
        name: Of the pool.
        parts: What it is made of.
        claim: The requests it is for.
        profile: Name of the scheduling profile in force.
        exists: Whether what defines the pool is there.
        app_protocol: How its engines want to be spoken to; empty when nobody said.
        annotations: Of the object that defines it.
        created: When that object was, RFC 3339 in UTC; empty when nobody said.
        refused_claim: Why the claim of its annotations is ignored; empty where it is not.
        overlaps: Name of the pool that comes first where both claim a request; empty for none.
        gate: Where its requests wait; None where they do not.
    """

    def __init__(self, planned: pools.Planned, shared: Shared) -> None:
        self.name = planned.name
        self.claim = planned.claim
        self.exists = True
        self._existed = False
        self.app_protocol = ""
        self.annotations: Mapping[str, str] = {}
        self.created = ""
        self.refused_claim = ""
        self.overlaps = ""
        self._settings = planned.settings
        self._shared = shared
        self._counts = shared.tallies.of(planned.name)
        self.parts = factory.build(planned.settings, on_gone=self._gone, guards=shared.guards)
        self._profiles = self.parts.profiles
        self.profile = self.parts.profile.name
        holding = planned.settings.holding
        self.gate = (
            Gate(
                self.parts.dispatcher,
                holding,
                clock=shared.clock,
                bugs=Bugs(shared.tallies.bugs, shared.clock),
            )
            if holding.enabled
            else None
        )
        told = pools.followed(planned.settings.pool)
        self._discovery = (
            factory.discovery(
                self.parts,
                clock=shared.clock,
                on_fact=self._discovered,
                supervisor=shared.supervisor,
            )
            if told
            else None
        )

    @property
    def claimant(self) -> Claimant:
        """As the switchboard sees it."""
        return Claimant(self.name, self.parts.dispatcher, self.claim)

    @property
    def synced(self) -> bool:
        """Whether discovery has spoken, and found the pool."""
        return self.exists and self.parts.fleet.synced

    @property
    def claim_state(self) -> ClaimState:
        """What became of its claim."""
        if self.refused_claim:
            return "refused"
        if self.claim.empty:
            return "none"
        return "overlapped" if self.overlaps else "in_force"

    @property
    def watched(self) -> Watched:
        """As the metrics page sees it."""
        fleet = self.parts.fleet
        gate = self.gate
        return Watched(
            fleet.pool,
            self._cache,
            fleet.tokenisers.learnt,
            fleet.health.ejections,
            fleet.health.probes,
            held=None if gate is None else (gate.queue.count, gate.queue.bytes),
            waits={} if gate is None else gate.outcomes,
            returning=self.parts.dispatcher.returning,
            claim=self.claim_state,
            addresses_left_out=0 if self._discovery is None else self._discovery.left_out,
        )

    async def sync(self) -> None:
        """Learn the endpoints, where they are not brought by somebody else.

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
                kept = keep("discovery", self._discovery.run, of=self.name)
                tasks.create_task(kept, name=f"discovery {self.name}")
            if self._settings.scrape.enabled:
                kept = keep("scrape", self._scraper().run, of=f"pool {self.name}")
                tasks.create_task(kept, name=f"scrape {self.name}")
            # A group without tasks would end, and with it what runs all sites.
            await asyncio.Event().wait()

    def take(self, found: Found) -> None:
        """Take in what discovery says of the pool."""
        if found.exists != self.exists:
            _log.warning("pool %s %s", self.name, self._fate(found))
        self.exists = found.exists
        self._existed = self._existed or found.exists
        self.app_protocol = found.app_protocol
        self.annotations = found.annotations
        self.created = found.created
        fleet = self.parts.fleet
        fleet.replace(found.endpoints, self._shared.clock())
        fleet.decree(found.policy)
        self._changed()

    def _fate(self, found: Found) -> str:
        if found.exists:
            return "is there"
        return "is gone" if self._existed else "is not there; see its name, namespace and group"

    def replanned(self, planned: pools.Planned) -> Callable[[], None]:
        """Build what other settings mean; calling what is returned puts it in force.

        Raises:
            ConfigError: A profile cannot be built; nothing was changed.
        """
        routing, profiles = factory.reroute(
            planned.settings,
            where="the configuration",
            guards=self._shared.guards,
            before=self._profiles,
        )

        def adopt() -> None:
            self._profiles = profiles
            self.parts.dispatcher.adopt(routing)
            self.parts.fleet.health.settings = planned.settings.health
            self.claim = planned.claim
            if self.gate is not None:
                self.gate.adopt(planned.settings.holding)
            self.profile = routing.profile.name

        return adopt

    def close(self) -> None:
        """End the waits, and drop what is counted of it."""
        if self.gate is not None:
            self.gate.close()
        self._shared.tallies.pools.pop(self.name, None)

    def _scraper(self) -> scraper.Scraper:  # type: ignore[type-arg]  # the fleet's own mark
        shared, parts = self._shared, self.parts
        return scraper.Scraper(
            parts.scraping,
            parts.fleet,
            client=shared.http,
            clock=shared.clock,
            rng=parts.rng,
            on_fact=self._scraped,
            missed=lambda: self._counts.unlisted,
            census=shared.census,
            supervisor=shared.supervisor,
        )

    def _cache(self, endpoint: Endpoint) -> Cache:
        known = self.parts.belief.of(endpoint)
        calibration = known.calibration
        return Cache(calibration.predicted, calibration.observed, known.capacity_tokens)

    def _changed(self) -> None:
        """Endpoints or loads are others: there may be capacity."""
        if self.gate is not None:
            self.gate.changed()

    def _gone(self, endpoint: Endpoint) -> None:
        self._counts.forget(endpoint.address)

    def _discovered(self, fact: static_discovery.DiscoveryFact) -> None:
        level = logging.INFO if fact.kind in _QUIET else logging.WARNING
        named = f"pool {self.name}: " if self.name else ""
        _log.log(level, "%s%s: %s, %d endpoints", named, fact.kind, fact.detail, fact.endpoints)
        self._changed()

    def _scraped(self, fact: scraper.ScrapeFact) -> None:
        if not fact.listing:
            self._changed()
            self._shared.tallies.scrape_s.add(fact.seconds)
        if self.parts.fleet.pool.find(fact.address) is None:
            return  # it left meanwhile, and its series with it
        counts = self._counts.listings if fact.listing else self._counts.scrapes
        counts[fact.address, fact.outcome] += 1
