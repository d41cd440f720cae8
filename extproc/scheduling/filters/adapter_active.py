"""Keeps endpoints that work for the requested adapter right now."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import msgspec

from extproc.endpoint import Candidate
from extproc.scheduling import lora_slots
from extproc.scheduling.context import SchedulingContext
from extproc.scheduling.framework import Signal


class AdapterActive(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Keeps the candidates whose batch holds the requested adapter; none when none does.

    The "LoRA affinity" of docs/spec/prior-systems.md#filter-tree, for the nodes of a tree, where
    no candidate left means the failure branch. On its own in a profile it refuses every request whose
    adapter is nowhere, the base model's among them: `lora-affinity` is the filter that lets
    every candidate pass then. While no engine says which adapters it holds, all stay.
    """

    kind: ClassVar[str] = "adapter-active"
    needs: ClassVar[frozenset[Signal]] = frozenset({Signal.ADAPTERS})

    def filter(
        self, turn: SchedulingContext, candidates: Sequence[Candidate]
    ) -> Sequence[Candidate]:
        """See the class."""
        if lora_slots.none_reported(candidates):
            return candidates
        return [c for c in candidates if lora_slots.is_loaded(c, turn.request.target)]
