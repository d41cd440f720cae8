"""Counters and histograms of an engine, fed from results of its core; wall-clock seconds."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping

from extproc.simulator import core, engine_request, vllm_metric_families


class Histogram:
    """Observations counted by upper bound. Mutable; one owner.

    Args:
        bounds: Inclusive upper bounds, ascending; the last bucket is unbounded.

    Attributes:
        counts: Observations per bucket, not cumulated.
    """

    __slots__ = ("bounds", "count", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.count = 0
        self.sum = 0.0

    def observe(self, value: float, *, times: int = 1) -> None:
        """Count a value, or the same value many times."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.count += times
        self.sum += value * times


class Stats:
    """Everything an engine's page says beyond the present state of its core.

    Attributes:
        totals: Counters by family name, or `family/variant`.
        histograms: By family name.
        adapters: Unix time of the last report of each set of running adapters. A set once
            reported stays, as in vLLM; the live one is the newest.
    """

    def __init__(self, engine: core.SimulatedEngine) -> None:
        self._engine = engine
        longest = vllm_metric_families.token_bounds(engine.profile.max_model_len)
        self.totals: Counter[str] = Counter()
        self.histograms = {
            family.name: Histogram(longest if family.bounds is None else family.bounds)
            for family in vllm_metric_families.FAMILIES
            if family.kind == "histogram"
        }
        self.adapters: dict[str, float] = {}

    def observe(self, result: engine_request.StepResult, unix_now: float) -> None:
        """Fold the result of one plan into the counters.

        Args:
            unix_now: Unix time of its end.
        """
        totals, histograms = self.totals, self.histograms
        totals["generation_tokens"] += result.tokens
        # As vLLM counts: a prompt when its prefill ends, without what a preemption made it compute
        # again, and every generated token, the first ones included.
        prompts = sum(first.computed_tokens for first in result.first_tokens)
        per_step = prompts + result.tokens // result.steps
        histograms["iteration_tokens_total"].observe(per_step, times=result.steps)
        between = histograms["inter_token_latency_seconds"]
        for gap in result.resumed_s:
            between.observe(gap)
        if result.decoding:
            between.observe(result.duration_s / result.steps, times=result.decoding * result.steps)
        for first in result.first_tokens:
            histograms["time_to_first_token_seconds"].observe(first.after_s)
        for done in result.finished:
            self._finished(done)
        if self._engine.profile.max_loras:
            self.adapters[",".join(self._engine.slots.active)] = unix_now

    def ended(self, reason: str) -> None:
        """Count a request by its `finished_reason`."""
        self.totals[f"request_success/{reason}"] += 1

    def rejected(self) -> None:
        """Count a request refused because the engine was full."""
        self.totals["admission_rejections/max_num_queued_reqs"] += 1

    def _finished(self, done: engine_request.RequestFinished) -> None:
        prompt, output = done.job.prompt_tokens, done.job.output_tokens
        decode_s = done.finished_at - done.first_token_at
        for name, value in (
            ("request_prompt_tokens", prompt),
            ("request_generation_tokens", output),
            ("request_max_num_generation_tokens", output),
            ("request_params_n", 1),
            ("request_params_max_tokens", output),
            ("request_time_per_output_token_seconds", decode_s / (output - 1) if output > 1 else 0),
            ("e2e_request_latency_seconds", done.finished_at - done.submitted_at),
            ("request_queue_time_seconds", done.started_at - done.submitted_at),
            ("request_inference_time_seconds", done.finished_at - done.started_at),
            ("request_prefill_time_seconds", done.first_token_at - done.started_at),
            ("request_decode_time_seconds", decode_s),
            ("request_num_preemptions", done.preemptions),
            ("request_prefill_kv_computed_tokens", prompt - done.cached_tokens),
        ):
            self.histograms[name].observe(value)

    def values(self) -> Mapping[str, float]:
        """Present counters and gauges by family name, or `family/variant`; absent means 0."""
        engine, hits = self._engine, self._engine.prefix_hits
        reloaded = engine.reloaded_tokens
        return {
            **self.totals,
            "num_requests_running": engine.running,
            "num_requests_waiting": engine.waiting,
            "num_requests_waiting_by_reason/capacity": engine.waiting - engine.deferred,
            "num_requests_waiting_by_reason/deferred": engine.deferred,
            "engine_sleep_state/awake": 1,
            "kv_cache_usage_perc": engine.kv_usage,
            "prefix_cache_queries": engine.prefix_queries,
            "prefix_cache_hits": hits,
            "num_preemptions": engine.preemptions,
            "prompt_tokens": engine.prefix_queries,
            "external_prefix_cache_hits": reloaded,
            "prompt_tokens_by_source/local_compute": engine.prefix_queries - hits - reloaded,
            "prompt_tokens_by_source/local_cache_hit": hits,
            "prompt_tokens_by_source/external_kv_transfer": reloaded,
            "prompt_tokens_cached": hits + reloaded,
            "prompt_tokens_cached_by_source/device": hits,
            "prompt_tokens_cached_by_source/host": reloaded,
            "kv_offload_load_time": engine.reload_s,
        }
