"""The metric families of a vLLM 0.32 engine as data, in the order of its page.

HELP and TYPE lines are protocol: scrapers and dashboards read them. The two families whose label
sets are not fixed, `lora_requests_info` and `cache_config_info`, are written by the page itself.
"""

from __future__ import annotations

import msgspec


class Family(msgspec.Struct, frozen=True, gc=False):
    """One metric family with the prefix `vllm:`.

    Attributes:
        name: Without prefix, and for counters without `_total`.
        kind: `counter`, `gauge` or `histogram`.
        help: The HELP text.
        label: The label beside `engine` and `model_name`; empty if there is none.
        variants: The values of that label, in order.
        engine: Whether samples carry the `engine` label.
        bounds: Upper bounds of histogram buckets; None for token counts, whose bounds follow the
            longest context of the model.
    """

    name: str
    kind: str
    help: str
    label: str = ""
    variants: tuple[str, ...] = ("",)
    engine: bool = True
    bounds: tuple[float, ...] | None = ()


def token_bounds(max_model_len: int) -> tuple[float, ...]:
    """1, 2, 5, 10, ... up to the longest context, as vLLM builds them."""
    bounds: list[float] = []
    decade = 1
    while True:
        for step in (1, 2, 5):
            if step * decade > max_model_len:
                return tuple(bounds)
            bounds.append(float(step * decade))
        decade *= 10


def _counter(name: str, text: str, label: str = "", variants: tuple[str, ...] = ("",)) -> Family:
    return Family(name, "counter", text, label, variants)


def _gauge(name: str, text: str, label: str = "", variants: tuple[str, ...] = ("",)) -> Family:
    return Family(name, "gauge", text, label, variants)


def _histogram(name: str, text: str, bounds: tuple[float, ...] | None) -> Family:
    return Family(name, "histogram", text, bounds=bounds)


_TOKENS = None
_STEP_TOKENS = tuple(float(2**power) for power in (0, *range(3, 15)))
_COUNTS = (1.0, 2.0, 5.0, 10.0, 20.0)
_PREEMPTIONS = (1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 20.0)
_FIRST_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_BETWEEN_S = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_REQUEST_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)

