"""Queue depth, request rate and replicas of one scale target over time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from extproc.autoscaling.time_window import TimeWindow

#: Seconds that the rate of requests is taken over, as on the published page of the queue-depth
#: policy (docs/spec/prior-systems.md#wallaroo).
RATE_S: Final = 180.0

#: Seconds below which a rate says little.
_FEW_S: Final = 10.0


class HistoryRow(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """State of a scale target at one time.

    Attributes:
        at_s: Monotonic or virtual seconds.
        depth: Requests that wait or run, per available replica (at least 1).
        depth_mean: Time-weighted mean of `depth` over the window of the policy.
        queries_per_s: Requests that arrived per second, mean over 3 minutes.
        available: Ready replicas (count).
        spec: Requested replicas (count).
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
            available: Ready replicas (count).
            spec: Requested replicas (count).
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
            arrivals += max(0.0, count - self._arrived.get(name, count))
            self._arrived[name] = count
        return arrivals
