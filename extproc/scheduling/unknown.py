"""Imputation of unknown values: they count as the mean of the known ones."""

from __future__ import annotations

from collections.abc import Sequence

#: Score of every candidate when no value is known.
NEUTRAL = 0.5


def impute_mean(values: Sequence[float | None]) -> Sequence[float] | None:
    """Put the mean of the known values in the place of the unknown ones.

    An unknown endpoint is thus neither the best nor the worst: it draws its share of requests and
    no more.

    Args:
        values: One for each candidate, in any unit.

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
