"""Keeps endpoints that need not evict an adapter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import msgspec

from extproc.endpoint import Candidate
from extproc.scheduling import lora_slots
from extproc.scheduling.context import SchedulingContext
from extproc.scheduling.framework import Signal


class LowCostAdapter(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Keeps a candidate when its batch holds the requested adapter, or `active < slots`.

    The "low-cost LoRA" of docs/spec/prior-systems.md#filter-tree: weak affinity, which spreads an
    adapter while there are slots for it. Unknown as in `can-accept-adapter`.
    """

    kind: ClassVar[str] = "low-cost-adapter"
    needs: ClassVar[frozenset[Signal]] = frozenset({Signal.ADAPTERS})

    def filter(
        self, turn: SchedulingContext, candidates: Sequence[Candidate]
    ) -> Sequence[Candidate]:
        """See the class."""
        free = lora_slots.free(candidates)
        if free is None:
            return candidates
        target = turn.request.target
        return [
            c
            for c, room in zip(candidates, free, strict=True)
            if room > 0 or lora_slots.is_loaded(c, target)
        ]
