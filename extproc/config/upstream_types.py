"""Every plugin type of the upstream endpoint picker, and what becomes of it here.

A file of kind `EndpointPickerConfig` names plugins by `type`. This table says for each of them
whether a plugin of ours has that kind, whether our picker does that work anyway, or whether nobody
does it. Names and parameters are those of llm-d-router 0.10.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import msgspec


class UpstreamType(msgspec.Struct, frozen=True, kw_only=True):
    """One plugin type.

    Attributes:
        name: Its `type` in a file.
        role: What it is: `filter`, `scorer`, `picker`, `handler`, `decider`, `producer`, `parser`,
            `source`, `extractor`, `detector`, `policy`, `admitter`, `discovery` or `hook`.
        status: `built`: our catalogue has a plugin of that kind with the same parameters.
            `deprecated`: still read, and `note` is the warning that says what to write instead.
            `implied`: our picker does it without being told, or does not need it; accepted, and
            `note` says what of ours does it. `unsupported`: nothing of ours does it; `note` says
            what happens in its place.
        kind: Its kind in the catalogue when it is built, or deprecated and built; else empty.
        instead: The upstream type that replaced a deprecated one; empty for the others.
        parameters: Parameters an implied, unsupported or not built deprecated type is known to
            have; they have no effect. Those of built types are the fields of the class.
        note: One sentence for whoever reads the configuration; empty when there is nothing to say.
    """

    name: str
    role: str
    status: str
    kind: str = ""
    instead: str = ""
    parameters: tuple[str, ...] = ()
    note: str = ""


def _built(role: str, *names: str) -> tuple[UpstreamType, ...]:
    return tuple(UpstreamType(name=n, role=role, status="built", kind=n) for n in names)


def _implied(role: str, name: str, note: str, *parameters: str) -> UpstreamType:
    return UpstreamType(name=name, role=role, status="implied", note=note, parameters=parameters)


def _unsupported(role: str, name: str, note: str, *parameters: str) -> UpstreamType:
    return UpstreamType(
        name=name, role=role, status="unsupported", note=note, parameters=parameters
    )


def _deprecated(
    role: str, name: str, instead: str, *parameters: str, kind: str = "", note: str = ""
) -> UpstreamType:
    return UpstreamType(
        name=name,
        role=role,
        status="deprecated",
        kind=kind,
        instead=instead,
        parameters=parameters,
        note=note or f"{name} is deprecated: write {instead} instead",
    )


_SCHEDULING = (
    *_built(
        "scorer",
        "active-request-scorer",
        "context-length-aware",
        "endpoint-attribute-scorer",
        "header-label-affinity-scorer",
        "kv-cache-utilization-scorer",
        "latency-scorer",
        "load-aware-scorer",
        "lora-affinity-scorer",
        "no-hit-lru-scorer",
        "prefix-cache-scorer",
        "queue-scorer",
        "running-requests-size-scorer",
        "session-affinity-scorer",
        "token-load-scorer",
        "topology-affinity-scorer",
    ),
    _deprecated(
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
    _unsupported(
        "scorer",
        "mm-embeddings-cache-scorer",
        "nobody knows which images an engine has encoded: it counts nothing",
        "mmEmbeddingsProducerName",
    ),
    *(
        _unsupported("scorer", name, "peer clusters are not candidates: it counts nothing")
        for name in (
            "multicluster-queue-scorer",
            "multicluster-kv-cache-utilization-scorer",
            "multicluster-prefix-cache-scorer",
            "multicluster-topology-scorer",
        )
    ),
    *_built(
        "filter",
        "decode-filter",
        "encode-filter",
        "endpoint-attribute-filter",
        "header-based-testing-filter",
        "label-selector-filter",
        "prefill-filter",
        "prefix-cache-affinity-filter",
        "session-affinity-filter",
        "topology-affinity-filter",
        "utilization-filter",
    ),
    _deprecated(
        "filter",
        "by-label",
        "label-selector-filter",
        kind="by-label",
        note="by-label is deprecated: write label-selector-filter with matchExpressions "
        "(key, operator In, values) instead",
    ),
    _deprecated(
        "filter", "by-label-selector", "label-selector-filter", kind="label-selector-filter"
    ),
    _implied(
        "filter",
        "slo-headroom-tier-filter",
        "without latency predictions it keeps everybody, here as there",
        "epsilonExploreNeg",
    ),
    _unsupported(
        "filter", "multicluster-session-affinity-filter", "peer clusters are not candidates"
    ),
    *_built("picker", "max-score-picker", "random-picker", "weighted-random-picker"),
)

_ONE_EACH = "one profile routes a request, which is all this handler says"
_DECODE_ONLY = (
    "prefill and decode are not split: the decode profile routes the request, and the engine it "
    "picks does its own prefill"
)

_HANDLERS = (
    _implied("handler", "single-profile-handler", _ONE_EACH),
    _unsupported(
        "handler",
        "disagg-profile-handler",
        _DECODE_ONLY,
        "profiles",
        "deciders",
        "stageOrder",
    ),
    _unsupported(
        "handler",
        "header-profile-handler",
        "no header chooses a profile: its defaultProfile routes every request",
        "headerName",
        "defaultProfile",
    ),
    _deprecated(
        "handler",
        "data-parallel-profile-handler",
        "single-profile-handler",
        "primaryPort",
        note="data-parallel-profile-handler is deprecated: write single-profile-handler instead "
        "and list the port of every rank; each is an endpoint of its own",
    ),
    _deprecated(
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
        _deprecated(
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
        _unsupported("decider", name, _DECODE_ONLY, *parameters)
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

_PRODUCERS = (
    _implied(
        "producer",
        "approx-prefix-cache-producer",
        "the prefix index of ours does it; its bounds are set in the section prefix",
        "autoTune",
        "blockSize",
        "blockSizeTokens",
        "maxPrefixBlocksToMatch",
        "maxPrefixTokensToMatch",
        "lruCapacityPerServer",
    ),
    _implied(
        "producer",
        "precise-prefix-cache-producer",
        "the prefix index of ours stands in; it reads no KV events and corrects itself by what "
        "engines report",
        "tokenProcessorConfig",
        "indexerConfig",
        "kvEventsConfig",
        "speculativeIndexing",
        "speculativeTTL",
        "tokenizersPoolConfig",
    ),
    _implied(
        "producer",
        "inflight-load-producer",
        "the in-flight accounts of ours do it, for requests and for uncached prompt tokens; "
        "generated tokens are not counted",
        "addEstimatedOutputTokens",
        "outputRatio",
        "maxEstimatedOutputTokens",
        "prefixMatchInfoProducerName",
        "syncCrossReplicaState",
    ),
    _implied(
        "producer",
        "token-producer",
        "prompt lengths are estimated at 4 bytes a token, and prompts are hashed as bytes; no "
        "tokenizer is asked",
        "modelName",
        "vllm",
        "estimate",
        "udsTokenizerConfig",
    ),
    _deprecated(
        "producer",
        "tokenizer",
        "token-producer",
        "modelName",
        "vllm",
        "estimate",
        "udsTokenizerConfig",
    ),
    _implied(
        "producer",
        "session-id-producer",
        "sessions are found in body and headers by the request parsers",
        "headerName",
        "cookieName",
    ),
    _unsupported(
        "producer",
        "predicted-latency-producer",
        "no latency predictor is asked: latency-scorer scores by KV cache, queue and prefix",
        "samplingMean",
        "maxDecodeTokenSamplesForPrediction",
        "maxSampledTokens",
        "sloBufferFactor",
        "contextTTL",
        "streamingMode",
        "endpointRoleLabel",
        "predictInProduce",
        "predictInPrepareData",
        "prefixMatchInfoProducerName",
    ),
    _unsupported(
        "producer",
        "burst-prefix-cache-producer",
        "requests are not held to be put together: the prefix index sees each as it comes",
        "windowDurationMs",
        "maxPerReplica",
        "blockSizeTokens",
        "minColocateBlocks",
        "maxBatchSize",
        "balanceBy",
    ),
    _unsupported(
        "producer",
        "mm-embeddings-cache-producer",
        "nobody knows which images an engine has encoded",
        "cacheSizeInMBPerServer",
        "cacheSizeInMB",
    ),
    _unsupported(
        "producer",
        "p2p-source-producer",
        "engines are not told where to fetch KV blocks from",
        "minCachedTokenDelta",
    ),
    _unsupported(
        "producer",
        "multicluster-approx-prefix-cache-producer",
        "peer clusters are not candidates",
    ),
)

_PARSED = "the request parsers of ours know this surface by its path"

_PARSERS = (
    *(
        _implied("parser", name, _PARSED)
        for name in (
            "openai-parser",
            "anthropic-parser",
            "vllmhttp-parser",
            "vllmgrpc-parser",
            "sglanghttp-parser",
        )
    ),
    _implied("parser", "passthrough-parser", "paths that nobody knows are routed by load alone"),
    _unsupported(
        "parser", "vertexai-parser", "Vertex calls are routed by load alone, their body unread"
    ),
)

_SCRAPED = "the scraper of ours does it; it is set in the section scrape"
_HTTP = (
    "scheme",
    "path",
    "insecureSkipVerify",
    "caCertPath",
    "clientCertPath",
    "clientKeyPath",
    "interval",
    "port",
)

_DATA = (
    _implied("source", "metrics-data-source", _SCRAPED, *_HTTP, "families"),
    _implied(
        "extractor",
        "core-metrics-extractor",
        "engines are recognised by the names of their metrics; a label is not needed",
        "engineLabelKey",
        "defaultEngine",
        "engineConfigs",
    ),
    _implied("source", "models-data-source", _SCRAPED, *_HTTP),
    _implied("extractor", "models-data-extractor", _SCRAPED),
    _implied(
        "extractor",
        "topology-extractor",
        "topology plugins read the labels of endpoints",
        "hostname",
        "rack",
        "zone",
        "region",
    ),
    *(
        _implied("source", name, "discovery of ours tells who comes and goes")
        for name in ("k8s-notification-source", "endpoint-notification-source")
    ),
    *(
        _unsupported("source", name, "GPU metrics are not scraped", *_HTTP)
        for name in ("dcgm-data-source", "dcgm-extractor")
    ),
    *(
        _unsupported("source", name, "peer clusters are not candidates", *_HTTP)
        for name in ("multicluster-metrics-data-source", "multicluster-metrics-extractor")
    ),
    _implied(
        "discovery",
        "file-discovery",
        "an endpoints file of ours does it; it is set in the section pool",
        "path",
        "watchFile",
    ),
    _unsupported(
        "discovery", "multicluster-file-discovery", "peer clusters are not candidates", "path"
    ),
)

_NO_QUEUE = "requests are not queued by this file"

_CONTROL = (
    *_built("detector", "concurrency-detector", "utilization-detector"),
    *(
        _unsupported("policy", name, _NO_QUEUE, *parameters)
        for name, *parameters in (
            ("global-strict-fairness-policy",),
            ("round-robin-fairness-policy",),
            ("program-aware-fairness",),
            ("fcfs-ordering-policy",),
            ("edf-ordering-policy",),
            ("slo-deadline-ordering-policy",),
            ("static-usage-limit-policy", "threshold"),
            ("priority-holdback-policy", "shape", "domain", "minCeiling", "maxCeiling", "ceilings"),
            ("soft-reflective-ceiling-policy",),
            ("eviction-sheddable-filter",),
            ("eviction-priority-then-time-ordering",),
        )
    ),
    _unsupported(
        "admitter", "latency-slo-admitter", "no latency predictor is asked: everybody is admitted"
    ),
    _unsupported(
        "admitter",
        "probabilistic-admitter",
        "requests have no priority yet: everybody is admitted",
        "queueDepthThreshold",
        "kvCacheUtilThreshold",
        "power",
        "k",
    ),
    _implied(
        "hook",
        "agent-identity",
        "sessions are found in body and headers by the request parsers",
    ),
    _unsupported(
        "hook",
        "disaggregatedset-rollout-screener",
        "revisions are not weighted during a rollout: everybody passes",
        "scope",
        "revisionGating",
    ),
    _unsupported(
        "hook",
        "request-attribute-reporter",
        "token usage is a metric here and not written into dynamic metadata",
        "attributes",
    ),
    _implied(
        "hook",
        "destination-endpoint-served-verifier",
        "the setting conformance does it",
    ),
)

#: Upstream name to what becomes of it.
TYPES: Mapping[str, UpstreamType] = MappingProxyType(
    {
        each.name: each
        for each in (*_SCHEDULING, *_HANDLERS, *_PRODUCERS, *_PARSERS, *_DATA, *_CONTROL)
    }
)
