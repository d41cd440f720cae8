"""Prometheus text exposition of counters and pool state."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from extproc import distribution
from extproc.supervision import LOOPS
from extproc.telemetry import (
    control_plane_metrics,
    llmd_metrics,
    llmd_process_metrics,
    pool_metrics,
)
from extproc.telemetry.counters import PoolCounters, ProcessCounters
from extproc.telemetry.metric_family import MetricFamily
from extproc.telemetry.pool_state import PoolView
from extproc.telemetry.request_series import (
    TOKEN_KINDS,
    HistogramSet,
    RequestSeries,
    Timing,
    merge_histogram,
    name_statuses,
)

#: Gauges of the process whose values other packages read: name to help text.
PROCESS_GAUGES: Mapping[str, str] = {
    "extproc_leader": "1 while this replica holds the Lease, else 0; only with leader election.",
    "extproc_peer_sync_peers": "Other replicas that share their requests; only with peer synchronization.",
    "extproc_peer_sync_inflight_requests": "Requests in flight of other replicas, as they report; only with peer synchronization.",
    "extproc_body_buffer_bytes": "Bytes of request bodies in buffers.",
    "extproc_http2_connections_open": "Open connections to the ports of ext_proc and gRPC health; only with the native transport.",
    "extproc_http2_unsent_bytes": "Bytes of answers that wait for the windows of peers or the network; only with the native transport.",
    "extproc_prefix_index_blocks": "Prefix blocks in the prefix index, summed over endpoints.",
    "extproc_prefix_index_bytes": "Bytes of memory of the prefix index, estimated.",
}

#: Results of streams. All are there from the start: a rate is blind for the first count of a series.
_STREAM_RESULTS = ("ok", "cancelled", "protocol", "error")


class Exposition:
    """Renders the metrics page on demand."""

    def __init__(
        self,
        counters: ProcessCounters,
        pools: Callable[[], Mapping[str, PoolView]],
        *,
        clock: Callable[[], float],
        gauges: Mapping[str, Callable[[], float]],
        about: Callable[[], Mapping[str, str]],
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

    def render(self, *, is_openmetrics: bool = False) -> bytes:
        """Renders the page in the Prometheus text format, or as OpenMetrics."""
        return "".join(self.pieces(is_openmetrics=is_openmetrics)).encode(errors="replace")

    def pieces(self, *, is_openmetrics: bool) -> Iterator[str]:
        """Renders the page in pieces; counters may change between two of them."""
        for family in self.collect():
            yield from family.render(is_openmetrics=is_openmetrics)
        if is_openmetrics:
            yield "# EOF\n"

    def collect(self) -> Iterator[MetricFamily]:
        """Yields all metric families."""
        about = self._about()
        yield MetricFamily(
            "info",
            "extproc",
            "Pool and scheduling profile of this replica, as labels; always 1.",
            tuple(about),
            [(tuple(about.values()), 1)],
        )
        yield from self._streams()
        yield from request_families(self._counters.pools)
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
        views = self._pools()
        yield from pool_metrics.state_families(views, self._clock())
        if self._counters.has_llmd_names:
            yield from llmd_metrics.llmd_families(
                self._counters.pools,
                views,
                now=self._clock(),
                routing_s=self._counters.routing_duration_s,
                profile=about.get("profile", ""),
                version=distribution.installed_version() or "",
            )
            read_blocks = self._gauges.get("extproc_prefix_index_blocks")
            yield from llmd_process_metrics.process_families(
                self._counters,
                views,
                now=self._clock(),
                profile=about.get("profile", ""),
                prefix_blocks=None if read_blocks is None else read_blocks(),
            )
        for name, read in self._gauges.items():
            yield _gauge(name, PROCESS_GAUGES[name], read())

    def _streams(self) -> Iterator[MetricFamily]:
        counters = self._counters
        yield _counter(
            "extproc_streams",
            "ext_proc streams that ended, by result. Envoy resets the stream of an answered request, which counts as cancelled.",
            "result",
            {result: counters.streams[result] for result in _STREAM_RESULTS},
        )
        yield _gauge(
            "extproc_streams_open", "ext_proc streams that are open.", counters.streams_open
        )
        yield _counter(
            "extproc_http2_limits",
            "Calls and connections that the native transport ended, by limit or violation.",
            "limit",
            counters.http2_limits,
        )
        yield _counter(
            "extproc_trace_spans",
            "Spans of traced requests, by result; none without tracing.",
            "result",
            counters.trace_spans,
        )
        yield _counter(
            "extproc_peer_sync_failures",
            "Connections with peers that failed, ended or were cut off as too slow (`slow`), by reason; "
            "only with `peer_sync.peers`.",
            "reason",
            counters.peer_sync_failures,
        )
        yield _counter(
            "extproc_recorded_rows",
            "Decisions and ends of requests for recordings, by result; none without a recording.",
            "result",
            counters.recorded_rows,
        )
        yield MetricFamily(
            "counter",
            "extproc_direct_responses",
            "Requests answered without an endpoint, such as GET /v1/models.",
            samples=[((), counters.direct_responses)],
        )

    def _configuration(self) -> Iterator[MetricFamily]:
        counters = self._counters
        yield _counter(
            "extproc_config_reloads",
            "Reloads of the configuration, by result.",
            "result",
            counters.reloads,
        )
        yield _gauge(
            "extproc_config_reload_failed",
            "1 while an older configuration is in force because the last reload failed, else 0.",
            counters.reload_failed,
        )
        yield _gauge(
            "extproc_config_restart_needed",
            "1 while the configuration differs in fields that only a restart changes, else 0.",
            counters.restart_needed,
        )

    def _loops(self) -> Iterator[MetricFamily]:
        supervisor = self._counters.supervisor
        failing = supervisor.degraded
        yield _counter(
            "extproc_loop_failures",
            "Exceptions in background loops, which continue after a pause.",
            "loop",
            {loop: supervisor.failures[loop] for loop in LOOPS},
        )
        yield MetricFamily(
            "gauge",
            "extproc_loop_degraded",
            "1 while a background loop fails and is retried, else 0.",
            ("loop",),
            [((loop,), loop in failing) for loop in LOOPS],
        )

    def _plugins(self) -> Iterator[MetricFamily]:
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
            yield MetricFamily(
                "counter", f"extproc_plugin_{name}", text, ("role", "kind"), counter.items()
            )

    def _bugs(self) -> Iterator[MetricFamily]:
        yield MetricFamily(
            "counter",
            "extproc_exceptions",
            "Unexpected exceptions in streams; the log names each place once a minute.",
            ("type", "place"),
            self._counters.exceptions.items(),
        )

    def _large_bodies(self) -> Iterator[MetricFamily]:
        yield _counter(
            "extproc_large_bodies",
            "Request bodies for the parser worker, which parses large ones, by result.",
            "result",
            self._counters.large_bodies,
        )

    def _distributions(self) -> Iterator[MetricFamily]:
        counters = self._counters
        for name, text, histogram in (
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
            family = MetricFamily("histogram", name, text)
            family.add_histogram((), histogram)
            yield family


def _gauge(name: str, text: str, value: float) -> MetricFamily:
    """A gauge without labels."""
    return MetricFamily("gauge", name, text, samples=[((), value)])


def _counter(name: str, text: str, label: str, counts: Mapping[str, float]) -> MetricFamily:
    """A counter with a single label."""
    samples = [((value,), count) for value, count in counts.items()]
    return MetricFamily("counter", name, text, (label,), samples)


#: Series with the same values of some labels, by these values.
GroupedSeries = Mapping[tuple[str, ...], Sequence[RequestSeries]]

#: Histograms by model: name of the metric, help text, and name of the histogram.
_HISTOGRAMS: tuple[tuple[str, str, Timing], ...] = (
    (
        "extproc_request_tpot_seconds",
        "Seconds per output token after the first, of streams whose chunks and usage are shown.",
        "tpot",
    ),
    (
        "extproc_request_itl_seconds",
        "Seconds between two chunks of a stream, where they are shown.",
        "itl",
    ),
    (
        "extproc_request_predicted_ttft_seconds",
        "Predicted seconds from the choice of the endpoint to the first token of a stream.",
        "predicted_ttft",
    ),
    (
        "extproc_request_ttft_ratio",
        "Actual over predicted time to the first token of a stream, from the choice of the endpoint.",
        "ttft_ratio",
    ),
)

#: Histograms by model and a further label: name of the metric, help text, label, and names of the
#: histograms by its values; None are the durations by status.
_LABELED_HISTOGRAMS: tuple[tuple[str, str, str, Mapping[str, str] | None], ...] = (
    (
        "extproc_request_duration_seconds",
        "Seconds from the start of a stream to its end, of routed requests.",
        "status",
        None,
    ),
    (
        "extproc_request_ttft_seconds",
        "Seconds from the start of a request to its first token: the first chunk of a stream, or response headers where chunks are not shown.",
        "streaming",
        {"true": "stream_ttft", "false": "complete_ttft"},
    ),
    (
        "extproc_request_tokens",
        "Tokens of a request as its response reported them, by kind.",
        "kind",
        {kind: kind for kind in TOKEN_KINDS},
    ),
)


def request_families(pools: Mapping[str, PoolCounters]) -> Iterator[MetricFamily]:
    """Yield the families of requests by model, tenant and status, by name of the pool."""
    by_model: defaultdict[tuple[str, ...], list[RequestSeries]] = defaultdict(list)
    by_tenant: defaultdict[tuple[str, ...], list[RequestSeries]] = defaultdict(list)
    histograms: defaultdict[tuple[str, str], list[HistogramSet]] = defaultdict(list)
    for pool, counters in pools.items():
        for some in counters.series.histograms:
            histograms[pool, some.model].append(some)
        for series in counters.series:
            labels = series.labels
            by_model[pool, labels.target_model].append(series)
            by_tenant[pool, labels.tenant, labels.target_model].append(series)
    yield from _count_families(by_model)
    for name, text, histogram_name in _HISTOGRAMS:
        family = MetricFamily("histogram", name, text, ("pool", "model"))
        for values, sets in histograms.items():
            family.add_histogram(values, merge_histogram(sets, histogram_name))
        yield family
    for name, text, label, names in _LABELED_HISTOGRAMS:
        family = MetricFamily("histogram", name, text, ("pool", "model", label))
        for values, sets in histograms.items():
            statuses = name_statuses(sets)
            for value, named in (names or {status: status for status in statuses}).items():
                family.add_histogram((*values, value), merge_histogram(sets, named))
        yield family
    yield from _tenant_families(by_tenant)


def _count_families(by_model: GroupedSeries) -> Iterator[MetricFamily]:
    """The families of requests and tokens by model."""
    yield MetricFamily(
        "counter",
        "extproc_requests",
        "Requests that ended, by HTTP status: of the response, or of the refusal.",
        ("pool", "model", "status"),
        (
            ((*values, status), count)
            for values, members in by_model.items()
            for status, count in _sum_counts(series.requests for series in members).items()
        ),
    )
    yield MetricFamily(
        "gauge",
        "extproc_requests_running",
        "Routed requests whose stream is open.",
        ("pool", "model"),
        (
            (values, sum([series.running for series in members]))
            for values, members in by_model.items()
        ),
    )
    yield MetricFamily(
        "counter",
        "extproc_usage_tokens",
        "Tokens that responses reported, by kind.",
        ("pool", "model", "kind"),
        _usage_samples(by_model),
    )


def _tenant_families(by_tenant: GroupedSeries) -> Iterator[MetricFamily]:
    """The families of usage by tenant and model."""
    yield MetricFamily(
        "counter",
        "extproc_tenant_requests",
        "Requests that ended, by tenant.",
        ("pool", "tenant", "model"),
        (
            (values, sum([sum(series.requests.values()) for series in members]))
            for values, members in by_tenant.items()
        ),
    )
    yield MetricFamily(
        "counter",
        "extproc_tenant_tokens",
        "Tokens that responses reported, by tenant and kind.",
        ("pool", "tenant", "model", "kind"),
        _usage_samples(by_tenant),
    )


def _usage_samples(grouped: GroupedSeries) -> Iterator[tuple[Sequence[str], float]]:
    for values, members in grouped.items():
        for kind, tokens in _sum_counts(series.tokens for series in members).items():
            if tokens:
                yield (*values, kind), tokens


def _sum_counts(counts: Iterable[Mapping[str, float]]) -> Mapping[str, float]:
    """The sums of counts by name."""
    total: dict[str, float] = {}
    for by_name in counts:
        for name, count in by_name.items():
            total[name] = total.get(name, 0) + count
    return total
