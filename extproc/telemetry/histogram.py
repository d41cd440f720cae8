"""Histograms with fixed bounds, cheap enough for every request."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Iterable

import msgspec

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


#: The last value of a sampled trace, and the id of that trace, by bucket.
Exemplars = dict[int, tuple[str, float]]


class MetricHistogram(msgspec.Struct, eq=False, gc=False):
    """A histogram with fixed upper bounds.

    Attributes:
        bounds: Ascending upper bounds, in the unit of what is added.
        counts: Values by bucket, not cumulative, up to the last bucket that has one.
        total: Sum of the values.
        exemplars: Exemplars; None without any.
    """

    bounds: tuple[float, ...]
    counts: list[int] = []
    total: float = 0.0
    exemplars: Exemplars | None = None

    def add(self, value: float) -> None:
        """Counts one value."""
        bucket = bisect_left(self.bounds, value)
        try:
            self.counts[bucket] += 1
        except IndexError:
            self.counts += [0] * (bucket - len(self.counts)) + [1]
        self.total += value

    @property
    def count(self) -> int:
        """Number of values."""
        return sum(self.counts)

    @property
    def cumulative(self) -> list[int]:
        """Values up to each bound, and all of them."""
        counts = list(itertools.accumulate(self.counts))
        return counts + [counts[-1] if counts else 0] * (len(self.bounds) + 1 - len(counts))


def merge(histograms: Iterable[MetricHistogram | None]) -> MetricHistogram | None:
    """The sum of histograms with the same bounds; None of none or of empty ones."""
    same = [histogram for histogram in histograms if histogram is not None and histogram.counts]
    if len(same) < 2:
        return same[0] if same else None
    merged = MetricHistogram(same[0].bounds)
    for histogram in same:
        pairs = itertools.zip_longest(merged.counts, histogram.counts, fillvalue=0)
        merged.counts = [count + more for count, more in pairs]
        merged.total += histogram.total
        if histogram.exemplars is not None:
            merged.exemplars = {**(merged.exemplars or {}), **histogram.exemplars}
    return merged


def rebucket(
    histogram: MetricHistogram | None, bounds: tuple[float, ...]
) -> MetricHistogram | None:
    """The same values by some of the bounds; None of None."""
    if histogram is None:
        return None
    cumulative = dict(zip((*histogram.bounds, math.inf), histogram.cumulative, strict=True))
    below = [cumulative[bound] for bound in (*bounds, math.inf)]
    counts = [count - less for count, less in zip(below, [0, *below], strict=False)]
    return MetricHistogram(bounds, counts, histogram.total)
