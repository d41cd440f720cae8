"""Replica history of a run: the four charts of the autoscaling page, and their sums."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import msgspec

from extproc.autoscaling.time_window import TimeWindow

#: Seconds over which requests per second are charted, as the published page does.
_RATE_S = 180.0


class ScalingSummary(msgspec.Struct, frozen=True):
    """Replica history of one run. Sequences are rows of the charts, by time.

    Attributes:
        replica_s: Seconds of replicas, from asking for one until it is gone.
        mean_replicas: The same until the last request ended, over that time.
        mean_available: Replicas that answer until then, over that time: what the published page
            charts.
        cold_starts: Replicas that were asked for (count).
        most: Most replicas at a time.
        to_least_s: From the end of the last request until there are as few as there may be.
        at_s: When a row was taken, virtual seconds.
        depth: Requests that wait or run, per replica that answers (at least 1).
        depth_mean: The same, averaged over the window.
        queries_per_s: Requests that came, over 3 minutes.
        available: Replicas that answer.
        spec: Replicas that were asked for.
    """

    replica_s: float
    mean_replicas: float
    mean_available: float
    cold_starts: int
    most: int
    to_least_s: float
    at_s: Sequence[float] = ()
    depth: Sequence[float] = ()
    depth_mean: Sequence[float] = ()
    queries_per_s: Sequence[float] = ()
    available: Sequence[int] = ()
    spec: Sequence[int] = ()


class FleetScalingHistory:
    """Collects chart rows and replica lifetimes. Mutable; one owner.

    Args:
        window_s: Seconds the queue depth is averaged over.
    """

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._depths = TimeWindow()
        self._arrivals: deque[float] = deque()
        self._rows: list[tuple[float, float, float, float, int, int]] = []
        self._begun: dict[int, float] = {}
        self._lives: list[tuple[float, float]] = []
        self._answered: dict[int, float] = {}
        self._answering: list[tuple[float, float]] = []
        self._most = 0

    def arrived(self, now: float) -> None:
        """Count an arrival."""
        self._arrivals.append(now)

    def row(self, now: float, *, requests: float, available: int, spec: int) -> None:
        """Append a row to the charts."""
        while self._arrivals and self._arrivals[0] <= now - _RATE_S:
            self._arrivals.popleft()
        depth = requests / max(1, available)
        self._depths = self._depths.add(now, depth, span_s=self._window_s)
        mean = self._depths.mean(now, self._window_s)
        rate = len(self._arrivals) / _RATE_S
        self._rows.append((now, depth, mean, rate, available, spec))

    def replica_requested(self, site: int, now: float) -> None:
        """Record the request for a replica."""
        self._begun[site] = now
        self._most = max(self._most, len(self._begun))

    def up(self, site: int, now: float) -> None:
        """Record the readiness of a replica."""
        self._answered[site] = now

    def leaves(self, site: int, now: float) -> None:
        """Record the begin of the draining of a replica."""
        if site in self._answered:
            self._answering.append((self._answered.pop(site), now))

    def gone(self, site: int, now: float) -> None:
        """Record the end of a replica."""
        self.leaves(site, now)
        self._lives.append((self._begun.pop(site), now))

    def closed(self, now: float, *, over_at: float) -> ScalingSummary:
        """Summary of the run.

        Args:
            now: When it ended, with as few replicas as there may be or without patience.
            over_at: When the last request had ended.
        """
        lives = [*self._lives, *((begun, now) for begun in self._begun.values())]
        answering = [*self._answering, *((begun, now) for begun in self._answered.values())]
        columns = [list(column) for column in zip(*self._rows, strict=True)] or [[]] * 6
        at_s, depth, mean, rate, available, spec = columns
        return ScalingSummary(
            replica_s=sum(end - begun for begun, end in lives),
            mean_replicas=_mean(lives, over_at),
            mean_available=_mean(answering, over_at),
            cold_starts=len(lives),
            most=self._most,
            to_least_s=now - over_at,
            at_s=at_s,
            depth=depth,
            depth_mean=mean,
            queries_per_s=rate,
            available=[int(value) for value in available],
            spec=[int(value) for value in spec],
        )


def _mean(lives: Sequence[tuple[float, float]], until: float) -> float:
    """Mean number of replicas from 0 to `until`."""
    within = sum(max(0.0, min(end, until) - begun) for begun, end in lives)
    return within / until if until else 0.0
