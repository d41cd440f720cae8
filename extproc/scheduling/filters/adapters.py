"""Filters of LoRA adapters: where one is loaded, labelled, or has room to be loaded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar

import msgspec

from extproc.endpoint import Candidate
from extproc.scheduling import labels, normalization
from extproc.scheduling.framework import SchedulingContext, Signal


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
        self, context: SchedulingContext, candidates: Sequence[Candidate]
    ) -> Sequence[Candidate]:
        """See the class."""
        if _none_reported(candidates):
            return candidates
        return [c for c in candidates if _is_loaded(c, context.request.target)]


class CanAcceptAdapter(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
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
        """See the class."""
        free = _free_slots(candidates)
        if free is None:
            return candidates
        return [c for c, room in zip(candidates, free, strict=True) if room > 0]


class LowCostAdapter(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Keeps a candidate when its batch holds the requested adapter, or `active < slots`.

    The "low-cost LoRA" of docs/spec/prior-systems.md#filter-tree: weak affinity, which spreads an
    adapter while there are slots for it. Unknown as in `can-accept-adapter`.
    """

    kind: ClassVar[str] = "low-cost-adapter"
    needs: ClassVar[frozenset[Signal]] = frozenset({Signal.ADAPTERS})

    def filter(
        self, context: SchedulingContext, candidates: Sequence[Candidate]
    ) -> Sequence[Candidate]:
        """See the class."""
        free = _free_slots(candidates)
        if free is None:
            return candidates
        target = context.request.target
        return [
            c for c, room in zip(candidates, free, strict=True) if room > 0 or _is_loaded(c, target)
        ]


class AdapterSoftAffinity(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Keeps the holders of the adapter, or once in a while those with room for it.

    Holders have the adapter in their batch; the others count as long as `active < slots`. Where
    there are both, the holders stay with probability `share`, else those with room; where there is
    one of the two, it stays; none where there is neither (the gateway's change #423). The seldom
    exception brings an adapter in demand to a second endpoint. While no engine says
    which adapters it holds, all stay.

    Attributes:
        share: Probability of the holders, 0..1. 0.999 is the gateway's: loading an adapter costs
            more than a place in a short queue.
    """

    kind: ClassVar[str] = "adapter-soft-affinity"
    needs: ClassVar[frozenset[Signal]] = frozenset({Signal.ADAPTERS})

    share: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.999

    def filter(
        self, context: SchedulingContext, candidates: Sequence[Candidate]
    ) -> Sequence[Candidate]:
        """See the class."""
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
        self, context: SchedulingContext, candidates: Sequence[Candidate]
    ) -> Sequence[Candidate]:
        """See the class."""
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


class AdapterCapable(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
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
        """See the class."""
        return labels.capable(labels.adapter(context, candidates), candidates)


def _free_slots(candidates: Sequence[Candidate]) -> Sequence[float] | None:
    """Adapter slots less adapters in the batch, of each candidate.

    Args:
        candidates: In the order of the answer.

    Returns:
        Counts, the mean of the known ones where an engine says nothing; None when no engine says
        anything.
    """
    return normalization.impute_mean(
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
