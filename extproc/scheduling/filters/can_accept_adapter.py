"""Keeps endpoints that can load one more adapter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import msgspec

from extproc.endpoint import Candidate
from extproc.scheduling import lora_slots
from extproc.scheduling.context import SchedulingContext
from extproc.scheduling.framework import Signal


class CanAcceptAdapter(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Keeps a candidate when `active < slots`, adapters in its batch against adapters that fit.

    The "can accept new LoRA" of docs/spec/prior-systems.md#filter-tree. An engine that does not say
    has the mean room of those that do; while no engine says, all stay. An engine without
    LoRA has no slots.
    """

    kind: ClassVar[str] = "can-accept-adapter"
    needs: ClassVar[frozenset[Signal]] = frozenset({Signal.ADAPTERS})

    def filter(
        self, turn: SchedulingContext, candidates: Sequence[Candidate]
    ) -> Sequence[Candidate]:
        """See the class."""
        free = lora_slots.free(candidates)
        if free is None:
            return candidates
        return [c for c, room in zip(candidates, free, strict=True) if room > 0]
