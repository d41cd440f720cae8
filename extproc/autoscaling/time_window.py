"""Time-weighted statistics over a sliding window."""

from __future__ import annotations

import msgspec


class TimeWindow(msgspec.Struct, frozen=True):
    """Samples of a quantity over time; a sample covers the time since the sample before it.

    Attributes:
        begun: Time of the first sample ever; None before it.
        samples: Pairs of time and value, in order; the first may lie before the window, and marks
            where the time of the second begins.
    """

    begun: float | None = None
    samples: tuple[tuple[float, float], ...] = ()

    def add(self, now: float, value: float, *, span_s: float) -> TimeWindow:
        """Return the window with a further sample.

        Args:
            now: Time of the sample; not before the last sample.
            value: The quantity.
            span_s: Length of the window.
        """
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
