"""Event queue with virtual time."""

from __future__ import annotations

import heapq
from collections.abc import Callable

EventCallback = Callable[[], None]


class EventQueue:
    """A clock that jumps from one event to the next. Mutable; one owner.

    Attributes:
        now: Virtual seconds since the start.
    """

    __slots__ = ("_events", "_serial", "now")

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, EventCallback]] = []
        self._serial = 0

    def at(self, when: float, act: EventCallback) -> None:
        """Schedule a callback; callbacks of the same moment run in the order of scheduling.

        Args:
            when: Virtual seconds; the past counts as now.
        """
        self._serial += 1
        heapq.heappush(self._events, (max(when, self.now), self._serial, act))

    def after(self, seconds: float, act: EventCallback) -> None:
        """Schedule a callback after so many seconds."""
        self.at(self.now + seconds, act)

    def step(self) -> bool:
        """Run the next event; returns False if there is none."""
        if not self._events:
            return False
        self.now, _, act = heapq.heappop(self._events)
        act()
        return True
