"""Metrics of the control loop of a pool."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from extproc.autoscaling.demand_estimator import PickerCounters
from extproc.autoscaling.interface import Demand, ScalingDecision
from extproc.autoscaling.scaling_history import ScalingHistory
from extproc.telemetry.control_plane_metrics import ScalingMetrics


class LoopMetrics:
    """Demand, decisions and changes of a pool. Mutable; owned by its loop.

    Args:
        window_s: Seconds the queue depth is averaged over.

    Attributes:
        demand: Demand of the last step; None before it.
        desired: Last decision; None before the first.
        changes: Changes of the requested replicas by reason (count).
        failures: Failed reads and changes of the target (count).
        wake_s: From the last request that waited at zero until a replica was requested; None while
            there was none.
    """

    def __init__(self, window_s: float) -> None:
        self.demand: Demand | None = None
        self.desired: ScalingDecision | None = None
        self.changes: Counter[str] = Counter()
        self.failures = 0
        self.wake_s: float | None = None
        self._history = ScalingHistory(window_s)

    def record(
        self, demand: Demand, desired: ScalingDecision, pickers: Mapping[str, PickerCounters | None]
    ) -> None:
        """Record a step.

        Args:
            demand: Demand of the step.
            desired: Decision of the step.
            pickers: Counters by picker; None where they cannot be read.
        """
        self._history.record(
            demand.now,
            requests=demand.requests,
            available=demand.available,
            spec=demand.spec,
            arrived={name: read.arrived for name, read in pickers.items() if read is not None},
        )
        self.demand, self.desired = demand, desired

    def changed(self, reason: str) -> None:
        """Count a change of the requested replicas."""
        self.changes[str(reason)] += 1

    def failed(self) -> None:
        """Count a failed read or change of the target."""
        self.failures += 1

    def woken(self, wake_s: float) -> None:
        """Record the seconds from a request that waited at zero to a requested replica."""
        self.wake_s = wake_s

    def snapshot(self) -> ScalingMetrics:
        """Return the current metrics."""
        demand, row = self.demand, self._history.latest
        if demand is None or self.desired is None or row is None:
            return ScalingMetrics(failures=self.failures)
        gauges = {
            "desired_replicas": float(self.desired.replicas),
            "queue_depth": row.depth,
            "queue_depth_mean": row.depth_mean,
            "requests_per_second": row.queries_per_s,
            "work_per_second": demand.arriving,
            "replica_work_per_second": demand.throughput,
            "cold_start_seconds": demand.cold_start_s,
            "counters_complete": float(demand.complete),
        }
        if self.wake_s is not None:
            gauges["from_zero_seconds"] = self.wake_s
        replicas = {
            "spec": demand.spec,
            "available": demand.available,
            "starting": demand.starting,
        }
        return ScalingMetrics(gauges, replicas, self.changes, self.failures)
