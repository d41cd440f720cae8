"""Picker of the highest total."""

from __future__ import annotations

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
