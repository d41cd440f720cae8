"""Lifetimes of the replicas of a run, and its summary."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from extproc.autoscaling.scaling_history import HistoryRow


class ScalingSummary(msgspec.Struct, frozen=True):
    """Replica history of one run. Sequences are columns of `HistoryRow`, by time.

    Attributes:
        replica_s: Seconds of replicas, from the request for a replica until it is gone.
        mean_replicas: Replicas until the last request ended, mean over that time.
        mean_available: Ready replicas, mean over the same time: what the published page charts.
        cold_starts: Requested replicas (count).
        most: Most replicas at a time.
        to_least_s: From the end of the last request until there are as few as there may be.
        at_s: Virtual seconds of the row.
        depth: See `HistoryRow`.
        depth_mean: See `HistoryRow`.
        queries_per_s: See `HistoryRow`.
        available: See `HistoryRow`.
        spec: See `HistoryRow`.
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


class ReplicaLifetimes:
    """Records when replicas are requested, ready, draining and gone. Mutable; one owner."""

    def __init__(self) -> None:
        self._begun: dict[int, float] = {}
        self._lives: list[tuple[float, float]] = []
        self._answered: dict[int, float] = {}
        self._answering: list[tuple[float, float]] = []
        self._most = 0

    def replica_requested(self, replica: int, now: float) -> None:
        """Record the request for a replica."""
        self._begun[replica] = now
        self._most = max(self._most, len(self._begun))

    def up(self, replica: int, now: float) -> None:
        """Record the readiness of a replica."""
        self._answered[replica] = now

    def leaves(self, replica: int, now: float) -> None:
        """Record the begin of the draining of a replica."""
        if replica in self._answered:
            self._answering.append((self._answered.pop(replica), now))

    def gone(self, replica: int, now: float) -> None:
        """Record the end of a replica."""
        self.leaves(replica, now)
        self._lives.append((self._begun.pop(replica), now))

    def closed(self, now: float, rows: Sequence[HistoryRow], *, over_at: float) -> ScalingSummary:
        """Summary of the run.

        Args:
            now: When it ended, with as few replicas as there may be or without patience.
            over_at: When the last request had ended.
        """
        lives = [*self._lives, *((begun, now) for begun in self._begun.values())]
        answering = [*self._answering, *((begun, now) for begun in self._answered.values())]
        return ScalingSummary(
            replica_s=sum(end - begun for begun, end in lives),
            mean_replicas=_mean(lives, over_at),
            mean_available=_mean(answering, over_at),
            cold_starts=len(lives),
            most=self._most,
            to_least_s=now - over_at,
            at_s=[row.at_s for row in rows],
            depth=[row.depth for row in rows],
            depth_mean=[row.depth_mean for row in rows],
            queries_per_s=[row.queries_per_s for row in rows],
            available=[row.available for row in rows],
            spec=[row.spec for row in rows],
        )


def _mean(lives: Sequence[tuple[float, float]], until: float) -> float:
    """Mean number of replicas from 0 to `until`."""
    within = sum(max(0.0, min(end, until) - begun) for begun, end in lives)
    return within / until if until else 0.0
