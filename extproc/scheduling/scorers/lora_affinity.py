"""Scorers of LoRA adapters: loaded, room to load, or waiting."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import msgspec

from extproc.endpoint import Candidate, Load
from extproc.scheduling import normalization
from extproc.scheduling.framework import SchedulingContext, Signal

ACTIVE = 1.0
ROOM = 0.8
WAITING = 0.6
UNKNOWN = 0.5
FULL = 0.0

NONE: frozenset[str] = frozenset()


class LoraAffinityTiers(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Tiers: adapter active 1, room for it 0.8, adapter waiting 0.6, unknown 0.5, no room 0.

    There is room when the union of active and waiting adapters is smaller than the slots. An
    endpoint that names no adapters, or no slots while the adapter is not there, is unknown: it may
    have room or not, so it stands between.

    A name that no candidate lists scores 0.5 everywhere unless the request says it is an adapter:
    it is most likely the base model, which no engine lists, and base traffic must not be driven
    away from endpoints with full slots. An adapter's first request therefore goes by load alone.
    That, the union and the fixed 0.5 for unknown distinguish it from `lora-affinity-scorer`.
    """

    kind: ClassVar[str] = "lora-affinity"
    needs: ClassVar[frozenset[Signal]] = frozenset({Signal.ADAPTERS})

    def score(self, context: SchedulingContext, candidates: Sequence[Candidate]) -> list[float]:
        """See the class."""
        target = context.request.target
        if not (context.request.adapter or _listed(target, candidates)):
            return [UNKNOWN] * len(candidates)
        # Most endpoints of a popular adapter serve it: they are spared the call.
        return [
            ACTIVE if (load := c.load).adapters and target in load.adapters else _tier(target, load)
            for c in candidates
        ]


def _listed(target: str, candidates: Sequence[Candidate]) -> bool:
    """True if any endpoint lists the adapter."""
    for candidate in candidates:
        load = candidate.load
        if load.adapters and target in load.adapters:
            return True
        if load.waiting_adapters and target in load.waiting_adapters:
            return True
    return False


def _tier(target: str, load: Load) -> float:
    """The tier of an endpoint whose batch does not hold the adapter."""
    active, waiting, slots = load.adapters, load.waiting_adapters or NONE, load.adapter_slots
    if active is None:
        return UNKNOWN
    # The union is only worth its cost when an adapter may be in both.
    if slots is not None and (
        len(active) + len(waiting) < slots or (waiting and len(active | waiting) < slots)
    ):
        return ROOM
    if target in waiting:
        return WAITING
    return UNKNOWN if slots is None else FULL


class LoraAffinityScorer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Tiers: adapter active 1, `active + waiting < slots` 0.8, adapter waiting 0.6, otherwise 0.

    Active and waiting are counted, not united as in `lora-affinity`. The base model is no adapter:
    its requests see room (0.8) and full slots (0) as those of any adapter would. An endpoint that
    does not list its adapters, or not its slots while it neither runs nor awaits the requested
    adapter, counts as the mean of the others, none known scores 0.5; the upstream picker gives it
    0. Upstream: `scorer/loraaffinity/lora_affinity.go`.
    """

    kind: ClassVar[str] = "lora-affinity-scorer"
    needs: ClassVar[frozenset[Signal]] = frozenset({Signal.ADAPTERS})

    def score(self, context: SchedulingContext, candidates: Sequence[Candidate]) -> list[float]:
        """See the class."""
        target = context.request.target
        tiers = normalization.impute_mean([_upstream_tier(target, c.load) for c in candidates])
        return [normalization.NEUTRAL] * len(candidates) if tiers is None else list(tiers)


def _upstream_tier(target: str, load: Load) -> float | None:
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
