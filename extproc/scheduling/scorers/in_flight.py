"""Prefers endpoints with few requests, as far as this picker can tell right now."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import msgspec

from extproc.endpoint import Candidate
from extproc.scheduling.context import SchedulingContext
from extproc.scheduling.framework import Signal


class InFlight(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`score = (s + low) / (s + r)`, with s = `soft_requests`.

    r is the candidate's dead-reckoned requests, low the smallest r among the candidates. The least
    loaded one scores 1; the score is the ratio of loads, so a lead of two requests counts when
    there are three and not when there are a hundred, and ten times the load looks like ten times
    the load. The usual (max - r)/(max - min) has neither property: it gives a difference of one
    request the full weight. Dead reckoning makes it right between two scrapes and without any.

    Attributes:
        soft_requests: Requests an engine batches without a noticeable delay. 8 is small against the
            256 sequences of a vLLM batch, and large enough that a lead of one or two requests on
            idle endpoints does not outweigh a cached prompt.
    """

    kind: ClassVar[str] = "in-flight"
    needs: ClassVar[frozenset[Signal]] = frozenset({Signal.IN_FLIGHT})

    soft_requests: float = 8.0

    def __post_init__(self) -> None:
        """Refuse a softening that could divide by zero.

        Raises:
            ValueError: `soft_requests` is not above zero.
        """
        if not self.soft_requests > 0:
            raise ValueError(f"expected soft_requests above 0, got {self.soft_requests}")

    def score(self, turn: SchedulingContext, candidates: Sequence[Candidate]) -> list[float]:
        """See the class."""
        if not candidates:
            return []
        soft = self.soft_requests
        loads = [c.estimated_requests for c in candidates]
        best = soft + min(loads)
        return [best / (soft + r) for r in loads]
