"""Prefers endpoints whose engine has few requests waiting."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import msgspec

from extproc.endpoint import Candidate
from extproc.scheduling import normalization
from extproc.scheduling.context import SchedulingContext
from extproc.scheduling.framework import Signal


class QueueDepth(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`score = 1 - (w - low) / max(high - low, min_span)`, with w the engine's waiting requests.

    low and high are the smallest and largest w among the candidates; all equal scores 1. With
    min_span 1 this is the (max - w)/(max - min) of the reference picker. Unknown w counts as the
    mean of the known ones; none known scores 0.5.

    Attributes:
        min_span_requests: Spread of queues below which differences fade. 1 keeps the reference
            formula, in which one waiting request more costs the whole score.
    """

    kind: ClassVar[str] = "queue-depth"
    needs: ClassVar[frozenset[Signal]] = frozenset({Signal.WAITING})

    min_span_requests: float = 1.0

    def __post_init__(self) -> None:
        """Refuse a span that could divide by zero.

        Raises:
            ValueError: `min_span_requests` is not above zero.
        """
        if not self.min_span_requests > 0:
            raise ValueError(f"expected min_span_requests above 0, got {self.min_span_requests}")

    def score(self, turn: SchedulingContext, candidates: Sequence[Candidate]) -> list[float]:
        """See the class."""
        waiting = normalization.impute_mean([c.load.waiting for c in candidates])
        if not waiting:
            return [normalization.NEUTRAL] * len(candidates)
        low = min(waiting)
        span = max(max(waiting) - low, self.min_span_requests)
        return [1.0 - (w - low) / span for w in waiting]
