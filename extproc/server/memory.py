"""Returns freed memory to the system after a peak of streams.

Who allocates keeps what was freed: the C library its pages, Python whole arenas of 1 MiB in which a
single object is left, some of them in lists of free objects that only a full collection empties. A
picker that held ten thousand requests for a minute would look like one that still does, and an
autoscaler or a memory limit would take it for that.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
from collections.abc import Callable

#: Streams that make a peak (count): some 30 MB.
_CROWD = 1000

#: Share of the peak that may be left when memory is returned.
_LEFT = 0.1

#: Seconds after the end of a peak: its last objects are freed a moment later, and what gRPC keeps for
#: connections goes with them.
_PAUSES_S = (1.0, 10.0)


def trimmer() -> Callable[[], None]:
    """Build the function that returns freed memory: some 40 ms after ten thousand streams."""
    try:
        trim: Callable[[int], int] = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError):
        trim = _keep  # another C library: Python's arenas go back all the same

    def both() -> None:
        gc.collect()
        trim(0)

    return both


def _keep(_: int) -> int:
    return 0


class IdleMemoryTrimmer:
    """Trims memory once most streams of a peak have ended.

    Args:
        trim: Returns freed memory to the system.
    """

    def __init__(self, trim: Callable[[], None]) -> None:
        self._trim = trim
        self._most = 0

    def count(self, streams: int) -> None:
        """Record the number of open streams."""
        if streams > self._most:
            self._most = streams
        elif self._most >= _CROWD and streams <= self._most * _LEFT:
            self._most = streams
            loop = asyncio.get_running_loop()
            for pause_s in _PAUSES_S:
                loop.call_later(pause_s, self._trim)
