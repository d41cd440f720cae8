"""Metrics of autoscaling, Kubernetes watches and the xDS server, as Prometheus families."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec

from extproc.telemetry.metric_family import MetricFamily


class ScalingMetrics(msgspec.Struct, frozen=True):
    """Autoscaling values of one pool.

    Attributes:
        gauges: Gauges by the last part of their names; empty before the first step of the loop.
        replicas: Replicas by state (count).
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
_SCALING_GAUGES = {
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


def scaling_families(pools: Mapping[str, ScalingMetrics]) -> Iterator[MetricFamily]:
    """Yields all families, also when no pool is scaled."""
    for name, text in _SCALING_GAUGES.items():
        gauge = MetricFamily("gauge", f"extproc_scaling_{name}", text, ("pool",))
        for pool, metrics in pools.items():
            if name in metrics.gauges:
                gauge.add([pool], metrics.gauges[name])
        yield gauge
    replicas = MetricFamily(
        "gauge",
        "extproc_scaling_replicas",
        "Engines by state: in the spec, available, starting.",
        ("pool", "state"),
    )
    changes = MetricFamily(
        "counter",
        "extproc_scaling_changes",
        "Changes of the desired replicas, by reason.",
        ("pool", "reason"),
    )
    failures = MetricFamily(
        "counter",
        "extproc_scaling_failures",
        "Failures to read or change the replicas of the target.",
        ("pool",),
    )
    refusals = MetricFamily(
        "counter",
        "extproc_scaling_invalid_annotations",
        "Rejected annotations of an InferencePool, which is then not scaled.",
        ("pool",),
    )
    for pool, metrics in pools.items():
        for state, count in metrics.replicas.items():
            replicas.add([pool, state], count)
        for reason, count in metrics.changes.items():
            changes.add([pool, reason], count)
        failures.add([pool], metrics.failures)
        refusals.add([pool], metrics.refusals)
    yield from (replicas, changes, failures, refusals)


#: Labels of a watch.
_WATCH_LABELS = ("collection", "namespace", "selector")


class WatchMetrics(msgspec.Struct, frozen=True):
    """Values of one watched collection.

    Attributes:
        collection: Plural name and group, such as `pods`.
        namespace: Watched namespace; empty for the whole cluster.
        selector: Label or field selector; empty for none.
        unsynced_s: Seconds since it was in sync with the API server; 0 while it is, and for an
            optional kind that is not installed.
    """

    collection: str
    namespace: str
    selector: str
    state: str
    states: Sequence[str]
    unsynced_s: float


def watch_families(watches: Iterable[WatchMetrics]) -> Iterator[MetricFamily]:
    """Yields all families, also when nothing is watched."""
    state = MetricFamily(
        "gauge",
        "extproc_discovery_watch_state",
        "1 for the current state of a Kubernetes watch, 0 for other states.",
        (*_WATCH_LABELS, "state"),
    )
    unsynced = MetricFamily(
        "gauge",
        "extproc_discovery_watch_unsynced_seconds",
        "Seconds since a Kubernetes watch was in sync with the API server; 0 while it is.",
        _WATCH_LABELS,
    )
    for watch in watches:
        labels = [watch.collection, watch.namespace, watch.selector]
        for name in watch.states:
            state.add([*labels, name], float(name == watch.state))
        unsynced.add(labels, watch.unsynced_s)
    yield from (state, unsynced)


class XdsCounters:
    """Counters of the xDS server.

    Attributes:
        responses: Responses sent, by type: `clusters`, `endpoints`.
        nacks: Responses rejected by Envoy, by type.
    """

    def __init__(self) -> None:
        self.streams_open = 0
        self.responses: Counter[str] = Counter()
        self.nacks: Counter[str] = Counter()

    def on_stream_opened(self) -> None:
        """Count an open stream."""
        self.streams_open += 1

    def on_stream_ended(self) -> None:
        """Count the end of a stream."""
        self.streams_open -= 1


def xds_families(counters: XdsCounters) -> Iterator[MetricFamily]:
    """Yields all families, also when no xDS is served."""
    yield MetricFamily(
        "gauge",
        "extproc_xds_streams_open",
        "xDS streams that are open.",
        samples=[((), counters.streams_open)],
    )
    for name, text, counter in (
        ("responses", "xDS responses sent, by type of resource.", counters.responses),
        ("nacks", "xDS responses that Envoy rejected (NACK), by type of resource.", counters.nacks),
    ):
        samples = [((kind,), count) for kind, count in counter.items()]
        yield MetricFamily("counter", f"extproc_xds_{name}", text, ("type",), samples)
