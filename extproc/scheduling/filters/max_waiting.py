"""Drops endpoints whose queue is too long."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import msgspec

from extproc.endpoint import Candidate
from extproc.scheduling.context import SchedulingContext
from extproc.scheduling.framework import Signal


class MaxWaiting(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Keeps candidates with `waiting <= max_waiting_requests`; all if no queue is known.

    When every candidate is over the bound it keeps none, and the client gets 429
    (retry later): a bound that gives way when it is needed is no bound. Use a scorer to merely prefer short
    queues.

    Attributes:
        max_waiting_requests: Longest queue that still takes more. 50 is the bound of the first
            llm-instance-gateway filter tree, far above what an engine that keeps up shows.
    """

    kind: ClassVar[str] = "max-waiting"
    needs: ClassVar[frozenset[Signal]] = frozenset({Signal.WAITING})

    max_waiting_requests: float = 50.0

    def filter(
        self, turn: SchedulingContext, candidates: Sequence[Candidate]
    ) -> Sequence[Candidate]:
        """See the class."""
        bound = self.max_waiting_requests
        return [c for c in candidates if c.load.waiting is None or c.load.waiting <= bound]
