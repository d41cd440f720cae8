"""Drops endpoints to which this picker has sent enough."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

import msgspec

from extproc.endpoint import Candidate
from extproc.scheduling.context import SchedulingContext
from extproc.scheduling.framework import Signal


class ConcurrencyDetector(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, rename="camel"
):
    """Keeps a candidate when `n < maxConcurrency * (1 + headroom)`; none left refuses with 429.

    n is the requests this picker has open there. In tokens mode it is the uncached prompt tokens
    not yet computed, held against `maxTokenConcurrency`; hybrid wants both. Bounds are whole
    numbers, rounded down.

    Attributes:
        concurrency_mode: `requests`, `tokens` or `hybrid`.
        max_concurrency: Requests. 100 is the upstream default.
        max_token_concurrency: Tokens. 1000000 is the upstream default.
        headroom: How far above the bound is allowed.
    """

    kind: ClassVar[str] = "concurrency-detector"
    needs: ClassVar[frozenset[Signal]] = frozenset({Signal.IN_FLIGHT, Signal.QUEUED})

    concurrency_mode: Literal["requests", "tokens", "hybrid"] = "requests"
    max_concurrency: Annotated[int, msgspec.Meta(gt=0)] = 100
    max_token_concurrency: Annotated[int, msgspec.Meta(gt=0)] = 1_000_000
    headroom: Annotated[float, msgspec.Meta(ge=0)] = 0.0

    def filter(
        self, turn: SchedulingContext, candidates: Sequence[Candidate]
    ) -> Sequence[Candidate]:
        """See the class."""
        return [c for c in candidates if not self.is_saturated(c)]

    def is_saturated(self, candidate: Candidate) -> bool:
        """See `framework.SaturationDetector`."""
        mode = self.concurrency_mode
        if mode != "tokens":
            requests = int(self.max_concurrency * (1.0 + self.headroom))
            if candidate.in_flight >= requests:
                return True
        if mode == "requests":
            return False
        return candidate.queued_tokens >= int(self.max_token_concurrency * (1.0 + self.headroom))
