"""Prefers endpoints whose engine runs few requests, by the upstream formula."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import msgspec

from extproc.endpoint import Candidate
from extproc.scheduling import normalization
from extproc.scheduling.context import SchedulingContext
from extproc.scheduling.framework import Signal


class RunningRequestsSizeScorer(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True
):
    """`score = (high - x) / (high - low)`, x the engine's running requests; all equal scores 1.

    low and high are the least and greatest x among the candidates. Unknown x counts as the mean of
    the known ones, none known scores 0.5; the upstream picker takes 0 for unknown.
    """

    kind: ClassVar[str] = "running-requests-size-scorer"
    needs: ClassVar[frozenset[Signal]] = frozenset({Signal.RUNNING})

    def score(self, turn: SchedulingContext, candidates: Sequence[Candidate]) -> list[float]:
        """See the class."""
        return normalization.min_max_inverted([c.load.running for c in candidates])
