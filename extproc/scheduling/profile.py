"""Scheduler profile: filters, scores and picks among the candidates of a request.

A plugin that raises, or answers something that cannot be right, costs its own contribution and
nothing else: the filter passes all candidates, the scorer is left out, the pick goes to the fewest
requests in flight. The decision then says so in `degraded`.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from functools import cached_property

import msgspec

from extproc import decision
from extproc.decision import (
    CostResult,
    Decision,
    FilterResult,
    FilterTreeStep,
    Rejection,
    ScorerResult,
)
from extproc.endpoint import Candidate, Endpoint
from extproc.errors import ConfigError
from extproc.scheduling.framework import (
    NEUTRAL,
    BypassedError,
    CostModel,
    Filter,
    Observer,
    Picker,
    Plugin,
    RequestKeyProvider,
    ResponseHeaderProvider,
    SaturationDetector,
    SchedulingContext,
    Scorer,
    Signal,
    TracedFilter,
)

_NONE_FILTERED: Sequence[FilterResult] = ()
_NO_HEADERS: Sequence[tuple[str, str]] = ()


class InvalidPluginResultError(Exception):
    """A plugin answered, and its answer cannot be used; never leaves this module."""


class SchedulerProfile(msgspec.Struct, frozen=True, dict=True):
    """Scheduling profile: filters, weighted scorers or a cost model, and a picker.

    Totals are sums of weight times score; only ratios of weights matter. Where there is a cost
    model, totals are its negated costs, and scorers are recorded without counting.

    Attributes:
        name: Name in decisions and metrics.
        filters: Run in order, each on what the one before left.
        scorers: Each with its weight, 0 or more; 0 records the score without letting it count.
        picker: Chooses among the scored candidates.
        cost: Judges candidates in one unit in place of the scorers; None for none.
    """

    name: str
    filters: tuple[Filter, ...]
    scorers: tuple[tuple[Scorer, float], ...]
    picker: Picker
    cost: CostModel | None = None

    def __post_init__(self) -> None:
        """Refuse weights that cannot be summed.

        Raises:
            ConfigError: A weight is negative or not finite.
        """
        for scorer, weight in self.scorers:
            if not 0.0 <= weight < math.inf:
                raise ConfigError(
                    f"profile {self.name}, scorer {scorer.kind}",
                    wanted="a finite weight of 0 or more",
                    got=str(weight),
                    fix="to make a scorer count against, change its formula",
                )

    @property
    def needs(self) -> frozenset[Signal]:
        """Every signal its plugins read."""
        return frozenset().union(*(plugin.needs for plugin in self.plugins))

    @property
    def plugins(self) -> tuple[Plugin, ...]:
        """Every plugin, in the order they run."""
        cost = () if self.cost is None else (self.cost,)
        return (*self.filters, *(scorer for scorer, _ in self.scorers), *cost, self.picker)

    @cached_property
    def observers(self) -> tuple[Observer, ...]:
        """The plugins that want to know what was chosen."""
        return tuple(plugin for plugin in self.plugins if isinstance(plugin, Observer))

    @cached_property
    def trees(self) -> tuple[TracedFilter | None, ...]:
        """The filters again, those that run others; None in the place of all the others."""
        return tuple(
            plugin if isinstance(plugin, TracedFilter) else None for plugin in self.filters
        )

    @cached_property
    def request_key_providers(self) -> tuple[RequestKeyProvider, ...]:
        """The plugins that remember by more than a decision holds."""
        return tuple(plugin for plugin in self.plugins if isinstance(plugin, RequestKeyProvider))

    @cached_property
    def response_header_providers(self) -> tuple[ResponseHeaderProvider, ...]:
        """The plugins that add headers to the answer."""
        return tuple(
            plugin for plugin in self.plugins if isinstance(plugin, ResponseHeaderProvider)
        )

    @cached_property
    def detectors(self) -> tuple[SaturationDetector, ...]:
        """The filters that know when an endpoint is full."""
        return tuple(plugin for plugin in self.filters if isinstance(plugin, SaturationDetector))

    @cached_property
    def max_endpoints(self) -> int:
        """Number of endpoints its picker names (upstream's `maxNumOfEndpoints`)."""
        width: int = getattr(self.picker, "max_num_of_endpoints", 1)
        return width

    def run(
        self, context: SchedulingContext, candidates: Sequence[Candidate], *, count: int = 1
    ) -> Decision | Rejection:
        """Choose an endpoint and its fallbacks; 429 when the filters leave no candidate.

        Args:
            candidates: Eligible endpoints; without any the result is a 503.
            count: Endpoints to return at most, fallbacks included; `max_endpoints` where that is
                more.
        """
        if not candidates:
            return decision.NO_ENDPOINTS
        errors: list[str] = []
        remaining_candidates, filtered = candidates, _NONE_FILTERED
        if self.filters:
            remaining_candidates, filtered = self._filter(context, candidates, errors)
            if not remaining_candidates:
                return decision.SATURATED
        scored: Sequence[ScorerResult] = ()
        totals: Sequence[float] = [0.0] * len(remaining_candidates)
        if self.scorers:
            scored, totals = self._score(context, remaining_candidates, errors)
        priced = None
        if self.cost is not None:
            priced, totals = self._cost(self.cost, context, remaining_candidates, errors, totals)
        if self.max_endpoints > count:  # noqa: PLR1730 - a call
            count = self.max_endpoints
        pick = self._pick if count == 1 else self._pick_engines
        order = pick(context, remaining_candidates, totals, count, errors)
        chosen = remaining_candidates[order[0]]
        keys, answer_headers = decision.NO_KEYS, _NO_HEADERS
        if self.request_key_providers or self.response_header_providers:
            keys, answer_headers = self._notify_observers(context, chosen.endpoint, errors)
        endpoints = [chosen.endpoint]
        if len(order) > 1:
            endpoints = [remaining_candidates[i].endpoint for i in order]
        # By position: sixteen keywords take three times as long.
        return Decision(
            context.request,
            endpoints,
            self.name,
            candidates,
            filtered,
            remaining_candidates,
            scored,
            priced,
            totals,
            self.picker.kind,
            context.blocks,
            chosen.matched_tokens,
            answer_headers,
            keys,
            "; ".join(errors) if errors else "",
            conversation_stats=(
                context.continuation_ratio,
                context.expected_growth_tokens,
                context.foreign_share,
                context.idle_conversations_per_open,
            ),
            affinity_seed=context.known_seed,
        )

    def fits_any(self, context: SchedulingContext, candidates: Sequence[Candidate]) -> bool:
        """True if a candidate passes the filters that read labels alone, such as those of roles."""
        fixed = [plugin for plugin in self.filters if plugin.needs == {Signal.LABELS}]
        alone = msgspec.structs.replace(self, filters=tuple(fixed))
        return bool(alone._filter(context, candidates, [])[0])  # noqa: SLF001 - of this class

    def find_fallbacks(
        self,
        context: SchedulingContext,
        candidates: Sequence[Candidate],
        chosen: Endpoint,
        *,
        count: int,
    ) -> Sequence[Endpoint]:
        """Choose fallbacks of an endpoint that is none of the candidates.

        Args:
            count: Endpoints to return at most; `max_endpoints` less one where that is more.
        """
        count = max(count, self.max_endpoints - 1)
        candidates = [c for c in candidates if _is_fallback(c.endpoint, chosen)]
        if not count or not candidates:
            return ()
        outcome = self.run(context, candidates, count=count)
        return outcome.endpoints[:count] if isinstance(outcome, Decision) else ()

    def _filter(
        self, context: SchedulingContext, candidates: Sequence[Candidate], errors: list[str]
    ) -> tuple[Sequence[Candidate], Sequence[FilterResult]]:
        """Run the filters in order, until no candidate is left."""
        steps: list[FilterResult] = []
        for plugin, tree in zip(self.filters, self.trees, strict=True):
            branches: Sequence[FilterTreeStep] = ()
            try:
                if tree is None:
                    remaining = plugin.filter(context, candidates)
                else:
                    remaining, branches = tree.walk(context, candidates)
                candidates = _check_filtered(remaining, candidates)
            except Exception as error:  # noqa: BLE001 - a plugin's bug must not fail the request
                errors.append(_describe_error("filter", plugin, error))
            steps.append(FilterResult(plugin.kind, candidates, branches))
            if not candidates:
                break
        return candidates, steps

    def _score(
        self, context: SchedulingContext, candidates: Sequence[Candidate], errors: list[str]
    ) -> tuple[Sequence[ScorerResult], Sequence[float]]:
        """Run the scorers; their weighted sum."""
        steps: list[ScorerResult] = []
        totals: list[float] = []
        for plugin, weight in self.scorers:
            try:
                scores = plugin.score(context, candidates)
                # A comparison with NaN is false.
                if len(scores) != len(candidates) or [s for s in scores if not 0.0 <= s <= 1.0]:
                    scores = _clip_scores(scores, len(candidates))
            except Exception as error:  # noqa: BLE001 - a plugin's bug must not fail the request
                errors.append(_describe_error("scorer", plugin, error))
                continue
            steps.append(ScorerResult(plugin.kind, weight, scores))
            if totals:
                totals = [t + weight * s for t, s in zip(totals, scores, strict=True)]
            else:
                totals = [weight * s for s in scores]
        return steps, totals or [0.0] * len(candidates)

    def _cost(
        self,
        cost: CostModel,
        context: SchedulingContext,
        candidates: Sequence[Candidate],
        errors: list[str],
        totals: Sequence[float],
    ) -> tuple[CostResult | None, Sequence[float]]:
        """Run the cost model; the negated costs, or the totals as they were if it fails."""
        try:
            priced = cost.cost(context, candidates)
            negated = [*map(operator.neg, priced.costs)]
            if len(negated) != len(candidates) or not math.isfinite(sum(negated)):
                raise InvalidPluginResultError  # noqa: TRY301 - the same way out as the plugin's own
        except Exception as error:  # noqa: BLE001 - a plugin's bug must not fail the request
            errors.append(_describe_error("cost", cost, error))
            return None, totals
        return priced, negated

    def _pick_engines(
        self,
        context: SchedulingContext,
        candidates: Sequence[Candidate],
        totals: Sequence[float],
        count: int,
        errors: list[str],
    ) -> Sequence[int]:
        """Pick, with at most one data-parallel rank of an engine."""
        if all(c.endpoint.rank is None for c in candidates):
            return self._pick(context, candidates, totals, count, errors)
        order = self._pick(context, candidates, totals, len(candidates), errors)
        return _distinct_engines(candidates, order)[:count]

    def _pick(
        self,
        context: SchedulingContext,
        candidates: Sequence[Candidate],
        totals: Sequence[float],
        count: int,
        errors: list[str],
    ) -> list[int]:
        """Run the picker; in its place the fewest requests in flight, equals by address."""
        try:
            order = self.picker.pick(context, candidates, totals, count=count)
            if len(order) != 1 or not 0 <= order[0] < len(candidates):
                _check_picked(order, candidates, count)
        except Exception as error:  # noqa: BLE001 - a plugin's bug must not fail the request
            errors.append(_describe_error("picker", self.picker, error))
        else:
            return order
        order = sorted(
            range(len(candidates)),
            key=lambda i: (candidates[i].in_flight, candidates[i].endpoint.address),
        )
        return order[:count]

    def _notify_observers(
        self, context: SchedulingContext, chosen: Endpoint, errors: list[str]
    ) -> tuple[Mapping[str, str], Sequence[tuple[str, str]]]:
        """Collect the keys and the response headers of plugins."""
        keys = self.find_keys(context, errors)
        headers: dict[str, str] = {}
        for answerer in self.response_header_providers:
            try:
                headers |= answerer.answer_headers(context, chosen)
            except Exception as error:  # noqa: BLE001 - a plugin's bug must not fail the request
                errors.append(_describe_error("answer of", answerer, error))
        return keys, tuple(headers.items())

    def find_keys(self, context: SchedulingContext, errors: list[str]) -> Mapping[str, str]:
        """Find the keys by which plugins with a memory recognize the request.

        Args:
            errors: A note of each plugin that raises is added.
        """
        keys: dict[str, str] = {}
        for keyed in self.request_key_providers:
            try:
                keys |= keyed.keys(context)
            except Exception as error:  # noqa: BLE001 - a plugin's bug must not fail the request
                errors.append(_describe_error("keys of", keyed, error))
        return keys


class HeaderProfiles(msgspec.Struct, frozen=True):
    """Profiles of a pool of which a header of each request names one.

    Attributes:
        header: Name of the header, in lower case.
        profiles: Profiles by name.
    """

    header: str
    profiles: Mapping[str, SchedulerProfile]

    def find_name(self, headers: Mapping[str, str]) -> str:
        """The name that the header has; empty without one."""
        return headers.get(self.header, "").strip()

    def choose(
        self, headers: Mapping[str, str], default: SchedulerProfile
    ) -> SchedulerProfile | Rejection:
        """The profile that the header names; `default` without one, 400 for an unknown one."""
        name = self.find_name(headers)
        if not name:
            return default
        if name in self.profiles:
            return self.profiles[name]
        known = ", ".join(sorted(self.profiles))
        message = f"{self.header} names no scheduling profile; there are: {known}"
        return Rejection(400, message, cause="unknown-profile")


def _distinct_engines(candidates: Sequence[Candidate], order: Sequence[int]) -> list[int]:
    """The first endpoint, and of those after it one per engine.

    A data plane that falls back sends the rank of the first endpoint along, so of another engine
    it is the rank of that number; one without it is left out.

    Args:
        order: Indexes of candidates, best first.
    """
    chosen = candidates[order[0]].endpoint
    by_engine = {chosen.host_port: order[0]}
    for i in order:
        endpoint = candidates[i].endpoint
        if _is_fallback(endpoint, chosen):
            by_engine.setdefault(endpoint.host_port, i)
    return list(by_engine.values())


def _is_fallback(endpoint: Endpoint, chosen: Endpoint) -> bool:
    """True if an endpoint is of another engine, and of the same rank if the chosen one has a rank."""
    if endpoint.host_port == chosen.host_port:
        return False
    rank = endpoint.rank
    return chosen.rank is None or (rank is not None and rank.index == chosen.rank.index)


def _describe_error(what: str, plugin: object, error: Exception) -> str:
    """A note of what went wrong; without the message, which may quote the prompt."""
    kind = getattr(plugin, "kind", type(plugin).__name__)
    if isinstance(error, BypassedError):
        return f"{what} {kind} bypassed"
    return f"{what} {kind} raised {type(error).__name__}"


def _check_filtered(
    remaining: Sequence[Candidate], candidates: Sequence[Candidate]
) -> Sequence[Candidate]:
    """Check that a filter returned only candidates of its input, and each of them once."""
    if remaining is candidates:
        return candidates
    remaining = list(remaining)
    known = {id(candidate) for candidate in candidates}
    remaining_ids = {id(candidate) for candidate in remaining}
    if not remaining_ids <= known or len(remaining_ids) < len(remaining):
        raise InvalidPluginResultError
    return remaining


def _clip_scores(scores: Sequence[float], length: int) -> list[float]:
    """Scores cut to 0..1; what is not a number becomes the mean of the others."""
    if len(scores) != length:
        raise InvalidPluginResultError
    cut = [score if math.isnan(score) else min(1.0, max(0.0, score)) for score in scores]
    known = [score for score in cut if not math.isnan(score)]
    mean = sum(known) / len(known) if known else NEUTRAL
    return [mean if math.isnan(score) else score for score in cut]


def _check_picked(order: Sequence[int], candidates: Sequence[Candidate], count: int) -> None:
    """Check that a pick is not empty, has no duplicates, and only valid positions."""
    inside = all(0 <= i < len(candidates) for i in order)
    if not inside or not 1 <= len(order) <= count or len(set(order)) < len(order):
        raise InvalidPluginResultError
