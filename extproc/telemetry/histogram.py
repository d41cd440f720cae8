"""Histograms with fixed bounds, cheap enough for every request."""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from operator import add

#: Bounds of durations and of times to first token, as the EPP of llm-d has them, so that both
#: names of a metric are served from the same counts.
DURATION_BOUNDS_S = (
    *(0.005, 0.025, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1, 1.25, 1.5, 2, 3, 4, 5, 6, 8, 10, 15, 20),
    *(30, 45, 60, 120, 180, 240, 300, 360, 480, 600, 900, 1200, 1800, 2700, 3600),
)
TTFT_BOUNDS_S = DURATION_BOUNDS_S[:24]

#: Bounds of seconds per output token, and of the gaps between the chunks of a response.
TPOT_BOUNDS_S = (
    *(0.0005, 0.00205, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.125, 0.15, 0.2),
    *(0.3, 0.4, 0.5, 0.6, 0.8, 1, 2),
)
GAP_BOUNDS_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 2)

#: Bounds of tokens of a request.
TOKEN_BOUNDS = (1, *(2**power for power in range(3, 21)))

#: Bounds of actual over predicted values.
RATIO_BOUNDS = (0.1, 0.25, 0.5, 0.67, 0.8, 0.9, 1, 1.1, 1.25, 1.5, 2, 4, 10)


class MetricHistogram:
    """A histogram with fixed upper bounds.

    Args:
        bounds: Ascending upper bounds, in the unit of what is added.

    Attributes:
        counts: Values by bucket, those above the last bound at the end; not cumulative.
        total: Sum of the values.
        exemplars: The last value of a sampled trace and the id of that trace, by bucket; None
            before there was one.
    """

    __slots__ = ("bounds", "counts", "exemplars", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0
        self.exemplars: dict[int, tuple[str, float]] | None = None

    def add(self, value: float, trace_id: str = "") -> None:
        """Counts one value; of a sampled trace, where it has an id."""
        bucket = bisect_left(self.bounds, value)
        self.counts[bucket] += 1
        self.total += value
        if trace_id:
            if self.exemplars is None:
                self.exemplars = {}
            self.exemplars[bucket] = (trace_id, value)

    @property
    def count(self) -> int:
        """Number of values."""
        return sum(self.counts)


def merge(histograms: Iterable[MetricHistogram]) -> MetricHistogram | None:
    """The sum of histograms with the same bounds; None of none or of empty ones."""
    same = list(histograms)
    if not same:
        return None
    merged = same[0]
    if len(same) > 1:
        merged = MetricHistogram(merged.bounds)
        for histogram in same:
            merged.counts = list(map(add, merged.counts, histogram.counts))
            merged.total += histogram.total
            if histogram.exemplars is not None:
                merged.exemplars = {**(merged.exemplars or {}), **histogram.exemplars}
    return merged if any(merged.counts) else None


def rebucket(histogram: MetricHistogram | None, bounds: Sequence[float]) -> MetricHistogram | None:
    """The same values by some of the bounds; None of None."""
    if histogram is None:
        return None
    counts = dict(zip(histogram.bounds, itertools.accumulate(histogram.counts), strict=False))
    view = MetricHistogram(bounds)
    below = 0
    for bucket, bound in enumerate(view.bounds):
        view.counts[bucket], below = counts[bound] - below, counts[bound]
    view.counts[-1] = histogram.count - below
    view.total = histogram.total
    return view