FAMILIES: tuple[Family, ...] = (
    _counter(
        "estimated_flops_per_gpu",
        "Estimated number of floating point operations per GPU (for Model Flops Utilization calculations).",
    ),
    _counter(
        "estimated_read_bytes_per_gpu",
        "Estimated number of bytes read from memory per GPU (for Model Flops Utilization calculations).",
    ),
    _counter(
        "estimated_write_bytes_per_gpu",
        "Estimated number of bytes written to memory per GPU (for Model Flops Utilization calculations).",
    ),
    _gauge("num_requests_running", "Number of requests in model execution batches."),
    _gauge("num_requests_waiting", "Number of requests waiting to be processed."),
    _gauge(
        "num_requests_waiting_by_reason",
        "Number of waiting requests by reason. Reason labels: 'capacity' = waiting for scheduling capacity; 'deferred' = deferred by transient constraints (LoRA budget, KV transfer, blocked status). Sum of all reasons equals vllm:num_requests_waiting.",
        label="reason",
        variants=("capacity", "deferred"),
    ),
    _gauge(
        "engine_sleep_state",
        "Engine sleep state; awake = 0 means engine is sleeping; awake = 1 means engine is awake; weights_offloaded = 1 means sleep level 1; discard_all = 1 means sleep level 2.",
        label="sleep_state",
        variants=("awake", "weights_offloaded", "discard_all"),
    ),
    _gauge("kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent usage."),
    _counter("prefix_cache_queries", "Prefix cache queries, in terms of number of queried tokens."),
    _counter("prefix_cache_hits", "Prefix cache hits, in terms of number of cached tokens."),
    _counter(
        "external_prefix_cache_queries",
        "External prefix cache queries from KV connector cross-instance cache sharing, in terms of number of queried tokens.",
    ),
    _counter(
        "external_prefix_cache_hits",
        "External prefix cache hits from KV connector cross-instance cache sharing, in terms of number of cached tokens.",
    ),
    _counter("mm_cache_queries", "Multi-modal cache queries, in terms of number of queried items."),
    _counter("mm_cache_hits", "Multi-modal cache hits, in terms of number of cached items."),
    _counter("num_preemptions", "Cumulative number of preemption from the engine."),
    _counter("prompt_tokens", "Number of prefill tokens processed."),
    _counter(
        "prompt_tokens_by_source",
        "Number of prompt tokens by source.",
        label="source",
        variants=("local_compute", "local_cache_hit", "external_kv_transfer"),
    ),
    _counter("prompt_tokens_cached", "Number of cached prompt tokens (local + external)."),
    _counter(
        "prompt_tokens_cached_by_source",
        "Prefix-cache hit tokens by the cache tier that supplied them: device (local HBM), host (offloaded to DRAM), disk, p2p (transferred from another vLLM instance) or external_unspecified. Counted at admission; sums to vllm:prefix_cache_hits + vllm:external_prefix_cache_hits.",
        label="source",
        variants=("device", "host", "p2p", "disk", "external_unspecified"),
    ),
    _counter("generation_tokens", "Number of generation tokens processed."),
    _counter(
        "request_success",
        "Count of successfully processed requests.",
        label="finished_reason",
        variants=("stop", "length", "abort", "error", "repetition"),
    ),
    Family(
        "admission_rejections",
        "counter",
        "Number of admission attempts rejected by a queue limit, by reason.",
        label="reason",
        variants=("max_num_queued_reqs", "max_num_queued_tokens"),
        engine=False,
    ),
    _histogram("request_prompt_tokens", "Number of prefill tokens processed.", _TOKENS),
    _histogram("request_generation_tokens", "Number of generation tokens processed.", _TOKENS),
    _histogram(
        "iteration_tokens_total", "Histogram of number of tokens per engine_step.", _STEP_TOKENS
    ),
    _histogram(
        "request_max_num_generation_tokens",
        "Histogram of maximum number of requested generation tokens.",
        _TOKENS,
    ),
    _histogram("request_params_n", "Histogram of the n request parameter.", _COUNTS),
    _histogram(
        "request_params_max_tokens", "Histogram of the max_tokens request parameter.", _TOKENS
    ),
    _histogram(
        "time_to_first_token_seconds", "Histogram of time to first token in seconds.", _FIRST_S
    ),
    _histogram(
        "inter_token_latency_seconds", "Histogram of inter-token latency in seconds.", _BETWEEN_S
    ),
    _histogram(
        "request_time_per_output_token_seconds",
        "Histogram of time_per_output_token_seconds per request.",
        _BETWEEN_S,
    ),
    _histogram(
        "e2e_request_latency_seconds",
        "Histogram of e2e request latency in seconds.",
        _REQUEST_S,
    ),
    _histogram(
        "request_queue_time_seconds",
        "Histogram of time spent in WAITING phase for request.",
        _REQUEST_S,
    ),
    _histogram(
        "request_inference_time_seconds",
        "Histogram of time spent in RUNNING phase for request.",
        _REQUEST_S,
    ),
    _histogram(
        "request_prefill_time_seconds",
        "Histogram of time spent in PREFILL phase for request.",
        _REQUEST_S,
    ),
    _histogram(
        "request_decode_time_seconds",
        "Histogram of time spent in DECODE phase for request.",
        _REQUEST_S,
    ),
    _histogram(
        "request_num_preemptions",
        "Histogram of the number of times a request was preempted.",
        _PREEMPTIONS,
    ),
    _histogram(
        "request_prefill_kv_computed_tokens",
        "Histogram of new KV tokens computed during prefill (excluding cached tokens).",
        _TOKENS,
    ),
)

#: Seconds of loading blocks from the memory of the host; only engines that offload have it.
RELOAD_TIME = _counter("kv_offload_load_time", "Total time of KV offload loads, in seconds.")
