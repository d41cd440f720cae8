"""Writer of the pool: the only place that replaces its snapshot."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence

import msgspec

from extproc.endpoint import Endpoint, Load, ServedModels, split_ranks
from extproc.errors import TOO_MANY_FILES
from extproc.pool import (
    endpoint_health,
    engine_counters,
    inference_policy,
    outlier_detection,
    plausibility,
    request_tokens,
)
from extproc.pool.adapter_names import AdapterNames
from extproc.pool.engine_counters import ForeignTraffic
from extproc.pool.inflight import InflightLoad
from extproc.pool.observed_page import ObservedPage, ScrapeToken
from extproc.pool.pool_step_times import PoolStepTimeEstimators
from extproc.pool.request_tokens import AnswerTokens, BytesPerTokenEstimator, TypicalWork
from extproc.pool.snapshot import EndpointSnapshot, Pool, build_pool

#: Scrape failures that say the endpoint cannot be reached at all.
NO_CONNECTION = frozenset({"refused", "timeout", "unreachable"})

_NONE: frozenset[str] = frozenset()

#: Share of requests of others below which engines are taken to be idle when nothing of ours is there.
_FEW_OTHERS = 0.05


class PoolStore:
    """Replaces the pool when discovery, a scrape or an account says so.

    Args:
        on_gone: Called with every endpoint incarnation that left, so that predictions about it can be
            dropped.
        outlier_detector: Decides which endpoints are ejected; None for the defaults and chance without a seed.
        on_changed: Called with the snapshots before and after endpoints or their health changed.

    Attributes:
        pool: Current snapshot; immutable, a later change makes another.
        bytes_per_token: Bytes per token of every model, learned.
        foreign_traffic: Load that other EPPs put on these endpoints.
    """

    def __init__(
        self,
        on_gone: Callable[[Endpoint], None],
        on_observed: Callable[[ObservedPage], None] = lambda _: None,
        *,
        outlier_detector: outlier_detection.OutlierDetector | None = None,
        on_changed: Callable[[Pool, Pool], None] = lambda _before, _after: None,
    ) -> None:
        self._on_gone = on_gone
        self._on_changed = on_changed
        self._on_observed = on_observed
        self.pool = Pool(members=(), positions={})
        self._incarnations = 0
        self._adapters = AdapterNames()
        self._answers = AnswerTokens(on_change=request_tokens.weak_callback(self._share_answers))
        self._estimators = PoolStepTimeEstimators(self._answers)
        self._synced = False
        #: Engines as discovery lists them, and numbers of the ranks on their pages, by address.
        self._listed: dict[str, Endpoint] = {}
        self._rank_numbers: dict[str, tuple[int, ...]] = {}
        self._policy = inference_policy.EMPTY_POLICY
        self._typical_work = TypicalWork(
            request_tokens.weak_callback(self._estimate_foreign_tokens)
        )
        self.bytes_per_token = BytesPerTokenEstimator()
        self.foreign_traffic = ForeignTraffic()
        self.outlier_detector = outlier_detector or outlier_detection.OutlierDetector(
            endpoint_health.OutlierDetectionSettings(), random.Random(0)
        )
        self._shown = self.outlier_detector.version
        #: Indexes in the snapshot of each engine: one, or those of its ranks.
        self._places: dict[int, list[int]] = {}

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
            endpoints: All engines, at most one per address; of duplicates the first counts. One
                whose page shows several data-parallel ranks becomes as many members.
        """
        listed: dict[str, Endpoint] = {}
        for endpoint in endpoints:
            listed.setdefault(endpoint.address, endpoint)
            if endpoint.models is not None:
                self._adapters.learn(endpoint.models.adapters, self.pool.members)
        before, self._listed = self._listed, listed
        self._rank_numbers = {
            address: numbers
            for address, numbers in self._rank_numbers.items()
            if address in listed and listed[address].uid == before[address].uid
        }
        self._synced = True
        self._update_members(now)

    def set_ranks(self, endpoint: Endpoint, numbers: Sequence[int], now: float) -> None:
        """Replace an engine by its data-parallel ranks, or change which there are.

        Ranks that stay keep account and load; the health of the engine stays with all of them.

        Args:
            endpoint: The engine or one of its ranks, in its incarnation when its page was requested.
        """
        members = self.pool.ranks_at(endpoint.host_port)
        if not members or members[0].endpoint.engine != endpoint.engine:
            return
        self._rank_numbers[endpoint.host_port] = tuple(numbers)
        self._update_members(now)

    def _update_members(self, now: float) -> None:
        """Make the members those that discovery lists, with ranks as their pages show them."""
        pool = self.pool
        old = {member.endpoint.address: member for member in pool.members}
        members: dict[str, EndpointSnapshot] = {}
        for listed in self._listed.values():
            former = pool.ranks_at(listed.address)
            is_same = bool(former) and former[0].endpoint.uid == listed.uid
            sibling = former[0] if is_same else None
            for endpoint in split_ranks(listed, self._rank_numbers.get(listed.address, ())):
                known = old.pop(endpoint.address, None) if is_same else None
                if known is None:
                    member = self._build_member(endpoint, now, sibling=sibling)
                else:
                    member = known.relabel(endpoint)
                members[endpoint.address] = member
                sibling = sibling or member
        self._remove_engines(old, members)
        self.outlier_detector.update_ejections(now)
        listed_members = list(members.values())
        if self.outlier_detector.version != self._shown:
            listed_members = [self._with_condition(member) for member in listed_members]
        self._publish(tuple(listed_members))
        for member in old.values():
            self._estimators.on_endpoint_removed(member.endpoint.incarnation)
            self.bytes_per_token.forget(member.endpoint.incarnation)
            self._on_gone(member.endpoint)

    def _remove_engines(
        self, old: Mapping[str, EndpointSnapshot], members: Mapping[str, EndpointSnapshot]
    ) -> None:
        """Drop the health of engines that left; ranks of an engine share theirs."""
        left = {member.endpoint.engine for member in old.values()}
        if left:
            left.difference_update([member.endpoint.engine for member in members.values()])
        for engine in left:
            self.outlier_detector.on_endpoint_removed(engine)

    def begin_scrape(self, endpoint: Endpoint) -> ScrapeToken:
        """Note our own requests at the moment a scrape is sent."""
        member = self.pool.find(endpoint.address)
        if member is None:
            return ScrapeToken(endpoint, 0)
        account = member.account
        return ScrapeToken(
            endpoint,
            account.in_flight,
            account.sent,
            account.kv_tokens_sent,
            account.served,
            account.idle,
        )

    def observe(self, token: ScrapeToken, load: Load, now: float) -> None:
        """Record a scrape of an engine that is one endpoint."""
        self.observe_ranks((token,), (load,), now)

    def observe_ranks(
        self, tokens: Sequence[ScrapeToken], loads: Sequence[Load], now: float
    ) -> None:
        """Record a scrape of one engine.

        Args:
            loads: Their loads, aligned with `tokens`.
        """
        pages = [
            page
            for token, load in zip(tokens, loads, strict=True)
            if (page := self._observe_load(token, load, now)) is not None
        ]
        if not pages:
            return
        self._note_pages(pages, now)
        for page in pages:
            self._on_observed(page)

    def _observe_load(self, token: ScrapeToken, load: Load, now: float) -> ObservedPage | None:
        """Record the load of one member; None where it left meanwhile.

        The part of the engine's work that is not ours, max(0, scraped - own at scrape), is fixed
        here. Own is the larger of the counts at both ends of the scrape: what started or ended in
        between may or may not be in the page, and must not be taken for foreign work.
        """
        member = self._current(token)
        if member is None:
            return None
        account, restart = member.account, engine_counters.engine_restarted(member.load, load)
        self._learn_text_sizes(load, account)
        own = max(token.in_flight, account.in_flight)
        account.settle_prefills(load)
        scraped = (load.running or 0.0) + (load.waiting or 0.0)
        progress = plausibility.next_progress(
            member.progress, account, before=member.load, after=load
        )
        flaws = plausibility.find_flaws(load, account, progress=progress, served=token.served)
        is_void = bool(flaws & plausibility.VOID)
        foreign = 0.0 if is_void else max(0.0, scraped - own)
        if not is_void:
            self.foreign_traffic.update(own, foreign)
        # Pages do not say whose requests wait. Others first: what is ours drains between pages, and an
        # engine on which we have requests must not seem to have less of a queue for it.
        waiting = min(foreign, load.waiting or 0.0)
        queued = None if is_void or load.waiting is None else load.waiting - waiting
        is_held_up = account.record_scrape(
            sent=token.sent,
            written=token.written,
            waiting=queued,
            running=load.running,
            at=load.at,
            now=now,
            free_tokens=load.free_kv_tokens,
        )
        learner = self._estimators.with_pool_prior(member.endpoint.incarnation, now, load)
        # Of the open requests; those that run are a part of them, or more where others send too.
        shared = account.shared_tokens * (load.running or 0.0) / max(1, account.in_flight)
        learner.update(
            load,
            ran=account.take_ran() & self._adapters.known,
            idle=token.idle,
            shared=shared,
            is_alone=self.foreign_traffic.share < _FEW_OTHERS,
            # An adapter that is loaded, and a slot for it, hold requests up as well.
            is_held_up=is_held_up and self._adapters.known.isdisjoint(account.adapters),
        )
        rates = learner.pooled_rates
        account.set_drain_rate(rates, own + foreign)
        named = (load.adapters or _NONE) | (load.waiting_adapters or _NONE)
        self._adapters.learn(named, self.pool.members)
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
        self._share_step_times(now, has_shown=rates.evidence > 0.0)
        return ObservedPage(member, load, restart)

    def _share_step_times(self, now: float, *, has_shown: bool) -> None:
        """Give members what the pool, and answers, show of those that show no step times."""
        members = self._estimators.share(self.pool.members, now, has_shown=has_shown)
        if members is not self.pool.members:
            self.pool = msgspec.structs.replace(self.pool, members=members)

    def scrape_failed(
        self, token: ScrapeToken, reason: str, now: float, *, is_own_port: bool = True
    ) -> None:
        """Count a failed scrape; the last load stays and ages.

        Only a connection that was refused or timed out says that the engine is down. A page that
        is missing or unreadable, or refused at another port than requests go to, says nothing of that.
        """
        member = self._current(token)
        if member is None:
            return
        if reason == TOO_MANY_FILES:
            self._replace_member(msgspec.structs.replace(member, failure=reason))
            return
        lost = reason in NO_CONNECTION
        failures = member.failures + 1 if lost else 0
        self._replace_member(msgspec.structs.replace(member, failures=failures, failure=reason))
        self._share_step_times(now, has_shown=member.rates.evidence > 0.0)
        if member.endpoint.rank is not None and member.endpoint.rank.index:
            return  # the health of the engine, which its first rank reports
        refused = is_own_port and reason == "refused"
        self.outlier_detector.record_scrape_failure(
            member.endpoint.engine, now, connected=not lost, refused=refused
        )
        self._publish_conditions()

    def record_sent(self, endpoint: Endpoint, now: float) -> None:
        """Record a request to an ejected endpoint, which may be its probe."""
        member = self.pool.find(endpoint.address)
        if member is not None and member.condition.state:
            self.outlier_detector.record_sent(member.endpoint.engine, now)
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
        """Record the outcome of a request to this life of an endpoint, as `OutlierDetector` does."""
        self.outlier_detector.record_outcome(
            endpoint.engine, outcome, sent_at=sent_at, now=now, cause=cause, sole=sole
        )
        if self.outlier_detector.version != self._shown:
            self._publish_conditions()

    def observe_models(self, endpoint: Endpoint, models: ServedModels) -> None:
        """Record which names an engine answers to; they stand until it restarts.

        Args:
            endpoint: The endpoint, in its incarnation when its models were requested.
        """
        members = self.pool.ranks_at(endpoint.host_port)
        if not members or members[0].endpoint.engine != endpoint.engine:
            return
        self._adapters.learn(models.adapters, self.pool.members)
        for member in members:
            if member.models != models:
                self._replace_member(msgspec.structs.replace(member, models=models))

    def _estimate_foreign_tokens(self) -> None:
        """Price the work of others anew: the usual work of a request has changed."""
        typical_work, pool = self._typical_work, self.pool
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
        self.pool = msgspec.structs.replace(pool, members=members)

    def _share_answers(self) -> None:
        """Give all members the tokens of an answer, which have changed."""
        mean, pool = self._answers.mean, self.pool
        members = [
            msgspec.structs.replace(
                member, rates=msgspec.structs.replace(member.rates, output_tokens=mean)
            )
            for member in pool.members
        ]
        self.pool = msgspec.structs.replace(pool, members=tuple(members))

    def _note_pages(self, pages: Sequence[ObservedPage], now: float) -> None:
        """Update the health of an engine that served a metrics page, of all its members."""
        moves = [page.moved for page in pages]
        self.outlier_detector.record_scrape(
            pages[0].before.endpoint.engine,
            now,
            restarted=any(page.restarted for page in pages),
            moved=None if None in moves else any(moves),
            idle=all(page.is_idle for page in pages),
        )
        self._publish_conditions()

    def _learn_text_sizes(self, load: Load, account: InflightLoad) -> None:
        if self.bytes_per_token.record_scrape(
            load,
            incarnation=account.endpoint.incarnation,
            texts={} if account.media_answered else account.texts,
            answered=account.answered,
        ):
            account.forget_texts()

    def _current(self, token: ScrapeToken) -> EndpointSnapshot | None:
        member = self.pool.find(token.endpoint.address)
        if member is None or member.endpoint.incarnation != token.endpoint.incarnation:
            return None
        return member

    def _with_condition(self, member: EndpointSnapshot) -> EndpointSnapshot:
        known = self.outlier_detector.condition(member.endpoint.engine)
        if member.condition is known:
            return member
        return msgspec.structs.replace(member, condition=known)

    def _publish_conditions(self) -> None:
        """Publish conditions that changed."""
        version = self.outlier_detector.version
        if version == self._shown:
            return
        self._shown = version
        pool = self.pool
        members, down, unhealthy = list(pool.members), pool.down, pool.unhealthy_or_doubtful
        # Only these: when hundreds of endpoints fail at once, each of them comes here.
        for engine in self.outlier_detector.take_changed():
            for at in self._places.get(engine, ()):
                before, after = members[at], self._with_condition(members[at])
                members[at] = after
                down += before.is_up - after.is_up
                unhealthy += bool(after.condition.state) - bool(before.condition.state)
        self.pool = msgspec.structs.replace(
            pool,
            members=tuple(members),
            down=down,
            unhealthy_or_doubtful=unhealthy,
            newest=self.outlier_detector.newest,
        )
        self._on_changed(pool, self.pool)

    def _build_member(
        self, endpoint: Endpoint, now: float, *, sibling: EndpointSnapshot | None
    ) -> EndpointSnapshot:
        """A new member; `sibling` is one of the same engine, whose health and models it has."""
        self._incarnations += 1
        incarnation = self._incarnations
        engine = incarnation if sibling is None else sibling.endpoint.engine
        born = msgspec.structs.replace(endpoint, incarnation=incarnation, engine=engine)
        learner = self._estimators.on_endpoint_added(born.incarnation)
        if sibling is None:
            # Those of the first list, and of a list after an empty one, are as old as the others.
            late = bool(self.pool.members)
            self.outlier_detector.on_endpoint_added(engine, now, late=late)
        account = InflightLoad(born, self._typical_work, self._answers)
        account.set_drain_rate(learner.rates, 0.0)
        return EndpointSnapshot(
            endpoint=born,
            account=account,
            rates=learner.rates,
            condition=self.outlier_detector.condition(engine),
            models=None if sibling is None else sibling.models,
        )

    def _replace_member(self, member: EndpointSnapshot) -> None:
        self.pool = self.pool.with_member(member, adapters=self._adapters.known)

    def _publish(self, members: tuple[EndpointSnapshot, ...]) -> None:
        before, self._shown = self.pool, self.outlier_detector.version
        self.outlier_detector.take_changed()
        self._places = {}
        for at, member in enumerate(members):
            self._places.setdefault(member.endpoint.engine, []).append(at)
        self.pool = build_pool(
            members, newest=self.outlier_detector.newest, adapters=self._adapters.known
        )
        self._on_changed(before, self.pool)
