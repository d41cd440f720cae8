"""Metric families under the names, labels and buckets of llm-d's endpoint picker (v0.10).

They are other views of the counts behind our own families, for dashboards, alerts and autoscalers
that know the EPP; `llmd_names` adds those with deprecated names.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Final

from extproc.endpoint import Candidate, Endpoint, Load
from extproc.pool.snapshot import EndpointSnapshot
from extproc.protocol.messages import CANONICAL_CODES, UNKNOWN_CODE
from extproc.request import UNNAMED, RequestLabels
from extproc.scheduling.load_bounds import UtilizationDetector
from extproc.telemetry.counters import PoolCounters
from extproc.telemetry.llmd_names import build_histograms, build_values
from extproc.telemetry.metric_family import MetricFamily, Sample
from extproc.telemetry.pool_state import PoolView
from extproc.telemetry.queue_counters import QueueCounters
from extproc.telemetry.request_series import (
    MAX_HISTOGRAMS,
    OTHER,
    TOKEN_BOUNDS,
    HistogramSet,
    MetricHistogram,
    RequestSeries,
    merge,
    merge_histogram,
    name_statuses,
    rebucket,
)

#: Fairness id of requests without one.
_DEFAULT_FLOW: Final = "default-flow"

#: Labels of the families of requests, and of the families of the queue.
_REQUEST_LABELS: Final = ("model_name", "target_model_name", "fairness_id", "priority")
_QUEUE_LABELS: Final = (
    *("fairness_id", "priority", "inference_pool", "model_name", "target_model_name"),
)

#: Buckets that are narrower than ours.
_SCHEDULER_BOUNDS_S: Final = (1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1)
_OUTPUT_BOUNDS: Final = TOKEN_BOUNDS[:12]

#: Detector of llm-d where its configuration names none.
_DEFAULT_DETECTOR: Final = UtilizationDetector()

#: Outcomes of queued requests, by ours; of all others that left the queue, `_EVICTED_OTHER`.
_OUTCOMES: Final = {
    "dispatched": "Dispatched",
    "full": "RejectedCapacity",
    "full-unserved": "RejectedNoEndpoints",
    "refused": "RejectedOther",
    "expired": "EvictedTTL",
    "expired-unserved": "EvictedNoEndpoints",
    "cancelled": "EvictedContextCancelled",
}
_EVICTED_OTHER: Final = "EvictedOther"

#: Labels of the histograms of all series but the first ones.
_ALL_OTHER: Final = (OTHER, OTHER, OTHER, "0")

#: Series by the values of `_REQUEST_LABELS`.
_SeriesByLabels = Mapping[tuple[str, ...], Sequence[RequestSeries]]

#: Histograms of requests: name, help text, and name of the histogram of a series; None are durations.
_REQUEST_HISTOGRAMS: Final[tuple[tuple[str, str, str | None], ...]] = (
    (
        "request_duration_seconds",
        "Seconds from the start of a request to the end of its response.",
        None,
    ),
    (
        "request_size_bytes",
        "Bytes of the body of a routed request, where it is shown whole.",
        "request_bytes",
    ),
    (
        "response_size_bytes",
        "Bytes of the body of a response, where it is shown.",
        "response_bytes",
    ),
    (
        "request_ntpot_seconds",
        "Seconds from the start of a request to the end of its response, per output token.",
        "ntpot",
    ),
    (
        "request_streaming_tpot_seconds",
        "Seconds per output token after the first, of streams whose chunks are shown.",
        "tpot",
    ),
    (
        "request_streaming_itl_seconds",
        "Seconds between two chunks of a stream, where they are shown.",
        "itl",
    ),
    (
        "request_input_tokens",
        "Prompt tokens of a request, as its response reported them.",
        "prompt",
    ),
    (
        "request_output_tokens",
        "Output tokens of a request, as its response reported them.",
        "completion",
    ),
    (
        "request_cached_tokens",
        "Prompt tokens of a request that the engine found in its cache, as its response reported them.",
        "cached",
    ),
)

#: Loads of endpoints whose mean and deviation are served: end of the names, and the load.
_POOL_LOADS: Final[tuple[tuple[str, Callable[[Load], float | None]], ...]] = (
    ("kv_cache_utilization", attrgetter("kv_usage")),
    ("queue_size", attrgetter("waiting")),
    ("running_requests", attrgetter("running")),
)


def llmd_families(
    pools: Mapping[str, PoolCounters],
    views: Mapping[str, PoolView],
    *,
    now: float,
    routing_s: MetricHistogram,
    profile: str,
    version: str,
) -> Iterator[MetricFamily]:
    """Yield all families.

    Args:
        profile: Name of the scheduling profile, which stands for all plugins.
    """
    yield from _request_families(pools, profile)
    yield from _pool_families(views)
    yield from _queue_families(pools, views)
    saturation = {pool: _saturation(view, now) for pool, view in views.items()}
    yield from build_values(
        "gauge",
        "flow_control_pool_saturation",
        "Mean saturation of endpoints, by the detectors of the configuration.",
        ("inference_pool", "stage"),
        (
            ((pool, stage), value)
            for pool, value in saturation.items()
            # Endpoints of no role are in the stage `decode`, which is absent without any.
            for stage in (("decode", "effective") if views[pool].pool.members else ("effective",))
        ),
    )
    yield from _scheduler_families(pools, views, routing_s=routing_s, profile=profile)
    labels = ("commit", "build_ref")
    samples = [((version, "extproc"), 1)]
    yield from build_values("gauge", "info", "Version of extproc.", labels, samples)


def _request_families(pools: Mapping[str, PoolCounters], profile: str) -> Iterator[MetricFamily]:
    by_labels: defaultdict[tuple[str, ...], list[RequestSeries]] = defaultdict(list)
    for counters in pools.values():
        for series in counters.series:
            by_labels[_request_values(series.labels)].append(series)
    yield from _count_families(by_labels)
    histograms = _group_histograms(by_labels)

    def read(sets: Collection[HistogramSet], histogram: str | None) -> MetricHistogram | None:
        if histogram is None:
            return merge_histogram(sets, *name_statuses(sets))
        merged = merge_histogram(sets, histogram)
        return rebucket(merged, _OUTPUT_BOUNDS) if histogram == "completion" else merged

    for name, text, histogram in _REQUEST_HISTOGRAMS:
        yield from build_histograms(
            name,
            text,
            _REQUEST_LABELS,
            ((values, read(sets, histogram)) for values, sets in histograms.items()),
        )
    yield from build_histograms(
        "request_ttft_seconds",
        "Seconds from the start of a request to its first token, or to response headers where chunks are not shown.",
        (*_REQUEST_LABELS, "streaming"),
        (
            ((*values, streaming), merge_histogram(sets, name))
            for values, sets in histograms.items()
            for streaming, name in (("true", "stream_ttft"), ("false", "complete_ttft"))
        ),
    )
    by_models: defaultdict[tuple[str, ...], list[HistogramSet]] = defaultdict(list)
    for (client_model, target_model, *_), sets in histograms.items():
        by_models[profile, profile, client_model, target_model] += sets
    yield from build_histograms(
        "request_predicted_ttft_seconds",
        "Predicted seconds from the choice of the endpoint to the first token of a stream.",
        ("plugin_name", "plugin_type", *_REQUEST_LABELS[:2]),
        ((values, merge_histogram(sets, "predicted_ttft")) for values, sets in by_models.items()),
    )


def _group_histograms(
    by_labels: _SeriesByLabels,
) -> Mapping[tuple[str, ...], Collection[HistogramSet]]:
    """The histograms of the first labels by label, and of all others as `other`."""
    # Each set once, in a dictionary without values: later series of a model share one.
    grouped: defaultdict[tuple[str, ...], dict[HistogramSet, None]] = defaultdict(dict)
    for number, (values, members) in enumerate(by_labels.items()):
        for series in members:
            some = series.histograms
            is_own = number < MAX_HISTOGRAMS and not some.is_shared
            grouped[values if is_own else _ALL_OTHER][some] = None
    return grouped


def _count_families(by_labels: _SeriesByLabels) -> Iterator[MetricFamily]:
    yield from build_values(
        "counter",
        "request",
        "Requests that were routed or refused.",
        _REQUEST_LABELS,
        ((values, sum(map(_count_routed, members))) for values, members in by_labels.items()),
    )
    errors: Counter[tuple[str, ...]] = Counter()
    for values, members in by_labels.items():
        for series in members:
            for status, count in series.requests.items():
                if status[:1] in {"4", "5"}:
                    code, _ = CANONICAL_CODES.get(int(status), UNKNOWN_CODE)
                    errors[*values, code] += count
    yield from build_values(
        "counter",
        "request_error",
        "Requests that were refused or failed.",
        (*_REQUEST_LABELS, "error_code"),
        errors.items(),
    )
    yield from build_values(
        "gauge",
        "request_running",
        "Requests that are running.",
        _REQUEST_LABELS,
        (
            (values, sum([series.running for series in members]))
            for values, members in by_labels.items()
        ),
    )


def _count_routed(series: RequestSeries) -> int:
    """Requests that ended, and those that run: the EPP counts them when they are routed."""
    # Those of `other` may move to a series of their own while they run: the count would fall.
    is_other = OTHER in (series.labels.target_model, series.labels.tenant)
    return sum(series.requests.values()) + (0 if is_other else series.running)


def _pool_families(views: Mapping[str, PoolView]) -> Iterator[MetricFamily]:
    for suffix, read in _POOL_LOADS:
        known = {
            pool: [value for m in view.pool.members if (value := read(m.load)) is not None]
            for pool, view in views.items()
        }
        for name, text, summarize in (
            ("average", "Mean over the endpoints of a pool.", statistics.fmean),
            ("std_dev", "Standard deviation over the endpoints of a pool.", _deviation),
        ):
            yield from build_values(
                "gauge",
                f"{name}_{suffix}",
                text,
                ("name",),
                (((pool,), summarize(values) if values else 0.0) for pool, values in known.items()),
            )
    yield from build_values(
        "gauge",
        "ready_endpoints",
        "Endpoints of a pool that are not ejected.",
        ("name",),
        (
            ((pool,), sum(not member.is_ejected for member in view.pool.members))
            for pool, view in views.items()
        ),
    )
    waiting: Counter[tuple[str, ...]] = Counter()
    for pool, view in views.items():
        for member in view.pool.members:
            waiting[pool, member.endpoint.name or member.endpoint.address] += int(
                member.load.waiting or 0
            )
    yield from build_values(
        "gauge",
        "per_endpoint_queue_size",
        "Requests queued in the engine at the last scrape.",
        ("name", "model_server_endpoint"),
        waiting.items(),
    )


def _queue_families(
    pools: Mapping[str, PoolCounters], views: Mapping[str, PoolView]
) -> Iterator[MetricFamily]:
    # A pool may be removed since the views were read: no new counters of it are made.
    queues = {
        pool: pools[pool].queue
        for pool, view in views.items()
        if view.queue is not None and pool in pools
    }
    for name, text in (
        ("size", "Requests in the queue."),
        ("bytes", "Bytes of the bodies of queued requests."),
    ):
        sizes: Counter[tuple[str, ...]] = Counter()
        for pool, queue in queues.items():
            sizes[_DEFAULT_FLOW, "0", pool, "", ""] += 0
            for labels, load in queue.queued.items():
                model, target, tenant, priority = _request_values(labels)
                count = load.requests if name == "size" else load.bytes
                sizes[tenant, priority, pool, model, target] += count
        yield from build_values(
            "gauge", f"flow_control_queue_{name}", text, _QUEUE_LABELS, sizes.items()
        )
    yield from _departure_families(queues)
    yield from _eviction_families(views)
    yield from _capacity_families(queues, views)


def _departure_families(queues: Mapping[str, QueueCounters]) -> Iterator[MetricFamily]:
    waits: defaultdict[tuple[str, ...], list[MetricHistogram]] = defaultdict(list)
    outcomes: Counter[tuple[str, ...]] = Counter()
    for pool, queue in queues.items():
        for labels, by_outcome in queue.waits_s.items():
            model, target, tenant, priority = _request_values(labels)
            for ours, histogram in by_outcome.items():
                outcome = _OUTCOMES.get(ours, _EVICTED_OTHER)
                waits[tenant, priority, outcome, pool, model, target].append(histogram)
                outcomes[outcome, priority, pool] += histogram.count
    yield from build_histograms(
        "flow_control_request_queue_duration_seconds",
        "Seconds in the queue, of requests that left it.",
        ("fairness_id", "priority", "outcome", "inference_pool", "model_name", "target_model_name"),
        ((values, merge(histograms)) for values, histograms in waits.items()),
    )
    yield from build_values(
        "counter",
        "flow_control_requests",
        "Requests that left the queue or found no room in it, by outcome.",
        ("outcome", "priority", "inference_pool"),
        outcomes.items(),
    )


def _eviction_families(views: Mapping[str, PoolView]) -> Iterator[MetricFamily]:
    for at, name, text, label in (
        (0, "revocations_issued", "Evictions by priority of the waiting request.", "priority"),
        (1, "revocations", "Evictions by outcome.", "outcome"),
    ):
        samples = [
            ((str(value), pool), count)
            for pool, view in views.items()
            for value, count in view.evictions[at].items()
        ]
        labels = (label, "inference_pool")
        yield from build_values("counter", f"flow_control_{name}", text, labels, samples)


def _capacity_families(
    queues: Mapping[str, QueueCounters], views: Mapping[str, PoolView]
) -> Iterator[MetricFamily]:
    for at, unit in enumerate(("requests", "bytes")):
        yield from build_values(
            "gauge",
            f"flow_control_global_capacity_utilization_{unit}",
            f"{unit.capitalize()} in the queue over those that may wait.",
            ("inference_pool",),
            (
                ((pool,), view.queue[at] / (_capacities(view)[at] or 1))
                for pool, view in views.items()
                if view.queue is not None
            ),
        )
        yield from build_values(
            "gauge",
            f"flow_control_capacity_utilization_{unit}",
            f"{unit.capitalize()} of a priority in the queue over those that may wait.",
            ("priority", "inference_pool"),
            _capacity_by_priority(queues, views, at),
        )


def _scheduler_families(
    pools: Mapping[str, PoolCounters],
    views: Mapping[str, PoolView],
    *,
    routing_s: MetricHistogram,
    profile: str,
) -> Iterator[MetricFamily]:
    scheduled = rebucket(routing_s, _SCHEDULER_BOUNDS_S)
    yield from build_histograms(
        "scheduler_e2e_duration_seconds", "Seconds to route a request.", (), [((), scheduled)]
    )
    yield from build_histograms(
        "plugin_duration_seconds",
        "Seconds to route a request, with all plugins of the profile as one.",
        ("extension_point", "plugin_type", "plugin_name"),
        [(("Scheduling", profile, profile), scheduled)],
    )
    attempts: Counter[tuple[str, ...]] = Counter()
    for pool, counters in pools.items():
        view = views.get(pool)
        for (address, target), count in counters.attempts.items():
            model = "" if target == UNNAMED else target
            if not address:
                attempts["failure", model, "", "", ""] += count
                continue
            member = None if view is None else view.pool.find(address)
            name, namespace = (address, "") if member is None else _name_endpoint(member.endpoint)
            port = address.rpartition(":")[2].partition("@")[0]
            attempts["success", model, name, namespace, port] += count
    yield from build_values(
        "counter",
        "scheduler_attempts",
        "Requests that were routed or refused.",
        ("status", "target_model_name", "endpoint_name", "namespace", "port"),
        attempts.items(),
    )
    hit_ratios = merge(map(attrgetter("prefix_hit_ratio"), pools.values()))
    yield from build_histograms(
        "prefix_indexer_hit_ratio",
        "Share of a prompt that is predicted to be cached on the chosen endpoint.",
        ("plugin_name", "plugin_type"),
        [((profile, profile), hit_ratios)],
    )


def _request_values(labels: RequestLabels) -> tuple[str, ...]:
    tenant = _DEFAULT_FLOW if labels.tenant == UNNAMED else labels.tenant
    return labels.client_model, labels.target_model, tenant, str(labels.priority)


def _name_endpoint(endpoint: Endpoint) -> tuple[str, str]:
    """Name and namespace of an endpoint; the latter is empty outside of Kubernetes."""
    return endpoint.name or endpoint.address, endpoint.labels.get("namespace", "")


def _deviation(values: Sequence[float]) -> float:
    """Standard deviation; `statistics.pstdev` computes with fractions, which takes 1 ms."""
    mean = statistics.fmean(values)
    return math.sqrt(sum([(value - mean) ** 2 for value in values]) / len(values))


def _saturation(view: PoolView, now: float) -> float:
    """Saturation of a pool; 1 without endpoints, as nothing can be sent, and for unknown loads."""
    if not view.pool.members:
        return 1.0
    rules = view.saturation
    return max(
        statistics.fmean(
            1.0
            if isinstance(detector, UtilizationDetector) and view.is_stale(member, now)
            else detector.saturation(_candidate(member, now))
            for member in view.pool.members
        )
        for detector in (rules and rules.detectors) or (_DEFAULT_DETECTOR,)
    )


def _candidate(member: EndpointSnapshot, now: float) -> Candidate:
    """An endpoint as a saturation detector sees it, without a request."""
    account = member.account
    return Candidate(
        member.endpoint,
        member.load,
        in_flight=account.in_flight,
        queued_tokens=account.queued(now) + member.foreign_tokens,
    )


def _capacities(view: PoolView) -> tuple[int, int]:
    return view.queue_capacity, view.queue_capacity_bytes


def _capacity_by_priority(
    queues: Mapping[str, QueueCounters], views: Mapping[str, PoolView], at: int
) -> Iterator[Sample]:
    """Queued requests over the bound of their priority, else that of all; bytes where `at` is 1."""
    for pool, queue in queues.items():
        view = views[pool]
        sizes: Counter[int] = Counter({0: 0})
        for labels, load in queue.queued.items():
            sizes[labels.priority] += (load.requests, load.bytes)[at]
        for priority, size in sizes.items():
            capacity = view.find_queue_bounds(priority)[at] or _capacities(view)[at]
            yield (str(priority), pool), size / (capacity or 1)
