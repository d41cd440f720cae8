"""Keeps the short end of the queues."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import msgspec

from extproc.endpoint import Candidate
from extproc.scheduling import normalization
from extproc.scheduling.context import SchedulingContext
from extproc.scheduling.framework import Signal


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
        self, turn: SchedulingContext, candidates: Sequence[Candidate]
    ) -> Sequence[Candidate]:
        """See the class."""
        waiting = normalization.impute_mean([c.load.waiting for c in candidates])
        if not waiting:
            return candidates
        low = min(waiting)
        limit = low + (max(waiting) - low) // len(waiting)
        return [c for c, w in zip(candidates, waiting, strict=True) if w <= limit]
