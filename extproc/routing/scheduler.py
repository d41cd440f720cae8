"""Scheduler: chooses the best endpoint for a request from the current snapshot.

Prompts are looked up in the prefix index for every endpoint (`PrefixMatcher`). A picker behind the
same Envoy as others sees some turns of a conversation, and its index knows nothing of the rest. So
all replicas expect a conversation at the same endpoint (rendezvous affinity), which follows from its
key and the endpoints' addresses and speeds alone, and because all of them expect it, it is there.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import mmh3
import msgspec

from extproc.decision import SHEDDABLE_DROPPED, Decision, Deferral, Outcome, Rejection
from extproc.endpoint import Candidate
from extproc.parsing import surfaces
from extproc.pool import candidate_builder, inference_policy, snapshot
from extproc.pool.conversations import ConversationTracker
from extproc.pool.endpoint_health import OutlierDetectionSettings
from extproc.pool.inflight import InflightLoad
from extproc.pool.snapshot import EndpointSnapshot
from extproc.pool.store import PoolStore
from extproc.prefix_cache import blocks
from extproc.prefix_cache.exact_prefixes import ExactPrefixes
from extproc.prefix_cache.index import PrefixIndex
from extproc.request import BYTES_PER_TOKEN, InferenceRequest, hash_affinity_key
from extproc.routing import admission, eligibility
from extproc.routing.prefix_matcher import ExactMatcher, PrefixMatcher
from extproc.scheduling.framework import Observer, SchedulingContext, Signal
from extproc.scheduling.profile import SchedulerProfile
from extproc.scheduling.shadow import ShadowScheduler


class RoutingSettings(msgspec.Struct, frozen=True):
    """Settings of routing.

    Attributes:
        stale_after_s: Age at which a scraped load counts as unknown.
        fallbacks: Further endpoints named after the chosen one.
        respect_subset: Keep to the endpoints the data plane allows. True, because ignoring the hint
            sends requests where they were not allowed.
        reject_unlisted: Reject requests for models that no endpoint serves, if all served models
            are known. False, because engines answer that themselves.
        busy_s: Wait above which an endpoint counts as busy (seconds); None where requests do not
            queue, and none is deferred.
        kubeai_names: Read `model_adapter` as the adapter of a base model, where both are known.
    """

    stale_after_s: float
    fallbacks: int = 0
    respect_subset: bool = True
    reject_unlisted: bool = False
    kubeai_names: bool = True
    busy_s: float | None = None


class RoutingConfig(msgspec.Struct, frozen=True):
    """Routing configuration that a reload replaces as a single value.

    Attributes:
        profile: Profile of models without one of their own.
        by_model: Profiles of single models.
        shadow: Second profile that looks at routed requests; None for none.
        hashes_prompts: Whether any profile reads prefixes, the shadow included; worked out, as are
            the next ones.
        credits_prefixes: Whether endpoints are charged for uncached tokens only: not where the shadow
            alone reads prefixes.
        tracks_conversations: Whether any profile that routes reads conversations.
        reads_first_message: Whether any profile reads the first user message, the shadow included.
        observers: Stateful plugins by name of the profile.
    """

    profile: SchedulerProfile
    by_model: Mapping[str, SchedulerProfile]
    settings: RoutingSettings
    policy: inference_policy.InferencePolicy = inference_policy.EMPTY_POLICY
    shadow: ShadowScheduler | None = None
    hashes_prompts: bool = False
    credits_prefixes: bool = False
    tracks_conversations: bool = False
    reads_first_message: bool = False
    observers: Mapping[str, Sequence[Observer]] = {}

    def __post_init__(self) -> None:
        needs, force = self.needs, msgspec.structs.force_setattr
        read = needs if self.shadow is None else needs | self.shadow.needs
        force(self, "hashes_prompts", Signal.PREFIX in read)
        force(self, "credits_prefixes", self.shadow is None or Signal.PREFIX in needs)
        force(self, "tracks_conversations", Signal.CONVERSATIONS in needs)
        force(self, "reads_first_message", Signal.FIRST_USER_MESSAGE in read)
        profiles = (self.profile, *self.by_model.values())
        force(self, "observers", {profile.name: profile.observers for profile in profiles})

    @property
    def needs(self) -> frozenset[Signal]:
        """Every signal any profile reads that routes."""
        profiles = (self.profile, *self.by_model.values())
        return frozenset().union(*(profile.needs for profile in profiles))


#: Reads a text out of a request, as text or as its bytes in UTF-8.
_ReadText: TypeAlias = Callable[[InferenceRequest], str | bytes]

#: Last values of a `SchedulingContext`, from `continuation_ratio` on.
_ConversationStats: TypeAlias = tuple[float, float, float, float, int | None]

#: Share of others from which there are others: what pages show late is less.
MIN_PEER_SHARE = 0.1

#: Largest share of a prompt that is expected on its affinity endpoint; its last turn is new.
_MAX_EXPECTED_SHARE = 0.95

#: Where so many endpoints hold so much of a prompt, we know it better than others could tell.
_MIN_HOLDERS, _MIN_HELD_SHARE = 2, 0.9

#: Requests on an engine at whose speed engines are compared.
_REFERENCE_BATCH = 32.0

#: Members whose speed is looked at (count).
_NUM_COMPARED = 16

#: Less than what rounding to a factor of 2^0.5 may multiply by: 2^-0.25.
_MOST_ROUNDED = 0.84

#: Values that a hash may have (count).
_NUM_HASHES = 1 << 32


def with_expected_hits(
    seed: int | None,
    tokens: int,
    members: Sequence[EndpointSnapshot],
    *,
    matched: Sequence[int],
    share: float,
) -> tuple[Sequence[int], int | None]:
    """Add the hits to expect where other replicas sent the earlier turns.

    Of what this replica did not send itself, others sent their share, if the prompt goes on from an
    earlier one. What engines find does not say how much that is: replicas that do not agree yet find
    less than they would.

    Args:
        seed: Hash of the conversation's identity, 32 bits; None without one.
        matched: Per member, prompt tokens that our own index predicts as cached there.
        share: Share of the requests that others send, times that of those that go on from an earlier
            one, 0..1.

    Returns:
        `matched`, with more at the conversation's affinity endpoint, and the index of that endpoint;
        None if it has none, or our own index knows more.
    """
    if seed is None or not share:
        return matched, None
    min_tokens = _MIN_HELD_SHARE * tokens
    # The sum takes twice as long as the maximum.
    if max(matched) >= min_tokens and (
        sum([held_tokens >= min_tokens for held_tokens in matched]) >= _MIN_HOLDERS
    ):
        return matched, None
    index = rendezvous_endpoint(seed, members)
    expected_tokens = int(
        min(_MAX_EXPECTED_SHARE * tokens, matched[index] + share * (tokens - matched[index]))
    )
    if not members[index].load.prefix_hits:
        return matched, None  # it does not cache prefixes, or that is unknown
    if expected_tokens <= matched[index]:
        return matched, index
    expected = list(matched)
    expected[index] = expected_tokens
    return expected, index


def rendezvous_endpoint(seed: int, members: Sequence[EndpointSnapshot]) -> int:
    """Index of the member a conversation belongs to, by weighted rendezvous hash.

    The least of -ln(u) s, with u the hash of seed and address in 0..1 and s the seconds between
    tokens (Thaler and Ravishankar 1998, with weights 1/s). Speeds are rounded to a factor of 2^0.5,
    because each picker learns them for itself. Speeds are looked at for the `_NUM_COMPARED` members of
    largest u only: a member further away would have to be several times as fast to win.

    Args:
        seed: Hash of the conversation's identity, 32 bits.
        members: Candidates, at least one.
    """
    draw = mmh3.hash
    draws: list[tuple[int, int]] = []
    if len(members) > _NUM_COMPARED:
        # Thrice as many as are needed lie above, on average. `heapq.nlargest` does the same, but its
        # loop in Python takes two to four times as long.
        min_hash = _NUM_HASHES - 3 * _NUM_COMPARED * _NUM_HASHES // len(members)
        draws = [
            (hashed, index)
            for index, member in enumerate(members)
            if (hashed := draw(member.endpoint.address, seed, False)) >= min_hash
        ]
    if len(draws) < _NUM_COMPARED:
        draws = [
            (draw(member.endpoint.address, seed, False), index)
            for index, member in enumerate(members)
        ]
    if len(draws) > _NUM_COMPARED:
        draws = sorted(draws, reverse=True)[:_NUM_COMPARED]
    best, least = 0, math.inf
    for hashed, index in draws:
        iteration_s = members[index].rates.iteration_s(_REFERENCE_BATCH)
        unweighted = -math.log((hashed + 1) / 4294967297.0)
        if unweighted * iteration_s * _MOST_ROUNDED >= least:  # most are, and need not be rounded
            continue
        distance = unweighted * 2.0 ** (0.5 * round(2.0 * math.log2(iteration_s)))
        if distance < least:
            best, least = index, distance
    return best


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
        self._routing = routing
        self._schedule = schedule
        self._imputer = candidate_builder.Imputer()
        self._rng = rng
        self._eligibility_cache: _EligibilityCache | None = None
        # Until then others leave more room, because a request of a priority above 0 came.
        self._priority_until = -math.inf

    def reconfigure(self, routing: RoutingConfig) -> None:
        """Choose by another configuration from the next request on."""
        self._routing = routing
        self._eligibility_cache = None

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
        read_first_message: _ReadText = surfaces.no_user_message
        if routing.reads_first_message:
            read_first_message = _first_message_reader(request, with_prompt)
        eligible = self._find_eligible(pool, request, now)
        if not isinstance(eligible, eligibility.EligibleEndpoints):
            return eligible
        members = eligible.members
        request, tokens = self._count_tokens(request, chain)
        adapter = pool.adapter_of(request.model, request.adapter)
        matched = self._match(request, now, chain=chain, members=members, tokens=tokens)
        last_account: InflightLoad | None = None
        conversation_stats: _ConversationStats = (0.0, 0.0, 0.0, 0.0, None)
        if routing.tracks_conversations:
            matched, last_account, conversation_stats = self._read_conversations(
                request, chain, members, matched=matched, read_first_message=read_first_message
            )
        candidates = candidate_builder.build_candidates(
            members,
            matched,
            adapter=adapter,
            adapters=pool.adapters,
            now=now,
            imputation=self._imputer.impute(
                members, pool=pool, oldest=now - routing.settings.stale_after_s
            ),
            last_account=last_account,
        )
        profile = routing.by_model.get(request.model, routing.profile)
        if request.priority < 0 and admission.is_saturated(profile, candidates):
            return SHEDDABLE_DROPPED
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
        outcome = self._run(profile, context, candidates, may_defer=may_defer)
        return eligible.with_exclusions(outcome) if isinstance(outcome, Decision) else outcome

    def _read_conversations(
        self,
        request: InferenceRequest,
        chain: Sequence[int],
        members: Sequence[EndpointSnapshot],
        *,
        matched: Sequence[int],
        read_first_message: _ReadText,
    ) -> tuple[Sequence[int], InflightLoad | None, _ConversationStats]:
        """`matched` with hits to expect, the last turn's account, and the context's last values."""
        foreign_share, tracker = self._store.foreign_traffic.share, self._conversation_tracker
        last_account, seed = tracker.last_endpoint(chain), None
        share = foreign_share * tracker.continuation_ratio
        if chain and share and foreign_share >= MIN_PEER_SHARE:
            if key := request.session or read_first_message(request):
                seed = hash_affinity_key(key)
            matched, affinity_index = with_expected_hits(
                seed, request.prompt_tokens, members, matched=matched, share=share
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

    def _match(
        self,
        request: InferenceRequest,
        now: float,
        *,
        chain: Sequence[int],
        members: Sequence[EndpointSnapshot],
        tokens: Sequence[int],
    ) -> Sequence[int]:
        """Cached prompt tokens per member; `tokens` are prompt tokens by depth in the chain."""
        exact = self._exact_matcher
        if exact is None:
            return self._prefix_matcher.match(chain, members, tokens)
        return exact.match(chain, members, tokens, prompt_tokens=request.prompt_tokens, now=now)

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

    def _run(
        self,
        profile: SchedulerProfile,
        context: SchedulingContext,
        candidates: Sequence[Candidate],
        *,
        may_defer: bool,
    ) -> Outcome:
        """Run a profile, limited to free endpoints where requests may queue."""
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
        ratio = self._store.bytes_per_token.ratio_for(request.target, request.prompt_bytes)
        if request.media:
            return self._count_media(request, chain, ratio)
        if ratio != BYTES_PER_TOKEN:
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


def _first_message_reader(
    request: InferenceRequest, with_prompt: Callable[[], InferenceRequest] | None
) -> _ReadText:
    """Reader of the first user message, also of a request whose prompt was dropped."""
    if with_prompt is None or request.prompt:
        return surfaces.find_first_user_message
    return lambda _: surfaces.find_first_user_message(with_prompt())
