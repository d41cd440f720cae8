"""Upstream plugin types that take part in a decision: filters, scorers, pickers and handlers."""

from __future__ import annotations

from extproc.config import upstream_type

_SCHEDULING = (
    upstream_type.built(
        "scorer", "active-request-scorer", "requestTimeout", "inFlightLoadProducerName"
    ),
    upstream_type.built("scorer", "context-length-aware", "reusableTokensProducerName"),
    upstream_type.built("scorer", "endpoint-attribute-scorer"),
    upstream_type.built("scorer", "header-label-affinity-scorer"),
    upstream_type.built("scorer", "kv-cache-utilization-scorer"),
    upstream_type.built(
        "scorer",
        "latency-scorer",
        "latencyPredictionInfoProducerName",
        "prefixMatchInfoProducerName",
    ),
    upstream_type.built("scorer", "load-aware-scorer"),
    upstream_type.built("scorer", "lora-affinity-scorer"),
    upstream_type.built(
        "scorer",
        "no-hit-lru-scorer",
        "prefixPluginType",
        "prefixPluginName",
        "prefixMatchInfoProducerName",
    ),
    upstream_type.built(
        "scorer",
        "prefix-cache-scorer",
        "prefixMatchInfoProducerName",
        *upstream_type.INDEX_PARAMETERS,
    ),
    upstream_type.built("scorer", "queue-scorer"),
    upstream_type.built("scorer", "running-requests-size-scorer"),
    upstream_type.built("scorer", "session-affinity-scorer", "profileName"),
    upstream_type.built(
        "scorer", "token-load-scorer", "nonTextTokenWeight", "inFlightLoadProducerName"
    ),
    upstream_type.built("scorer", "topology-affinity-scorer", "topologyProducerName"),
    upstream_type.deprecated(
        "scorer",
        "precise-prefix-cache-scorer",
        "prefix-cache-scorer",
        "tokenProcessorConfig",
        "indexerConfig",
        "kvEventsConfig",
        "speculativeIndexing",
        "speculativeTTL",
        kind="prefix-cache-scorer",
        note="precise-prefix-cache-scorer is deprecated: write prefix-cache-scorer instead; its "
        "parameters have no effect, because KV events are not read and the prefix index corrects "
        "itself by what engines report",
    ),
    upstream_type.unsupported(
        "scorer",
        "mm-embeddings-cache-scorer",
        "nobody knows which images an engine has encoded: it counts nothing",
        "mmEmbeddingsProducerName",
    ),
    *(
        upstream_type.unsupported(
            "scorer", name, "peer clusters are not candidates: it counts nothing"
        )
        for name in (
            "multicluster-queue-scorer",
            "multicluster-kv-cache-utilization-scorer",
            "multicluster-prefix-cache-scorer",
            "multicluster-topology-scorer",
        )
    ),
    upstream_type.built("filter", "decode-filter"),
    upstream_type.built("filter", "encode-filter"),
    upstream_type.built("filter", "endpoint-attribute-filter", "producer"),
    upstream_type.built("filter", "header-based-testing-filter"),
    upstream_type.built("filter", "label-selector-filter"),
    upstream_type.built("filter", "prefill-filter"),
    upstream_type.built(
        "filter",
        "prefix-cache-affinity-filter",
        "prefixMatchInfoProducerName",
        "inFlightLoadProducerName",
        "latencyPredictionInfoProducerName",
        "prefillCalibrationFile",
        "prefillCalibrationFingerprint",
        "prefillCalibrationRequired",
    ),
    upstream_type.built("filter", "session-affinity-filter", "profileName"),
    upstream_type.built("filter", "topology-affinity-filter", "topologyProducerName"),
    upstream_type.built("filter", "utilization-filter", "inFlightLoadProducerName"),
    upstream_type.deprecated(
        "filter",
        "by-label",
        "label-selector-filter",
        kind="by-label",
        note="by-label is deprecated: write label-selector-filter with matchExpressions "
        "(key, operator In, values) instead",
    ),
    upstream_type.deprecated(
        "filter", "by-label-selector", "label-selector-filter", kind="label-selector-filter"
    ),
    upstream_type.implied(
        "filter",
        "slo-headroom-tier-filter",
        "without latency predictions it keeps everybody, here as there",
        "epsilonExploreNeg",
    ),
    upstream_type.unsupported(
        "filter", "multicluster-session-affinity-filter", "peer clusters are not candidates"
    ),
    upstream_type.built("picker", "max-score-picker"),
    upstream_type.built("picker", "random-picker"),
    upstream_type.built("picker", "weighted-random-picker"),
)

_ONE_EACH = "one profile routes a request, which is all this handler says"
_DECODE_ONLY = (
    "prefill and decode are not split: the decode profile routes the request, and the engine it "
    "picks does its own prefill"
)

_HANDLERS = (
    upstream_type.implied("handler", "single-profile-handler", _ONE_EACH),
    upstream_type.unsupported(
        "handler",
        "disagg-profile-handler",
        _DECODE_ONLY,
        "profiles",
        "deciders",
        "stageOrder",
    ),
    upstream_type.unsupported(
        "handler",
        "header-profile-handler",
        "no header chooses a profile: its defaultProfile routes every request",
        "headerName",
        "defaultProfile",
    ),
    upstream_type.deprecated(
        "handler",
        "data-parallel-profile-handler",
        "single-profile-handler",
        "primaryPort",
        note="data-parallel-profile-handler is deprecated: write single-profile-handler instead "
        "and list the port of every rank; each is an endpoint of its own",
    ),
    upstream_type.deprecated(
        "handler",
        "pd-profile-handler",
        "disagg-profile-handler",
        "threshold",
        "hashBlockSize",
        "decodeProfile",
        "prefillProfile",
        "prefixPluginType",
        "prefixPluginName",
        "primaryPort",
        "deciderPluginName",
        note="pd-profile-handler is deprecated: write disagg-profile-handler instead; "
        + _DECODE_ONLY,
    ),
    *(
        upstream_type.deprecated(
            "hook",
            name,
            "disagg-profile-handler",
            "prefillProfile",
            "encodeProfile",
            note=f"{name} is deprecated: leave it out; no prefill or encode endpoint is picked, so "
            "there is no header to write",
        )
        for name in ("disagg-headers-handler", "prefill-header-handler")
    ),
    *(
        upstream_type.unsupported("decider", name, _DECODE_ONLY, *parameters)
        for name, *parameters in (
            (
                "prefix-based-pd-decider",
                "nonCachedTokens",
                "promptTokens",
                "prefixMatchInfoProducerName",
            ),
            ("always-disagg-pd-decider",),
            ("always-disagg-multimodal-decider",),
        )
    ),
)

ROWS = (*_SCHEDULING, *_HANDLERS)
