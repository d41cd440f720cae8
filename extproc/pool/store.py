"""Writer of the pool: the only place that replaces its snapshot."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from extproc.endpoint import (
    METRICS_PORT,
    Endpoint,
    EngineCounters,
    Load,
    ServedModels,
    StepTimeModel,
)
from extproc.pool import (
    endpoint_health,
    inference_policy,
    outlier_detection,
    plausibility,
    step_time_estimator,
)
from extproc.pool.engine_counters import ForeignTraffic
from extproc.pool.inflight import InflightLoad
from extproc.pool.request_tokens import BytesPerTokenEstimator, TypicalWork
from extproc.pool.snapshot import EndpointSnapshot, ModelIndex, Pool
from extproc.pool.step_time_estimator import PoolStepTimeEstimators

#: Scrape failures that say the endpoint cannot be reached at all.
NO_CONNECTION = frozenset({"refused", "timeout", "unreachable"})

#: Adapter names remembered (count); far more than a pool serves.
MAX_ADAPTERS = 4096

_NONE: frozenset[str] = frozenset()


class ScrapeToken(msgspec.Struct, frozen=True, gc=False):
    """Our own counts at the time a scrape was sent.

    Attributes:
        endpoint: The endpoint in its life then.
        in_flight: Our own requests on it.
        sent: `InflightLoad.sent` when the scrape was requested (tokens).
        written: `InflightLoad.kv_tokens_sent`.
        served: `InflightLoad.served` when the scrape was requested (requests).
    """

    endpoint: Endpoint
    in_flight: int
    sent: int = 0
    written: int = 0
    served: int = 0


class ScrapeObserver(Protocol):
    """Callback for every scrape taken in."""

    def __call__(
        self,
        endpoint: Endpoint,
        *,
        before: Load,
        after: Load,
        rates: StepTimeModel,
        restarted: bool,
    ) -> None:
        """Handle a scrape that was taken in.

        Args:
            endpoint: The endpoint scraped.
            before: The load until then.
            after: The load from now on.
            rates: Step times of the engine.
            restarted: Whether the engine is another process now.
        """


def _ignore_scrape(
    endpoint: Endpoint, *, before: Load, after: Load, rates: StepTimeModel, restarted: bool
) -> None:
    """Do nothing."""


def _ignore_change(before: Pool, after: Pool) -> None:
    """Do nothing."""


class PoolStore:
    """Replaces the pool when discovery, a scrape or an account says so.

    Args:
        on_gone: Called with every endpoint incarnation that left, so that predictions about it can be
            dropped.
        on_observed: Called after every scrape that was taken in.
        outlier_detector: Decides which endpoints are ejected; None for the defaults and chance without a seed.
        on_changed: Called with the snapshots before and after endpoints or their health changed.

    Attributes:
        bytes_per_token: Bytes per token of every model, learned.
        foreign_traffic: Load that other EPPs put on these endpoints.
        outlier_detector: Health of the endpoints.
    """

    def __init__(
        self,
        on_gone: Callable[[Endpoint], None],
        on_observed: ScrapeObserver | None = None,
        *,
        outlier_detector: outlier_detection.OutlierDetector | None = None,
        on_changed: Callable[[Pool, Pool], None] = _ignore_change,
    ) -> None:
        self._on_gone = on_gone
        self._on_changed = on_changed
        self._on_observed = on_observed or _ignore_scrape
        self._pool = Pool(members=(), positions={})
        self._incarnations = 0
        self._adapters: frozenset[str] = frozenset()
        self._estimators = PoolStepTimeEstimators()
        self._synced = False
        self._policy = inference_policy.EMPTY_POLICY
        self._typical_work = TypicalWork(self._estimate_foreign_tokens)
        self.bytes_per_token = BytesPerTokenEstimator()
        self.foreign_traffic = ForeignTraffic()
        self.outlier_detector = outlier_detector or outlier_detection.OutlierDetector(
            endpoint_health.OutlierDetectionSettings(), random.Random(0)
        )
        self._shown = self.outlier_detector.version

    @property
    def pool(self) -> Pool:
        """Current snapshot; immutable, a later change makes another."""
        return self._pool

    @property
    def synced(self) -> bool:
        """True once discovery has listed endpoints."""
        return self._synced

    @property
    def policy(self) -> inference_policy.InferencePolicy:
        """Inference policy of this pool, from discovery."""
        return self._policy

    def set_policy(self, policy: inference_policy.InferencePolicy) -> None:
        """Replace all objectives and rewrites by those of discovery."""
        if policy != self._policy:
            self._policy = policy

    def set_endpoints(self, endpoints: Sequence[Endpoint], now: float) -> None:
        """Replace all endpoints by those of discovery.

        An endpoint that stays keeps its account and load; its labels are updated. One that comes
        back, or whose address belongs to another pod now, gets a new incarnation and a clean
        account, while reservations of its earlier life still close against the earlier account.

        Args:
            endpoints: All endpoints, at most one per address; of duplicates the first counts.
        """
        old = {member.endpoint.address: member for member in self._pool.members}
        members: dict[str, EndpointSnapshot] = {}
        for endpoint in endpoints:
            if endpoint.address in members:
                continue
            if endpoint.models is not None:
                self._learn_adapters(endpoint.models.adapters)
            known = old.get(endpoint.address)
            if known is not None and known.endpoint.uid == endpoint.uid:
                del old[endpoint.address]
            else:
                known = None
            members[endpoint.address] = (
                self._build_member(endpoint, now) if known is None else _relabel(known, endpoint)
            )
        self._synced = True
        for member in old.values():
            self.outlier_detector.on_endpoint_removed(member.endpoint.incarnation)
        self.outlier_detector.update_ejections(now)
        listed = list(members.values())
        if self.outlier_detector.version != self._shown:
            listed = [self._with_condition(member) for member in listed]
        self._publish(tuple(listed))
        for member in old.values():
            self._estimators.on_endpoint_removed(member.endpoint.incarnation)
            self.bytes_per_token.forget(member.endpoint.incarnation)
            self._on_gone(member.endpoint)

    def begin_scrape(self, endpoint: Endpoint) -> ScrapeToken:
        """Note our own requests at the moment a scrape is sent."""
        member = self._pool.find(endpoint.address)
        if member is None:
            return ScrapeToken(endpoint, 0)
        account = member.account
        return ScrapeToken(
            endpoint, account.in_flight, account.sent, account.kv_tokens_sent, account.served
        )

    def observe(self, token: ScrapeToken, load: Load, now: float) -> None:
        """Take in a scrape.

        The part of the engine's work that is not ours, max(0, scraped - own at scrape), is fixed
        here. Own is the larger of the counts at both ends of the scrape: what started or ended in
        between may or may not be in the page, and must not be taken for foreign work.
        """
        member = self._current(token)
        if member is None:
            return
        account = member.account
        restart = step_time_estimator.engine_restarted(member.load, load)
        if self.bytes_per_token.record_scrape(
            load,
            incarnation=account.endpoint.incarnation,
            texts=account.texts,
            answered=account.answered,
        ):
            account.forget_texts()
        own = max(token.in_flight, account.in_flight)
        scraped = (load.running or 0.0) + (load.waiting or 0.0)
        progress = plausibility.next_progress(
            member.progress, account, before=member.load, after=load
        )
        flaws = plausibility.find_flaws(load, account, progress=progress, served=token.served)
        is_void = bool(flaws & plausibility.VOID)
        foreign = 0.0 if is_void else max(0.0, scraped - own)
        if not is_void:
            self.foreign_traffic.update(own, foreign, before=member.load, after=load)
        # Pages do not say whose requests wait. Others first: what is ours drains between pages, and an engine on which
        # we have requests must not seem to have less of a queue for it.
        waiting = min(foreign, load.waiting or 0.0)
        queued = None if is_void or load.waiting is None else load.waiting - waiting
        account.record_scrape(sent=token.sent, written=token.written, waiting=queued, now=now)
        learner = self._estimators.with_pool_prior(member.endpoint.incarnation, now)
        # Of the open requests; those that run are a part of them, or more where others send too.
        shared = account.shared_tokens * (load.running or 0.0) / max(1, account.in_flight)
        ran = account.take_ran() & self._adapters
        learner.update(load, ran=ran, idled=account.idled, shared=shared)
        rates = learner.pooled_rates
        account.set_drain_rate(rates, own + foreign)
        self._learn_adapters((load.adapters or _NONE) | (load.waiting_adapters or _NONE))
        self._replace_member(
            msgspec.structs.replace(
                member,
                load=load,
                foreign=foreign,
                rates=rates,
                foreign_waiting=waiting,
                foreign_tokens=self._typical_work.price(waiting, load.kv_tokens),
                flaws=flaws,
                progress=progress,
                failures=0,
                failure="",
                models=None if restart else member.models,
            )
        )
        self._note_page(member, load, now, restarted=restart)
        self._on_observed(
            member.endpoint,
            before=member.load,
            after=load,
            rates=rates,
            restarted=restart,
        )

    def scrape_failed(self, token: ScrapeToken, reason: str, now: float) -> None:
        """Count a failed scrape; the last load stays and ages.

        Only a connection that was refused or timed out says that the engine is down. A page that
        is missing or unreadable says nothing about its ability to serve.
        """
        member = self._current(token)
        if member is None:
            return
        lost = reason in NO_CONNECTION
        failures = member.failures + 1 if lost else 0
        self._replace_member(msgspec.structs.replace(member, failures=failures, failure=reason))
        self.outlier_detector.record_scrape_failure(
            member.endpoint.incarnation,
            now,
            connected=not lost,
            refused=reason == "refused" and METRICS_PORT not in member.endpoint.labels,
        )
        self._publish_conditions()

    def record_sent(self, endpoint: Endpoint, now: float) -> None:
        """Record a request to an ejected endpoint, which may be its probe."""
        member = self._pool.find(endpoint.address)
        if member is not None and member.condition.state:
            self.outlier_detector.record_sent(member.endpoint.incarnation, now)
            self._publish_conditions()

    def record_outcome(
        self,
        endpoint: Endpoint,
        outcome: endpoint_health.RequestOutcome,
        *,
        sent_at: float,
        now: float,
        cause: str = "errors",
        sole: bool = True,
    ) -> None:
        """Take in the outcome of a request to this life of an endpoint, as `OutlierDetector` does."""
        self.outlier_detector.record_outcome(
            endpoint.incarnation, outcome, sent_at=sent_at, now=now, cause=cause, sole=sole
        )
        if self.outlier_detector.version != self._shown:
            self._publish_conditions()

    def observe_models(self, endpoint: Endpoint, models: ServedModels) -> None:
        """Take in which names an engine answers to; they stand until it restarts.

        Args:
            endpoint: The endpoint, in its incarnation when its models were requested.
            models: Models that it listed.
        """
        member = self._pool.find(endpoint.address)
        if member is None or member.endpoint.incarnation != endpoint.incarnation:
            return
        self._learn_adapters(models.adapters)
        if member.models != models:
            self._replace_member(msgspec.structs.replace(member, models=models))

    def _estimate_foreign_tokens(self) -> None:
        """Price the work of others anew: the usual work of a request has changed."""
        typical_work, pool = self._typical_work, self._pool
        members = tuple(
            [
                msgspec.structs.replace(
                    member,
                    foreign_tokens=typical_work.price(
                        member.foreign_waiting, member.load.kv_tokens
                    ),
                )
                if member.foreign_waiting
                else member
                for member in pool.members
            ]
        )
        self._pool = msgspec.structs.replace(pool, members=members)

    def _note_page(
        self, member: EndpointSnapshot, load: Load, now: float, *, restarted: bool
    ) -> None:
        """Update the health of an endpoint that served a metrics page.

        Args:
            member: With the load until then.
            restarted: Whether the engine is another process now.
        """
        self.outlier_detector.record_scrape(
            member.endpoint.incarnation,
            now,
            restarted=restarted,
            moved=_moved(member.load.counters, load.counters),
            idle=not member.account.in_flight or not (load.running or load.waiting),
        )
        self._publish_conditions()

    def _learn_adapters(self, named: frozenset[str]) -> None:
        """Remember which names are adapters; bounded, as engines list what clients made up."""
        if not named <= self._adapters and len(self._adapters) < MAX_ADAPTERS:
            self._adapters |= named

    def _current(self, token: ScrapeToken) -> EndpointSnapshot | None:
        member = self._pool.find(token.endpoint.address)
        if member is None or member.endpoint.incarnation != token.endpoint.incarnation:
            return None
        return member

    def _with_condition(self, member: EndpointSnapshot) -> EndpointSnapshot:
        known = self.outlier_detector.condition(member.endpoint.incarnation)
        if member.condition is known:
            return member
        return msgspec.structs.replace(member, condition=known)

    def _publish_conditions(self) -> None:
        """Publish conditions that changed."""
        version = self.outlier_detector.version
        if version == self._shown:
            return
        self._shown = version
        pool = self._pool
        members = tuple([self._with_condition(member) for member in pool.members])
        self._pool = msgspec.structs.replace(
            pool,
            members=members,
            down=sum(not member.is_up for member in members),
            unhealthy_or_doubtful=sum(bool(member.condition.state) for member in members),
            newest=self.outlier_detector.newest,
        )
        self._on_changed(pool, self._pool)

    def _build_member(self, endpoint: Endpoint, now: float) -> EndpointSnapshot:
        self._incarnations += 1
        born = msgspec.structs.replace(endpoint, incarnation=self._incarnations)
        learner = self._estimators.on_endpoint_added(born.incarnation)
        # Those of the first list, and of a list after an empty one, are as old as the others.
        self.outlier_detector.on_endpoint_added(
            born.incarnation, now, late=bool(self._pool.members)
        )
        account = InflightLoad(born, self._typical_work)
        account.set_drain_rate(learner.rates, 0.0)
        known = self.outlier_detector.condition(born.incarnation)
        return EndpointSnapshot(
            endpoint=born, account=account, rates=learner.rates, condition=known
        )

    def _replace_member(self, member: EndpointSnapshot) -> None:
        pool = self._pool
        at = pool.positions[member.endpoint.address]
        old = pool.members[at]
        members = (*pool.members[:at], member, *pool.members[at + 1 :])
        self._pool = Pool(
            members=members,
            positions=pool.positions,
            down=pool.down,
            unhealthy_or_doubtful=pool.unhealthy_or_doubtful,
            newest=pool.newest,
            adapters=self._adapters,
            serving=pool.serving if old.serves is member.serves else _serving(members),
            has_unknown_values=pool.has_unknown_values
            if old.flaws == member.flaws
            else _is_patchy(members),
        )

    def _publish(self, members: tuple[EndpointSnapshot, ...]) -> None:
        before, self._shown = self._pool, self.outlier_detector.version
        positions = {member.endpoint.address: at for at, member in enumerate(members)}
        down = sum(not member.is_up for member in members)
        self._pool = Pool(
            members=members,
            positions=positions,
            down=down,
            unhealthy_or_doubtful=sum(bool(member.condition.state) for member in members),
            newest=self.outlier_detector.newest,
            adapters=self._adapters,
            serving=_serving(members),
            has_unknown_values=_is_patchy(members),
        )
        self._on_changed(before, self._pool)


def _moved(before: EngineCounters, after: EngineCounters) -> bool | None:
    """True if an engine computed anything between two pages.

    None where it has no counter that moves with every iteration: others stand still for as long as
    one answer takes.
    """
    counts = after.steps, after.computed_tokens, after.decoded_tokens
    if counts == (None, None, None):
        return None
    return counts != (before.steps, before.computed_tokens, before.decoded_tokens)


def _is_patchy(members: Sequence[EndpointSnapshot]) -> bool:
    """True if pages differ in the values they lack, or some are not plausible."""
    flaws = {member.flaws for member in members}
    return len(flaws) > 1 or any(flaw & plausibility.VOID for flaw in flaws)


def _serving(members: Sequence[EndpointSnapshot]) -> ModelIndex:
    return ModelIndex([(member.endpoint, member.serves) for member in members])


def _relabel(known: EndpointSnapshot, endpoint: Endpoint) -> EndpointSnapshot:
    """A member with what discovery says now; its list of models is dropped where that differs."""
    renamed = msgspec.structs.replace(endpoint, incarnation=known.endpoint.incarnation)
    if renamed == known.endpoint:
        return known
    models = known.models if renamed.models == known.endpoint.models else None
    return msgspec.structs.replace(known, endpoint=renamed, models=models)
