"""Upstream plugin types around a decision: producers, parsers, data, flow control, hooks."""

from __future__ import annotations

from extproc.config import epp_plugin_type

_PRODUCERS = (
    epp_plugin_type.no_op(
        "producer",
        "approx-prefix-cache-producer",
        "the prefix index of ours does it; its bounds are set in the section prefix",
        *epp_plugin_type.INDEX_PARAMETERS,
    ),
    epp_plugin_type.unsupported(
        "producer",
        "precise-prefix-cache-producer",
        "no KV events are read: the prefix index of ours stands in, which believes what was routed "
        "and corrects itself by what engines report",
        "tokenProcessorConfig",
        "indexerConfig",
        "kvEventsConfig",
        "speculativeIndexing",
        "speculativeTTL",
        "tokenizersPoolConfig",
    ),
    epp_plugin_type.no_op(
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
    epp_plugin_type.unsupported(
        "producer",
        "token-producer",
        "no tokenizer is asked: prompt lengths are estimated at 4 bytes a token until the ratio of "
        "a model is learned, and prompts are hashed as bytes",
        "backend",
        "modelName",
        "vllm",
        "estimate",
        "udsTokenizerConfig",
    ),
    epp_plugin_type.deprecated(
        "producer",
        "tokenizer",
        "token-producer",
        "modelName",
        "vllm",
        "estimate",
        "udsTokenizerConfig",
    ),
    epp_plugin_type.no_op(
        "producer",
        "session-id-producer",
        "sessions are found in body and headers by the request parsers",
        "headerName",
        "cookieName",
    ),
    epp_plugin_type.unsupported(
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
    epp_plugin_type.unsupported(
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
    epp_plugin_type.unsupported(
        "producer",
        "mm-embeddings-cache-producer",
        "nobody knows which images an engine has encoded",
        "cacheSizeInMBPerServer",
        "cacheSizeInMB",
    ),
    epp_plugin_type.unsupported(
        "producer",
        "p2p-source-producer",
        "engines are not told where to fetch KV blocks from",
        "minCachedTokenDelta",
    ),
    epp_plugin_type.unsupported(
        "producer",
        "multicluster-approx-prefix-cache-producer",
        "peer clusters are not candidates",
    ),
)

_PARSED = "the request parsers of ours know this surface by its path"

_PARSERS = (
    *(
        epp_plugin_type.no_op("parser", name, _PARSED)
        for name in (
            "openai-parser",
            "anthropic-parser",
            "vllmhttp-parser",
            "vllmgrpc-parser",
            "sglanghttp-parser",
        )
    ),
    epp_plugin_type.no_op(
        "parser", "passthrough-parser", "paths that nobody knows are routed by load alone"
    ),
    epp_plugin_type.unsupported(
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
    epp_plugin_type.no_op("source", "metrics-data-source", _SCRAPED, *_HTTP, "families"),
    epp_plugin_type.no_op(
        "extractor",
        "core-metrics-extractor",
        "engines are recognised by the names of their metrics; a label is not needed",
        "engineLabelKey",
        "defaultEngine",
        "engineConfigs",
    ),
    epp_plugin_type.no_op("source", "models-data-source", _SCRAPED, *_HTTP),
    epp_plugin_type.no_op("extractor", "models-data-extractor", _SCRAPED),
    epp_plugin_type.no_op(
        "extractor",
        "topology-extractor",
        "topology plugins read the labels of endpoints",
        "hostname",
        "rack",
        "zone",
        "region",
    ),
    *(
        epp_plugin_type.no_op("source", name, "discovery of ours tells who comes and goes")
        for name in ("k8s-notification-source", "endpoint-notification-source")
    ),
    *(
        epp_plugin_type.unsupported("source", name, "GPU metrics are not scraped", *_HTTP)
        for name in ("dcgm-data-source", "dcgm-extractor")
    ),
    *(
        epp_plugin_type.unsupported("source", name, "peer clusters are not candidates", *_HTTP)
        for name in ("multicluster-metrics-data-source", "multicluster-metrics-extractor")
    ),
    epp_plugin_type.no_op(
        "discovery",
        "file-discovery",
        "an endpoints file of ours does it; it is set in the section pool",
        "path",
        "watchFile",
    ),
    epp_plugin_type.unsupported(
        "discovery", "multicluster-file-discovery", "peer clusters are not candidates", "path"
    ),
)

_QUEUED = "`flow_control` does it, where flowControl of an EndpointPickerConfig or holding itself names it"
_NO_CEILING = "no ceiling of use: priorities above 0 find an endpoint free for longer than others"
_NO_EVICTION = (
    "requests under way are not ended: those that wait are displaced, lowest priority first"
)

_CONTROL = (
    epp_plugin_type.built("detector", "concurrency-detector", "inFlightLoadProducerName"),
    epp_plugin_type.built("detector", "utilization-detector", "metricsStalenessThreshold"),
    *(
        epp_plugin_type.no_op("policy", name, _QUEUED)
        for name in (
            "global-strict-fairness-policy",
            "round-robin-fairness-policy",
            "fcfs-ordering-policy",
            "edf-ordering-policy",
            "slo-deadline-ordering-policy",
        )
    ),
    epp_plugin_type.unsupported(
        "policy", "program-aware-fairness", "tenants take turns as `flow_control.fairness` says"
    ),
    *(
        epp_plugin_type.unsupported("policy", name, _NO_CEILING, *parameters)
        for name, *parameters in (
            ("static-usage-limit-policy", "threshold"),
            ("priority-holdback-policy", "shape", "domain", "minCeiling", "maxCeiling", "ceilings"),
            ("soft-reflective-ceiling-policy",),
        )
    ),
    *(
        epp_plugin_type.unsupported("policy", name, _NO_EVICTION)
        for name in ("eviction-sheddable-filter", "eviction-priority-then-time-ordering")
    ),
    epp_plugin_type.unsupported(
        "admitter", "latency-slo-admitter", "no latency predictor is asked: everybody is admitted"
    ),
    epp_plugin_type.unsupported(
        "admitter",
        "probabilistic-admitter",
        "nobody is refused by chance: priorities of objectives and `flow_control` of an ExtProcConfig decide "
        "who waits and who is dropped",
        "queueDepthThreshold",
        "kvCacheUtilThreshold",
        "power",
        "k",
    ),
    epp_plugin_type.unsupported(
        "hook",
        "outlen-bucket",
        "answers are not sorted into long and short ones beforehand",
    ),
    epp_plugin_type.unsupported(
        "hook",
        "topology-stamp-handler",
        "no answer says where its engine is; header-label-affinity-scorer can, label by label",
        "headerName",
        "profileName",
        "topologyProducerName",
    ),
    epp_plugin_type.unsupported(
        "hook",
        "models-responder",
        "GET /v1/models is answered as responses.list_models of an ExtProcConfig says",
    ),
    epp_plugin_type.no_op(
        "hook",
        "agent-identity",
        "sessions are found in body and headers by the request parsers",
    ),
    epp_plugin_type.unsupported(
        "hook",
        "disaggregatedset-rollout-screener",
        "revisions are not weighted during a rollout: everybody passes",
        "scope",
        "revisionGating",
    ),
    epp_plugin_type.unsupported(
        "hook",
        "request-attribute-reporter",
        "the cost of an answer is put into dynamic metadata by responses.request_cost, as weights",
        "attributes",
    ),
    epp_plugin_type.no_op(
        "hook",
        "destination-endpoint-served-verifier",
        "the setting conformance does it",
    ),
)

ROWS = (*_PRODUCERS, *_PARSERS, *_DATA, *_CONTROL)
