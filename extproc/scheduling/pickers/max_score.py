"""Takes the highest total."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import msgspec

from extproc.endpoint import Candidate
from extproc.scheduling.context import SchedulingContext
from extproc.scheduling.framework import Signal


class MaxScore(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The highest totals in falling order; equal totals in random order.

    Random among ties, because a fixed order would send every request of a burst to one endpoint.
    """

    kind: ClassVar[str] = "max-score"
    needs: ClassVar[frozenset[Signal]] = frozenset()

    def pick(
        self,
        turn: SchedulingContext,
        candidates: Sequence[Candidate],
        totals: Sequence[float],
        *,
        count: int,
    ) -> list[int]:
        """See the class."""
        if count == 1:
            best = max(totals)
            ties = [i for i, total in enumerate(totals) if total == best]
            return ties if len(ties) == 1 else [turn.rng.choice(ties)]
        order = turn.rng.sample(range(len(totals)), len(totals))
        order.sort(key=totals.__getitem__, reverse=True)
        return order[:count]
