"""Prometheus text exposition of counters and pool state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from extproc.supervision import LOOPS
from extproc.telemetry import pool_metrics, scaling_metrics, watch_metrics, xds_metrics
from extproc.telemetry.counters import LatencyHistogram, ProcessCounters

#: Gauges of the process whose values other packages read: name to help text.
PROCESS_GAUGES: Mapping[str, str] = {
    "extproc_leader": "1 while this replica holds the Lease; with `cluster.leader_election`.",
    "extproc_sharing_pickers": "Other pickers that share their requests; with `peer_sync.url`.",
    "extproc_sharing_open": "Open requests of other pickers in the accounts; with `peer_sync.url`.",
    "extproc_gathered_bytes": "Bytes of request bodies held.",
    "extproc_prefix_blocks": "Prefix blocks believed held by endpoints.",
    "extproc_prefix_index_bytes": "Estimated memory of the prefix index.",
}


class Exposition(Collector):
    """Renders the metrics page on demand.

    Args:
        counters: What was counted.
        pools: Gives the pools by name.
        clock: Monotonic seconds, for ages.
        gauges: Readers of `PROCESS_GAUGES`, by name.
        about: Labels of `extproc_info`: which pool and profile this is.
    """

    def __init__(
        self,
        counters: ProcessCounters,
        pools: Callable[[], Mapping[str, pool_metrics.PoolView]],
        *,
        clock: Callable[[], float],
        gauges: Mapping[str, Callable[[], float]],
        about: Mapping[str, str],
    ) -> None:
        self._counters = counters
        self._pools = pools
        self._clock = clock
        self._gauges = gauges
        self._about = about
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def render(self) -> bytes:
        """Renders the page in the Prometheus text format."""
        return generate_latest(self._registry)

    def describe(self) -> Iterator[Metric]:
        """Returns nothing: families are collected on demand only."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """Yields all metric families."""
        yield InfoMetricFamily("extproc", "What this picker is.", value=dict(self._about))
        yield from self._streams()
        yield from pool_metrics.counters(self._counters.pools)
        yield from xds_metrics.series(self._counters.xds)
        yield from scaling_metrics.series(self._counters.scaling())
        yield from watch_metrics.series(self._counters.watches())
        yield from self._plugins()
        yield from self._bugs()
        yield from self._large_bodies()
        yield from self._configuration()
        yield from self._loops()
        yield from self._distributions()
        yield from pool_metrics.endpoints(self._pools(), self._clock())
        for name, read in self._gauges.items():
            yield GaugeMetricFamily(name, PROCESS_GAUGES[name], value=read())

    def _streams(self) -> Iterator[Metric]:
        counters = self._counters
        streams = CounterMetricFamily(
            "extproc_streams", "ext_proc streams by how they ended.", labels=["end"]
        )
        for end, count in counters.streams.items():
            streams.add_metric([end], count)
        yield streams
        yield GaugeMetricFamily(
            "extproc_streams_open", "Open ext_proc streams.", value=counters.streams_open
        )
        yield CounterMetricFamily(
            "extproc_answers",
            "Requests answered here in place of an engine (/v1/models).",
            value=counters.direct_responses,
        )

    def _configuration(self) -> Iterator[Metric]:
        counters = self._counters
        reloads = CounterMetricFamily(
            "extproc_config_reloads", "Attempts to read the configuration again.", labels=["result"]
        )
        for result, count in counters.reloads.items():
            reloads.add_metric([result], count)
        yield reloads
        yield GaugeMetricFamily(
            "extproc_config_reload_failed",
            "1 while an older configuration is in force because the last one is wrong.",
            value=float(counters.reload_failed),
        )
        yield GaugeMetricFamily(
            "extproc_config_restart_needed",
            "1 while the configuration differs in what only a restart changes.",
            value=float(counters.restart_needed),
        )

    def _loops(self) -> Iterator[Metric]:
        supervisor = self._counters.supervisor
        failures = CounterMetricFamily(
            "extproc_loop_failures",
            "Exceptions in loops, which went on, and in what loops call.",
            labels=["loop"],
        )
        degraded = GaugeMetricFamily(
            "extproc_loop_degraded",
            "1 while a loop fails and tries again after a pause.",
            labels=["loop"],
        )
        failing = supervisor.degraded
        for loop in LOOPS:
            failures.add_metric([loop], supervisor.failures[loop])
            degraded.add_metric([loop], float(loop in failing))
        yield failures
        yield degraded

    def _plugins(self) -> Iterator[Metric]:
        counts = self._counters.plugins
        for name, text, counter in (
            ("overruns", "Calls of plugins of others above their time budget.", counts.overruns),
            ("bypasses", "Times a plugin of others was put aside for a while.", counts.bypasses),
            (
                "exceptions",
                "Calls of plugins of others that raised, and of any plugin told of its decision.",
                counts.exceptions,
            ),
        ):
            family = CounterMetricFamily(f"extproc_plugin_{name}", text, labels=["role", "kind"])
            for key, count in counter.items():
                family.add_metric(key, count)
            yield family

    def _bugs(self) -> Iterator[Metric]:
        family = CounterMetricFamily(
            "extproc_bugs",
            "Exceptions that streams ran into; the log names the place, once a minute.",
            labels=["type", "place"],
        )
        for key, count in self._counters.exceptions.items():
            family.add_metric(key, count)
        yield family

    def _large_bodies(self) -> Iterator[Metric]:
        family = CounterMetricFamily(
            "extproc_large_bodies",
            "Request bodies for the process that reads large ones, by what came of them.",
            labels=["result"],
        )
        for result, count in self._counters.large_bodies.items():
            family.add_metric([result], count)
        yield family

    def _distributions(self) -> Iterator[Metric]:
        counters = self._counters
        for name, text, distribution in (
            ("extproc_route_seconds", "Time one decision took.", counters.routing_duration_s),
            (
                "extproc_headers_seconds",
                "From pick to response headers.",
                counters.response_headers_s,
            ),
            ("extproc_exchange_seconds", "From first event to end.", counters.request_duration_s),
            ("extproc_scrape_seconds", "Time one scrape took.", counters.scrape_duration_s),
            (
                "extproc_held_seconds",
                "Waits for capacity that ended well.",
                counters.queue_duration_s,
            ),
            (
                "extproc_large_body_seconds",
                "Time large request bodies waited and were read.",
                counters.large_body_duration_s,
            ),
            (
                "extproc_loop_stall_seconds",
                "How late timers of the event loop were: how long something held up all other requests.",
                counters.event_loop_lag_s,
            ),
            (
                "extproc_loop_stall_cpu_seconds",
                "Of the same, CPU time of the event loop's thread; the rest is a blocking call or a busy machine.",
                counters.event_loop_lag_cpu_s,
            ),
        ):
            yield _histogram(name, text, distribution)


def _histogram(name: str, text: str, distribution: LatencyHistogram) -> Metric:
    buckets = []
    running = 0
    bounds = [*map(str, distribution.bounds), "+Inf"]
    for bound, count in zip(bounds, distribution.counts, strict=True):
        running += count
        buckets.append((bound, float(running)))
    return HistogramMetricFamily(name, text, buckets=buckets, sum_value=distribution.total)
