"""Scheduler: chooses the best endpoint for a request from the current snapshot.

Prompts are looked up in the prefix index for every endpoint (`PrefixMatcher`). Beside other pickers,
conversations are expected where all of them expect them (`rendezvous_affinity`).
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import msgspec

from extproc.decision import SATURATED, SHEDDABLE_DROPPED, Decision, Deferral, Outcome, Rejection
from extproc.endpoint import Candidate
from extproc.parsing import surfaces
from extproc.pool import candidate_builder, snapshot
from extproc.pool.conversations import ConversationTracker
from extproc.pool.endpoint_health import OutlierDetectionSettings
from extproc.pool.inflight import InflightLoad
from extproc.pool.snapshot import EndpointSnapshot
from extproc.pool.store import PoolStore
from extproc.prefix_cache import blocks
from extproc.prefix_cache.exact_prefixes import ExactPrefixes
from extproc.prefix_cache.index import PrefixIndex
from extproc.request import BYTES_PER_TOKEN, InferenceRequest, hash_affinity_key
from extproc.routing import admission, eligibility, rendezvous_affinity
from extproc.routing.prefix_matcher import ExactMatcher, PrefixMatcher
from extproc.routing.routing_config import RoutingConfig
from extproc.routing.usage_limit import PriorityCeilings
from extproc.scheduling.framework import SchedulingContext
from extproc.scheduling.profile import SchedulerProfile

#: Reads a text out of a request, as text or as its bytes in UTF-8.
_ReadText: TypeAlias = Callable[[InferenceRequest], str | bytes]

#: Last values of a `SchedulingContext`, from `continuation_ratio` on.
_ConversationStats: TypeAlias = tuple[float, float, float, float, int | None]


class _EligibilityCache(msgspec.Struct, frozen=True):
    """Endpoints found for the last request without a subset hint.

    Attributes:
        adapter: Adapter of the request, where it names one apart from the model.
    """

    pool: snapshot.Pool
    health: OutlierDetectionSettings
    model: str
    adapter: str
    at: float
    endpoints: eligibility.EligibleEndpoints


class Scheduler:
    """Chooses endpoints for parsed and hashed requests, without charging them.

    Args:
        conversation_tracker: Conversations of the pool; only read.
        routing: Profiles and settings; `reconfigure` replaces them.
        exact: What engines publish of their blocks; None where they are not subscribed to.
    """

    def __init__(
        self,
        store: PoolStore,
        index: PrefixIndex,
        conversation_tracker: ConversationTracker,
        *,
        routing: RoutingConfig,
        schedule: blocks.Schedule,
        rng: random.Random,
        exact: ExactPrefixes | None = None,
    ) -> None:
        self._store = store
        self._prefix_matcher = PrefixMatcher(store, index)
        self._exact_matcher = (
            None if exact is None else ExactMatcher(store, exact, self._prefix_matcher)
        )
        self._conversation_tracker = conversation_tracker
        self._schedule = schedule
        self._tokens = schedule.tokens
        self._imputer = candidate_builder.Imputer()
        self._rendezvous_affinity = rendezvous_affinity.RendezvousAffinity()
        self._rng = rng
        self._ceilings = PriorityCeilings()
        self.reconfigure(routing)
        # Until then others leave more room, because a request of a priority above 0 came.
        self._priority_until = -math.inf

    def reconfigure(self, routing: RoutingConfig) -> None:
        """Choose by another configuration from the next request on."""
        self._routing = routing
        self._eligibility_cache: _EligibilityCache | None = None
        settings = routing.settings
        self._ceilings.reconfigure(settings.usage_limit, settings.banded_priorities)

    def schedule(
        self,
        request: InferenceRequest,
        now: float,
        *,
        chain: Sequence[int],
        headers: Mapping[str, str],
        may_defer: bool = True,
        with_prompt: Callable[[], InferenceRequest] | None = None,
    ) -> Outcome:
        """Choose an endpoint for a parsed and hashed request, without charging it.

        Args:
            chain: Block hashes of the prompt, 64 bits each, root first, cut as the schedule cuts.
            may_defer: Whether it may wait for an endpoint while another one has a place.
            with_prompt: Returns the request with its prompt, where `request` has none.
        """
        pool, routing = self._store.pool, self._routing
        profile = routing.by_model.get(request.model, routing.profile)
        if routing.by_header is not None:
            named = routing.by_header.choose(headers, profile)
            if isinstance(named, Rejection):
                return named
            profile = named
        read_first_message: _ReadText = surfaces.no_user_message
        if routing.reads_first_message:
            read_first_message = surfaces.find_first_user_message
            if with_prompt is not None and not request.prompt:
                read_first_message = _parsing_reader(with_prompt)
        eligible = self._find_eligible(pool, request, now)
        if not isinstance(eligible, eligibility.EligibleEndpoints):
            return eligible
        while True:
            # By position: a keyword costs more.
            outcome = self._choose(
                profile,
                eligible,
                request,
                now,
                chain,
                headers,
                read_first_message,
                may_defer=may_defer,
            )
            if outcome is not None:
                return outcome
            eligible = eligible.with_least_bad(pool)

    def _choose(
        self,
        profile: SchedulerProfile,
        eligible: eligibility.EligibleEndpoints,
        request: InferenceRequest,
        now: float,
        chain: Sequence[int],
        headers: Mapping[str, str],
        read_first_message: _ReadText,
        *,
        may_defer: bool,
    ) -> Outcome | None:
        """Choose among eligible endpoints; None where all that the labels allow are put aside."""
        pool, routing, members = self._store.pool, self._routing, eligible.members
        request, tokens = self._count_tokens(request, chain)
        adapter = pool.adapter_of(request.model, request.adapter)
        exact = self._exact_matcher
        matched: Sequence[int]
        if exact is None:
            matched = self._prefix_matcher.match(chain, members, tokens)
        else:
            matched = exact.match(
                chain, members, tokens, prompt_tokens=request.prompt_tokens, now=now
            )
        last_account: InflightLoad | None = None
        conversation_stats: _ConversationStats = (0.0, 0.0, 0.0, 0.0, None)
        if routing.tracks_conversations:
            matched, last_account, conversation_stats = self._read_conversations(
                request, chain, members, matched, read_first_message
            )
        imputation = self._imputer.impute(members, pool, now - routing.settings.stale_after_s)
        candidates = candidate_builder.build_candidates(
            members, matched, adapter, pool.adapters, now, imputation, last_account
        )
        context = SchedulingContext(
            request,
            now,
            self._rng,
            headers,
            chain,
            read_first_message,
            adapter,
            *conversation_stats,
        )
        if eligible.overdue:
            outcome = self._probe(profile, context, candidates, eligible, may_defer=may_defer)
        else:
            outcome = self._run(profile, context, candidates, may_defer=may_defer)
        if not isinstance(outcome, Decision):
            if outcome is SATURATED and eligible.has_excluded:
                return outcome if profile.fits_any(context, candidates) else None
            return outcome
        if routing.stages is not None or routing.kv_cache_source is not None:
            outcome = self._choose_others(profile, context, candidates, eligible, outcome)
        return eligible.with_exclusions(outcome)

    def _choose_others(
        self,
        profile: SchedulerProfile,
        context: SchedulingContext,
        candidates: Sequence[Candidate],
        eligible: eligibility.EligibleEndpoints,
        decision: Decision,
    ) -> Decision:
        """Add endpoints beside the serving one, for stages first those that are to be probed.

        None of those where the request probes its serving endpoint already.
        """
        routing, groups = self._routing, [candidates]
        if eligible.overdue:
            addresses = {member.endpoint.address for member in eligible.overdue}
            groups = [[c for c in candidates if c.endpoint.address not in addresses]]
            if decision.endpoints[0].address not in addresses:
                groups.insert(0, [c for c in candidates if c.endpoint.address in addresses])
        if routing.stages is not None and profile is routing.profile:
            decision = routing.stages.choose(context, groups, decision)
            stages = decision.disaggregation
            if self._exact_matcher is not None and stages is not None:
                for part in stages.parts.values():
                    self._exact_matcher.with_source(part)
        if routing.kv_cache_source is not None:
            decision = routing.kv_cache_source.add_source(context, groups[-1], decision)
        return decision

    def _read_conversations(
        self,
        request: InferenceRequest,
        chain: Sequence[int],
        members: Sequence[EndpointSnapshot],
        matched: Sequence[int],
        read_first_message: _ReadText,
    ) -> tuple[Sequence[int], InflightLoad | None, _ConversationStats]:
        """`matched` with hits to expect, the last turn's account, and the context's last values."""
        foreign_share, tracker = self._store.foreign_traffic.share, self._conversation_tracker
        last_account, seed = tracker.last_endpoint(chain), None
        share = foreign_share * tracker.continuation_ratio
        if chain and share and foreign_share >= rendezvous_affinity.MIN_PEER_SHARE:
            if key := request.session or read_first_message(request):
                seed = hash_affinity_key(key)
            matched, affinity_index = rendezvous_affinity.with_expected_hits(
                seed,
                request.prompt_tokens,
                members,
                affinity=self._rendezvous_affinity,
                matched=matched,
                share=share,
            )
            # Where our own last turn of it went, the others do not know.
            if affinity_index is not None:
                last_account = members[affinity_index].account
        conversation_stats = (
            tracker.continuation_ratio,
            tracker.expected_growth_tokens(request.prompt_tokens),
            foreign_share,
            tracker.idle_per_open(foreign_share),
            seed,
        )
        return matched, last_account, conversation_stats

    def _find_eligible(
        self, pool: snapshot.Pool, request: InferenceRequest, now: float
    ) -> eligibility.EligibleEndpoints | Deferral | Rejection:
        """Find the eligible endpoints, or return why there are none.

        Many requests leave a queue, or arrive, between two changes of the pool.
        """
        settings, health = self._routing.settings, self._store.outlier_detector.settings
        cache = self._eligibility_cache
        if (
            cache is not None
            and cache.pool is pool
            and request.subset is None
            and cache.model == request.model
            and cache.adapter == request.adapter
            and cache.at <= now < cache.endpoints.valid_until
            and cache.health is health
        ):
            return cache.endpoints
        eligible = eligibility.find_eligible(
            pool,
            request,
            respect_subset=settings.respect_subset,
            reject_unlisted=settings.reject_unlisted,
            may_defer=settings.busy_s is not None,
            health=health,
            now=now,
            rng=self._rng,
        )
        if request.subset is None and isinstance(eligible, eligibility.EligibleEndpoints):
            self._eligibility_cache = _EligibilityCache(
                pool, health, request.model, request.adapter, now, eligible
            )
        return eligible

    def _probe(
        self,
        profile: SchedulerProfile,
        context: SchedulingContext,
        candidates: Sequence[Candidate],
        eligible: eligibility.EligibleEndpoints,
        *,
        may_defer: bool,
    ) -> Outcome:
        """Choose an endpoint to probe, and fallbacks among the others; any one if none has capacity.

        A request that waited for it would hold up all others: until it is probed, they try it first.
        """
        addresses = {member.endpoint.address for member in eligible.overdue}
        overdue = [c for c in candidates if c.endpoint.address in addresses]
        outcome = self._run(profile, context, overdue, may_defer=may_defer)
        if not isinstance(outcome, Decision):
            return self._run(profile, context, candidates, may_defer=may_defer)
        chosen = outcome.endpoints[0]
        others = [c for c in candidates if c.endpoint.address not in addresses]
        fallbacks = profile.find_fallbacks(
            context, others, chosen, count=self._routing.settings.fallbacks
        )
        return msgspec.structs.replace(
            outcome,
            endpoints=[chosen, *fallbacks],
            excluded_by_health=((eligibility.PROBE, [c.endpoint for c in others]),),
        )

    def _run(
        self,
        profile: SchedulerProfile,
        context: SchedulingContext,
        candidates: Sequence[Candidate],
        *,
        may_defer: bool,
    ) -> Outcome:
        """Run a profile, limited to free endpoints where requests may queue."""
        rules = self._routing.saturation
        if context.request.priority < 0 and admission.is_saturated(profile, candidates, rules):
            return SHEDDABLE_DROPPED
        shadow, exact = self._routing.shadow, self._exact_matcher
        if shadow is not None and profile is self._routing.profile:
            shadow.note_context(context)
        settings = self._routing.settings
        count = 1 + settings.fallbacks
        outcome: Outcome
        if settings.busy_s is None:
            outcome = profile.run(context, candidates, count=count)
        else:
            if context.request.priority > 0:
                self._priority_until = context.now + admission.PRIORITY_MEMORY_S
            if settings.usage_limit is not None:
                ceiling = self._ceilings.find(context.request.priority, context.now)
                if admission.is_held(candidates, ceiling, rules):
                    return admission.HELD
            outcome = admission.admit(
                lambda some: profile.run(context, some, count=count),
                candidates,
                settings.busy_s,
                priority=context.request.priority,
                may_defer=may_defer,
                leaves_headroom=context.now < self._priority_until,
                num_adapters=len(self._store.pool.adapters),
            )
        return outcome if exact is None else exact.with_source(outcome)

    def _count_tokens(
        self, request: InferenceRequest, chain: Sequence[int]
    ) -> tuple[InferenceRequest, Sequence[int]]:
        """The request with its token count, and its tokens by depth in the chain."""
        ratio: float = BYTES_PER_TOKEN  # of token ids
        if request.prompt_bytes:
            ratio = self._store.bytes_per_token.bytes_per_token(request.adapter or request.model)
        if request.media:
            return self._count_media(request, chain, ratio)
        if ratio == BYTES_PER_TOKEN:
            return request, self._tokens
        tokens = max(1, round(request.prompt_bytes / ratio))
        request = msgspec.structs.replace(request, prompt_tokens=tokens)
        return request, self._schedule.tokens_at(ratio)

    def _count_media(
        self, request: InferenceRequest, chain: Sequence[int], ratio: float
    ) -> tuple[InferenceRequest, Sequence[int]]:
        """As `_count_tokens`, for a prompt with media."""
        media_tokens = self._store.bytes_per_token.media.tokens(request.target, request.media)
        tokens = max(1, round(request.prompt_bytes / ratio + sum(media_tokens)))
        table = self._schedule.tokens_with_media(
            request.media, media_tokens, bytes_per_token=ratio, depth=len(chain)
        )
        return msgspec.structs.replace(request, prompt_tokens=tokens), table

    def estimate_cached_tokens(
        self, member: snapshot.EndpointSnapshot, chain: Sequence[int], *, bytes_per_token: float
    ) -> int:
        """Prompt tokens of a chain that are predicted as cached on an endpoint."""
        tokens = self._schedule.tokens_at(bytes_per_token)
        return self._prefix_matcher.match(chain, (member,), tokens)[0]


def _parsing_reader(with_prompt: Callable[[], InferenceRequest]) -> _ReadText:
    """Reader of the first user message of a request whose prompt was dropped."""
    return lambda _: surfaces.find_first_user_message(with_prompt())
