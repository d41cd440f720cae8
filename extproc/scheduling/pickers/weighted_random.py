"""Takes any candidate, better ones more often."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

import msgspec

from extproc.endpoint import Candidate
from extproc.scheduling.context import SchedulingContext
from extproc.scheduling.framework import Signal


class WeightedRandom(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Draws without replacement, the probability of a candidate proportional to its total.

    The keys are log(U)/total with U uniform in (0, 1], the highest first (A-Res by Efraimidis and
    Spirakis, in logarithms). A total of 0 comes after all others; when all totals are 0 every
    candidate is as likely. Several pickers that see the same scores do not herd.
    """

    kind: ClassVar[str] = "weighted-random"
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
        draw = turn.rng.random
        # The second item orders the zeros among themselves.
        keys = [
            (math.log(1.0 - u) / total if total > 0.0 else -math.inf, u)
            for u, total in ((draw(), total) for total in totals)
        ]
        return sorted(range(len(keys)), key=keys.__getitem__, reverse=True)[:count]
