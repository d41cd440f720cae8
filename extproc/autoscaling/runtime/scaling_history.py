"""History of the autoscaling of a pool: series behind its metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from extproc.autoscaling.demand_estimator import PickerCounters
from extproc.autoscaling.interface import Demand, ScalingDecision
from extproc.autoscaling.time_window import TimeWindow
from extproc.telemetry.scaling_metrics import ScalingMetrics

#: Seconds that the rate of requests is taken over, as in the charts of the queue-depth policy's
#: origin (docs/spec/prior-systems.md#wallaroo).
RATE_S = 180.0

#: Seconds below which a rate says little.
_FEW_S = 10.0

#: Seconds the depth is averaged over where the policy has no window.
_WINDOW_S = 60.0


class ScalingHistory:
    """Demand, decisions and changes of a pool over time. Mutable; owned by its loop.

    Attributes:
        window_s: Seconds the depth is averaged over.
        demand: Demand of the last step; None before it.
        desired: Last decision; None before the first.
        changes: Changes of the requested replicas by reason (count).
        failures: Failed reads and changes of the target (count).
        wake_s: From the last request that waited at zero until a replica was requested; None while
            there was none.
    """

    def __init__(self) -> None:
        self.window_s = _WINDOW_S
        self.demand: Demand | None = None
        self.desired: ScalingDecision | None = None
        self.changes: Counter[str] = Counter()
        self.failures = 0
        self.wake_s: float | None = None
        self._depths = TimeWindow()
        self._rates = TimeWindow()
        self._arrived: dict[str, float] = {}

    def record(
        self, demand: Demand, desired: ScalingDecision, pickers: Mapping[str, PickerCounters | None]
    ) -> None:
        """Record a step.

        Args:
            demand: Demand of the step.
            desired: Decision of the step.
            pickers: Counters of every picker.
        """
        now = demand.now
        since = now - self.demand.now if self.demand is not None else 0.0
        came = 0.0
        for name, counters in pickers.items():
            if counters is not None:
                before = self._arrived.get(name, counters.arrived)
                came += max(0.0, counters.arrived - before)
                self._arrived[name] = counters.arrived
        self._rates = self._rates.add(now, came / since if since > 0 else 0.0, span_s=RATE_S)
        self._depths = self._depths.add(now, depth(demand), span_s=self.window_s)
        self.demand, self.desired = demand, desired

    def changed(self, why: str) -> None:
        """Count a change of the requested replicas."""
        self.changes[str(why)] += 1

    def figures(self) -> ScalingMetrics:
        """Current metrics."""
        demand = self.demand
        if demand is None or self.desired is None:
            return ScalingMetrics(failures=self.failures)
        gauges = {
            "desired_replicas": float(self.desired.replicas),
            "queue_depth": depth(demand),
            "queue_depth_mean": self._depths.mean(demand.now, self.window_s),
            "requests_per_second": self._rate(demand.now),
            "work_per_second": demand.arriving,
            "replica_work_per_second": demand.throughput,
            "cold_start_seconds": demand.cold_start_s,
            "complete": float(demand.complete),
        }
        if self.wake_s is not None:
            gauges["wake_seconds"] = self.wake_s
        replicas = {
            "asked": demand.spec,
            "available": demand.available,
            "starting": demand.starting,
        }
        return ScalingMetrics(gauges, replicas, self.changes, self.failures)

    def _rate(self, now: float) -> float:
        """Requests per second, scaled down while the watched time is short."""
        watched_s = self._rates.watched_s(now)
        return self._rates.mean(now, RATE_S) * min(1.0, watched_s / _FEW_S)


def depth(demand: Demand) -> float:
    """Requests that wait or run, per replica that answers."""
    return demand.requests / max(1, demand.available)
