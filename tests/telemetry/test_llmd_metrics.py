"""Metrics under the names of llm-d: labels, buckets, and the queries of its dashboards."""

from __future__ import annotations

import msgspec
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from extproc.decision import NO_ENDPOINTS, Decision, Disaggregation
from extproc.endpoint import Endpoint, Load
from extproc.request import InferenceRequest, RequestLabels
from extproc.scheduling.load_bounds import (
    ConcurrencyDetector,
    SaturationRules,
    UtilizationDetector,
)
from extproc.telemetry.counters import ProcessCounters
from extproc.telemetry.decision_log import DecisionLog
from extproc.telemetry.exposition import Exposition
from extproc.telemetry.kv_event_metrics import KvEventStats
from extproc.telemetry.stream_recorder import StreamRecorder
from tests.support.metrics_pages import build_exposition, build_view
from tests.support.pool_fixture import PoolFixture

FIRST, SECOND = "10.0.0.1:8000", "10.0.0.2:8000"
REQUEST = {
    "model_name": "chat",
    "target_model_name": "llama",
    "fairness_id": "ann",
    "priority": "2",
}

IN_FLIGHT = {
    "endpoint_name": FIRST,
    "namespace": "ml",
    "producer_name": "inflight-load-producer",
    "fairness_id": "",
    "priority": "",
}


