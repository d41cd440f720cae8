"""Metric families of requests by model and tenant, from the series of the pools."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

from extproc.telemetry.counters import PoolCounters
from extproc.telemetry.metric_family import MetricFamily
from extproc.telemetry.request_series import (
    OTHER,
    TOKEN_KINDS,
    RequestSeries,
    Timing,
    merge_histogram,
)

#: Models of a pool that have histograms, the first ones; those of all others are added up (count).
#: Names may have 512 bytes, and the histograms of a model take 50 lines of the page.
MAX_HISTOGRAM_MODELS: Final = 64

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
    for pool, counters in pools.items():
        for series in counters.series:
            labels = series.labels
            by_model[pool, labels.target_model].append(series)
            by_tenant[pool, labels.tenant, labels.target_model].append(series)
    yield from _count_families(by_model)
    by_model = _merge_later_models(by_model)
    for name, text, histogram_name in _HISTOGRAMS:
        family = MetricFamily("histogram", name, text, ("pool", "model"))
        for values, members in by_model.items():
            family.add_histogram(values, merge_histogram(members, histogram_name))
        yield family
    for name, text, label, names in _LABELED_HISTOGRAMS:
        family = MetricFamily("histogram", name, text, ("pool", "model", label))
        for values, members in by_model.items():
            statuses = dict.fromkeys(status for series in members for status in series.statuses)
            for value, named in (names or {status: status for status in statuses}).items():
                family.add_histogram((*values, value), merge_histogram(members, named))
        yield family
    yield from _tenant_families(by_tenant)


def _merge_later_models(
    by_model: Mapping[tuple[str, ...], list[RequestSeries]],
) -> defaultdict[tuple[str, ...], list[RequestSeries]]:
    """The series of the first models of each pool by model, and of all others as `other`."""
    merged: defaultdict[tuple[str, ...], list[RequestSeries]] = defaultdict(list)
    num_models: Counter[str] = Counter()
    for (pool, model), series in by_model.items():
        num_models[pool] += model != OTHER
        is_early = num_models[pool] <= MAX_HISTOGRAM_MODELS
        merged[pool, model if is_early else OTHER] += series
    return merged


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
            (values, sum(series.count for series in members))
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
        for kind in TOKEN_KINDS:
            tokens = sum(series.total(kind) for series in members)
            if tokens:
                yield (*values, kind), tokens


def _sum_counts(counters: Iterable[Mapping[str, int]]) -> Counter[str]:
    total: Counter[str] = Counter()
    for counter in counters:
        total.update(counter)
    return total
