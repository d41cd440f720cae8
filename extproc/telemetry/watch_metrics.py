"""Prometheus families of Kubernetes watches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import msgspec
from prometheus_client.core import GaugeMetricFamily, Metric

_LABELS = ("collection", "namespace", "selector")


class WatchMetrics(msgspec.Struct, frozen=True):
    """Values of one watched collection.

    Attributes:
        collection: Plural name and group, such as `pods`.
        namespace: Watched namespace; empty for the whole cluster.
        selector: Label or field selector; empty for none.
        state: Current state.
        states: All states.
        unsynced_s: Seconds since it was in sync with the API server; 0 while it is, and for an
            optional kind that is not installed.
    """

    collection: str
    namespace: str
    selector: str
    state: str
    states: Sequence[str]
    unsynced_s: float


def series(watches: Iterable[WatchMetrics]) -> Iterator[Metric]:
    """Yields all families, also when nothing is watched."""
    state = GaugeMetricFamily(
        "extproc_discovery_watch_state",
        "1 for the current state of a Kubernetes watch, 0 for other states.",
        labels=[*_LABELS, "state"],
    )
    unsynced = GaugeMetricFamily(
        "extproc_discovery_watch_unsynced_seconds",
        "Seconds since a Kubernetes watch was in sync with the API server; 0 while it is.",
        labels=_LABELS,
    )
    for watch in watches:
        labels = [watch.collection, watch.namespace, watch.selector]
        for name in watch.states:
            state.add_metric([*labels, name], float(name == watch.state))
        unsynced.add_metric(labels, watch.unsynced_s)
    yield from (state, unsynced)
