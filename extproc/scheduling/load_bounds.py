"""Filters of bounds on load: of the engine's page or this picker's own account."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar, Literal

import msgspec

from extproc.endpoint import Candidate
from extproc.scheduling import attributes, framework
from extproc.scheduling.framework import (
    NonNegative,
    PluginParameters,
    SchedulingContext,
    Share,
    Signal,
    UpstreamParameters,
)


class QueueRange(PluginParameters, frozen=True, kw_only=True):
    """Keeps a candidate when `w <= low + (high - low) // n`.

    w is waiting requests, low and high the extremes and n the number of the candidates that came in
    (docs/spec/prior-systems.md#filter-tree, "least queuing"). The division is of whole numbers, so
    with small spans only the shortest queues stay: of 0, 3 and 10 the limit 3 keeps 0 and 3, of 0
    and 3 the limit 1 keeps 0. An unknown queue counts as the mean of the known ones.
    """

    kind: ClassVar[str] = "queue-range"
    needs: ClassVar[frozenset[Signal]] = frozenset({Signal.WAITING})

    def filter(
        self, context: SchedulingContext, candidates: Sequence[Candidate]
    ) -> Sequence[Candidate]:
        waiting = framework.impute_mean([c.load.waiting for c in candidates])
        if not waiting:
            return candidates
        low = min(waiting)
        limit = low + (max(waiting) - low) // len(waiting)
        return [c for c, w in zip(candidates, waiting, strict=True) if w <= limit]


class KvRange(PluginParameters, frozen=True, kw_only=True):
    """Keeps a candidate when `u <= low + (high - low) / n`.

    u is KV usage, low and high the extremes and n the number of the candidates that came in
    (docs/spec/prior-systems.md#filter-tree, "least KV cache"). An unknown usage counts as the mean
    of the known ones.
    """

    kind: ClassVar[str] = "kv-range"
    needs: ClassVar[frozenset[Signal]] = frozenset({Signal.KV_USAGE})

    def filter(
        self, context: SchedulingContext, candidates: Sequence[Candidate]
    ) -> Sequence[Candidate]:
        usage = framework.impute_mean([c.load.kv_usage for c in candidates])
        if not usage:
            return candidates
        low = min(usage)
        limit = low + (max(usage) - low) / len(usage)
        return [c for c, u in zip(candidates, usage, strict=True) if u <= limit]


class LowLatency(PluginParameters, frozen=True, kw_only=True):
    """Keeps a candidate when `waiting < below_waiting_requests`; none when no queue is so short.

    For the nodes of a tree, where no candidate left means the failure branch. An unknown queue counts as
    the mean of the known ones.

    Attributes:
        below_waiting_requests: The first length that is too long. 50 is the bound of the first
            gateway's filter tree (docs/spec/prior-systems.md#filter-tree), 128 that of its later
            one.
    """

    kind: ClassVar[str] = "low-latency"
    needs: ClassVar[frozenset[Signal]] = frozenset({Signal.WAITING})

    below_waiting_requests: NonNegative = 50.0

    def filter(
        self, context: SchedulingContext, candidates: Sequence[Candidate]
    ) -> Sequence[Candidate]:
        waiting = framework.impute_mean([c.load.waiting for c in candidates])
        if waiting is None:
            return candidates
        bound = self.below_waiting_requests
        return [c for c, w in zip(candidates, waiting, strict=True) if w < bound]


class MaxWaiting(PluginParameters, frozen=True, kw_only=True):
    """Keeps candidates with `waiting <= max_waiting_requests`; all if no queue is known.

    When every candidate is over the bound it keeps none, and the client gets 429
    (retry later): a bound that gives way when it is needed is no bound. Use a scorer to merely prefer short
    queues.

    Attributes:
        max_waiting_requests: Longest queue that still takes more. 50 is the bound of the first
            llm-instance-gateway filter tree, far above what an engine that keeps up shows.
    """

    kind: ClassVar[str] = "max-waiting"
    needs: ClassVar[frozenset[Signal]] = frozenset({Signal.WAITING})

    max_waiting_requests: NonNegative = 50.0

    def filter(
        self, context: SchedulingContext, candidates: Sequence[Candidate]
    ) -> Sequence[Candidate]:
        bound = self.max_waiting_requests
        return [c for c in candidates if c.load.waiting is None or c.load.waiting <= bound]


class SheddableCapacity(PluginParameters, frozen=True, kw_only=True):
    """Keeps a candidate when `waiting <= max_waiting_requests` and `kv_usage <= max_kv_usage`.

    It reads nothing of the request: a tree sends it those that may be refused. An unknown value
    counts as the mean of the known ones, and passes where none is known.

    Attributes:
        max_waiting_requests: Longest queue that is not yet full use. 5 is the bound of the first
            gateway's filter tree (docs/spec/prior-systems.md#filter-tree).
        max_kv_usage: Highest KV usage, 0..1. 0.8 is its bound there; above, requests that run soon
            push each other out.
    """

    kind: ClassVar[str] = "sheddable-capacity"
    needs: ClassVar[frozenset[Signal]] = frozenset({Signal.WAITING, Signal.KV_USAGE})

    max_waiting_requests: NonNegative = 5.0
    max_kv_usage: Share = 0.8

    def filter(
        self, context: SchedulingContext, candidates: Sequence[Candidate]
    ) -> Sequence[Candidate]:
        nothing = [0.0] * len(candidates)
        waiting = framework.impute_mean([c.load.waiting for c in candidates]) or nothing
        usage = framework.impute_mean([c.load.kv_usage for c in candidates]) or nothing
        return [
            c
            for c, w, u in zip(candidates, waiting, usage, strict=True)
            if w <= self.max_waiting_requests and u <= self.max_kv_usage
        ]


class TopK(PluginParameters, frozen=True, kw_only=True):
    """Keeps the `k` candidates with the least value, and all equal to the last of them.

    Equals stay because a filter has no chance to draw by: the picker chooses
    among them. An unknown value counts as the mean of the known ones.

    Attributes:
        by: The value: waiting requests, or KV usage.
        k: How many. 3 is the default of the filter of that name in the gateway's downstream branch
            (docs/spec/prior-systems.md#single-strategies): a few, so that pickers with the same
            stale scrape do not all send to one endpoint.
    """

    kind: ClassVar[str] = "top-k"

    by: Literal["waiting", "kv_usage"] = "waiting"
    k: Annotated[int, msgspec.Meta(ge=1)] = 3

    @property
    def needs(self) -> frozenset[Signal]:
        """The value it goes by."""
        return frozenset({Signal(self.by)})

    def filter(
        self, context: SchedulingContext, candidates: Sequence[Candidate]
    ) -> Sequence[Candidate]:
        if self.by == "waiting":
            values = framework.impute_mean([c.load.waiting for c in candidates])
        else:
            values = framework.impute_mean([c.load.kv_usage for c in candidates])
        if not values or len(values) <= self.k:
            return candidates
        limit = min(values) if self.k == 1 else sorted(values)[self.k - 1]
        return [c for c, value in zip(candidates, values, strict=True) if value <= limit]


_READ: Mapping[str, attributes.Attribute] = {
    "active-requests": attributes.find("in_flight"),
    "running-requests": attributes.find("running"),
    "waiting-queue": attributes.find("waiting"),
    "kv-cache-utilization": attributes.find("kv_usage"),
}


class UtilizationCondition(UpstreamParameters, frozen=True, kw_only=True):
    """One bound.

    Attributes:
        metric: What is bounded: our own open requests, the engine's running or waiting ones, or
            the share of KV blocks held by live requests.
        max_value: Greatest value that passes; a share of at most 1 for the last.
    """

    metric: Literal["active-requests", "running-requests", "waiting-queue", "kv-cache-utilization"]
    max_value: NonNegative

    def __post_init__(self) -> None:
        """Refuse a percentage.

        Raises:
            ValueError: A share above 1.
        """
        if self.metric == "kv-cache-utilization" and self.max_value > 1.0:
            raise ValueError(
                f"expected a maxValue of at most 1 for kv-cache-utilization, got {self.max_value}"
            )


class UtilizationFilter(UpstreamParameters, frozen=True, kw_only=True):
    """Keeps a candidate when `value <= maxValue` in every condition.

    An unknown value counts as the mean of the known ones, and passes where none is known. Upstream:
    `filter/utilization/filter.go`.

    Attributes:
        conditions: The bounds, at least one.
        fallback_on_empty: Keep all when none passes. False, the upstream default, refuses the
            request.
    """

    kind: ClassVar[str] = "utilization-filter"

    conditions: Annotated[tuple[UtilizationCondition, ...], msgspec.Meta(min_length=1)]
    fallback_on_empty: bool = False

    @property
    def needs(self) -> frozenset[Signal]:
        """Signals that the conditions read."""
        return frozenset(_READ[condition.metric].signal for condition in self.conditions)

    def filter(
        self, context: SchedulingContext, candidates: Sequence[Candidate]
    ) -> Sequence[Candidate]:
        bounds = [
            (_READ[condition.metric].read, condition.max_value) for condition in self.conditions
        ]
        passing = [
            c
            for c in candidates
            if all((value := read(c)) is None or value <= bound for read, bound in bounds)
        ]
        return candidates if not passing and self.fallback_on_empty else passing


class UtilizationDetector(UpstreamParameters, frozen=True, kw_only=True):
    """Keeps candidates with `w < Q * (1 + h)` and `u < min(1, K * (1 + h))`; all if none passes.

    w is the engine's waiting requests and u the share of KV blocks held by live requests. Unknown
    values count as the mean of the known ones, and pass where none is known; the upstream detector
    takes them for full, so that a late scrape stops an endpoint. Upstream:
    `../flowcontrol/saturationdetector/utilization/detector.go`.

    Attributes:
        queue_depth_threshold: Q, waiting requests. 5 is the upstream default.
        kv_cache_util_threshold: K, used share of the KV cache, 0 to 1. 0.8 is the upstream default.
        headroom: h, share by which both thresholds may be exceeded, 0 or more.
    """

    kind: ClassVar[str] = "utilization-detector"
    needs: ClassVar[frozenset[Signal]] = frozenset({Signal.WAITING, Signal.KV_USAGE})

    queue_depth_threshold: Annotated[int, msgspec.Meta(gt=0)] = 5
    kv_cache_util_threshold: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.8
    headroom: NonNegative = 0.0

    def filter(
        self, context: SchedulingContext, candidates: Sequence[Candidate]
    ) -> Sequence[Candidate]:
        return [c for c in candidates if not self.is_saturated(c)] or candidates

    def is_saturated(self, candidate: Candidate) -> bool:
        """See `framework.SaturationDetector`."""
        load = candidate.load
        if load.waiting is not None:
            queue = self.queue_depth_threshold * (1.0 + self.headroom)
            if load.waiting >= queue:
                return True
        if load.kv_usage is None:
            return False
        return load.kv_usage >= min(1.0, self.kv_cache_util_threshold * (1.0 + self.headroom))

    def saturation(self, candidate: Candidate) -> float:
        """The larger of `w / Q` and `u / K`, 0 where neither is known."""
        load = candidate.load
        return max(
            (load.waiting or 0.0) / self.queue_depth_threshold,
            (load.kv_usage or 0.0) / self.kv_cache_util_threshold,
        )


class ConcurrencyDetector(UpstreamParameters, frozen=True, kw_only=True):
    """Keeps a candidate when `n < maxConcurrency * (1 + headroom)`; none left refuses with 429.

    n is the requests this picker has open there. In tokens mode it is the uncached prompt tokens
    not yet computed, held against `maxTokenConcurrency`; hybrid wants both. Bounds are whole
    numbers, rounded down. Both counts are always known. Upstream:
    `../flowcontrol/saturationdetector/concurrency/detector.go`.

    Attributes:
        concurrency_mode: `requests`, `tokens` or `hybrid`.
        max_concurrency: Requests. 100 is the upstream default.
        max_token_concurrency: Tokens. 1000000 is the upstream default.
        headroom: Share by which the bound may be exceeded, 0 or more.
    """

    kind: ClassVar[str] = "concurrency-detector"
    needs: ClassVar[frozenset[Signal]] = frozenset({Signal.IN_FLIGHT, Signal.QUEUED})

    concurrency_mode: Literal["requests", "tokens", "hybrid"] = "requests"
    max_concurrency: Annotated[int, msgspec.Meta(gt=0)] = 100
    max_token_concurrency: Annotated[int, msgspec.Meta(gt=0)] = 1_000_000
    headroom: NonNegative = 0.0

    def filter(
        self, context: SchedulingContext, candidates: Sequence[Candidate]
    ) -> Sequence[Candidate]:
        return [c for c in candidates if not self.is_saturated(c)]

    def is_saturated(self, candidate: Candidate) -> bool:
        """See `framework.SaturationDetector`."""
        mode = self.concurrency_mode
        if mode != "tokens":
            requests = int(self.max_concurrency * (1.0 + self.headroom))
            if candidate.in_flight >= requests:
                return True
        if mode == "requests":
            return False
        return candidate.queued_tokens >= int(self.max_token_concurrency * (1.0 + self.headroom))

    def saturation(self, candidate: Candidate) -> float:
        """The counts over their bounds without headroom; in hybrid mode the larger of both."""
        requests = candidate.in_flight / self.max_concurrency
        tokens = candidate.queued_tokens / self.max_token_concurrency
        if self.concurrency_mode == "hybrid":
            return max(requests, tokens)
        return tokens if self.concurrency_mode == "tokens" else requests


class SaturationRules(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Detectors that say when requests with a priority below 0 are refused, whatever the profile.

    They are refused while the mean saturation of the candidates is 1 or more by one of them. Without
    any they are not.

    Attributes:
        utilization: By waiting requests and KV cache usage, such as `{queueDepthThreshold: 5,
            kvCacheUtilThreshold: 0.8}`. Null: not by these.
        concurrency: By open requests of this picker, such as `{maxConcurrency: 100}`. Null: not by
            these.
    """

    utilization: UtilizationDetector | None = None
    concurrency: ConcurrencyDetector | None = None

    @property
    def detectors(self) -> tuple[UtilizationDetector | ConcurrencyDetector, ...]:
        """The detectors that are configured."""
        detectors = self.utilization, self.concurrency
        return tuple(detector for detector in detectors if detector is not None)

    def saturation(self, candidates: Sequence[Candidate]) -> float:
        """Mean saturation of the candidates, at least one, by the detector that says most; 0 for none."""
        totals = [sum(map(detector.saturation, candidates)) for detector in self.detectors]
        return max(totals, default=0.0) / len(candidates)

    def is_saturated(self, candidates: Sequence[Candidate]) -> bool:
        """True if the candidates, at least one, are saturated on average."""
        return self.saturation(candidates) >= 1.0
