"""Prefers endpoints with nothing waiting, by an absolute measure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar

import msgspec

from extproc.endpoint import Candidate
from extproc.scheduling import normalization
from extproc.scheduling.context import SchedulingContext
from extproc.scheduling.framework import Signal


class LoadAwareScorer(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, rename="camel"
):
    """`score = 0.5 * (1 - min(w, threshold) / threshold)`, with w the engine's waiting requests.

    An empty queue scores 0.5, `threshold` or more 0. Unknown w counts as the mean of the known
    ones, none known scores 0.5; the upstream picker takes 0 for unknown.

    Attributes:
        threshold: Waiting requests at which an engine counts as overloaded. 128 is the upstream
            default.
    """

    kind: ClassVar[str] = "load-aware-scorer"
    needs: ClassVar[frozenset[Signal]] = frozenset({Signal.WAITING})

    threshold: Annotated[int, msgspec.Meta(gt=0)] = 128

    def score(self, turn: SchedulingContext, candidates: Sequence[Candidate]) -> list[float]:
        """See the class."""
        waiting = normalization.impute_mean([c.load.waiting for c in candidates])
        if waiting is None:
            return [normalization.NEUTRAL] * len(candidates)
        return [0.5 * (1.0 - normalization.share(w, self.threshold)) for w in waiting]
