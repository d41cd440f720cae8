"""Normalization: lists of values to lists of scores.

Imputation of unknown values: they count as the mean of the known ones.
"""

from __future__ import annotations

from collections.abc import Sequence

#: Score of every candidate when no value is known.
NEUTRAL = 0.5


def impute_mean(values: Sequence[float | None]) -> Sequence[float] | None:
    """Put the mean of the known values in the place of the unknown ones.

    An unknown endpoint is thus neither the best nor the worst: it draws its share of requests and
    no more.

    Args:
        values: A value for each candidate, in any unit; None if it is unknown.

    Returns:
        The values without gaps; None when none is known.
    """
    known = [value for value in values if value is not None]
    if len(known) == len(values):
        return known
    if not known:
        return None
    mean = sum(known) / len(known)
    return [mean if value is None else value for value in values]


def min_max_inverted(values: Sequence[float | None]) -> list[float]:
    """`(high - v) / (high - low)`, low and high the extremes of the values; all equal scores 1.

    Args:
        values: A value for each candidate, lower is better. Unknown values count as the mean of the
            known ones; when none is known all score `NEUTRAL`.
    """
    known = impute_mean(values)
    if not known:
        return [NEUTRAL] * len(values)
    low, high = min(known), max(known)
    if low == high:
        return [1.0] * len(known)
    span = high - low
    return [(high - value) / span for value in known]


def share(part: float, total: float) -> float:
    """`part / total`, cut to 0..1; 0 where the total is 0."""
    return min(1.0, max(0.0, part / total)) if total > 0 else 0.0
