"""Pickers of the upstream endpoint picker: highest total, random, and weighted by totals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, ClassVar

import msgspec

from extproc.endpoint import Candidate
from extproc.scheduling.framework import SchedulingContext, Signal


class MaxScorePicker(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, rename="camel"
):
    """The highest totals in falling order; equal totals in random order.

    Random among ties, because a fixed order would send every request of a burst to one endpoint.
    Upstream: `picker/maxscore/picker.go`.

    Attributes:
        max_num_of_endpoints: Endpoints to name, the first one and its fallbacks; more when the
            server is set to more. 1 is the upstream default.
    """

    kind: ClassVar[str] = "max-score-picker"
    needs: ClassVar[frozenset[Signal]] = frozenset()

    max_num_of_endpoints: Annotated[int, msgspec.Meta(gt=0)] = 1

    def pick(
        self,
        context: SchedulingContext,
        candidates: Sequence[Candidate],
        totals: Sequence[float],
        *,
        count: int,
    ) -> list[int]:
        """See the class."""
        if count == 1:
            best = max(totals)
            ties = [i for i, total in enumerate(totals) if total == best]
            return ties if len(ties) == 1 else [context.rng.choice(ties)]
        order = context.rng.sample(range(len(totals)), len(totals))
        order.sort(key=totals.__getitem__, reverse=True)
        return order[:count]


class RandomPicker(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, rename="camel"
):
    """Every candidate with the same probability; totals are ignored.

    Upstream: `picker/random/picker.go`.

    Attributes:
        max_num_of_endpoints: Endpoints to name, the first one and its fallbacks; more when the
            server is set to more. 1 is the upstream default.
    """

    kind: ClassVar[str] = "random-picker"
    needs: ClassVar[frozenset[Signal]] = frozenset()

    max_num_of_endpoints: Annotated[int, msgspec.Meta(gt=0)] = 1

    def pick(
        self,
        context: SchedulingContext,
        candidates: Sequence[Candidate],
        totals: Sequence[float],
        *,
        count: int,
    ) -> list[int]:
        """See the class."""
        return context.rng.sample(range(len(candidates)), min(count, len(candidates)))


class WeightedRandomPicker(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, rename="camel"
):
    """Draws without replacement, the probability of a candidate proportional to its total.

    The keys are U ** (1 / total) with U uniform in (0, 1], the highest first (A-Res by Efraimidis
    and Spirakis); computed as log(U) / total, which does not underflow. A total of 0 comes after
    all others; when all totals are 0 every candidate is as likely. Several pickers that see the
    same scores do not herd. Upstream: `picker/weightedrandom/picker.go`.

    Attributes:
        max_num_of_endpoints: Endpoints to name, the first one and its fallbacks; more when the
            server is set to more. 1 is the upstream default.
    """

    kind: ClassVar[str] = "weighted-random-picker"
    needs: ClassVar[frozenset[Signal]] = frozenset()

    max_num_of_endpoints: Annotated[int, msgspec.Meta(gt=0)] = 1

    def pick(
        self,
        context: SchedulingContext,
        candidates: Sequence[Candidate],
        totals: Sequence[float],
        *,
        count: int,
    ) -> list[int]:
        """See the class."""
        draw = context.rng.random
        # The second item orders the zeros among themselves.
        keys = [
            (math.log(1.0 - u) / total if total > 0.0 else -math.inf, u)
            for u, total in ((draw(), total) for total in totals)
        ]
        return sorted(range(len(keys)), key=keys.__getitem__, reverse=True)[:count]
