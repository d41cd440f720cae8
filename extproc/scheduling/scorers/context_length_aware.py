"""Prefers endpoints that are for prompts of this length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import msgspec

from extproc.endpoint import Candidate
from extproc.scheduling import labels
from extproc.scheduling.context import SchedulingContext
from extproc.scheduling.framework import Signal


class ContextLengthAwareScorer(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, rename="camel"
):
    """`0.3 + 0.7 * (0.7 / (1 + width/10000) + 0.3 * headroom / width)` inside the range.

    width is the length of the range and headroom the tokens up to its end; a range of one length
    scores 1. Outside `0.3 / (1 + distance/1000)`, distance to the nearer end, so any match beats
    any miss. Without the label 0.5; a label that is no range scores 0.

    Attributes:
        label: Label of endpoints with the range, `min-max` in tokens.
        enable_filtering: No effect on scores; the filter of the same kind reads it.
    """

    kind: ClassVar[str] = "context-length-aware"
    needs: ClassVar[frozenset[Signal]] = frozenset({Signal.LABELS})

    label: str = labels.LABEL
    enable_filtering: bool = False

    def score(self, turn: SchedulingContext, candidates: Sequence[Candidate]) -> list[float]:
        """See the class."""
        length = turn.request.prompt_tokens
        return [_fit(length, c.endpoint.labels.get(self.label)) for c in candidates]


def _fit(length: int, label: str | None) -> float:
    """The score of one label."""
    if label is None:
        return 0.5
    lengths = labels.parse_context_range(label)
    if lengths is None:
        return 0.0
    if length not in lengths:
        return 0.3 / (1.0 + lengths.distance(length) / 1000.0)
    if not lengths.width:
        return 1.0
    narrow = 0.7 / (1.0 + lengths.width / 10_000.0)
    return 0.3 + 0.7 * (narrow + 0.3 * (lengths.high - length) / lengths.width)
