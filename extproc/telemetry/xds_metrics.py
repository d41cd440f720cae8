"""Counters of the xDS server and their Prometheus families."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric


class XdsCounters:
    """Counters of the xDS server.

    Attributes:
        streams_open: Open xDS streams now.
        responses: Responses sent, by type: `clusters`, `endpoints`.
        nacks: Of these, rejected by Envoy.
    """

    def __init__(self) -> None:
        self.streams_open = 0
        self.responses: Counter[str] = Counter()
        self.nacks: Counter[str] = Counter()


def series(counters: XdsCounters) -> Iterator[Metric]:
    """Yields all families, also when no xDS is served."""
    yield GaugeMetricFamily(
        "extproc_xds_streams_open", "xDS streams that are open.", value=counters.streams_open
    )
    for name, text, counter in (
        ("responses", "xDS responses sent, by type of resource.", counters.responses),
        ("nacks", "xDS responses that Envoy rejected (NACK), by type of resource.", counters.nacks),
    ):
        family = CounterMetricFamily(f"extproc_xds_{name}", text, labels=["type"])
        for kind, count in counter.items():
            family.add_metric([kind], count)
        yield family
