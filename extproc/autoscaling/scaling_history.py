"""Queue depth, request rate and replicas of one scale target over time; sliding windows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

#: Seconds that the rate of requests is taken over, as on the published page of the queue-depth
#: policy (docs/spec/prior-systems.md#wallaroo).
RATE_S: Final = 180.0

#: Seconds below which a rate says little.
_FEW_S: Final = 10.0

#: Pickers whose counts are remembered (count), the latest read: each has another name once restarted,
#: and one that cannot be read for a while goes on where it was.
_MAX_PICKERS: Final = 1024


class HistoryRow(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """State of a scale target at one time.

    Attributes:
        at_s: Monotonic or virtual seconds.
        depth: Requests that wait or run, per available replica (at least 1).
        depth_mean: Time-weighted mean of `depth` over the window of the policy.
        queries_per_s: Requests that arrived per second, mean over 3 minutes.
    """

    at_s: float
    depth: float
    depth_mean: float
    queries_per_s: float
    available: int
    spec: int


#: Title of each chart by the field of `HistoryRow` that it shows.
CHARTS: Mapping[str, str] = {
    "depth": "queue depth per replica",
    "depth_mean": "queue depth, mean over the window",
    "queries_per_s": "requests per second, over 3 minutes",
    "available": "replicas available",
}


class TimeWindow(msgspec.Struct, frozen=True):
    """Samples of a quantity over time; a sample covers the time since the sample before it.

    Attributes:
        begun: Monotonic seconds of the first sample ever; None before it.
        samples: Pairs of time and value, in order; the first may lie before the window, and marks
            where the time of the second begins.
    """

    begun: float | None = None
    samples: tuple[tuple[float, float], ...] = ()

    def add(self, now: float, value: float, *, span_s: float) -> TimeWindow:
        """Return the window with a further sample, not before the last one."""
        samples = self.samples
        first = 0
        while first + 1 < len(samples) and samples[first + 1][0] <= now - span_s:
            first += 1
        return TimeWindow(
            now if self.begun is None else self.begun, (*samples[first:], (now, value))
        )

    def watched_s(self, now: float) -> float:
        """Seconds since the first sample, not limited by the window."""
        return 0.0 if self.begun is None else now - self.begun

    def mean(self, now: float, span_s: float) -> float:
        """Time-weighted mean of the last `span_s` seconds, or of the watched time if shorter.

        The first value of all speaks for no time, and counts only where it is alone.
        """
        start = now - span_s
        total = seconds = 0.0
        for (before, _), (at, value) in zip(self.samples, self.samples[1:], strict=False):
            piece = at - max(before, start)
            if piece > 0:
                total += piece * value
                seconds += piece
        if seconds:
            return total / seconds
        return self.samples[-1][1] if self.samples else 0.0

    def min(self, now: float, span_s: float) -> float:
        """Smallest value of the last seconds; 0 where there is none."""
        return min((value for at, value in self.samples if at > now - span_s), default=0.0)

    def max(self, now: float, span_s: float) -> float:
        """Largest value of the last seconds; 0 where there is none."""
        return max((value for at, value in self.samples if at > now - span_s), default=0.0)

    def shift_time(self, by_s: float) -> TimeWindow:
        """Return the window with all times moved by `by_s` seconds, for another clock."""
        if self.begun is None:
            return self
        samples = tuple((at + by_s, value) for at, value in self.samples)
        return TimeWindow(self.begun + by_s, samples)


def shift_time(when: float | None, by_s: float) -> float | None:
    """Move a time by `by_s` seconds, for another clock; None stays None."""
    return None if when is None else when + by_s


class ScalingHistory:
    """Turns observations of a scale target into rows. Mutable; one owner.

    Args:
        window_s: Seconds the depth is averaged over.

    Attributes:
        latest: Row of the last observation; None before the first.
    """

    def __init__(self, window_s: float) -> None:
        self.latest: HistoryRow | None = None
        self._window_s = window_s
        self._depths = TimeWindow()
        self._rates = TimeWindow()
        self._arrived: dict[str, float] = {}

    def record(
        self,
        now: float,
        *,
        requests: float,
        available: int,
        spec: int,
        arrived: Mapping[str, float],
    ) -> HistoryRow:
        """Add an observation.

        Args:
            now: Seconds; not before those of the last observation.
            requests: Requests that wait or run (count).
            arrived: Requests received so far (counter), by picker. The first value of a picker is
                its zero; a value below the one before it means that the picker began again.
        """
        since_s = now - self.latest.at_s if self.latest is not None else 0.0
        rate = 0.0
        if since_s > 0 or self.latest is None:
            # Arrivals between two observations at the same time count in the next one.
            rate = self._count(arrived) / (since_s or 1.0)
        depth = requests / max(1, available)
        self._rates = self._rates.add(now, rate, span_s=RATE_S)
        self._depths = self._depths.add(now, depth, span_s=self._window_s)
        self.latest = HistoryRow(
            at_s=now,
            depth=depth,
            depth_mean=self._depths.mean(now, self._window_s),
            # Scaled down while the observed time is short.
            queries_per_s=self._rates.mean(now, RATE_S)
            * min(1.0, self._rates.watched_s(now) / _FEW_S),
            available=available,
            spec=spec,
        )
        return self.latest

    def _count(self, arrived: Mapping[str, float]) -> float:
        """Requests that arrived since the last call."""
        arrivals = 0.0
        for name, count in arrived.items():
            arrivals += max(0.0, count - self._arrived.pop(name, count))
            self._arrived[name] = count
        while len(self._arrived) > max(_MAX_PICKERS, len(arrived)):
            del self._arrived[next(iter(self._arrived))]
        return arrivals