def exported(*, has_llmd_names, saturation=None):
    """The samples of a page: name and labels to value, and the bounds of histograms by name."""
    counters = ProcessCounters(has_llmd_names=has_llmd_names)
    recorder = StreamRecorder(counters, DecisionLog(10), lambda: 0.0)
    labels = RequestLabels("chat", "llama", "ann", 2)
    for status in ("200", "503"):
        request = recorder.observe_request("pool")
        decision = Decision(
            InferenceRequest("chat", "llama", prompt_tokens=10),
            [Endpoint(FIRST)],
            matched_tokens=5,
            disaggregation=Disaggregation(prefill_reason="cached"),
        )
        request.on_dequeued(0.2, priority=2)
        request.on_routed(
            decision,
            request_id="",
            labels=labels,
            trace_id="",
            now=0.0,
            duration_s=0.015,
            body_bytes=700,
        )
        request.on_response_headers(
            0.3, elapsed_s=0.5, status=status, is_stream=True, is_shown=True
        )
        request.on_response_chunk(0.5)
        request.on_response_chunk(0.9)
        request.on_usage({"prompt": 10, "cached": 4, "completion": 3}, 90000)
        request.on_finished(endpoint=FIRST, status=status, duration_s=1.0)
    for tenant in ("ann", "bob"):
        refused = recorder.observe_request("pool")
        named = RequestLabels("chat", "llama", tenant, 2)
        refused.on_rejected(NO_ENDPOINTS, request_id="", labels=named, now=9.0, started_s=5.0)
    queue = counters.for_pool("pool").queue
    for queued in (labels, labels, RequestLabels("chat", "llama", "none", 0)):
        queue.record_queued(queued, 10)
    for outcome, wait_s in (("dispatched", 0.2), ("dispatched", 0.2), ("expired", 30.0)):
        left = queue.record_queued(labels, 10)
        queue.record_departed(left, 10, outcome=outcome, wait_s=wait_s)
    for refusal in ("full", "full-unserved", "refused"):
        queue.record_refused(labels, refusal)
    left = queue.record_queued(labels, 10)
    queue.record_departed(left, 10, outcome="expired-unserved", wait_s=60.0)
    loads = {
        FIRST: Load(at=100.0, waiting=10.0, running=4.0, kv_usage=0.2),
        SECOND: Load(at=98.0, waiting=0.0, running=2.0, kv_usage=0.4),
    }
    store = PoolFixture(loads).store
    store.set_endpoints([Endpoint(FIRST, labels={"namespace": "ml"}), Endpoint(SECOND)], 100.0)
    store.pool.members[0].account.restore(1, prompt_tokens=60, queued_tokens=40, now=100.0)
    view = build_view(
        store.pool,
        queue=(3, 30),
        evictions=({2: 3}, {"confirmed": 2, "timed_out": 1}),
        queue_capacity=100,
        queue_capacity_bytes=1000,
        kv_events=KvEventStats(
            **{name: {} for name in ("batches", "prompts", "waits", "usage_tokens")},
            states=[(FIRST, 0, "exact"), (FIRST, 1, "lost"), (SECOND, 0, "partial")],
            **dict.fromkeys(("blocks", "lower_blocks"), ()),
            dropped_blocks=0,
            received=[
                *((Endpoint(FIRST, name="pod", labels={"namespace": "ml"}), 3),) * 2,
                (Endpoint(SECOND), 5),
            ],
        ),
        find_queue_bounds=lambda priority: (50, None) if priority == 2 else (None, None),
        stale_after_s=1.0,
        saturation=saturation,
    )
    counters.for_pool("pool").disaggregation["none", "encode-prefill-decode"] += 1
    counters.for_pool("pool").poll_errors["metrics-data-source"] += 3
    for result in ("ok", "protocol"):
        recorder.on_stream_opened()
        recorder.on_stream_ended(result)
    recorder.on_stream_opened()
    exposition = Exposition(
        counters,
        lambda: {"pool": view},
        clock=lambda: 100.0,
        gauges={"extproc_prefix_index_blocks": lambda: 7.0},
        about=lambda: {"pool": "pool", "profile": "adaptive"},
    )
    page = exposition.render(is_openmetrics=True).decode()
    samples, bounds = {}, {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            rest = {name: value for name, value in sample.labels.items() if name != "le"}
            key = (sample.name, tuple(sorted(rest.items())), sample.labels.get("le"))
            assert key not in samples
            samples[key] = sample.value
            if "le" in sample.labels:
                bounds.setdefault(family.name, {})[float(sample.labels["le"])] = None
    return samples, bounds


SAMPLES, BOUNDS = exported(has_llmd_names=True)


def value(name, /, **labels):
    return SAMPLES[name, tuple(sorted(labels.items())), None]


@pytest.mark.parametrize(
    ("name", "labels", "expected"),
    [
        ("request_total", REQUEST, 3),
        ("request_error_total", {**REQUEST, "error_code": "ServiceUnavailable"}, 2),
        ("request_duration_seconds_count", REQUEST, 2),
        ("request_ttft_seconds_sum", {**REQUEST, "streaming": "true"}, 0.5),
        ("request_size_bytes_sum", REQUEST, 1400),
        ("response_size_bytes_sum", REQUEST, 180000),
        ("request_ntpot_seconds_sum", REQUEST, 2 / 3),
        ("request_streaming_tpot_seconds_sum", REQUEST, 0.2),
        ("request_streaming_itl_seconds_count", REQUEST, 1),
        ("request_input_tokens_sum", REQUEST, 20),
        ("request_output_tokens_sum", REQUEST, 6),
        ("request_cached_tokens_sum", REQUEST, 8),
        ("request_running", REQUEST, 0),
        ("average_kv_cache_utilization", {"name": "pool"}, 0.3),
        ("average_queue_size", {"name": "pool"}, 5),
        ("average_running_requests", {"name": "pool"}, 3),
        ("std_dev_queue_size", {"name": "pool"}, 5),
        ("ready_endpoints", {"name": "pool"}, 2),
        ("per_endpoint_queue_size", {"name": "pool", "model_server_endpoint": FIRST}, 10),
        ("scheduler_e2e_duration_seconds_sum", {}, 0.03),
        (
            "scheduler_attempts_total",
            {
                "status": "success",
                "target_model_name": "llama",
                "endpoint_name": FIRST,
                "namespace": "ml",
                "port": "8000",
            },
            2,
        ),
        (
            "scheduler_attempts_total",
            {
                "status": "failure",
                "target_model_name": "llama",
                "endpoint_name": "",
                "namespace": "",
                "port": "",
            },
            2,
        ),
        (
            "plugin_duration_seconds_count",
            {
                "extension_point": "Scheduling",
                "plugin_type": "adaptive",
                "plugin_name": "adaptive",
            },
            2,
        ),
        (
            "flow_control_queue_size",
            {**REQUEST, "inference_pool": "pool"},
            2,
        ),
        (
            "flow_control_queue_bytes",
            {**REQUEST, "fairness_id": "default-flow", "priority": "0", "inference_pool": "pool"},
            10,
        ),
        (
            "flow_control_request_queue_duration_seconds_count",
            {**REQUEST, "outcome": "Dispatched", "inference_pool": "pool"},
            2,
        ),
        (
            "flow_control_request_queue_duration_seconds_sum",
            {**REQUEST, "outcome": "EvictedTTL", "inference_pool": "pool"},
            30,
        ),
        (
            "flow_control_requests_total",
            {"outcome": "EvictedTTL", "priority": "2", "inference_pool": "pool"},
            1,
        ),
        *[
            (
                "flow_control_requests_total",
                {"outcome": outcome, "priority": "2", "inference_pool": "pool"},
                1,
            )
            for outcome in (
                *("RejectedCapacity", "RejectedNoEndpoints", "RejectedOther"),
                "EvictedNoEndpoints",
            )
        ],
        *[
            (
                "flow_control_pool_saturation",
                {"inference_pool": "pool", "stage": stage},
                1.5,
            )
            for stage in ("decode", "effective")
        ],
        (
            "flow_control_revocations_issued_total",
            {"priority": "2", "inference_pool": "pool"},
            3,
        ),
        (
            "flow_control_revocations_total",
            {"outcome": "timed_out", "inference_pool": "pool"},
            1,
        ),
        (
            "flow_control_capacity_utilization_requests",
            {"priority": "2", "inference_pool": "pool"},
            0.04,
        ),
        (
            "flow_control_capacity_utilization_bytes",
            {"priority": "2", "inference_pool": "pool"},
            0.02,
        ),
        ("flow_control_global_capacity_utilization_requests", {"inference_pool": "pool"}, 0.03),
        ("flow_control_global_capacity_utilization_bytes", {"inference_pool": "pool"}, 0.03),
        ("flow_control_stale_endpoints", {"detector": "utilization-detector"}, 1),
        (
            "prefix_indexer_hit_ratio_sum",
            {"plugin_name": "adaptive", "plugin_type": "adaptive"},
            1.0,
        ),
        (
            "prefix_indexer_hit_bytes_sum",
            {"plugin_name": "adaptive", "plugin_type": "adaptive"},
            40,
        ),
        ("request_processing_duration_seconds_sum", {}, 2 * 0.2 + 2 * 4.0),
        ("extproc_stream_duration_seconds_sum", {}, 2 * 1.0 + 2 * 4.0),
        ("prefix_indexer_size", {"plugin_name": "adaptive", "plugin_type": "adaptive"}, 7),
        ("inflight_requests", IN_FLIGHT, 1),
        ("inflight_tokens", IN_FLIGHT, 40),
        ("kv_cache_events_active_subscribers", {}, 3),
        ("kv_cache_events_messages_received_total", {"pod_identifier": "ml/pod"}, 6),
        ("kv_cache_events_messages_received_total", {"pod_identifier": SECOND}, 5),
        ("extproc_streams_inflight", {}, 1),
        ("extproc_streams_total", {"code": "InvalidArgument"}, 1),
        ("datalayer_poll_errors_total", {"source_type": "metrics-data-source"}, 3),
        (
            "model_rewrite_decisions_total",
            {"model_rewrite_name": "", "model_name": "chat", "target_model": "llama"},
            2,
        ),
        (
            "disagg_decision_total",
            {
                "plugin_name": "disagg-profile-handler",
                "plugin_type": "disagg-profile-handler",
                "model_name": "llama",
                "decision_type": "decode-only",
            },
            2,
        ),
        *[
            (
                f"{name}_decision_total",
                {
                    "plugin_name": plugin,
                    "plugin_type": plugin,
                    "model_name": "unknown",
                    "decision_type": decision_type,
                },
                1,
            )
            for name, plugin, decision_type in (
                ("disagg", "disagg-profile-handler", "encode-prefill-decode"),
                ("pd", "pd-profile-handler", "prefill-decode"),
            )
        ],
    ],
)
def test_samples_have_the_labels_of_llmd(name, labels, expected):
    """The same counts as ours, by other labels."""
    assert value(f"llm_d_epp_{name}", **labels) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("name", "first", "last", "count"),
    [
        ("request_duration_seconds", 0.005, 3600, 35),
        ("request_ttft_seconds", 0.005, 120, 24),
        ("request_size_bytes", 64, 2**30, 25),
        ("response_size_bytes", 1, 65536, 15),
        ("request_ntpot_seconds", 0.001, 10, 13),
        ("request_streaming_tpot_seconds", 0.0005, 2, 19),
        ("request_streaming_itl_seconds", 0.001, 2, 15),
        ("request_input_tokens", 1, 1048576, 19),
        ("request_output_tokens", 1, 8192, 12),
        ("scheduler_e2e_duration_seconds", 0.0001, 0.1, 10),
        ("flow_control_request_queue_duration_seconds", 0.0001, 60, 16),
        ("prefix_indexer_hit_ratio", 0, 1, 11),
        ("prefix_indexer_hit_bytes", 0, 65536, 14),
        ("request_processing_duration_seconds", 0.0005, 10, 16),
        ("extproc_stream_duration_seconds", 0.001, 600, 14),
    ],
)
def test_histograms_have_the_buckets_of_llmd(name, first, last, count):
    """Recording rules and heat maps for the EPP go on working."""
    *bounds, infinity = BOUNDS[f"llm_d_epp_{name}"]
    assert (bounds[0], bounds[-1], len(bounds), infinity) == (first, last, count, float("inf"))


