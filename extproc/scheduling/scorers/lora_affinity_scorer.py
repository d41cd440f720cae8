"""Prefers endpoints that serve the requested LoRA adapter, in the upstream tiers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import msgspec

from extproc.endpoint import Candidate, Load
from extproc.scheduling import normalization
from extproc.scheduling.context import SchedulingContext
from extproc.scheduling.framework import Signal


class LoraAffinityScorer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Tiers: adapter active 1, `active + waiting < slots` 0.8, adapter waiting 0.6, otherwise 0.

    Active and waiting are counted, not united. The base model is no adapter: its requests see room
    (0.8) and full slots (0) as those of any adapter would. An endpoint that does not list its
    adapters, or not its slots while it neither runs nor awaits this one, counts as the mean of the
    others; the upstream picker gives it 0.
    """

    kind: ClassVar[str] = "lora-affinity-scorer"
    needs: ClassVar[frozenset[Signal]] = frozenset({Signal.ADAPTERS})

    def score(self, turn: SchedulingContext, candidates: Sequence[Candidate]) -> list[float]:
        """See the class."""
        target = turn.request.target
        tiers = normalization.impute_mean([_tier(target, c.load) for c in candidates])
        return [normalization.NEUTRAL] * len(candidates) if tiers is None else list(tiers)


def _tier(target: str, load: Load) -> float | None:
    """The tier; None when the endpoint does not say enough."""
    active, waiting, slots = load.adapters, load.waiting_adapters or frozenset(), load.adapter_slots
    if active is None:
        return None
    if target in active:
        return 1.0
    if slots is not None and len(active) + len(waiting) < slots:
        return 0.8
    if target in waiting:
        return 0.6
    return None if slots is None else 0.0
