"""The map of llm-d's metrics to those of extproc, for users who replace the upstream EPP.

It lists the families that the EPP of llm-d-router exports: those that its sources name at the tag
v0.10.0 and on its main branch of 2026-08-22 (`Name:` and `NewDesc` of its Prometheus options), without
their prefix `llm_d_epp_`. Left out are the twins under deprecated prefixes and the families of the
sidecar (`moriio_dns_`).
"""

from __future__ import annotations

import re

from tests.docs import metrics_reference

#: Ends of texts of families of its index of KV blocks.
_NO_BLOCK_INDEX = ", nor are the earlier prefixes `llm_d_router_epp_` and `kvcache_`; `enableMetrics` causes a warning"

#: Families of llm-d to the text in the table; metrics of extproc are in backticks.
ROWS: tuple[tuple[tuple[str, ...], str], ...] = (
    (
        ("request_total", "request_error_total"),
        "`extproc_requests_total` by status, and for the first one `extproc_requests_running`",
    ),
    (("request_duration_seconds",), "`extproc_request_duration_seconds`"),
    (("request_ttft_seconds",), "`extproc_request_ttft_seconds`"),
    (
        ("request_size_bytes", "response_size_bytes"),
        "counted for these names only, where bodies are shown",
    ),
    (
        ("request_ntpot_seconds",),
        "counted for this name only: `extproc_request_duration_seconds` over reported output tokens",
    ),
    (("request_streaming_tpot_seconds",), "`extproc_request_tpot_seconds`"),
    (("request_streaming_itl_seconds",), "`extproc_request_itl_seconds`"),
    (("request_predicted_ttft_seconds",), "`extproc_request_predicted_ttft_seconds`"),
    (
        ("request_input_tokens", "request_output_tokens", "request_cached_tokens"),
        "`extproc_request_tokens` by kind, where responses are visible; of gRPC streams the tokens of all chunks",
    ),
    (("request_running",), "`extproc_requests_running`"),
    (("per_endpoint_queue_size",), "`extproc_endpoint_waiting_requests`"),
    (
        ("average_kv_cache_utilization", "std_dev_kv_cache_utilization"),
        "from `extproc_endpoint_kv_cache_usage_ratio`",
    ),
    (("average_queue_size", "std_dev_queue_size"), "from `extproc_endpoint_waiting_requests`"),
    (
        ("average_running_requests", "std_dev_running_requests"),
        "from `extproc_endpoint_running_requests`",
    ),
    (("inflight_requests",), "`extproc_endpoint_inflight_requests`"),
    (("inflight_tokens",), "`extproc_endpoint_queued_tokens`: uncached prompt tokens"),
    (("ready_endpoints",), "`count(extproc_endpoint_up == 1)`"),
    (("flow_control_stale_endpoints",), "from `extproc_endpoint_metrics_age_seconds`"),
    (("scheduler_e2e_duration_seconds",), "`extproc_routing_duration_seconds`"),
    (
        ("scheduler_attempts_total",),
        "`extproc_routed_requests_total` by endpoint, and `extproc_rejections_total`",
    ),
    (("model_rewrite_decisions_total",), "`extproc_model_rewrites_total`"),
    (
        ("datalayer_poll_errors_total",),
        "`extproc_scrapes_total` and `extproc_model_list_polls_total` by result",
    ),
    (
        ("datalayer_extract_errors_total",),
        "not provided: pages that cannot be read count as `datalayer_poll_errors_total`",
    ),
    (("flow_control_queue_size",), "`extproc_flow_control_queue_size`"),
    (("flow_control_queue_bytes",), "`extproc_flow_control_queue_bytes`"),
    (
        ("flow_control_request_queue_duration_seconds",),
        "`extproc_flow_control_request_queue_duration_seconds`",
    ),
    (("flow_control_requests_total",), "`extproc_flow_control_requests_total`"),
    (("llm_d_epp_extproc_streams_inflight",), "`extproc_streams_open`"),
    (("llm_d_epp_extproc_streams_total",), "`extproc_streams_total`"),
    (("prefix_indexer_size",), "`extproc_prefix_index_blocks`, `extproc_prefix_index_bytes`"),
    (("prefix_indexer_hit_ratio",), "`extproc_prefix_hit_ratio`"),
    (
        ("prefix_indexer_hit_bytes",),
        "`extproc_matched_tokens_total`, of which this name alone has a histogram",
    ),
    (("info",), "`extproc_info`"),
    (
        ("plugin_duration_seconds",),
        "`extproc_routing_duration_seconds`; plugins are not timed one by one at each request",
    ),
    (
        ("plugin_data_scope_violations_total",),
        "not provided: plugins do not declare what they read and write",
    ),
    (
        ("request_processing_duration_seconds", "llm_d_epp_extproc_stream_duration_seconds"),
        "counted for these names only",
    ),
    (
        ("response_processing_duration_seconds",),
        "not provided: the clock would be read twice for each message of a response",
    ),
    (
        (
            "flow_control_pool_saturation",
            "flow_control_capacity_utilization_requests",
            "flow_control_capacity_utilization_bytes",
            "flow_control_global_capacity_utilization_requests",
            "flow_control_global_capacity_utilization_bytes",
        ),
        "from the queue and the pool",
    ),
    (
        (
            "flow_control_dispatch_cycle_duration_seconds",
            "flow_control_request_enqueue_duration_seconds",
        ),
        "not provided: a request joins the queue as a part of its routing, and no cycles dispatch it",
    ),
    (
        (
            "flow_control_revocations_issued_total",
            "flow_control_revocations_total",
        ),
        "`extproc_flow_control_evictions_total`, and by priority of the request that waited",
    ),
    (
        (
            "flow_control_reclaim_target",
            "flow_control_pending_reclaim",
            "flow_control_revocation_confirmation_seconds",
        ),
        "not provided: an eviction frees what a request needs on its endpoint, not saturation",
    ),
    (
        ("disagg_decision_total",),
        "`extproc_disaggregation_decisions_total` by model and type, also of `pd-profile-handler`",
    ),
    (
        ("pd_decision_total",),
        "the same decisions, without the stage of encoders",
    ),
    (
        (
            "disaggregatedset_strict_header_no_match_total",
            "disaggregatedset_revision_gating_share",
        ),
        "not provided: `disaggregatedset-rollout-screener` is not acted on",
    ),
    (
        (
            "encoder_cache_queries_total",
            "encoder_cache_hits_total",
            "encoder_cache_hit_ratio",
        ),
        "not provided: lookups of media that were sent to endpoints are not counted",
    ),
    (
        (
            "request_predicted_tpot_seconds",
            "request_ttft_prediction_duration_seconds",
            "request_tpot_prediction_duration_seconds",
        ),
        "not provided: no predictor is asked, and only the time to the first token is predicted",
    ),
    (
        ("request_slo_violation_total",),
        "not provided: the headers of an SLO order the queue, and are not compared with the response",
    ),
    (
        ("inference_request_metric",),
        "not provided: it has the values of the last request alone, which the histograms have of all",
    ),
    (
        (
            "program_aware_jains_fairness_index",
            "program_aware_avg_wait_time_milliseconds",
            "program_aware_attained_service_tokens",
        ),
        "not provided: `program-aware-fairness` is replaced by `round-robin`",
    ),
    (
        (
            "kv_cache_index_admissions_total",
            "kv_cache_index_evictions_total",
            "kv_cache_index_lookup_requests_total",
            "kv_cache_index_lookup_hits_total",
            "kv_cache_index_max_pod_hit_count_total",
            "kv_cache_index_lookup_latency_seconds",
        ),
        f"not provided: lookups and changes of the index are not counted{_NO_BLOCK_INDEX}",
    ),
    (
        (
            "kv_cache_events_dedup_removed_hashes_suppressed_total",
            "kv_cache_events_dedup_removed_hashes_forwarded_total",
            "kv_cache_events_stores_skipped_total",
            "kv_cache_events_removals_skipped_total",
            "kv_cache_events_subscriber_reconnections_total",
            "kv_cache_events_zmq_errors_total",
            "kv_cache_events_pool_queue_depth",
            "kv_cache_events_pool_capacity",
        ),
        f"not provided: `extproc_kv_event_batches_total` has what is lost and malformed{_NO_BLOCK_INDEX}",
    ),
    (
        ("kv_cache_events_active_subscribers",),
        "`count(extproc_kv_event_subscription_state)`, only with `kv_events`",
    ),
    (
        ("kv_cache_events_messages_received_total",),
        "by endpoint; `extproc_kv_event_batches_total` by pool and result",
    ),
)