@pytest.mark.parametrize(
    "name", ["request_input_tokens", "request_cached_tokens", "response_size_bytes"]
)
def test_histograms_have_the_uneven_bound_of_llmd(name):
    """Queries name the bound as it is there, with its slip."""
    bounds = BOUNDS[f"llm_d_epp_{name}"]
    assert 32778 in bounds
    assert 32768 not in bounds


MODELS = {"model_name": "chat", "target_model_name": "llama"}
ATTEMPT = {"status": "success", "target_model_name": "llama", "namespace": "ml", "port": "8000"}
QUEUED = {**REQUEST, "inference_pool": "pool"}


@pytest.mark.parametrize(
    ("name", "labels", "expected"),
    [
        ("inference_objective_request_total", {**MODELS, "priority": "2"}, 4),
        (
            "inference_objective_request_error_total",
            {**MODELS, "error_code": "ServiceUnavailable"},
            3,
        ),
        ("inference_objective_running_requests", {"model_name": "chat"}, 0),
        ("inference_objective_request_duration_seconds_count", MODELS, 2),
        ("inference_objective_request_ttft_seconds_sum", MODELS, 0.5),
        ("inference_objective_request_tpot_seconds_sum", MODELS, 0.2),
        ("inference_objective_request_sizes_sum", MODELS, 1400),
        ("inference_objective_response_sizes_sum", MODELS, 180000),
        ("inference_objective_normalized_time_per_output_token_seconds_count", MODELS, 2),
        ("inference_objective_input_tokens_sum", MODELS, 20),
        ("inference_objective_output_tokens_sum", MODELS, 6),
        ("inference_objective_prompt_cached_tokens_sum", MODELS, 8),
        ("inference_pool_average_kv_cache_utilization", {"name": "pool"}, 0.3),
        ("inference_pool_average_queue_size", {"name": "pool"}, 5),
        ("inference_pool_average_running_requests", {"name": "pool"}, 3),
        ("inference_pool_ready_pods", {"name": "pool"}, 2),
        ("inference_pool_per_pod_queue_size", {"name": "pool", "model_server_pod": FIRST}, 10),
        ("inference_extension_scheduler_e2e_duration_seconds_sum", {}, 0.03),
        (
            "inference_extension_plugin_duration_seconds_count",
            {
                "extension_point": "Scheduling",
                "plugin_type": "adaptive",
                "plugin_name": "adaptive",
            },
            2,
        ),
        (
            "llm_d_inference_scheduler_disagg_decision_total",
            {"model_name": "llama", "decision_type": "decode-only"},
            2,
        ),
        (
            "llm_d_inference_scheduler_pd_decision_total",
            {"model_name": "llama", "decision_type": "decode-only"},
            2,
        ),
        ("inference_extension_scheduler_attempts_total", {**ATTEMPT, "pod_name": FIRST}, 2),
        ("inference_extension_flow_control_queue_size", QUEUED, 2),
        ("inference_extension_flow_control_queue_bytes", QUEUED, 20),
        (
            "inference_extension_flow_control_request_queue_duration_seconds_sum",
            {**QUEUED, "outcome": "EvictedTTL"},
            30,
        ),
        (
            "inference_extension_flow_control_pool_saturation",
            {"inference_pool": "pool", "stage": "effective"},
            1.5,
        ),
        ("inference_extension_prefix_indexer_hit_ratio_sum", {}, 1.0),
        ("inference_extension_prefix_indexer_hit_bytes_sum", {}, 40),
        ("inference_extension_prefix_indexer_size", {}, 7),
        (
            "llm_d_inference_scheduler_datalayer_poll_errors_total",
            {"source_type": "metrics-data-source"},
            3,
        ),
        (
            "inference_extension_model_rewrite_decisions_total",
            {"model_rewrite_name": "", "model_name": "chat", "target_model": "llama"},
            2,
        ),
    ],
)
def test_deprecated_names_have_the_labels_that_they_have_there(name, labels, expected):
    """Dashboards and autoscalers of earlier releases go on working; other labels are added up."""
    assert value(name, **labels) == pytest.approx(expected)


