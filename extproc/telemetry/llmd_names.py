"""Names of the families of llm-d's endpoint picker: the present one, and the deprecated twin.

The twin of a family has its values with some of its labels; what differs by the others is added up.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

from extproc.telemetry.metric_family import FamilyType, MetricFamily, Sample
from extproc.telemetry.request_series import MetricHistogram, merge

_PREFIX: Final = "llm_d_epp_"
_MODELS: Final = ("model_name", "target_model_name")

#: Names of twins without suffix, and their labels in the order of names; None for the same ones.
_TWINS: Final[dict[str, tuple[str, Sequence[str] | None]]] = {
    "request": ("inference_objective_request", (*_MODELS, "priority")),
    "request_error": ("inference_objective_request_error", (*_MODELS, "error_code")),
    "request_running": ("inference_objective_running_requests", ("model_name",)),
    "request_duration_seconds": ("inference_objective_request_duration_seconds", _MODELS),
    "request_size_bytes": ("inference_objective_request_sizes", _MODELS),
    "response_size_bytes": ("inference_objective_response_sizes", _MODELS),
    "request_ntpot_seconds": (
        *("inference_objective_normalized_time_per_output_token_seconds", _MODELS),
    ),
    "request_ttft_seconds": ("inference_objective_request_ttft_seconds", _MODELS),
    "request_streaming_tpot_seconds": ("inference_objective_request_tpot_seconds", _MODELS),
    "request_predicted_ttft_seconds": (
        *("inference_objective_request_predicted_ttft_seconds", _MODELS),
    ),
    "request_input_tokens": ("inference_objective_input_tokens", _MODELS),
    "request_output_tokens": ("inference_objective_output_tokens", _MODELS),
    "request_cached_tokens": ("inference_objective_prompt_cached_tokens", _MODELS),
    "scheduler_attempts": (
        "inference_extension_scheduler_attempts",
        ("status", "target_model_name", "pod_name", "namespace", "port"),
    ),
    "prefix_indexer_size": ("inference_extension_prefix_indexer_size", ()),
    "datalayer_poll_errors": ("llm_d_inference_scheduler_datalayer_poll_errors", None),
    "disagg_decision": (
        "llm_d_inference_scheduler_disagg_decision",
        ("model_name", "decision_type"),
    ),
    "pd_decision": ("llm_d_inference_scheduler_pd_decision", ("model_name", "decision_type")),
    "prefix_indexer_hit_bytes": ("inference_extension_prefix_indexer_hit_bytes", ()),
    "prefix_indexer_hit_ratio": ("inference_extension_prefix_indexer_hit_ratio", ()),
    "per_endpoint_queue_size": ("inference_pool_per_pod_queue_size", ("name", "model_server_pod")),
    "ready_endpoints": ("inference_pool_ready_pods", None),
    **{
        name: (f"inference_pool_{name}", None)
        for name in (
            *("average_kv_cache_utilization", "average_queue_size", "average_running_requests"),
        )
    },
    **{
        name: (f"inference_extension_{name}", None)
        for name in (
            *("scheduler_e2e_duration_seconds", "plugin_duration_seconds", "info"),
            "model_rewrite_decisions",
            *("flow_control_queue_size", "flow_control_queue_bytes"),
            *("flow_control_request_queue_duration_seconds", "flow_control_pool_saturation"),
        )
    },
}

#: Labels of twins that have another name there.
_RENAMED_LABELS: Final = {
    "pod_name": "endpoint_name",
    "model_server_pod": "model_server_endpoint",
}


def build_values(
    kind: FamilyType, name: str, text: str, labels: Sequence[str], samples: Iterable[Sample]
) -> Iterator[MetricFamily]:
    """Yield a family of counters or gauges, and its twin.

    Args:
        name: Name without prefix and suffix.
    """
    samples = list(samples)
    family = MetricFamily(kind, _PREFIX + name, text, labels, samples)
    yield family
    twin, twin_labels = _TWINS.get(name, ("", None))
    if twin_labels is None:
        yield from [family.renamed(twin)] if twin else []
        return
    select = _build_selector(labels, twin_labels)
    sums: defaultdict[tuple[str, ...], float] = defaultdict(int)
    for values, value in samples:
        sums[select(values)] += value
    yield MetricFamily(kind, twin, text, twin_labels, sums.items())


def build_histograms(
    name: str,
    text: str,
    labels: Sequence[str],
    histograms: Iterable[tuple[Sequence[str], MetricHistogram | None]],
) -> Iterator[MetricFamily]:
    """Yield a family of histograms, and its twin."""
    histograms = list(histograms)
    family = MetricFamily("histogram", _PREFIX + name, text, labels)
    for values, histogram in histograms:
        family.add_histogram(values, histogram)
    yield family
    twin, twin_labels = _TWINS.get(name, ("", None))
    if twin_labels is None:
        yield from [family.renamed(twin)] if twin else []
        return
    select = _build_selector(labels, twin_labels)
    members: defaultdict[tuple[str, ...], list[MetricHistogram | None]] = defaultdict(list)
    for values, histogram in histograms:
        members[select(values)].append(histogram)
    family = MetricFamily("histogram", twin, text, twin_labels)
    for values, group in members.items():
        family.add_histogram(values, merge(group))
    yield family


def _build_selector(
    labels: Sequence[str], twin_labels: Sequence[str]
) -> Callable[[Sequence[str]], tuple[str, ...]]:
    """Build what takes the values of a twin's labels from those of a family."""
    places = [labels.index(_RENAMED_LABELS.get(label, label)) for label in twin_labels]
    return lambda values: tuple([values[place] for place in places])
