"""Measures stalls of the event loop: a timer records how late it fires.

While the loop is held no stream is served and no probe answered. A hold is seen as what is left of
it when the timer was due: by up to `BUSY_S` less than it was while streams are open, and by up to
`QUIET_S` while none is.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final

from extproc.telemetry.counters import ProcessCounters
from extproc.telemetry.request_series import MetricHistogram

#: Seconds between two looks while a stream is open. 0.02 misses nothing above 20 ms, and beside
#: requests its timers come with wake-ups that are there anyway: 5 us each.
BUSY_S: Final = 0.02

#: Seconds between two looks while none is: no request waits, and a wake-up costs more than a look
#: (`python -m bench.stalls`).
QUIET_S: Final = 0.2


class StallMeter:
    """Records stalls of the event loop on which it was started.

    Of a late timer the part that the loop's own thread computed is noted apart: on a busy machine
    the rest is time in which other processes had the core.

    Args:
        clock: Monotonic seconds, of the same kind as the event loop's.
        thread_time: Seconds of processor time of the current thread.
        count_streams: Called at each look with the number of open streams.
    """

    def __init__(
        self,
        counters: ProcessCounters,
        *,
        clock: Callable[[], float] = time.monotonic,
        thread_time: Callable[[], float] = time.thread_time,
        count_streams: Callable[[int], object] = int,
    ) -> None:
        self._stall_s: MetricHistogram = counters.event_loop_lag_s
        self._stall_cpu_s: MetricHistogram = counters.event_loop_lag_cpu_s
        self._clock = clock
        self._thread_time = thread_time
        self._counters = counters
        self._count_streams = count_streams
        self._timer: asyncio.TimerHandle | None = None
        self._quiet = False
        self._due = 0.0
        self._computed_s = 0.0

    def start(self) -> None:
        """Start the timer."""
        self._computed_s = self._thread_time()
        self._schedule()

    def stop(self) -> None:
        """Stop the timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._quiet = False

    def wake(self) -> None:
        """Switch to the busy interval. Cheap: called for every opened stream."""
        if self._quiet and self._timer is not None:
            self._timer.cancel()
            self._schedule()

    def measure(self) -> None:
        """Record how late this call is; called by the timer."""
        try:
            computed_s = self._thread_time()
            late_s = max(0.0, self._clock() - self._due)
            self._stall_s.add(late_s)
            self._stall_cpu_s.add(min(late_s, computed_s - self._computed_s))
            self._computed_s = computed_s
            self._count_streams(self._counters.streams_open)
        finally:
            # What raises here goes to the supervisor, and must not be the last look.
            self._schedule()

    def _schedule(self) -> None:
        self._quiet = not self._counters.streams_open
        wait_s = QUIET_S if self._quiet else BUSY_S
        self._due = self._clock() + wait_s
        self._timer = asyncio.get_running_loop().call_later(wait_s, self.measure)
