"""Prometheus families of pools and their endpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import attrgetter
from typing import get_args

from extproc.pool.pool_step_times import find_slowness
from extproc.pool.snapshot import EndpointSnapshot
from extproc.scheduling.shadow import ShadowCounts, ShadowResult
from extproc.telemetry.counters import PoolCounters
from extproc.telemetry.kv_event_metrics import kv_event_families
from extproc.telemetry.metric_family import FamilyType, MetricFamily, Sample
from extproc.telemetry.pool_state import PoolView, PrefixCacheStats


def labeled(counts: Mapping[str, float]) -> list[Sample]:
    """Samples of counts by the value of a single label."""
    return [([value], count) for value, count in counts.items()]


#: Refusals of the queue, by status and cause. They are there from the start, because an alert is for
#: the first one, and a rate is blind for the first count of a series.
_QUEUE_REFUSALS = dict.fromkeys(
    [(429, cause) for cause in ("queue-full", "queue-timeout", "displaced")], 0
)


#: A counter family: name, help text, labels after `pool`, and its samples in one pool.
_CounterRow = tuple[str, str, tuple[str, ...], Callable[[PoolCounters], Iterable[Sample]]]

_COUNTERS: tuple[_CounterRow, ...] = (
    (
        "extproc_routed_requests",
        "Requests routed to an endpoint.",
        ("endpoint",),
        lambda counters: labeled(counters.requests_routed),
    ),
    (
        "extproc_rejection_causes",
        "Requests rejected, by HTTP status and cause; the log has the same causes.",
        ("status", "cause"),
        lambda counters: [
            ([str(status), cause], count)
            for (status, cause), count in (_QUEUE_REFUSALS | counters.rejection_causes).items()
        ],
    ),
    (
        "extproc_rejections",
        "Requests rejected, by HTTP status and reason.",
        ("status", "reason"),
        lambda counters: [
            ([str(status), reason], count)
            for (status, reason), count in counters.rejections.items()
        ],
    ),
    (
        "extproc_degraded_decisions",
        "Requests routed by a fallback instead of the profile, by reason.",
        ("reason",),
        lambda counters: labeled(counters.degraded),
    ),
    (
        "extproc_disaggregation_decisions",
        "Requests routed by a profile with stages that other endpoints may do, by the stages that were split.",
        ("model", "type"),
        lambda counters: list(counters.disaggregation.items()),
    ),
    (
        "extproc_disaggregation_routed_stages",
        "Stages of these requests that the endpoint does before the one that serves.",
        ("endpoint", "stage"),
        lambda counters: list(counters.routed_stages.items()),
    ),
    (
        "extproc_disaggregation_kept_stages",
        "Stages of these requests that the serving endpoint does itself, by reason.",
        ("stage", "reason"),
        lambda counters: list(counters.kept_stages.items()),
    ),
    (
        "extproc_responses",
        "Responses to routed requests, by HTTP status.",
        ("endpoint", "status"),
        lambda counters: list(counters.responses.items()),
    ),
    (
        "extproc_requests_without_response",
        "Routed requests whose stream ended before response headers.",
        ("endpoint",),
        lambda counters: labeled(counters.without_response),
    ),
    (
        "extproc_prompt_tokens",
        "Prompt tokens of routed requests, estimated.",
        (),
        lambda counters: [([], counters.prompt_tokens)],
    ),
    (
        "extproc_matched_tokens",
        "Prompt tokens of routed requests that are predicted to be cached on the chosen endpoint.",
        (),
        lambda counters: [([], counters.matched_tokens)],
    ),
    (
        "extproc_scrapes",
        "Scrapes of endpoint metrics, by result.",
        ("endpoint", "result"),
        lambda counters: list(counters.scrapes.items()),
    ),
    (
        "extproc_model_list_polls",
        "Polls of the model lists of endpoints, by result.",
        ("endpoint", "result"),
        lambda counters: list(counters.model_list_polls.items()),
    ),
    (
        "extproc_model_rewrites",
        "Requests whose model name was rewritten, by whether the body could be edited.",
        ("result",),
        lambda counters: labeled(counters.rewrites),
    ),
    (
        "extproc_unknown_model_requests",
        "Requests for a model that no eligible endpoint lists, routed or rejected.",
        (),
        lambda counters: [([], counters.unknown_models)],
    ),
)

#: A gauge of an endpoint: name, help text, and its value at a time; None is not shown.
_EndpointGauge = tuple[str, str, Callable[[EndpointSnapshot, float], float | None]]

_ENDPOINT_GAUGES: tuple[_EndpointGauge, ...] = (
    (
        "extproc_endpoint_waiting_requests",
        "Requests queued in the engine at the last scrape; absent while unknown.",
        lambda member, _: member.load.waiting,
    ),
    (
        "extproc_endpoint_running_requests",
        "Requests in the running batch of the engine at the last scrape; absent while unknown.",
        lambda member, _: member.load.running,
    ),
    (
        "extproc_endpoint_kv_cache_usage_ratio",
        "KV cache blocks held by running requests at the last scrape, 0 to 1; absent while unknown.",
        lambda member, _: member.load.kv_usage,
    ),
    (
        "extproc_endpoint_inflight_requests",
        "Requests in flight that this replica routed to the endpoint.",
        lambda member, _: float(member.account.own),
    ),
    (
        "extproc_endpoint_foreign_requests",
        "Requests of other replicas and clients on the endpoint at the last scrape, estimated.",
        lambda member, _: member.foreign,
    ),
    (
        "extproc_endpoint_up",
        "1 unless scrapes cannot connect to the endpoint, then 0.",
        lambda member, _: float(member.is_reachable),
    ),
    (
        "extproc_endpoint_ejected",
        "1 while the endpoint is ejected because it fails or cannot be reached, else 0.",
        lambda member, _: float(member.is_ejected),
    ),
    (
        "extproc_endpoint_metrics_age_seconds",
        "Seconds since the last successful scrape; +Inf before the first.",
        lambda member, now: now - member.load.at,
    ),
    (
        "extproc_endpoint_models",
        "Models and adapters that the endpoint lists; absent while unknown.",
        lambda member, _: (
            None
            if member.models is None
            else float(len(member.models.bases) + len(member.models.adapters))
        ),
    ),
    (
        "extproc_endpoint_queued_tokens",
        "Uncached prompt tokens on the endpoint not yet computed, also of others, estimated.",
        lambda member, now: member.account.queued(now) + member.foreign_tokens,
    ),
    (
        "extproc_endpoint_prefill_seconds_per_token",
        "Seconds to compute one uncached prompt token, learned.",
        lambda member, _: member.rates.prefill_s,
    ),
    (
        "extproc_endpoint_step_seconds",
        "Seconds of an engine iteration before the terms of its load, learned.",
        lambda member, _: member.rates.step_s,
    ),
    (
        "extproc_endpoint_decode_seconds_per_sequence",
        "Seconds that one decoding sequence adds to an iteration, learned.",
        lambda member, _: member.rates.decode_s,
    ),
    (
        "extproc_endpoint_context_seconds_per_token",
        "Seconds that one token of context adds to an iteration, learned.",
        lambda member, _: member.rates.context_s,
    ),
    (
        "extproc_endpoint_adapter_load_seconds",
        "Seconds to load a LoRA adapter, learned.",
        lambda member, _: member.rates.adapter_load_s,
    ),
    (
        "extproc_endpoint_output_tokens",
        "Mean output tokens of a response, learned.",
        lambda member, _: member.rates.output_tokens,
    ),
    (
        "extproc_endpoint_max_num_seqs",
        "Requests that the engine runs at a time, learned; absent while unknown.",
        lambda member, _: member.rates.max_num_seqs,
    ),
)


def _shadow_counts(view: PoolView) -> list[tuple[str, ShadowCounts]]:
    """Name of the profile and totals of the shadow; empty without one."""
    return [] if view.shadow is None else [(view.shadow.profile.name, view.shadow.counts)]


#: A family of a pool's state: type, name, help text, labels after `pool`, samples in one pool.
_PoolRow = tuple[FamilyType, str, str, tuple[str, ...], Callable[[PoolView], Iterable[Sample]]]

_POOL_ROWS: tuple[_PoolRow, ...] = (
    (
        "counter",
        "extproc_ejections",
        "Ejections of endpoints by outlier detection, by cause.",
        ("cause",),
        lambda view: labeled(view.ejections),
    ),
    (
        "counter",
        "extproc_probes",
        "Probe requests to ejected endpoints, by result.",
        ("result",),
        lambda view: labeled(view.probes),
    ),
    (
        "gauge",
        "extproc_flow_control_queue_size",
        "Requests in the queue; absent without flow control.",
        (),
        lambda view: [] if view.queue is None else [([], view.queue[0])],
    ),
    (
        "gauge",
        "extproc_flow_control_queue_bytes",
        "Bytes of the bodies of queued requests; absent without flow control.",
        (),
        lambda view: [] if view.queue is None else [([], view.queue[1])],
    ),
    (
        "counter",
        "extproc_flow_control_requests",
        "Requests that left the queue, by outcome.",
        ("outcome",),
        lambda view: labeled(view.queue_outcomes),
    ),
    (
        "counter",
        "extproc_flow_control_evictions",
        "Requests in flight that were evicted for others, by outcome: ended, or not within 5 s.",
        ("outcome",),
        lambda view: labeled(view.evictions[1]),
    ),
    (
        "gauge",
        "extproc_pool_match_state",
        "State of the match in the annotations of an InferencePool, as a label; always 1.",
        ("state",),
        lambda view: [([view.match_state], 1)],
    ),
    (
        "gauge",
        "extproc_discovery_dropped_addresses",
        "Addresses from flags, files and DNS that exceed the limit of a pool.",
        (),
        lambda view: [([], view.dropped_addresses)],
    ),
    (
        "gauge",
        "extproc_continuation_ratio",
        "Ratio of requests that continue a conversation, 0 to 1, learned.",
        (),
        lambda view: [] if view.conversations is None else [([], view.conversations[0])],
    ),
    (
        "gauge",
        "extproc_idle_conversations_per_request",
        "Idle conversations that will continue, per request in flight, learned.",
        (),
        lambda view: [] if view.conversations is None else [([], view.conversations[1])],
    ),
    (
        "gauge",
        "extproc_bytes_per_token",
        "Prompt bytes per token of a model that engines answered for, learned.",
        ("model",),
        lambda view: labeled(view.bytes_per_token),
    ),
    (
        "gauge",
        "extproc_media_token_ratio",
        "Prompt tokens of images, videos or audio over those that were estimated, learned.",
        ("model", "kind"),
        lambda view: [
            ([model, kind], value) for (model, kind), value in view.media_factors.items()
        ],
    ),
    (
        "counter",
        "extproc_shadow_decisions",
        "Routed requests of the sample of the shadow, by what it preferred; absent without a shadow.",
        ("shadow", "result"),
        lambda view: [
            ([name, result], counts.results[result])
            for name, counts in _shadow_counts(view)
            for result in get_args(ShadowResult)  # all: none that agrees is an agreement of 0
        ],
    ),
    (
        "counter",
        "extproc_shadow_expected_seconds",
        "Seconds expected of the routed and of the preferred endpoint, by the profile that expects them.",
        ("shadow", "judge", "choice"),
        lambda view: [
            ([name, judge, choice], seconds)
            for name, counts in _shadow_counts(view)
            for (judge, choice), seconds in counts.seconds.items()
        ],
    ),
    (
        "counter",
        "extproc_shadow_seconds",
        "Seconds that the shadow took to decide.",
        ("shadow",),
        lambda view: [([name], counts.cpu_s) for name, counts in _shadow_counts(view)],
    ),
)

#: Families of an endpoint's prefix cache: type, name, help text, and value; None is not shown.
_CACHE_ROWS: tuple[tuple[FamilyType, str, str, Callable[[PrefixCacheStats], float | None]], ...] = (
    (
        "counter",
        "extproc_prefix_predicted_tokens",
        "Prompt tokens predicted to be cached, of requests that the prefix cache counters of the engine show as looked up.",
        attrgetter("predicted_tokens"),
    ),
    (
        "counter",
        "extproc_prefix_observed_tokens",
        "Prompt tokens of the same requests that these counters show as found.",
        attrgetter("observed_tokens"),
    ),
    (
        "gauge",
        "extproc_prefix_capacity_tokens",
        "Capacity of the prefix cache in tokens, estimated; absent while unknown.",
        attrgetter("capacity_tokens"),
    ),
)

#: Labels of all families of an endpoint.
_ENDPOINT_LABELS = ("pool", "endpoint")


def request_families(pools: Mapping[str, PoolCounters]) -> Iterator[MetricFamily]:
    """Yield the families of requests and scrapes, by name of the pool."""
    for name, text, labels, read in _COUNTERS:
        yield MetricFamily(
            "counter",
            name,
            text,
            ("pool", *labels),
            (
                ((pool, *values), value)
                for pool, counters in pools.items()
                for values, value in read(counters)
            ),
        )
    headers = MetricFamily(
        "histogram",
        "extproc_time_to_response_headers_seconds",
        "Seconds from the choice of the endpoint to response headers.",
        ("pool",),
    )
    hit_ratio = MetricFamily(
        "histogram",
        "extproc_prefix_hit_ratio",
        "Share of the prompt of a routed request that is predicted to be cached on the chosen endpoint.",
        ("pool",),
    )
    endpoint_headers = MetricFamily(
        "summary",
        "extproc_endpoint_response_headers_seconds",
        "Seconds from the choice of the endpoint to the headers of responses below 400, sum and count.",
        _ENDPOINT_LABELS,
    )
    queued = MetricFamily(
        "histogram",
        "extproc_flow_control_request_queue_duration_seconds",
        "Seconds in the queue, of requests that were dispatched, by priority.",
        ("pool", "priority"),
    )
    for pool, counters in pools.items():
        headers.add_histogram((pool,), counters.response_headers_s)
        hit_ratio.add_histogram((pool,), counters.prefix_hit_ratio)
        for address, histogram in counters.endpoint_headers_s.items():
            endpoint_headers.add_histogram((pool, address), histogram)
        for priority, histogram in counters.queue_duration_s.items():
            queued.add_histogram((pool, priority), histogram)
    yield from (headers, hit_ratio, endpoint_headers, queued)


def state_families(pools: Mapping[str, PoolView], now: float) -> Iterator[MetricFamily]:
    """Yield the families of endpoint and pool state, by name of the pool, at monotonic `now`."""
    yield from _endpoint_families(pools, now)
    for kind, name, text, labels, read in _POOL_ROWS:
        yield MetricFamily(
            kind,
            name,
            text,
            ("pool", *labels),
            (
                ((pool, *values), value)
                for pool, view in pools.items()
                for values, value in read(view)
            ),
        )
    yield from kv_event_families(
        {name: view.kv_events for name, view in pools.items() if view.kv_events is not None}
    )


def _endpoint_families(pools: Mapping[str, PoolView], now: float) -> Iterator[MetricFamily]:
    """Yield the families of endpoints; the text of their labels is made once."""
    format_labels = MetricFamily("gauge", "", "", _ENDPOINT_LABELS).format_labels
    members = [(pool, view, member) for pool, view in pools.items() for member in view.pool.members]
    labels = [format_labels((pool, member.endpoint.address)) for pool, _, member in members]
    snapshots = [member for _, _, member in members]
    # Before the first family is yielded: an endpoint may be gone when the page goes on.
    num_ejections = [
        float(view.count_ejections(member.endpoint.engine)) for _, view, member in members
    ]
    stats = [view.cache(member.endpoint) for _, view, member in members]
    slowness = [ratio for view in pools.values() for ratio in find_slowness(view.pool.members)]
    for name, text, value_of in _ENDPOINT_GAUGES:
        family = MetricFamily("gauge", name, text, _ENDPOINT_LABELS)
        family.add_column(labels, [value_of(member, now) for member in snapshots])
        yield family
    slow = MetricFamily(
        "gauge",
        "extproc_endpoint_slowness_ratio",
        "Time that the endpoint takes to compute a request alone, over that of the quicker quarter of"
        " endpoints with the same engine and cache size, learned; absent while unknown.",
        _ENDPOINT_LABELS,
    )
    slow.add_column(labels, slowness)
    yield slow
    ejections = MetricFamily(
        "counter",
        "extproc_endpoint_ejections",
        "Ejections of the endpoint by outlier detection.",
        _ENDPOINT_LABELS,
    )
    ejections.add_column(labels, num_ejections)
    yield ejections
    for kind, name, text, value_in in _CACHE_ROWS:
        family = MetricFamily(kind, name, text, _ENDPOINT_LABELS)
        family.add_column(labels, list(map(value_in, stats)))
        yield family
