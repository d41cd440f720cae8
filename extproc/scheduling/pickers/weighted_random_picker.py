"""Takes any candidate, better ones more often, under the upstream name."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, ClassVar

import msgspec

from extproc.endpoint import Candidate
from extproc.scheduling.context import SchedulingContext
from extproc.scheduling.framework import Signal


class WeightedRandomPicker(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, rename="camel"
):
    """Draws without replacement, the probability of a candidate proportional to its total.

    The keys are U ** (1 / total) with U uniform in (0, 1], the highest first (A-Res by Efraimidis
    and Spirakis); computed as log(U) / total, which does not underflow. A total of 0 comes after
    all others; when all totals are 0 every candidate is as likely.

    Attributes:
        max_num_of_endpoints: Endpoints to name, the first one and its fallbacks; more when the
            server is set to more. 1 is the upstream default.
    """

    kind: ClassVar[str] = "weighted-random-picker"
    needs: ClassVar[frozenset[Signal]] = frozenset()

    max_num_of_endpoints: Annotated[int, msgspec.Meta(gt=0)] = 1

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
