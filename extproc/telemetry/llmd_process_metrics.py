"""Families of llm-d's endpoint picker on streams, scrapes, the prefix index and requests in flight."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Final

from extproc.request import UNNAMED
from extproc.telemetry.counters import ProcessCounters
from extproc.telemetry.llmd_names import build_histograms, build_values
from extproc.telemetry.metric_family import MetricFamily
from extproc.telemetry.pool_state import PoolView

#: Default names of the plugins there that have what is counted here.
_PRODUCER: Final = "inflight-load-producer"
_DETECTOR: Final = "utilization-detector"
_SPLITTER: Final = "disagg-profile-handler"
_PREFILL_SPLITTER: Final = "pd-profile-handler"

#: Types of decisions by the older plugin, which knows no stage but prefill.
_PREFILL_TYPES: Final = {"encode-decode": "decode-only", "encode-prefill-decode": "prefill-decode"}

#: Model of requests that name none, in families of split stages.
_NO_MODEL: Final = "unknown"

#: Status codes by result of a stream. Envoy resets the stream of an answered request.
_CODES: Final = {
    "ok": "OK",
    "cancelled": "Canceled",
    "protocol": "InvalidArgument",
    "error": "Internal",
}


def process_families(
    counters: ProcessCounters,
    views: Mapping[str, PoolView],
    *,
    now: float,
    profile: str,
    prefix_blocks: float | None,
) -> Iterator[MetricFamily]:
    """Yield the families.

    Args:
        profile: Name of the scheduling profile, which stands for all plugins.
        prefix_blocks: Blocks in the prefix index (count); None without one.
    """
    yield from _inflight_families(views, now)
    yield from _stream_families(counters)
    yield from _event_families(views)
    yield from build_values(
        "gauge",
        "flow_control_stale_endpoints",
        "Endpoints whose load is unknown or too old.",
        ("detector",),
        [((_DETECTOR,), sum(_count_stale(view, now) for view in views.values()))],
    )
    errors: Counter[str] = Counter()
    for pool in counters.pools.values():
        errors.update(pool.poll_errors)
    yield from build_values(
        "counter",
        "datalayer_poll_errors",
        "Scrapes and requests for model lists that failed.",
        ("source_type",),
        (((source,), errors[source]) for source in ("metrics-data-source", "models-data-source")),
    )
    yield from build_values(
        "gauge",
        "prefix_indexer_size",
        "Prefix blocks in the prefix index, summed over endpoints.",
        ("plugin_name", "plugin_type"),
        [] if prefix_blocks is None else [((profile, profile), prefix_blocks)],
    )
    yield from build_histograms(
        "prefix_indexer_hit_bytes",
        "Bytes of a prompt that are predicted to be cached on the chosen endpoint, at four to a token.",
        ("plugin_name", "plugin_type"),
        [((profile, profile), counters.prefix_hit_bytes)],
    )
    rewrites: Counter[tuple[str, ...]] = Counter()
    for pool in counters.pools.values():
        for series in pool.series:
            client, target = series.labels.client_model, series.labels.target_model
            if client != target:
                routed = sum(series.requests.values()) - sum(series.refused.values())
                rewrites["", client, target] += routed + series.running
    yield from build_values(
        "counter",
        "model_rewrite_decisions",
        "Routed requests whose model name was rewritten.",
        ("model_rewrite_name", "model_name", "target_model"),
        rewrites.items(),
    )
    yield from _disaggregation_families(counters)


def _disaggregation_families(counters: ProcessCounters) -> Iterator[MetricFamily]:
    stages: Counter[tuple[str, ...]] = Counter()
    prefills: Counter[tuple[str, ...]] = Counter()
    for pool in counters.pools.values():
        for (label, decision_type), count in pool.disaggregation.items():
            model = _NO_MODEL if label == UNNAMED else label
            stages[_SPLITTER, _SPLITTER, model, decision_type] += count
            prefill_type = _PREFILL_TYPES.get(decision_type, decision_type)
            prefills[_PREFILL_SPLITTER, _PREFILL_SPLITTER, model, prefill_type] += count
    labels = ("plugin_name", "plugin_type", "model_name", "decision_type")
    for name, text, counts in (
        ("disagg_decision", "Routed requests by the stages that were split.", stages),
        ("pd_decision", "Routed requests by whether prefill was split.", prefills),
    ):
        yield from build_values("counter", name, text, labels, counts.items())


def _stream_families(counters: ProcessCounters) -> Iterator[MetricFamily]:
    yield from build_values(
        "gauge",
        "extproc_streams_inflight",
        "ext_proc streams that are open.",
        (),
        [((), counters.streams_open)],
    )
    yield from build_values(
        "counter",
        "extproc_streams",
        "ext_proc streams that ended, by status code.",
        ("code",),
        (((code,), counters.streams[result]) for result, code in _CODES.items()),
    )
    for name, text, histogram in (
        (
            "extproc_stream_duration_seconds",
            "Seconds for which ext_proc streams of routed or refused requests were open.",
            counters.stream_duration_s,
        ),
        (
            "request_processing_duration_seconds",
            "Seconds from the first message of a request to the choice of its endpoint, or to its refusal.",
            counters.request_processing_s,
        ),
    ):
        yield from build_histograms(name, text, (), [((), histogram)])


def _event_families(views: Mapping[str, PoolView]) -> Iterator[MetricFamily]:
    """Yield the families of KV events, which have samples where a pool subscribes to them."""
    pools = [view.kv_events for view in views.values() if view.kv_events is not None]
    yield from build_values(
        "gauge",
        "kv_cache_events_active_subscribers",
        "Subscriptions to KV events of engines, also those that are lost.",
        (),
        [((), sum(len(events.states) for events in pools))] if pools else [],
    )
    received: Counter[tuple[str, ...]] = Counter()
    for events in pools:
        for endpoint, count in events.received:
            name, namespace = endpoint.name or endpoint.address, endpoint.labels.get("namespace")
            received[(f"{namespace}/{name}" if namespace else name,)] += count
    yield from build_values(
        "counter",
        "kv_cache_events_messages_received",
        "Messages with KV events that were received, by endpoint.",
        ("pod_identifier",),
        received.items(),
    )


def _inflight_families(views: Mapping[str, PoolView], now: float) -> Iterator[MetricFamily]:
    labels = ("endpoint_name", "namespace", "producer_name", "fairness_id", "priority")
    requests: Counter[tuple[str, ...]] = Counter()
    tokens: Counter[tuple[str, ...]] = Counter()
    for view in views.values():
        for member in view.pool.members:
            endpoint, account = member.endpoint, member.account
            name = endpoint.name or endpoint.address
            values = (name, endpoint.labels.get("namespace", ""), _PRODUCER, "", "")
            requests[values] += account.in_flight
            tokens[values] += round(account.queued(now))
    for name, text, counts in (
        ("inflight_requests", "Requests in flight on an endpoint.", requests),
        ("inflight_tokens", "Uncached prompt tokens that are not computed yet.", tokens),
    ):
        yield from build_values("gauge", name, text, labels, counts.items())


def _count_stale(view: PoolView, now: float) -> int:
    return sum(view.is_stale(member, now) for member in view.pool.members)
