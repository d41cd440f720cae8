"""Keeps the low end of KV cache usage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import msgspec

from extproc.endpoint import Candidate
from extproc.scheduling import normalization
from extproc.scheduling.context import SchedulingContext
from extproc.scheduling.framework import Signal


class KvRange(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Keeps a candidate when `u <= low + (high - low) / n`.

    u is KV usage, low and high the extremes and n the number of the candidates that came in
    (docs/spec/prior-systems.md#filter-tree, "least KV cache"). An unknown usage counts as the mean
    of the known ones.
    """

    kind: ClassVar[str] = "kv-range"
    needs: ClassVar[frozenset[Signal]] = frozenset({Signal.KV_USAGE})

    def filter(
        self, turn: SchedulingContext, candidates: Sequence[Candidate]
    ) -> Sequence[Candidate]:
        """See the class."""
        usage = normalization.impute_mean([c.load.kv_usage for c in candidates])
        if not usage:
            return candidates
        low = min(usage)
        limit = low + (max(usage) - low) / len(usage)
        return [c for c, u in zip(candidates, usage, strict=True) if u <= limit]
