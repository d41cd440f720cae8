"""Keeps a LoRA adapter where it is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import msgspec

from extproc.endpoint import Candidate
from extproc.scheduling.context import SchedulingContext
from extproc.scheduling.framework import Signal


class LoraAffinityFilter(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Keeps the candidates whose batch holds the requested adapter; all of them when none does.

    The hard form of the scorer of the same name, for engines where loading an adapter costs
    seconds. A candidate over the bound does not count as holding the adapter, so an overloaded
    holder gives way. The base model is in no adapter set, so its requests pass.

    Attributes:
        max_waiting_requests: Longest queue with which a holder still attracts its adapter's
            requests. 50 is the affinity bound of the first llm-instance-gateway filter tree.
    """

    kind: ClassVar[str] = "lora-affinity"
    needs: ClassVar[frozenset[Signal]] = frozenset({Signal.ADAPTERS, Signal.WAITING})

    max_waiting_requests: float = 50.0

    def filter(
        self, turn: SchedulingContext, candidates: Sequence[Candidate]
    ) -> Sequence[Candidate]:
        """See the class."""
        target = turn.request.target
        bound = self.max_waiting_requests
        holders = [
            c
            for c in candidates
            if c.load.adapters is not None
            and target in c.load.adapters
            and (c.load.waiting is None or c.load.waiting <= bound)
        ]
        return holders or candidates
