"""Metric names per engine type, as one literal table.

Sources: Gateway API proposal 003 (model server protocol) for the names; the engines' own pages for
the alternatives of older and newer versions. Of several alternatives the first one present wins.
"""

from __future__ import annotations

import re

import msgspec

from extproc.errors import ConfigError

#: Endpoint labels that name the engine, newest first (llm-d; the second is its legacy form).
TYPE_LABELS = ("llm-d.ai/engine-type", "inference.networking.k8s.io/engine-type")

#: Unix time the process started; every Prometheus client library exports it, whatever the engine.
STARTED = b"process_start_time_seconds"

_SPEC = re.compile(
    r"(?P<name>[A-Za-z_:][A-Za-z0-9_:]*)"
    r"(?:\{(?P<where>[^{}]*)\})?"
    r"(?:\[(?P<label>[A-Za-z_][A-Za-z0-9_]*)\])?"
)
_CLAUSE = re.compile(r'\s*([A-Za-z_][A-Za-z0-9_]*)\s*=\s*(?:"([^"]*)"|([^",]*?))\s*')


class MetricSelector(msgspec.Struct, frozen=True):
    """Selects one number of a metrics page.

    Attributes:
        name: The metric name as it stands at the start of a sample line.
        label: Read the number from this label rather than from the sample's value.
    """

    name: bytes
    where: tuple[tuple[bytes, bytes], ...] = ()
    label: bytes = b""


class EngineSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Metric selectors of one engine type; an empty tuple means the engine has no such metric.

    Attributes:
        kind: Value of `Load.engine`.
        type_label: Value of the engine-type label that names it.
        page_prefix: Beginning of a sample line by which a page of it is recognised.
        waiting: Requests queued (gauge, count).
        running: Requests in the batch (gauge, count).
        kv_usage: Share of KV blocks in use (gauge, 0..1).
        kv_blocks: KV blocks (count).
        block_tokens: Tokens per KV block.
        prefix_queries: Prompt tokens looked up in the prefix cache (counter).
        prefix_hits: Prompt tokens found there (counter).
        adapters: Family whose labels list the LoRA adapters; empty when there is none.
        rank_label: Label by which samples name the data-parallel rank they are of; empty where pages
            do not show ranks.
        worker_labels: Labels by which samples name the worker of a rank they are of. Every worker
            shows the requests of its rank.
        part_label: Label of the parts into which requests that wait and run are divided. Where a
            sample with an empty value is beside them, it is their total.
        totals: Counters that speed is learned from: field of `endpoint.EngineCounters` and its series, in
            the order of the engine's page.
    """

    kind: str
    type_label: str
    page_prefix: bytes
    waiting: tuple[MetricSelector, ...] = ()
    running: tuple[MetricSelector, ...] = ()
    kv_usage: tuple[MetricSelector, ...] = ()
    kv_blocks: tuple[MetricSelector, ...] = ()
    block_tokens: tuple[MetricSelector, ...] = ()
    prefix_queries: tuple[MetricSelector, ...] = ()
    prefix_hits: tuple[MetricSelector, ...] = ()
    adapters: bytes = b""
    rank_label: bytes = b""
    worker_labels: tuple[bytes, ...] = ()
    part_label: bytes = b""
    totals: tuple[tuple[str, tuple[MetricSelector, ...]], ...] = ()


def series(*specs: str, where: str = "metric series") -> tuple[MetricSelector, ...]:
    """Parses selectors from their written form, preferred alternative first.

    Args:
        specs: `name`, `name{label=value,...}` (proposal 003) or `name[label]`, the last of which
            reads the number from a label.

    Raises:
        ConfigError: If a form is none of these.
    """
    return tuple(_series(spec, where) for spec in specs)


def _series(spec: str, where: str) -> MetricSelector:
    match = _SPEC.fullmatch(spec.strip())
    labels = (match["where"] or "").strip(" ,") if match else ""
    clauses = [_CLAUSE.fullmatch(clause) for clause in labels.split(",")] if labels else []
    if match is None or None in clauses:
        raise ConfigError(
            where,
            wanted="name, name{label=value,...} or name[label]",
            got=repr(spec),
            fix="write the metric name as it stands on the engine's /metrics page",
        )
    return MetricSelector(
        name=match["name"].encode(),
        where=tuple(
            (clause[1].encode(), (clause[2] if clause[2] is not None else clause[3]).encode())
            for clause in clauses
            if clause is not None
        ),
        label=(match["label"] or "").encode(),
    )


#: Every engine known, in the order in which a page is tried against them.
TABLE: tuple[EngineSpec, ...] = (
    EngineSpec(
        kind="vllm",
        type_label="vllm",
        page_prefix=b"vllm:",
        waiting=series("vllm:num_requests_waiting"),
        running=series("vllm:num_requests_running"),
        # The gpu_ names are those of vLLM before 0.11.
        kv_usage=series("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
        kv_blocks=series("vllm:cache_config_info[num_gpu_blocks]"),
        block_tokens=series("vllm:cache_config_info[block_size]"),
        prefix_queries=series(
            "vllm:prefix_cache_queries_total", "vllm:gpu_prefix_cache_queries_total"
        ),
        prefix_hits=series("vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total"),
        adapters=b"vllm:lora_requests_info",
        rank_label=b"engine",
        totals=(
            ("preemptions", series("vllm:num_preemptions_total")),
            ("prompt_tokens", series("vllm:prompt_tokens_total")),
            (
                "reloaded_tokens",
                series(
                    "vllm:prompt_tokens_cached_by_source_total{source=host}",
                    "vllm:external_prefix_cache_hits_total",
                ),
            ),
            ("generated_tokens", series("vllm:generation_tokens_total")),
            ("finished", series("vllm:request_success_total")),
            ("finished_prompt_tokens", series("vllm:request_prompt_tokens_sum")),
            ("steps", series("vllm:iteration_tokens_total_count")),
            ("step_tokens", series("vllm:iteration_tokens_total_sum")),
            ("gaps", series("vllm:inter_token_latency_seconds_count")),
            ("gaps_s", series("vllm:inter_token_latency_seconds_sum")),
            ("prefill_s", series("vllm:request_prefill_time_seconds_sum")),
            ("prefill_tokens", series("vllm:request_prefill_kv_computed_tokens_sum")),
            ("first_tokens", series("vllm:time_to_first_token_seconds_count")),
            ("adapter_loads", series("vllm:lora_adapter_load_seconds_count")),
            ("adapter_load_s", series("vllm:lora_adapter_load_seconds_sum")),
            # The second is that of vLLM before 0.25.
            (
                "reload_s",
                series(
                    "vllm:kv_offload_load_time_total",
                    "vllm:kv_offload_total_time_total{transfer_type=CPU_to_GPU}",
                ),
            ),
        ),
    ),
    EngineSpec(
        kind="sglang",
        type_label="sglang",
        page_prefix=b"sglang:",
        waiting=series("sglang:num_queue_reqs"),
        running=series("sglang:num_running_reqs"),
        kv_usage=series("sglang:token_usage"),
        # Gauges of their own since SGLang 0.5.11, labels before.
        kv_blocks=series("sglang:num_pages", "sglang:cache_config_info[num_pages]"),
        block_tokens=series("sglang:page_size", "sglang:cache_config_info[page_size]"),
        prefix_queries=series("sglang:prompt_tokens_total"),
        prefix_hits=series("sglang:cached_tokens_total"),
        rank_label=b"dp_rank",
        # Each stage of a pipeline shows its own, and with `--enable-metrics-for-all-schedulers` each
        # rank of tensor parallelism.
        worker_labels=(b"pp_rank", b"tp_rank"),
        part_label=b"priority",
        totals=(
            ("prompt_tokens", series("sglang:prompt_tokens_total")),
            ("generated_tokens", series("sglang:generation_tokens_total")),
            ("finished", series("sglang:num_requests_total")),
            # Counted when a request is finished, unlike vLLM's.
            ("finished_prompt_tokens", series("sglang:prompt_tokens_total")),
            # Counted as they are computed, by versions that have them.
            ("computed_tokens", series("sglang:realtime_tokens_total{mode=prefill_compute}")),
            ("decoded_tokens", series("sglang:realtime_tokens_total{mode=decode}")),
        ),
    ),
    EngineSpec(
        kind="trtllm",
        type_label="trtllm-serve",
        page_prefix=b"trtllm_",
        waiting=series("trtllm_num_requests_waiting"),
        running=series("trtllm_num_requests_running"),
        kv_usage=series("trtllm_kv_cache_utilization"),
        kv_blocks=series("trtllm_kv_cache_max_blocks"),
        block_tokens=series("trtllm_kv_cache_tokens_per_block"),
    ),
    EngineSpec(
        kind="triton",
        type_label="triton-tensorrt-llm",
        page_prefix=b"nv_trt_llm_",
        waiting=series("nv_trt_llm_request_metrics{request_type=waiting}"),
        running=series("nv_trt_llm_request_metrics{request_type=scheduled}"),
        kv_usage=series("nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type=fraction}"),
        kv_blocks=series("nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type=max}"),
        block_tokens=series("nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type=tokens_per}"),
    ),
    EngineSpec(
        kind="triton",
        type_label="triton",
        page_prefix=b"nv_inference_",
        waiting=series("nv_inference_pending_request_count"),
        # nv_inference_exec_count is a counter of executions since start, so it is no gauge of
        # what runs now; plain Triton has none.
    ),
)
