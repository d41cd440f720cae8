"""A timer whose clock a test moves."""

from __future__ import annotations

from collections.abc import Callable


class ScheduledFixture:
    """A callback that a timer fixture runs at `when`, unless it is cancelled."""

    def __init__(self, when: float, callback: Callable[[], None]) -> None:
        self.when = when
        self.callback = callback
        self.is_cancelled = False

    def cancel(self) -> None:
        """Drop the callback."""
        self.is_cancelled = True


class TimerFixture:
    """Implements `Timer`; `advance` moves the clock and runs what is due."""

    def __init__(self) -> None:
        self.time = 0.0
        self.scheduled: list[ScheduledFixture] = []

    def now(self) -> float:
        """Return the time that the test set."""
        return self.time

    def call_at(self, when: float, callback: Callable[[], None]) -> ScheduledFixture:
        """Schedule a callback."""
        self.scheduled.append(ScheduledFixture(when, callback))
        return self.scheduled[-1]

    def call_soon(self, callback: Callable[[], None]) -> None:
        """Schedule a callback for this moment."""
        self.call_at(self.time, callback)

    @property
    def pending(self) -> list[float]:
        """Times of the callbacks that will run, in order."""
        return sorted(entry.when for entry in self.scheduled if not entry.is_cancelled)

    def advance(self, seconds: float) -> None:
        """Move the clock, and run each callback at its time."""
        end = self.time + seconds
        while self.pending and self.pending[0] <= end:
            entry = min(
                (entry for entry in self.scheduled if not entry.is_cancelled),
                key=lambda entry: entry.when,
            )
            self.scheduled.remove(entry)
            self.time = max(self.time, entry.when)
            entry.callback()
        self.time = end
