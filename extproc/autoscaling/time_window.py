"""What was seen over the last seconds."""

from __future__ import annotations

import msgspec


class TimeWindow(msgspec.Struct, frozen=True):
    """A quantity over time. A value speaks for the time since the one before it.

    Attributes:
        begun: When the first value was seen, however long ago; None for never.
        samples: When and what, in order; the first may be from before the window, and says where
            the time of the second begins.
    """

    begun: float | None = None
    samples: tuple[tuple[float, float], ...] = ()

    def add(self, now: float, value: float, *, span_s: float) -> TimeWindow:
        """This window with one more value.

        Args:
            now: When it was seen; not before the last one.
            value: What was seen.
            span_s: How much of the past is kept.
        """
        samples = self.samples
        first = 0
        while first + 1 < len(samples) and samples[first + 1][0] <= now - span_s:
            first += 1
        return TimeWindow(
            now if self.begun is None else self.begun, (*samples[first:], (now, value))
        )

    def watched_s(self, now: float) -> float:
        """How long it was watched, without end."""
        return 0.0 if self.begun is None else now - self.begun

    def mean(self, now: float, span_s: float) -> float:
        """Mean over the last seconds, by time; over what was seen where that is shorter.

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
        """The same on a clock that shows so many seconds more."""
        if self.begun is None:
            return self
        samples = tuple((at + by_s, value) for at, value in self.samples)
        return TimeWindow(self.begun + by_s, samples)


def shift_time(when: float | None, by_s: float) -> float | None:
    """A moment on a clock that shows so many seconds more; None stays what never was."""
    return None if when is None else when + by_s
