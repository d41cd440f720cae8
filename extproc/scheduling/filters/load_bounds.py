"""Filters of scraped engine load: waiting requests and KV cache usage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

import msgspec

from extproc.endpoint import Candidate
from extproc.scheduling import normalization
from extproc.scheduling.framework import SchedulingContext, Signal


class QueueRange(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
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
        """See the class."""
        waiting = normalization.impute_mean([c.load.waiting for c in candidates])
        if not waiting:
            return candidates
        low = min(waiting)
        limit = low + (max(waiting) - low) // len(waiting)
        return [c for c, w in zip(candidates, waiting, strict=True) if w <= limit]


class KvRange(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
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
        """See the class."""
        usage = normalization.impute_mean([c.load.kv_usage for c in candidates])
        if not usage:
            return candidates
        low = min(usage)
        limit = low + (max(usage) - low) / len(usage)
        return [c for c, u in zip(candidates, usage, strict=True) if u <= limit]


class LowLatency(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
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

    below_waiting_requests: float = 50.0

    def filter(
        self, context: SchedulingContext, candidates: Sequence[Candidate]
    ) -> Sequence[Candidate]:
        """See the class."""
        waiting = normalization.impute_mean([c.load.waiting for c in candidates])
        if waiting is None:
            return candidates
        bound = self.below_waiting_requests
        return [c for c, w in zip(candidates, waiting, strict=True) if w < bound]


class MaxWaiting(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
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

    max_waiting_requests: float = 50.0

    def filter(
        self, context: SchedulingContext, candidates: Sequence[Candidate]
    ) -> Sequence[Candidate]:
        """See the class."""
        bound = self.max_waiting_requests
        return [c for c in candidates if c.load.waiting is None or c.load.waiting <= bound]


class SheddableCapacity(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
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

    max_waiting_requests: float = 5.0
    max_kv_usage: float = 0.8

    def filter(
        self, context: SchedulingContext, candidates: Sequence[Candidate]
    ) -> Sequence[Candidate]:
        """See the class."""
        nothing = [0.0] * len(candidates)
        waiting = normalization.impute_mean([c.load.waiting for c in candidates]) or nothing
        usage = normalization.impute_mean([c.load.kv_usage for c in candidates]) or nothing
        return [
            c
            for c, w, u in zip(candidates, waiting, usage, strict=True)
            if w <= self.max_waiting_requests and u <= self.max_kv_usage
        ]


class TopK(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
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
        """See the class."""
        if self.by == "waiting":
            values = normalization.impute_mean([c.load.waiting for c in candidates])
        else:
            values = normalization.impute_mean([c.load.kv_usage for c in candidates])
        if not values or len(values) <= self.k:
            return candidates
        limit = min(values) if self.k == 1 else sorted(values)[self.k - 1]
        return [c for c, value in zip(candidates, values, strict=True) if value <= limit]
