"""Takes any candidate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import msgspec

from extproc.endpoint import Candidate
from extproc.scheduling.context import SchedulingContext
from extproc.scheduling.framework import Signal


class Random(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Every candidate with the same probability; totals are ignored."""

    kind: ClassVar[str] = "random"
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
        return turn.rng.sample(range(len(candidates)), min(count, len(candidates)))
