"""Plugin types of earlier releases of the gateway's picker and of llm-d.

Files that name them are still in use, the gateway's default of version 0.5 among them: a decision
tree of low-queue, lora-affinity, least-queue and least-kv-cache filters.
"""

from __future__ import annotations

from collections.abc import Mapping

from extproc.config import epp_plugin_type

#: Kind of the filter that a decision tree becomes; `decision_trees` makes its parameters.
DECISION_TREE = "decision-tree-filter"

#: Of the latency predictor, which is not asked; others are parameters of `latency-scorer` still.
_PREDICTION = (
    "samplingMean",
    "maxSampledTokens",
    "sloBufferFactor",
    "negHeadroomTTFTWeight",
    "negHeadroomTPOTWeight",
    "headroomTTFTWeight",
    "headroomTPOTWeight",
    "epsilonExploreSticky",
    "epsilonExploreNeg",
    "affinityGateTau",
    "affinityGateTauGlobal",
    "contextTTL",
    "selectionMode",
    "streamingMode",
    "endpointRoleLabel",
)

#: The length of a queue that was still short for the gateway.
_SHORT_QUEUE = 128


def _low_queue(old_params: Mapping[str, object]) -> Mapping[str, object]:
    """Convert `threshold` to a condition on waiting requests."""
    params = {"threshold": _SHORT_QUEUE, **old_params}
    bound = {"metric": "waiting-queue", "maxValue": params.pop("threshold")}
    return {"conditions": [bound], **params}


def _active_requests(old_params: Mapping[str, object]) -> Mapping[str, object]:
    """Convert `maxRequests` to a condition on our open requests."""
    params = dict(old_params)
    bound: dict[str, object] = {"metric": "active-requests"}
    if "maxRequests" in params:
        bound |= {"maxValue": params.pop("maxRequests")}
    return {"conditions": [bound], **params}


def _share(old_params: Mapping[str, object]) -> Mapping[str, object]:
    """Rename `threshold`, the probability of endpoints that hold the adapter, to `share`."""
    return {"share" if name == "threshold" else name: value for name, value in old_params.items()}


_FILTERS = (
    epp_plugin_type.deprecated(
        "filter",
        "low-queue-filter",
        "utilization-filter",
        kind="utilization-filter",
        note="low-queue-filter is deprecated: write utilization-filter with a condition on "
        "waiting-queue instead",
        translate=_low_queue,
    ),
    epp_plugin_type.deprecated(
        "filter",
        "active-request-filter",
        "utilization-filter",
        "inFlightLoadProducerName",
        kind="utilization-filter",
        note="active-request-filter is deprecated: write utilization-filter with a condition on "
        "active-requests instead",
        translate=_active_requests,
    ),
    epp_plugin_type.deprecated("filter", "least-queue-filter", "queue-range", kind="queue-range"),
    epp_plugin_type.deprecated("filter", "least-kv-cache-filter", "kv-range", kind="kv-range"),
    epp_plugin_type.deprecated(
        "filter",
        "lora-affinity-filter",
        "adapter-soft-affinity",
        kind="adapter-soft-affinity",
        note="lora-affinity-filter is deprecated: write adapter-soft-affinity instead, and share "
        "for threshold",
        translate=_share,
    ),
    epp_plugin_type.deprecated(
        "filter",
        DECISION_TREE,
        "tree",
        kind="tree",
        note="decision-tree-filter is deprecated: write tree instead, with a root of kind, params, "
        "on_success, on_failure and on_either",
    ),
    epp_plugin_type.deprecated(
        "filter",
        "sheddable-capacity-filter",
        "utilization-filter",
        "queueThreshold",
        "kvCacheThreshold",
        note="sheddable-capacity-filter is deprecated: write utilization-filter with conditions on "
        "waiting-queue and kv-cache-utilization instead, which also stop requests that may not be "
        "refused; the old name keeps everybody",
    ),
)

_SCORERS = (
    epp_plugin_type.deprecated(
        "scorer",
        "kv-cache-scorer",
        "kv-cache-utilization-scorer",
        kind="kv-cache-utilization-scorer",
    ),
    *(
        epp_plugin_type.deprecated(
            "scorer",
            name,
            "prefix-cache-scorer",
            "prefix_length",
            "blockSize",
            *epp_plugin_type.INDEX_PARAMETERS,
            kind="prefix-cache-scorer",
        )
        for name in ("prefix-aware-scorer", "kvcache-aware-scorer")
    ),
    *(
        epp_plugin_type.deprecated(
            "scorer",
            name,
            "latency-scorer",
            *_PREDICTION,
            kind="latency-scorer",
            note=f"{name} is deprecated: write latency-scorer instead; no latency predictor is "
            "asked, so it scores by KV cache, queue and prefix",
        )
        for name in ("slo-scorer", "slo-aware-routing", "predicted-latency-scorer")
    ),
)

_AROUND = (
    *(
        epp_plugin_type.deprecated(
            "handler",
            name,
            "single-profile-handler",
            note=f"{name} is deprecated: write single-profile-handler instead; no header chooses a "
            f"profile, and {profile} routes every request",
        )
        for name, profile in (
            ("slo-aware-profile-handler", "default"),
            ("predicted-latency-profile-handler", "predicted-latency-no-routing"),
        )
    ),
    epp_plugin_type.deprecated(
        "producer",
        "slo-request-tracker",
        "predicted-latency-producer",
        note="slo-request-tracker is deprecated: leave it out, no latency predictor is asked",
    ),
    epp_plugin_type.deprecated(
        "extractor",
        "model-server-protocol-metrics",
        "core-metrics-extractor",
        "engineLabelKey",
        "defaultEngine",
        "engineConfigs",
    ),
)

ROWS = (*_FILTERS, *_SCORERS, *_AROUND)
