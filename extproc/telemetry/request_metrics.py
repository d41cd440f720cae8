"""Metric families of requests by model and tenant, from the series of the pools."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter

from extproc.telemetry.counters import PoolCounters
from extproc.telemetry.histogram import MetricHistogram, merge
from extproc.telemetry.metric_family import MetricFamily
from extproc.telemetry.request_series import RequestSeries

#: Series with the same values of some labels, by these values.
GroupedSeries = Mapping[tuple[str, ...], Sequence[RequestSeries]]

#: Histograms by model: name, help text, and the histogram of a series.
_HISTOGRAMS: tuple[tuple[str, str, Callable[[RequestSeries], MetricHistogram]], ...] = (
    (
        "extproc_request_tpot_seconds",
        "Seconds per output token after the first, of streams whose chunks and usage are shown.",
        attrgetter("tpot_s"),
    ),
    (
        "extproc_request_itl_seconds",
        "Seconds between two chunks of a stream, where they are shown.",
        attrgetter("gap_s"),
    ),
    (
        "extproc_request_predicted_ttft_seconds",
        "Predicted seconds from the choice of the endpoint to the first token of a stream.",
        attrgetter("predicted_ttft_s"),
    ),
    (
        "extproc_request_ttft_ratio",
        "Actual over predicted time to the first token of a stream, from the choice of the endpoint.",
        attrgetter("ttft_ratio"),
    ),
)

#: Histograms by model and a further label: name, help text, label, and histograms by its value.
_LABELED_HISTOGRAMS: tuple[
    tuple[str, str, str, Callable[[RequestSeries], Mapping[str, MetricHistogram]]], ...
] = (
    (
        "extproc_request_duration_seconds",
        "Seconds from the start of a stream to its end, of routed requests.",
        "status",
        attrgetter("duration_s"),
    ),
    (
        "extproc_request_ttft_seconds",
        "Seconds from the start of a request to its first token: the first chunk of a stream, or response headers where chunks are not shown.",
        "streaming",
        lambda series: {
            str(is_stream).lower(): histogram for is_stream, histogram in series.ttft_s.items()
        },
    ),
    (
        "extproc_request_tokens",
        "Tokens of a request as its response reported them, by kind.",
        "kind",
        attrgetter("tokens"),
    ),
)


def merge_by_key(
    histograms: Iterable[Mapping[str, MetricHistogram]],
) -> Iterator[tuple[str, MetricHistogram]]:
    """The sums of histograms with the same key; empty ones are left out."""
    by_key: defaultdict[str, list[MetricHistogram]] = defaultdict(list)
    for keyed in histograms:
        for key, histogram in keyed.items():
            by_key[key].append(histogram)
    for key, same in by_key.items():
        merged = merge(same)
        if merged is not None:
            yield key, merged


def request_families(pools: Mapping[str, PoolCounters]) -> Iterator[MetricFamily]:
    """Yield the families of requests by model, tenant and status, by name of the pool."""
    by_model: defaultdict[tuple[str, ...], list[RequestSeries]] = defaultdict(list)
    by_tenant: defaultdict[tuple[str, ...], list[RequestSeries]] = defaultdict(list)
    for pool, counters in pools.items():
        for series in counters.series:
            labels = series.labels
            by_model[pool, labels.target_model].append(series)
            by_tenant[pool, labels.tenant, labels.target_model].append(series)
    yield from _count_families(by_model)
    for name, text, read in _HISTOGRAMS:
        family = MetricFamily("histogram", name, text, ("pool", "model"))
        for values, members in by_model.items():
            family.add_histogram(values, merge(map(read, members)))
        yield family
    for name, text, label, read_labeled in _LABELED_HISTOGRAMS:
        family = MetricFamily("histogram", name, text, ("pool", "model", label))
        for values, members in by_model.items():
            for key, histogram in merge_by_key(map(read_labeled, members)):
                family.add_histogram((*values, key), histogram)
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
            for status, count in sum_counters(series.requests for series in members).items()
        ),
    )
    yield MetricFamily(
        "gauge",
        "extproc_requests_running",
        "Routed requests whose stream is open.",
        ("pool", "model"),
        (
            (values, sum(series.running for series in members))
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
            (values, sum(series.requests.total() for series in members))
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
        totals: Counter[str] = Counter()
        for series in members:
            for kind, histogram in series.tokens.items():
                totals[kind] += int(histogram.total)
        for kind, tokens in totals.items():
            yield (*values, kind), tokens


def sum_counters(counters: Iterable[Counter[str]]) -> Counter[str]:
    """The sum of counters."""
    total: Counter[str] = Counter()
    for counter in counters:
        total.update(counter)
    return total
