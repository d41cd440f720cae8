"""Takes any candidate, under the upstream name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar

import msgspec

from extproc.endpoint import Candidate
from extproc.scheduling.context import SchedulingContext
from extproc.scheduling.framework import Signal


class RandomPicker(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, rename="camel"
):
    """Every candidate with the same probability; totals are ignored.

    Attributes:
        max_num_of_endpoints: Endpoints to name, the first one and its fallbacks; more when the
            server is set to more. 1 is the upstream default.
    """

    kind: ClassVar[str] = "random-picker"
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
        return turn.rng.sample(range(len(candidates)), min(count, len(candidates)))
