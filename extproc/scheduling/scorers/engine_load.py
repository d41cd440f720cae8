"""Scorers of scraped engine load: waiting and running requests, KV cache usage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar

import msgspec

from extproc.endpoint import Candidate
from extproc.scheduling import normalization
from extproc.scheduling.framework import SchedulingContext, Signal


class QueueScorer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`score = 1 - (w - low) / max(high - low, min_span_requests)`, w the engine's waiting requests.

    low and high are the least and greatest w among the candidates; all equal scores 1. Range 0 to
    1. Unknown w counts as the mean of the known ones, none known scores 0.5; the upstream picker
    takes 0 for unknown. Upstream: `scorer/queuedepth/queue.go`.

    Attributes:
        min_span_requests: Spread of queues below which differences fade. 1 is the upstream
            formula `(high - w) / (high - low)`, in which one waiting request more costs the whole
            score.
    """

    kind: ClassVar[str] = "queue-scorer"
    needs: ClassVar[frozenset[Signal]] = frozenset({Signal.WAITING})

    min_span_requests: float = 1.0

    def __post_init__(self) -> None:
        """Refuse a span that could divide by zero.

        Raises:
            ValueError: `min_span_requests` is not above zero.
        """
        if not self.min_span_requests > 0:
            raise ValueError(f"expected min_span_requests above 0, got {self.min_span_requests}")

    def score(self, context: SchedulingContext, candidates: Sequence[Candidate]) -> list[float]:
        """See the class."""
        waiting = normalization.impute_mean([c.load.waiting for c in candidates])
        if not waiting:
            return [normalization.NEUTRAL] * len(candidates)
        low = min(waiting)
        span = max(max(waiting) - low, self.min_span_requests)
        return [1.0 - (w - low) / span for w in waiting]


class RunningRequestsSizeScorer(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True
):
    """`score = (high - x) / (high - low)`, x the engine's running requests; all equal scores 1.

    low and high are the least and greatest x among the candidates. Range 0 to 1. Unknown x counts
    as the mean of the known ones, none known scores 0.5; the upstream picker takes 0 for unknown.
    Upstream: `scorer/runningrequests/runningrequest.go`.
    """

    kind: ClassVar[str] = "running-requests-size-scorer"
    needs: ClassVar[frozenset[Signal]] = frozenset({Signal.RUNNING})

    def score(self, context: SchedulingContext, candidates: Sequence[Candidate]) -> list[float]:
        """See the class."""
        return normalization.min_max_inverted([c.load.running for c in candidates])


class LoadAwareScorer(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, rename="camel"
):
    """`score = 0.5 * (1 - min(w, threshold) / threshold)`, with w the engine's waiting requests.

    An absolute measure: an empty queue scores 0.5, `threshold` or more 0. Unknown w counts as the
    mean of the known ones, none known scores 0.5; the upstream picker takes 0 for unknown.
    Upstream: `scorer/loadaware/load_aware.go`.

    Attributes:
        threshold: Waiting requests at which an engine counts as overloaded. 128 is the upstream
            default.
    """

    kind: ClassVar[str] = "load-aware-scorer"
    needs: ClassVar[frozenset[Signal]] = frozenset({Signal.WAITING})

    threshold: Annotated[int, msgspec.Meta(gt=0)] = 128

    def score(self, context: SchedulingContext, candidates: Sequence[Candidate]) -> list[float]:
        """See the class."""
        waiting = normalization.impute_mean([c.load.waiting for c in candidates])
        if waiting is None:
            return [normalization.NEUTRAL] * len(candidates)
        return [0.5 * (1.0 - normalization.share(w, self.threshold)) for w in waiting]


class KvCacheUtilizationScorer(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True
):
    """`score = 1 - u`, with u the share of KV blocks held by live requests, cut to 0..1.

    Range 0 to 1. Unknown u counts as the mean of the known ones, none known scores 0.5; the
    upstream picker takes 0 for unknown, which makes an endpoint without a scrape look free.
    Upstream: `scorer/kvcacheutilization/kvcache_utilization.go`.
    """

    kind: ClassVar[str] = "kv-cache-utilization-scorer"
    needs: ClassVar[frozenset[Signal]] = frozenset({Signal.KV_USAGE})

    def score(self, context: SchedulingContext, candidates: Sequence[Candidate]) -> list[float]:
        """See the class."""
        usage = normalization.impute_mean([c.load.kv_usage for c in candidates])
        if usage is None:
            return [normalization.NEUTRAL] * len(candidates)
        return [1.0 - u if 0.0 <= u <= 1.0 else float(u < 0.0) for u in usage]
