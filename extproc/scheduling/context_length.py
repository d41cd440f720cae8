"""Scorer and filter by prompt length: endpoints declare their range in a label.

It is a plugin of two roles, so it stands neither among the scorers nor among the filters.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import ClassVar

import msgspec

from extproc.endpoint import Candidate
from extproc.scheduling.framework import SchedulingContext, Signal

#: Label of endpoints with a range of prompt tokens, such as `0-2048`.
LABEL = "llm-d.ai/context-length-range"

_RANGE = re.compile(r"\s*(\d+)\s*-\s*(\d+)\s*", re.ASCII)


class ContextRange(msgspec.Struct, frozen=True):
    """Prompt lengths in tokens, both ends included.

    Attributes:
        low: Shortest context (tokens, inclusive).
        high: Longest context (tokens, inclusive).
    """

    low: int
    high: int

    def __contains__(self, length: int) -> bool:
        """True if the range includes a prompt length."""
        return self.low <= length <= self.high

    @property
    def width(self) -> int:
        """Tokens between the ends."""
        return self.high - self.low

    def distance(self, length: int) -> int:
        """Tokens from a length to the nearer end; 0 inside."""
        return max(self.low - length, length - self.high, 0)


def parse_context_range(text: str) -> ContextRange | None:
    """Parse a range from its label; None when the label is no range."""
    match = _RANGE.fullmatch(text)
    if match is None:
        return None
    low, high = int(match[1]), int(match[2])
    return ContextRange(low, high) if low <= high else None


class ContextLengthAware(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, rename="camel"
):
    """Scores or filters endpoints by the range of prompt lengths that their label names.

    As a scorer, inside the range `0.3 + 0.7 * (0.7 / (1 + width/10000) + 0.3 * headroom / width)`:
    width is the length of the range and headroom the tokens up to its end; a range of a single
    length scores 1. Outside `0.3 / (1 + distance/1000)`, distance to the nearer end, so any match
    beats any miss. Without the label 0.5; a label that is no range scores 0.

    As a filter it keeps candidates whose range holds the prompt's tokens, and those without the
    label, but only with `enableFiltering`; otherwise all. A label that is no range is dropped.
    Upstream: `scorer/contextlengthaware/context_length_aware.go`.

    Attributes:
        label: Label of endpoints with the range, `min-max` in tokens.
        enable_filtering: Whether the filter drops any candidate; no effect on scores. False is the
            upstream default.
    """

    kind: ClassVar[str] = "context-length-aware"
    needs: ClassVar[frozenset[Signal]] = frozenset({Signal.LABELS})

    label: str = LABEL
    enable_filtering: bool = False

    def score(self, context: SchedulingContext, candidates: Sequence[Candidate]) -> list[float]:
        length = context.request.prompt_tokens
        return [_fit(length, c.endpoint.labels.get(self.label)) for c in candidates]

    def filter(
        self, context: SchedulingContext, candidates: Sequence[Candidate]
    ) -> Sequence[Candidate]:
        if not self.enable_filtering:
            return candidates
        length = context.request.prompt_tokens
        return [c for c in candidates if _is_for(length, c.endpoint.labels.get(self.label))]


def _fit(length: int, label: str | None) -> float:
    """The score of one label."""
    if label is None:
        return 0.5
    lengths = parse_context_range(label)
    if lengths is None:
        return 0.0
    if length not in lengths:
        return 0.3 / (1.0 + lengths.distance(length) / 1000.0)
    if not lengths.width:
        return 1.0
    narrow = 0.7 / (1.0 + lengths.width / 10_000.0)
    return 0.3 + 0.7 * (narrow + 0.3 * (lengths.high - length) / lengths.width)


def _is_for(length: int, label: str | None) -> bool:
    """True if an endpoint with that label takes such a prompt."""
    if label is None:
        return True
    lengths = parse_context_range(label)
    return lengths is not None and length in lengths
