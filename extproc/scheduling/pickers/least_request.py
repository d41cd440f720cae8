"""Picker of the fewest open requests, of two endpoints drawn at random or of all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import msgspec

from extproc.endpoint import Candidate
from extproc.scheduling.framework import SchedulingContext, Signal


class LeastRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Draws `choices` different candidates and takes the one with the fewest requests in flight.

    Two choices is what Envoy's LEAST_REQUEST does with equal weights: almost as even as looking at
    all, without the herd that several pickers form when all of them see the same least loaded
    endpoint. Totals are ignored. Fallbacks are drawn the same way from the rest.

    Attributes:
        choices: How many to draw. 2 is Envoy's default; more is evener and herds more.
        full_scan: Look at all candidates; equals are drawn at random.
    """

    kind: ClassVar[str] = "least-request"
    needs: ClassVar[frozenset[Signal]] = frozenset({Signal.IN_FLIGHT})

    choices: int = 2
    full_scan: bool = False

    def __post_init__(self) -> None:
        """Refuse a draw of no candidate.

        Raises:
            ValueError: `choices` is below one.
        """
        if self.choices < 1:
            raise ValueError(f"expected choices of at least 1, got {self.choices}")

    def pick(
        self,
        context: SchedulingContext,
        candidates: Sequence[Candidate],
        totals: Sequence[float],
        *,
        count: int,
    ) -> list[int]:
        """See the class."""
        if len(candidates) == 1:
            return [0]
        remaining: list[int] | range = range(len(candidates))
        order: list[int] = []
        while remaining and len(order) < count:
            size = len(remaining) if self.full_scan else min(self.choices, len(remaining))
            drawn = context.rng.sample(remaining, size)
            best = min(drawn, key=lambda i: candidates[i].in_flight)
            order.append(best)
            if len(order) < count:
                remaining = [i for i in remaining if i != best]
        return order
