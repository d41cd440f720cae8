"""Filters and scorers of LoRA adapters: loaded, labeled, or with a free slot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from extproc.endpoint import Candidate, Load
from extproc.scheduling import framework, labels
from extproc.scheduling.framework import (
    NonNegative,
    PluginParameters,
    SchedulingContext,
    Share,
    Signal,
)


class AdapterActive(PluginParameters, frozen=True, kw_only=True):
    """Keeps the candidates whose batch holds the requested adapter; none when none does.

    The "LoRA affinity" of docs/spec/prior-systems.md#filter-tree, for the nodes of a tree, where
    no candidate left means the failure branch. On its own in a profile it refuses every request whose
    adapter is nowhere, the base model's among them: `lora-affinity` is the filter that lets
    every candidate pass then. While no engine says which adapters it holds, all stay.
    """

    kind: ClassVar[str] = "adapter-active"
    needs: ClassVar[frozenset[Signal]] = frozenset({Signal.ADAPTERS})

    def filter(
        self, context: SchedulingContext, candidates: Sequence[Candidate]
    ) -> Sequence[Candidate]:
        if _none_reported(candidates):
            return candidates
        return [c for c in candidates if _is_loaded(c, context.request.target)]


class CanAcceptAdapter(PluginParameters, frozen=True, kw_only=True):
    """Keeps a candidate when `active < slots`, adapters in its batch against adapters that fit.

    The "can accept new LoRA" of docs/spec/prior-systems.md#filter-tree. An engine that does not say
    has the mean room of those that do; while no engine says, all stay. An engine without
    LoRA has no slots.
    """

    kind: ClassVar[str] = "can-accept-adapter"
    needs: ClassVar[frozenset[Signal]] = frozenset({Signal.ADAPTERS})

    def filter(
        self, context: SchedulingContext, candidates: Sequence[Candidate]
    ) -> Sequence[Candidate]:
        free = _free_slots(candidates)
        if free is None:
            return candidates
        return [c for c, room in zip(candidates, free, strict=True) if room > 0]


class LowCostAdapter(PluginParameters, frozen=True, kw_only=True):
    """Keeps a candidate when its batch holds the requested adapter, or `active < slots`.

    The "low-cost LoRA" of docs/spec/prior-systems.md#filter-tree: weak affinity, which spreads an
    adapter while there are slots for it. Unknown as in `can-accept-adapter`.
    """

    kind: ClassVar[str] = "low-cost-adapter"
    needs: ClassVar[frozenset[Signal]] = frozenset({Signal.ADAPTERS})

    def filter(
        self, context: SchedulingContext, candidates: Sequence[Candidate]
    ) -> Sequence[Candidate]:
        free = _free_slots(candidates)
        if free is None:
            return candidates
        target = context.request.target
        return [
            c for c, room in zip(candidates, free, strict=True) if room > 0 or _is_loaded(c, target)
        ]


class AdapterSoftAffinity(PluginParameters, frozen=True, kw_only=True):
    """Keeps the holders of the adapter, or once in a while those with room for it.

    Holders have the adapter in their batch; the others count as long as `active < slots`. Where
    there are both, the holders stay with probability `share`, else those with room; where there is
    one of the two, it stays; none where there is neither
    (kubernetes-sigs/gateway-api-inference-extension#423). The seldom exception brings an adapter in
    demand to a second endpoint. While no engine says which adapters it holds, all stay.

    Attributes:
        share: Probability of the holders, 0..1. 0.999 is the gateway's: loading an adapter costs
            more than a place in a short queue.
    """

    kind: ClassVar[str] = "adapter-soft-affinity"
    needs: ClassVar[frozenset[Signal]] = frozenset({Signal.ADAPTERS})

    share: Share = 0.999

    def filter(
        self, context: SchedulingContext, candidates: Sequence[Candidate]
    ) -> Sequence[Candidate]:
        if _none_reported(candidates):
            return candidates
        target = context.request.target
        free = _free_slots(candidates) or [0.0] * len(candidates)
        holders = [c for c in candidates if _is_loaded(c, target)]
        with_room = [
            c
            for c, room in zip(candidates, free, strict=True)
            if room > 0 and not _is_loaded(c, target)
        ]
        if holders and with_room:
            return holders if context.rng.random() < self.share else with_room
        return holders or with_room


class LoraAffinityFilter(PluginParameters, frozen=True, kw_only=True):
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

    max_waiting_requests: NonNegative = 50.0

    def filter(
        self, context: SchedulingContext, candidates: Sequence[Candidate]
    ) -> Sequence[Candidate]:
        target = context.request.target
        bound = self.max_waiting_requests
        holders = [
            c
            for c in candidates
            if c.load.adapters is not None
            and target in c.load.adapters
            and (c.load.waiting is None or c.load.waiting <= bound)
        ]
        return holders or candidates


class AdapterCapable(PluginParameters, frozen=True, kw_only=True):
    """Keeps the candidates with the label `adapter.kubeai.org/NAME` of the requested adapter.

    All for the base model, and where no candidate carries such a label; none when others
    are labelled and this adapter is nowhere, because an engine without it answers 404
    (docs/spec/prior-systems.md#adapter-names).
    """

    kind: ClassVar[str] = "adapter-capable"
    needs: ClassVar[frozenset[Signal]] = frozenset({Signal.LABELS})

    def filter(
        self, context: SchedulingContext, candidates: Sequence[Candidate]
    ) -> Sequence[Candidate]:
        return labels.capable(labels.adapter(context, candidates), candidates)


def _free_slots(candidates: Sequence[Candidate]) -> Sequence[float] | None:
    """Adapter slots less adapters in the batch, of each candidate.

    Returns:
        Counts, the mean of the known ones where an engine says nothing; None when no engine says
        anything.
    """
    return framework.impute_mean(
        [
            None
            if (active := c.load.adapters) is None or (slots := c.load.adapter_slots) is None
            else float(slots - len(active))
            for c in candidates
        ]
    )


def _none_reported(candidates: Sequence[Candidate]) -> bool:
    """True if no engine says which adapters are in its batch."""
    return all(c.load.adapters is None for c in candidates)


def _is_loaded(candidate: Candidate, target: str) -> bool:
    """True if an adapter is in the batch; False where the engine does not say."""
    return candidate.load.adapters is not None and target in candidate.load.adapters


ACTIVE = 1.0
ROOM = 0.8
WAITING = 0.6
UNKNOWN = 0.5
FULL = 0.0

NONE: frozenset[str] = frozenset()


class LoraAffinityTiers(PluginParameters, frozen=True, kw_only=True):
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


class LoraAffinityScorer(PluginParameters, frozen=True, kw_only=True):
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
        target = context.request.target
        tiers = framework.impute_mean([_upstream_tier(target, c.load) for c in candidates])
        return [framework.NEUTRAL] * len(candidates) if tiers is None else list(tiers)


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
