"""Keeps a LoRA adapter where it is, most of the time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar

import msgspec

from extproc.endpoint import Candidate
from extproc.scheduling import lora_slots
from extproc.scheduling.context import SchedulingContext
from extproc.scheduling.framework import Signal


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
        self, turn: SchedulingContext, candidates: Sequence[Candidate]
    ) -> Sequence[Candidate]:
        """See the class."""
        if lora_slots.none_reported(candidates):
            return candidates
        target = turn.request.target
        free = lora_slots.free(candidates) or [0.0] * len(candidates)
        holders = [c for c in candidates if lora_slots.is_loaded(c, target)]
        roomy = [
            c
            for c, room in zip(candidates, free, strict=True)
            if room > 0 and not lora_slots.is_loaded(c, target)
        ]
        if holders and roomy:
            return holders if turn.rng.random() < self.share else roomy
        return holders or roomy
