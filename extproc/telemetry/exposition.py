"""Prometheus text exposition of counters and pool state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

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
from extproc.telemetry import control_plane_metrics, pool_metrics
from extproc.telemetry.counters import ProcessCounters

#: Gauges of the process whose values other packages read: name to help text.
PROCESS_GAUGES: Mapping[str, str] = {
    "extproc_leader": "1 while this replica holds the Lease, else 0; only with leader election.",
    "extproc_peer_sync_peers": "Other replicas that share their requests; only with `peer_sync.url`.",
    "extproc_peer_sync_inflight_requests": "Requests in flight of other replicas, as they report; only with `peer_sync.url`.",
    "extproc_body_buffer_bytes": "Bytes of request bodies in buffers.",
    "extproc_http2_connections_open": "Open connections to the ports of ext_proc and gRPC health; only with the native transport.",
    "extproc_http2_unsent_bytes": "Bytes of answers that wait for the windows of peers or the network; only with the native transport.",
    "extproc_prefix_index_blocks": "Prefix blocks in the prefix index, summed over endpoints.",
    "extproc_prefix_index_bytes": "Bytes of memory of the prefix index, estimated.",
}


class Exposition(Collector):
    """Renders the metrics page on demand.

    Args:
        counters: Metrics of the process.
        pools: Gives the pools by name.
        clock: Monotonic seconds, for ages.
        gauges: Readers of `PROCESS_GAUGES`, by name.
        scaling: Returns the autoscaling metrics by name of the pool.
        watches: Returns the metrics of Kubernetes watches.
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
        scaling: Callable[[], Mapping[str, control_plane_metrics.ScalingMetrics]] = dict,
        watches: Callable[[], Iterable[control_plane_metrics.WatchMetrics]] = tuple,
    ) -> None:
        self._counters = counters
        self._pools = pools
        self._clock = clock
        self._gauges = gauges
        self._about = about
        self._scaling = scaling
        self._watches = watches
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
        yield InfoMetricFamily(
            "extproc",
            "Pool and scheduling profile of this replica, as labels; always 1.",
            value=dict(self._about),
        )
        yield from self._streams()
        yield from pool_metrics.request_families(self._counters.pools)
        yield from control_plane_metrics.xds_families(self._counters.xds)
        yield from control_plane_metrics.scaling_families(self._scaling())
        yield from control_plane_metrics.watch_families(self._watches())
        yield from self._plugins()
        yield from self._bugs()
        yield from self._large_bodies()
        yield from self._configuration()
        yield from self._loops()
        yield from self._distributions()
        yield from pool_metrics.state_families(self._pools(), self._clock())
        for name, read in self._gauges.items():
            yield GaugeMetricFamily(name, PROCESS_GAUGES[name], value=read())

    def _streams(self) -> Iterator[Metric]:
        counters = self._counters
        streams = CounterMetricFamily(
            "extproc_streams", "ext_proc streams that ended, by result.", labels=["result"]
        )
        for result, count in counters.streams.items():
            streams.add_metric([result], count)
        yield streams
        yield GaugeMetricFamily(
            "extproc_streams_open", "ext_proc streams that are open.", value=counters.streams_open
        )
        limits = CounterMetricFamily(
            "extproc_http2_limits",
            "Calls and connections that the native transport ended, by limit or violation.",
            labels=["limit"],
        )
        for limit, count in counters.http2_limits.items():
            limits.add_metric([limit], count)
        yield limits
        yield CounterMetricFamily(
            "extproc_direct_responses",
            "Requests answered without an endpoint, such as GET /v1/models.",
            value=counters.direct_responses,
        )

    def _configuration(self) -> Iterator[Metric]:
        counters = self._counters
        reloads = CounterMetricFamily(
            "extproc_config_reloads", "Reloads of the configuration, by result.", labels=["result"]
        )
        for result, count in counters.reloads.items():
            reloads.add_metric([result], count)
        yield reloads
        yield GaugeMetricFamily(
            "extproc_config_reload_failed",
            "1 while an older configuration is in force because the last reload failed, else 0.",
            value=float(counters.reload_failed),
        )
        yield GaugeMetricFamily(
            "extproc_config_restart_needed",
            "1 while the configuration differs in fields that only a restart changes, else 0.",
            value=float(counters.restart_needed),
        )

    def _loops(self) -> Iterator[Metric]:
        supervisor = self._counters.supervisor
        failures = CounterMetricFamily(
            "extproc_loop_failures",
            "Exceptions in background loops, which continue after a pause.",
            labels=["loop"],
        )
        degraded = GaugeMetricFamily(
            "extproc_loop_degraded",
            "1 while a background loop fails and is retried, else 0.",
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
            (
                "overruns",
                "Calls of external plugins that exceeded their time budget.",
                counts.overruns,
            ),
            (
                "bypasses",
                "Times that an external plugin was bypassed for a while.",
                counts.bypasses,
            ),
            (
                "exceptions",
                "Calls of external plugins that raised, and of any plugin after a decision.",
                counts.exceptions,
            ),
        ):
            family = CounterMetricFamily(f"extproc_plugin_{name}", text, labels=["role", "kind"])
            for key, count in counter.items():
                family.add_metric(key, count)
            yield family

    def _bugs(self) -> Iterator[Metric]:
        family = CounterMetricFamily(
            "extproc_exceptions",
            "Unexpected exceptions in streams; the log names each place once a minute.",
            labels=["type", "place"],
        )
        for key, count in self._counters.exceptions.items():
            family.add_metric(key, count)
        yield family

    def _large_bodies(self) -> Iterator[Metric]:
        family = CounterMetricFamily(
            "extproc_large_bodies",
            "Request bodies for the parser worker, which parses large ones, by result.",
            labels=["result"],
        )
        for result, count in self._counters.large_bodies.items():
            family.add_metric([result], count)
        yield family

    def _distributions(self) -> Iterator[Metric]:
        counters = self._counters
        for name, text, distribution in (
            (
                "extproc_routing_duration_seconds",
                "Seconds to route a request, without its time in the queue.",
                counters.routing_duration_s,
            ),
            (
                "extproc_scrape_duration_seconds",
                "Seconds of a scrape of endpoint metrics.",
                counters.scrape_duration_s,
            ),
            (
                "extproc_large_body_parse_duration_seconds",
                "Seconds that large request bodies waited and were parsed.",
                counters.large_body_duration_s,
            ),
            (
                "extproc_event_loop_lag_seconds",
                "Seconds that timers of the event loop fired late, in which no request is served.",
                counters.event_loop_lag_s,
            ),
            (
                "extproc_event_loop_lag_cpu_seconds",
                "CPU seconds of the event loop's thread in this lag; the rest is a blocking call or a busy machine.",
                counters.event_loop_lag_cpu_s,
            ),
        ):
            yield HistogramMetricFamily(
                name,
                text,
                buckets=pool_metrics.cumulative_buckets(distribution),
                sum_value=distribution.total,
            )
