"""Drops endpoints whose engine says it is full."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar

import msgspec

from extproc.endpoint import Candidate
from extproc.scheduling.context import SchedulingContext
from extproc.scheduling.framework import Signal


class UtilizationDetector(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, rename="camel"
):
    """Keeps candidates with `w < Q * (1 + h)` and `u < min(1, K * (1 + h))`; all if none passes.

    w is the engine's waiting requests and u the share of KV blocks held by live requests. Unknown
    values count as the mean of the known ones, and pass where none is known; the upstream detector takes them for full, so that a late scrape stops an endpoint.

    Attributes:
        queue_depth_threshold: Q. 5 is the upstream default.
        kv_cache_util_threshold: K. 0.8 is the upstream default.
        headroom: h, how far above the thresholds is allowed.
    """

    kind: ClassVar[str] = "utilization-detector"
    needs: ClassVar[frozenset[Signal]] = frozenset({Signal.WAITING, Signal.KV_USAGE})

    queue_depth_threshold: Annotated[int, msgspec.Meta(gt=0)] = 5
    kv_cache_util_threshold: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.8
    headroom: Annotated[float, msgspec.Meta(ge=0)] = 0.0

    def filter(
        self, turn: SchedulingContext, candidates: Sequence[Candidate]
    ) -> Sequence[Candidate]:
        """See the class."""
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
