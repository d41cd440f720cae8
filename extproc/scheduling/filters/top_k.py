"""Keeps the few with the least of one value."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

import msgspec

from extproc.endpoint import Candidate
from extproc.scheduling import normalization
from extproc.scheduling.context import SchedulingContext
from extproc.scheduling.framework import Signal


class TopK(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Keeps the `k` candidates with the least value, and all equal to the last of them.

    Equals stay because a filter has no chance to draw by: the picker chooses
    among them. An unknown value counts as the mean of the known ones.

    Attributes:
        by: The value: waiting requests, or KV usage.
        k: How many. 3 is the default of the filter of that name in the gateway's downstream branch
            (docs/spec/prior-systems.md#single-strategies): a few, so that pickers with the same
            stale scrape do not all send to one endpoint.
    """

    kind: ClassVar[str] = "top-k"

    by: Literal["waiting", "kv_usage"] = "waiting"
    k: Annotated[int, msgspec.Meta(ge=1)] = 3

    @property
    def needs(self) -> frozenset[Signal]:
        """The value it goes by."""
        return frozenset({Signal(self.by)})

    def filter(
        self, turn: SchedulingContext, candidates: Sequence[Candidate]
    ) -> Sequence[Candidate]:
        """See the class."""
        if self.by == "waiting":
            values = normalization.impute_mean([c.load.waiting for c in candidates])
        else:
            values = normalization.impute_mean([c.load.kv_usage for c in candidates])
        if not values or len(values) <= self.k:
            return candidates
        limit = min(values) if self.k == 1 else sorted(values)[self.k - 1]
        return [c for c, value in zip(candidates, values, strict=True) if value <= limit]
