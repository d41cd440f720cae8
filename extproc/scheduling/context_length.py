"""Context length label: the range of prompt tokens an endpoint is for, such as `0-2048`."""

from __future__ import annotations

import re

import msgspec

LABEL = "llm-d.ai/context-length-range"

_RANGE = re.compile(r"\s*(\d+)\s*-\s*(\d+)\s*", re.ASCII)


class Range(msgspec.Struct, frozen=True):
    """Prompt lengths in tokens, both ends included.

    Attributes:
        low: Shortest.
        high: Longest.
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


def parse(text: str) -> Range | None:
    """Parse a range from its label; None when the label is no range."""
    match = _RANGE.fullmatch(text)
    if match is None:
        return None
    low, high = int(match[1]), int(match[2])
    return Range(low, high) if low <= high else None