def upstream_names() -> list[str]:
    """All families of llm-d in the table."""
    return [name for names, _ in ROWS for name in names]


def own_names() -> set[str]:
    """All metrics of extproc that the table names."""
    return {name for _, text in ROWS for name in re.findall(r"extproc_\w+", text)}


def unknown_names() -> set[str]:
    """Metrics in the table that extproc does not export."""
    families = {family.name for family in metrics_reference.families()}
    return own_names() - metrics_reference.series_names() - families


def served_names() -> dict[str, tuple[str, ...]]:
    """Names of the samples that `server.llmd_metrics` adds to the page, by name of the family."""
    own = {family.name for family in metrics_reference.families()}
    return {
        family.name: tuple(family.sample_names)
        for family in metrics_reference.families(has_llmd_names=True)
        if family.name not in own
    }


def block() -> str:
    """One row for each group of families; those that are served are marked."""
    served = {
        name for served in served_names() for name in (served, served.removeprefix("llm_d_epp_"))
    }
    rows = ["| `llm_d_epp_...` | also served | extproc |", "|---|---|---|"]
    for names, text in ROWS:
        for is_served in (True, False):
            some = [name for name in names if (name.removesuffix("_total") in served) is is_served]
            if some:
                shown = ", ".join(f"`{name}`" for name in some)
                rows.append(f"| {shown} | {'yes' if is_served else ''} | {text} |")
    return "\n".join(rows)
