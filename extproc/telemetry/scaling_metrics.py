"""Prometheus families of autoscaling: desired replicas and the values behind them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric


class ScalingMetrics(msgspec.Struct, frozen=True):
    """Autoscaling values of one pool.

    Attributes:
        gauges: By the last part of their names; empty before the first step of the loop.
        replicas: By state.
        changes: Changes of the desired replicas (count), by reason.
        failures: Failures to read or change the target (count).
        refusals: Rejected annotations of the pool (count).
    """

    gauges: Mapping[str, float] = {}
    replicas: Mapping[str, int] = {}
    changes: Mapping[str, int] = {}
    failures: int = 0
    refusals: int = 0


#: Name and help text of every gauge.
_GAUGES = {
    "desired_replicas": "Replicas that the policy wants; an HPA or KEDA uses a target value of 1.",
    "queue_depth": "Requests that wait or run per available engine, at all replicas of extproc.",
    "queue_depth_mean": "Mean of `queue_depth` over the window of the policy.",
    "requests_per_second": "Requests that arrive per second at all replicas of extproc, mean over 3 minutes.",
    "work_per_second": "Work that arrives, in token seconds per second.",
    "replica_work_per_second": "Work that one engine does, in token seconds per second, learned.",
    "cold_start_seconds": "Seconds from the request for an engine to its first response, learned.",
    "from_zero_seconds": "Seconds from the last request queued at zero engines to the request for one.",
    "counters_complete": "1 if the counters of all replicas of extproc are known, else 0, which keeps engines.",
}


def series(pools: Mapping[str, ScalingMetrics]) -> Iterator[Metric]:
    """Yields all families, also when no pool is scaled.

    Args:
        pools: By name.
    """
    for name, text in _GAUGES.items():
        gauge = GaugeMetricFamily(f"extproc_scaling_{name}", text, labels=["pool"])
        for pool, metrics in pools.items():
            if name in metrics.gauges:
                gauge.add_metric([pool], metrics.gauges[name])
        yield gauge
    replicas = GaugeMetricFamily(
        "extproc_scaling_replicas",
        "Engines by state: in the spec, available, starting.",
        labels=["pool", "state"],
    )
    changes = CounterMetricFamily(
        "extproc_scaling_changes",
        "Changes of the desired replicas, by reason.",
        labels=["pool", "reason"],
    )
    failures = CounterMetricFamily(
        "extproc_scaling_failures",
        "Failures to read or change the replicas of the target.",
        labels=["pool"],
    )
    refusals = CounterMetricFamily(
        "extproc_scaling_invalid_annotations",
        "Rejected annotations of an InferencePool, which is then not scaled.",
        labels=["pool"],
    )
    for pool, metrics in pools.items():
        for state, count in metrics.replicas.items():
            replicas.add_metric([pool, state], count)
        for reason, count in metrics.changes.items():
            changes.add_metric([pool, reason], count)
        failures.add_metric([pool], metrics.failures)
        refusals.add_metric([pool], metrics.refusals)
    yield from (replicas, changes, failures, refusals)
