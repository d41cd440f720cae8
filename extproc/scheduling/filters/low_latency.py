"""Keeps endpoints where a new request hardly waits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import msgspec

from extproc.endpoint import Candidate
from extproc.scheduling import normalization
from extproc.scheduling.context import SchedulingContext
from extproc.scheduling.framework import Signal


class LowLatency(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Keeps a candidate when `waiting < below_waiting_requests`; none when no queue is so short.

    For the nodes of a tree, where no candidate left means the failure branch. An unknown queue counts as
    the mean of the known ones.

    Attributes:
        below_waiting_requests: The first length that is too long. 50 is the bound of the first
            gateway's filter tree (docs/spec/prior-systems.md#filter-tree), 128 that of its later
            one.
    """

    kind: ClassVar[str] = "low-latency"
    needs: ClassVar[frozenset[Signal]] = frozenset({Signal.WAITING})

    below_waiting_requests: float = 50.0

    def filter(
        self, turn: SchedulingContext, candidates: Sequence[Candidate]
    ) -> Sequence[Candidate]:
        """See the class."""
        waiting = normalization.impute_mean([c.load.waiting for c in candidates])
        if waiting is None:
            return candidates
        bound = self.below_waiting_requests
        return [c for c, w in zip(candidates, waiting, strict=True) if w < bound]
