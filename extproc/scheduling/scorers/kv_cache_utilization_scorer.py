"""Prefers endpoints with room in their KV cache, under the upstream name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import msgspec

from extproc.endpoint import Candidate
from extproc.scheduling import normalization
from extproc.scheduling.context import SchedulingContext
from extproc.scheduling.framework import Signal


class KvCacheUtilizationScorer(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True
):
    """`score = 1 - u`, with u the share of KV blocks held by live requests, cut to 0..1.

    Unknown u counts as the mean of the known ones, none known scores 0.5; the upstream picker
    takes 0 for unknown, which makes an endpoint without a scrape look free.
    """

    kind: ClassVar[str] = "kv-cache-utilization-scorer"
    needs: ClassVar[frozenset[Signal]] = frozenset({Signal.KV_USAGE})

    def score(self, turn: SchedulingContext, candidates: Sequence[Candidate]) -> list[float]:
        """See the class."""
        usage = normalization.impute_mean([c.load.kv_usage for c in candidates])
        if usage is None:
            return [normalization.NEUTRAL] * len(candidates)
        return [1.0 - u if 0.0 <= u <= 1.0 else float(u < 0.0) for u in usage]
