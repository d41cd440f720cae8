"""Prometheus families of autoscaling: desired replicas and the values behind them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric


class ScalingMetrics(msgspec.Struct, frozen=True):
    """Autoscaling values of one pool.

    Attributes:
        gauges: By the last part of their names; none before the first look.
        replicas: By state.
        changes: Changes of the desired replicas (count), by reason.
        failures: Times that, or looking, failed.
        refusals: Times annotations of the pool were refused.
    """

    gauges: Mapping[str, float] = {}
    replicas: Mapping[str, int] = {}
    changes: Mapping[str, int] = {}
    failures: int = 0
    refusals: int = 0


#: Name and help text of every gauge.
_GAUGES = {
    "desired_replicas": "Replicas there should be; for an HPA or KEDA, with a target of 1.",
    "queue_depth": "Requests that wait or run per replica that answers, of all pickers.",
    "queue_depth_mean": "The same, mean over the window of the policy.",
    "requests_per_second": "Requests that came per second, of all pickers, mean over 3 minutes.",
    "work_per_second": "Work that arrives (token seconds per second).",
    "replica_work_per_second": "Work one replica is believed to do (token seconds per second).",
    "cold_start_seconds": "What a replica is believed to take from being asked for to answering.",
    "wake_seconds": "From the last request that waited at zero until a replica was asked for.",
    "complete": "0 while counters of some picker cannot be read, which keeps replicas.",
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
        "Replicas by state: asked for, available, starting.",
        labels=["pool", "state"],
    )
    changes = CounterMetricFamily(
        "extproc_scaling_changes",
        "Times another number was asked for, by reason.",
        labels=["pool", "why"],
    )
    failures = CounterMetricFamily(
        "extproc_scaling_failures",
        "Times the target could not be read or changed.",
        labels=["pool"],
    )
    refusals = CounterMetricFamily(
        "extproc_scaling_invalid_annotations",
        "Times annotations of an InferencePool were refused, which is then not scaled.",
        labels=["pool"],
    )
    for pool, metrics in pools.items():
        for state, count in metrics.replicas.items():
            replicas.add_metric([pool, state], count)
        for why, count in metrics.changes.items():
            changes.add_metric([pool, why], count)
        failures.add_metric([pool], metrics.failures)
        refusals.add_metric([pool], metrics.refusals)
    yield from (replicas, changes, failures, refusals)
