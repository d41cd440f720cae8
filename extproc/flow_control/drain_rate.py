"""Drain rate: departures from a queue per second, and the wait that it means."""

from __future__ import annotations

import math

#: Seconds over which releases are averaged: the first of these in which enough of them were seen.
#: Fleets release hundreds a second, and a serial engine one in half a minute.
_WINDOWS_S = (10.0, 60.0, 300.0)

#: Releases, fading, that are enough (count).
_ENOUGH = 4.0

#: Upper bound of the estimate (seconds): beyond it the estimate means little.
_LONGEST_S = 300

#: Estimate before the first departure (seconds).
_UNKNOWN_S = 5


class DrainRateEstimator:
    """Departures per second, exponentially decayed.

    rate(t) = sum of 2^(-(t - t_i) / w) ln 2 / w / (1 - 2^(-(t - t_0) / w)): an average over the last
    w seconds, or those since the first request went on at t_0.
    """

    __slots__ = ("_at", "_began", "_sums")

    def __init__(self) -> None:
        self._sums = [0.0] * len(_WINDOWS_S)
        self._at = 0.0
        self._began = math.inf

    def record_departures(self, count: int, now: float) -> None:
        """Record departures (count)."""
        self._sums = [total + count for total in self._faded(now)]
        self._at = now
        self._began = min(self._began, now)

    def per_s(self, now: float) -> float:
        """Departures per second at `now`."""
        if self._began == math.inf:
            return 0.0
        totals = zip(self._faded(now), _WINDOWS_S, strict=True)
        total, window_s = next((entry for entry in totals if entry[0] >= _ENOUGH), (0.0, 0.0))
        if not window_s:
            total, window_s = self._faded(now)[-1], _WINDOWS_S[-1]
        observed_ratio = 1.0 - math.exp2(-max(1.0, now - self._began) / window_s)
        return total * math.log(2.0) / window_s / observed_ratio

    def wait_s(self, ahead: int, now: float, *, most_s: float = _LONGEST_S) -> int:
        """Estimated time until so many departures, in whole seconds, at least 1.

        Args:
            ahead: Departures (count).
            most_s: Upper bound (seconds); five minutes where that is less.
        """
        most = max(1, math.floor(min(most_s, _LONGEST_S)))
        rate = self.per_s(now)
        if rate < 1.0 / _LONGEST_S:
            return min(most, _UNKNOWN_S if ahead < _UNKNOWN_S else _LONGEST_S)
        return min(most, max(1, math.ceil(ahead / rate)))

    def _faded(self, now: float) -> list[float]:
        passed = self._at - now
        return [
            total * math.exp2(passed / window_s)
            for total, window_s in zip(self._sums, _WINDOWS_S, strict=True)
        ]
