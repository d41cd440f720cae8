"""Scheduler: chooses the best endpoint for a request from the current snapshot.

Prefix matching: predicted cached tokens of a prompt for every endpoint.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence

import msgspec

from extproc.decision import Outcome, Rejection, sheddable_dropped
from extproc.endpoint import Candidate
from extproc.parsing import first_user_message
from extproc.pool import candidate_builder, snapshot
from extproc.pool.conversations import ConversationTracker
from extproc.pool.snapshot import EndpointSnapshot
from extproc.pool.store import PoolStore
from extproc.prefix_cache import blocks, cache_model
from extproc.prefix_cache.index import PrefixIndex
from extproc.request import BYTES_PER_TOKEN, InferenceRequest
from extproc.routing import admission, eligibility, rendezvous_affinity, routing_config
from extproc.scheduling.context import SchedulingContext
from extproc.scheduling.framework import Signal
from extproc.scheduling.profile import SchedulerProfile


class PrefixMatcher:
    """Looks prompts up in the index for the members of a fleet.

    Args:
        fleet: Whose members.
        index: Predicted prefix blocks per endpoint.
    """

    def __init__(self, fleet: PoolStore, index: PrefixIndex) -> None:
        self._fleet = fleet
        self._index = index
        self._slots: Mapping[str, int] = {}
        self._slots_in_order: Sequence[int] = ()
        self._slots_of: object = None

    def match(
        self, chain: Sequence[int], members: Sequence[EndpointSnapshot], tokens: Sequence[int]
    ) -> Sequence[int]:
        """Predicted cached prompt tokens per member.

        Args:
            chain: The prompt's block hashes, root first.
            members: Endpoints to match.
            tokens: By depth in the chain.
        """
        if not chain:
            return [0] * len(members)
        self._follow_pool()
        depths = self._index.match(chain)
        if members is self._fleet.pool.members:
            return [tokens[depths[slot]] for slot in self._slots_in_order]
        slots = self._slots
        return [tokens[depths[slots[member.endpoint.address]]] for member in members]

    def _follow_pool(self) -> None:
        """Look index slots up again when the endpoint set changed."""
        pool = self._fleet.pool
        if self._slots_of is not pool.positions:
            self._slots_of = pool.positions
            self._slots_in_order = [
                self._index.slot(cache_model.index_key(member.endpoint)) for member in pool.members
            ]
            self._slots = dict(zip(pool.positions, self._slots_in_order, strict=True))


class Scheduler:
    """Chooses endpoints for parsed and hashed requests, without charging them.

    Args:
        fleet: Endpoints and loads.
        index: Predicted prefix blocks per endpoint.
        recurrence: Conversations of the pool; only read.
        schedule: How prompts are cut into blocks.
        rng: All chance there is.
    """

    def __init__(
        self,
        fleet: PoolStore,
        index: PrefixIndex,
        recurrence: ConversationTracker,
        *,
        schedule: blocks.Schedule,
        rng: random.Random,
    ) -> None:
        self._fleet = fleet
        self._prefix_matcher = PrefixMatcher(fleet, index)
        self._recurrence = recurrence
        self._schedule = schedule
        self._imputer = candidate_builder.Imputer()
        self._rng = rng
        # Until then others leave more room, because a request of a priority above 0 came.
        self._shared_until = -math.inf

    def adopt(self, routing: routing_config.RoutingConfig) -> None:
        """Choose by another configuration from the next request on."""
        self._routing = routing
        self._settings = routing.settings
        self._read_opening = (
            first_user_message.first_user_message
            if Signal.FIRST_USER_MESSAGE in routing.needs
            else first_user_message.no_message
        )
        self._homing = Signal.CONVERSATIONS in routing.needs

    def schedule(
        self,
        request: InferenceRequest,
        now: float,
        *,
        chain: Sequence[int],
        headers: Mapping[str, str],
        patient: bool,
        prompted: Callable[[], InferenceRequest] | None = None,
    ) -> Outcome:
        """See `Director.choose`; `prompted` supplies the request with its prompt."""
        pool = self._fleet.pool
        read_opening: Callable[[InferenceRequest], str] = self._read_opening
        if prompted is not None and not request.prompt:
            read_opening = _lazy_first_user_message(read_opening, prompted)
        eligible = self._find_eligible(pool, request, now)
        if isinstance(eligible, Rejection):
            return eligible
        members = eligible.members
        request, ratio = self._counted(request)
        adapter = request.adapter or (request.model if request.model in pool.adapters else "")
        matched = self._prefix_matcher.match(chain, members, self._schedule.tokens_at(ratio))
        home, learned = None, (0.0, 0.0, 0.0, 0.0)
        if self._homing:
            peers, known = self._fleet.foreign_traffic, self._recurrence
            others, home = peers.share, known.last_endpoint(chain)
            learned = (
                known.continuation_ratio,
                known.expected_growth_tokens(request.prompt_tokens),
                others,
                known.idle_per_open(others),
            )
            if chain and others >= rendezvous_affinity.LEAST_SHARE:
                key = request.session or read_opening(request)
                matched, at = rendezvous_affinity.with_expected_hits(
                    key, request.prompt_tokens, members, matched=matched, peers=peers
                )
                # Where our own last turn of it went, the others do not know.
                home = home if at is None else members[at].account
        candidates = candidate_builder.build_candidates(
            members,
            matched,
            adapter=adapter,
            adapters=pool.adapters,
            now=now,
            imputation=self._imputer.impute(
                members, oldest=now - self._settings.stale_after_s, is_patchy=pool.is_patchy
            ),
            home=home,
        )
        routing = self._routing
        profile = routing.by_model.get(request.model, routing.profile)
        if request.priority < 0 and admission.saturated(profile, candidates):
            return sheddable_dropped()
        turn = SchedulingContext(
            request, now, self._rng, headers, chain, read_opening, adapter, *learned
        )
        outcome = self._run(profile, turn, candidates, patient=patient)
        if isinstance(outcome, Rejection) or eligible.nothing_excluded:
            return outcome
        return msgspec.structs.replace(
            outcome,
            excluded_by_model=eligible.excluded_by_model,
            model_unlisted=eligible.model_unlisted,
            excluded_by_health=eligible.excluded_by_health,
        )

    def _find_eligible(
        self, pool: snapshot.Pool, request: InferenceRequest, now: float
    ) -> eligibility.EligibleEndpoints | Rejection:
        """Find the eligible endpoints, or return the rejection."""
        return eligibility.find_eligible(
            pool,
            request,
            respect_subset=self._settings.respect_subset,
            reject_unlisted=self._settings.reject_unlisted,
            health=self._fleet.outlier_detector.settings,
            now=now,
            rng=self._rng,
        )

    def _run(
        self,
        profile: SchedulerProfile,
        turn: SchedulingContext,
        candidates: Sequence[Candidate],
        *,
        patient: bool,
    ) -> Outcome:
        """Run a profile, limited to free endpoints where requests may queue."""
        count = 1 + self._settings.fallbacks
        if self._settings.busy_s is None:
            return profile.run(turn, candidates, count=count)
        if turn.request.priority > 0:
            self._shared_until = turn.now + admission.REMEMBERED_S
        return admission.admit(
            lambda some: profile.run(turn, some, count=count),
            candidates,
            self._settings.busy_s,
            priority=turn.request.priority,
            patient=patient,
            shared=turn.now < self._shared_until,
        )

    def _counted(self, request: InferenceRequest) -> tuple[InferenceRequest, float]:
        """The request with its token count, and the bytes per token of its model."""
        ratio = self._fleet.bytes_per_token.ratio_for(request.target, request.prompt_bytes)
        if ratio != BYTES_PER_TOKEN:
            tokens = max(1, round(request.prompt_bytes / ratio))
            request = msgspec.structs.replace(request, prompt_tokens=tokens)
        return request, ratio

    def estimate_cached_tokens(
        self, member: snapshot.EndpointSnapshot, chain: Sequence[int], *, bytes_per_token: float
    ) -> int:
        """Prompt tokens of a chain that are predicted as cached on an endpoint."""
        tokens = self._schedule.tokens_at(bytes_per_token)
        return self._prefix_matcher.match(chain, (member,), tokens)[0]


def _lazy_first_user_message(
    read: Callable[[InferenceRequest], str], prompted: Callable[[], InferenceRequest]
) -> Callable[[InferenceRequest], str]:
    """Read the first user message of a request whose prompt was dropped."""
    return lambda _: read(prompted())
