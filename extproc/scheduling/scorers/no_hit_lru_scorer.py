"""Spreads prompts that no endpoint has cached."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from functools import cached_property
from typing import Annotated, ClassVar

import msgspec

from extproc.decision import Decision
from extproc.endpoint import Candidate
from extproc.scheduling.context import SchedulingContext
from extproc.scheduling.framework import Signal


class NoHitLruScorer(
    msgspec.Struct,
    frozen=True,
    forbid_unknown_fields=True,
    kw_only=True,
    rename="camel",
    dict=True,
):
    """`score = 1 - rank / (n - 1)` when no candidate has any of the prompt cached, else 0.5.

    Ranked first are the candidates that never got such a prompt, by address, then the others by
    when they last got one, longest ago first. Alone, a candidate scores 1. So caches grow evenly:
    a prompt that is new to all goes where the last new one is oldest.

    Attributes:
        lru_size: Endpoints whose last new prompt is remembered. 1024 is the upstream default.
    """

    kind: ClassVar[str] = "no-hit-lru-scorer"
    needs: ClassVar[frozenset[Signal]] = frozenset({Signal.PREFIX})

    lru_size: Annotated[int, msgspec.Meta(gt=0)] = 1024

    @cached_property
    def _last(self) -> OrderedDict[str, None]:
        """Addresses that got a new prompt, longest ago first."""
        return OrderedDict()

    def score(self, turn: SchedulingContext, candidates: Sequence[Candidate]) -> list[float]:
        """See the class."""
        if any(c.matched_tokens for c in candidates):
            return [0.5] * len(candidates)
        if len(candidates) == 1:
            return [1.0]
        places = {address: at for at, address in enumerate(self._last)}
        addresses = [c.endpoint.address for c in candidates]
        order = sorted(addresses, key=lambda address: (places.get(address, -1), address))
        ranks = {address: rank for rank, address in enumerate(order)}
        return [1.0 - ranks[address] / (len(addresses) - 1) for address in addresses]

    def on_committed(self, decision: Decision, now: float) -> None:
        """Remember the endpoint of a prompt that was new to all."""
        if any(c.matched_tokens for c in decision.scored_candidates):
            return
        self._last[decision.endpoints[0].address] = None
        self._last.move_to_end(decision.endpoints[0].address)
        if len(self._last) > self.lru_size:
            self._last.popitem(last=False)
