"""Lists of numbers to lists of scores."""

from __future__ import annotations

from collections.abc import Sequence

from extproc.scheduling import unknown


def min_max_inverted(values: Sequence[float | None]) -> list[float]:
    """`(high - v) / (high - low)`, low and high the extremes of the values; all equal scores 1.

    Args:
        values: One for each candidate, lower is better. Unknown ones count as the mean of the known
            ones; when none is known all score `unknown.NEUTRAL`.
    """
    known = unknown.impute_mean(values)
    if not known:
        return [unknown.NEUTRAL] * len(values)
    low, high = min(known), max(known)
    if low == high:
        return [1.0] * len(known)
    span = high - low
    return [(high - value) / span for value in known]


def share(part: float, total: float) -> float:
    """`part / total`, cut to 0..1; 0 where the total is 0."""
    return min(1.0, max(0.0, part / total)) if total > 0 else 0.0
