"""Upstream plugin types of a decision: filters, scorers, pickers and handlers."""

from __future__ import annotations

from extproc.config import epp_plugin_type

_SCHEDULING = (
    epp_plugin_type.built(
        "scorer", "active-request-scorer", "requestTimeout", "inFlightLoadProducerName"
    ),
    epp_plugin_type.built("scorer", "context-length-aware", "reusableTokensProducerName"),
    epp_plugin_type.built("scorer", "endpoint-attribute-scorer"),
    epp_plugin_type.built("scorer", "header-label-affinity-scorer"),
    epp_plugin_type.built("scorer", "kv-cache-utilization-scorer"),
    epp_plugin_type.built(
        "scorer",
        "latency-scorer",
        "latencyPredictionInfoProducerName",
        "prefixMatchInfoProducerName",
    ),
    epp_plugin_type.built("scorer", "load-aware-scorer"),
    epp_plugin_type.built("scorer", "lora-affinity-scorer"),
    epp_plugin_type.built(
        "scorer",
        "no-hit-lru-scorer",
        "prefixPluginType",
        "prefixPluginName",
        "prefixMatchInfoProducerName",
    ),
    epp_plugin_type.built(
        "scorer",
        "prefix-cache-scorer",
        "prefixMatchInfoProducerName",
        *epp_plugin_type.INDEX_PARAMETERS,
    ),
    epp_plugin_type.built("scorer", "queue-scorer"),
    epp_plugin_type.built("scorer", "running-requests-size-scorer"),
    epp_plugin_type.built("scorer", "session-affinity-scorer", "profileName"),
    epp_plugin_type.built(
        "scorer", "token-load-scorer", "nonTextTokenWeight", "inFlightLoadProducerName"
    ),
    epp_plugin_type.built("scorer", "topology-affinity-scorer", "topologyProducerName"),
    epp_plugin_type.deprecated(
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
    epp_plugin_type.unsupported(
        "scorer",
        "mm-embeddings-cache-scorer",
        "nobody knows which images an engine has encoded: it counts nothing",
        "mmEmbeddingsProducerName",
    ),
    *(
        epp_plugin_type.unsupported(
            "scorer", name, "peer clusters are not candidates: it counts nothing"
        )
        for name in (
            "multicluster-queue-scorer",
            "multicluster-kv-cache-utilization-scorer",
            "multicluster-prefix-cache-scorer",
            "multicluster-topology-scorer",
        )
    ),
    epp_plugin_type.built("filter", "decode-filter"),
    epp_plugin_type.built("filter", "encode-filter"),
    epp_plugin_type.built("filter", "endpoint-attribute-filter", "producer"),
    epp_plugin_type.built("filter", "header-based-testing-filter"),
    epp_plugin_type.built("filter", "label-selector-filter"),
    epp_plugin_type.built("filter", "prefill-filter"),
    epp_plugin_type.built(
        "filter",
        "prefix-cache-affinity-filter",
        "prefixMatchInfoProducerName",
        "inFlightLoadProducerName",
        "latencyPredictionInfoProducerName",
        "prefillCalibrationFile",
        "prefillCalibrationFingerprint",
        "prefillCalibrationRequired",
    ),
    epp_plugin_type.built("filter", "session-affinity-filter", "profileName"),
    epp_plugin_type.built("filter", "topology-affinity-filter", "topologyProducerName"),
    epp_plugin_type.built("filter", "utilization-filter", "inFlightLoadProducerName"),
    epp_plugin_type.deprecated(
        "filter",
        "by-label",
        "label-selector-filter",
        kind="by-label",
        note="by-label is deprecated: write label-selector-filter with matchExpressions "
        "(key, operator In, values) instead",
    ),
    epp_plugin_type.deprecated(
        "filter", "by-label-selector", "label-selector-filter", kind="label-selector-filter"
    ),
    epp_plugin_type.no_op(
        "filter",
        "slo-headroom-tier-filter",
        "without latency predictions it keeps everybody, here as there",
        "epsilonExploreNeg",
    ),
    epp_plugin_type.unsupported(
        "filter", "multicluster-session-affinity-filter", "peer clusters are not candidates"
    ),
    epp_plugin_type.built("picker", "max-score-picker"),
    epp_plugin_type.built("picker", "random-picker"),
    epp_plugin_type.built("picker", "weighted-random-picker"),
)

_ONE_EACH = "one profile routes a request, which is all this handler says"
_DECODE_ONLY = (
    "prefill and decode are not split: the decode profile routes the request, and the engine it "
    "picks does its own prefill"
)

_HANDLERS = (
    epp_plugin_type.no_op("handler", "single-profile-handler", _ONE_EACH),
    epp_plugin_type.unsupported(
        "handler",
        "disagg-profile-handler",
        _DECODE_ONLY,
        "profiles",
        "deciders",
        "stageOrder",
    ),
    epp_plugin_type.unsupported(
        "handler",
        "header-profile-handler",
        "no header chooses a profile: its defaultProfile routes every request",
        "headerName",
        "defaultProfile",
    ),
    epp_plugin_type.deprecated(
        "handler",
        "data-parallel-profile-handler",
        "single-profile-handler",
        "primaryPort",
        note="data-parallel-profile-handler is deprecated: write single-profile-handler instead "
        "and list the port of every rank; each is an endpoint of its own",
    ),
    epp_plugin_type.deprecated(
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
        epp_plugin_type.deprecated(
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
        epp_plugin_type.unsupported("decider", name, _DECODE_ONLY, *parameters)
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
