"""How long a place in the queue takes: for Retry-After, from what the queue itself sees."""

from __future__ import annotations

import math

#: Seconds over which releases are averaged.
_WINDOW_S = 10.0

#: Longest wait a client is told of (seconds): beyond it the estimate means little.
_LONGEST_S = 300

#: Told while nothing went on yet (seconds).
_UNKNOWN_S = 5


class Pace:
    """Requests that go on per second, fading.

    rate(t) = sum of 2^(-(t - t_i) / w) ln 2 / w: an average over the last w seconds that needs two
    numbers.
    """

    __slots__ = ("_at", "_sum")

    def __init__(self) -> None:
        self._sum = 0.0
        self._at = 0.0

    def went(self, now: float) -> None:
        """One went on."""
        self._sum = self._faded(now) + 1.0
        self._at = now

    def per_s(self, now: float) -> float:
        """Requests per second now."""
        return self._faded(now) * math.log(2.0) / _WINDOW_S

    def wait_s(self, ahead: int, now: float) -> int:
        """Whole seconds until so many went on, at least 1 and at most five minutes."""
        rate = self.per_s(now)
        if rate < 1.0 / _LONGEST_S:
            return _UNKNOWN_S if ahead < _UNKNOWN_S else _LONGEST_S
        return min(_LONGEST_S, max(1, math.ceil(ahead / rate)))

    def _faded(self, now: float) -> float:
        return self._sum * math.exp2((self._at - now) / _WINDOW_S)