def test_these_names_are_served_only_when_wanted():
    """They double the series of requests."""
    samples, _ = exported(has_llmd_names=False)
    assert not [name for name, *_ in samples if not name.startswith("extproc")]


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        (SaturationRules(), 1.5),
        (SaturationRules(utilization=UtilizationDetector(queue_depth_threshold=20)), 0.75),
        (SaturationRules(concurrency=ConcurrencyDetector(max_concurrency=2)), 0.25),
        (
            SaturationRules(
                utilization=UtilizationDetector(),
                concurrency=ConcurrencyDetector(
                    concurrency_mode="tokens", max_token_concurrency=630
                ),
            ),
            4.0,
        ),
    ],
)
def test_the_configured_detectors_say_how_saturated_a_pool_is(rules, expected):
    """As in the EPP, where an HPA goes by it; the counts of this picker have no age."""
    samples, _ = exported(has_llmd_names=True, saturation=rules)
    labels = (("inference_pool", "pool"), ("stage", "effective"))
    name = "llm_d_epp_flow_control_pool_saturation"
    assert samples[name, labels, None] == pytest.approx(expected)


def test_a_pool_without_endpoints_is_saturated():
    """Whatever scales by saturation then adds some."""
    empty = msgspec.structs.replace(PoolFixture({FIRST: None}).store.pool, members=())
    counters = ProcessCounters(has_llmd_names=True)
    exposition = build_exposition(counters, {"pool": build_view(empty)})
    name = "llm_d_epp_flow_control_pool_saturation"
    lines = [
        line for line in exposition.render().decode().splitlines() if line.startswith(f"{name}{{")
    ]
    assert lines == [f'{name}{{inference_pool="pool",stage="effective"}} 1.0']
