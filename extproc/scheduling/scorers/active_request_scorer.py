"""Prefers endpoints with few requests of this picker."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar

import msgspec

from extproc.endpoint import Candidate
from extproc.scheduling.context import SchedulingContext
from extproc.scheduling.framework import Signal


class ActiveRequestScorer(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, rename="camel"
):
    """`score = (high - c) / high * maxBusyScore`, and 1 when `c <= idleThreshold`.

    c is the requests this picker has open on the candidate, high the most among the candidates.
    With maxBusyScore below 1 an idle endpoint beats a busy one by a gap, which keeps a beginning
    that all prompts share from drawing all traffic to one endpoint.

    Attributes:
        idle_threshold: Most open requests that count as idle. 0 is the upstream default.
        max_busy_score: Score below which all busy endpoints stay. 1, the upstream default, makes
            no gap.
    """

    kind: ClassVar[str] = "active-request-scorer"
    needs: ClassVar[frozenset[Signal]] = frozenset({Signal.IN_FLIGHT})

    idle_threshold: Annotated[int, msgspec.Meta(ge=0)] = 0
    max_busy_score: Annotated[float, msgspec.Meta(ge=0, le=1)] = 1.0

    def score(self, turn: SchedulingContext, candidates: Sequence[Candidate]) -> list[float]:
        """See the class."""
        counts = [c.in_flight for c in candidates]
        high = max(counts, default=0)
        idle, top = self.idle_threshold, self.max_busy_score
        return [1.0 if c <= idle else (high - c) / high * top for c in counts]
