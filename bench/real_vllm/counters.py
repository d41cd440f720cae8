"""Counters of the engines before and after a run, and the predictions of the picker."""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from bench.real_vllm import tiny
from extproc.endpoint import Load
from extproc.scrape import metrics_page

_PREDICTED = re.compile(r"(?:^|; )cached=(\d+)/(\d+)(?:;|$)")
_CHOSEN = re.compile(r"(?:^|; )chose=([^;]+)(?:;|$)")
#: Requests of a run, at least, for differences between them to say anything.
_FEWEST_ROWS = 3

_PAIR = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


class EngineAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """One answer as the client saw it.

    Attributes:
        status: HTTP status; 0 if there was none.
        began_s: When it was sent, by the clock that measures `ttft_s`.
        ttft_s: Seconds to the first event.
        prompt_tokens: By the engine's usage.
        cached_tokens: Of these, found in the prefix cache; None where usage does not say.
        decision: The picker's own short account (`x-extproc-decision`).
    """

    status: int
    began_s: float = 0.0
    ttft_s: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int | None = None
    decision: str = ""

    @property
    def predicted(self) -> int | None:
        """Prompt tokens the picker believed cached on the endpoint it chose."""
        match = _PREDICTED.search(self.decision)
        return None if match is None else int(match[1])

    @property
    def endpoint(self) -> str:
        """Endpoint of the request; empty when no decision names it."""
        match = _CHOSEN.search(self.decision)
        return "" if match is None else match[1]


class Moved(msgspec.Struct, frozen=True):
    """Growth of an engine's counters.

    Attributes:
        queries: Prompt tokens looked up in the prefix cache.
        hits: Of these, found.
        finished: Requests finished.
        preemptions: Sequences that lost their blocks.
    """

    queries: float
    hits: float
    finished: float
    preemptions: float


def moved(before: Load, after: Load) -> Moved:
    """Growth between two readings of one engine; a counter that is missing counts as 0."""
    return Moved(
        queries=(after.prefix_queries or 0.0) - (before.prefix_queries or 0.0),
        hits=(after.prefix_hits or 0.0) - (before.prefix_hits or 0.0),
        finished=(after.counters.finished or 0.0) - (before.counters.finished or 0.0),
        preemptions=(after.counters.preemptions or 0.0) - (before.counters.preemptions or 0.0),
    )


def hit_ratio(replicas: Sequence[Moved]) -> float:
    """Tokens found over tokens looked up, of all replicas together."""
    queries = sum(replica.queries for replica in replicas)
    return sum(replica.hits for replica in replicas) / queries if queries else 0.0


def figures(
    answers: Sequence[EngineAnswer], replicas: Sequence[Moved], wall_s: float
) -> dict[str, Any]:
    """One run in numbers: `hit_ratio` from the engines' counters, `usage` from the answers."""
    times = sorted(row.ttft_s for row in answers if row.status == 200)
    queries = sum(row.queries for row in replicas)
    hits = sum(row.hits for row in replicas)
    cached = [row.cached_tokens for row in answers if row.cached_tokens is not None]
    shares = [row.finished for row in replicas]
    return {
        "requests": len(answers),
        "failed": sum(row.status != 200 for row in answers),
        "hit_ratio": round(hits / queries, 4) if queries else 0.0,
        "wall_s": round(wall_s, 2),
        "ttft_mean_ms": round(1e3 * statistics.fmean(times), 1) if times else None,
        "ttft_p50_ms": round(1e3 * times[len(times) // 2], 1) if times else None,
        "ttft_p95_ms": round(1e3 * times[int(0.95 * len(times))], 1) if times else None,
        "requests_by_replica": [round(share) for share in shares],
        "preemptions": round(sum(row.preemptions for row in replicas)),
        "counter_tokens": {"prompt": round(queries), "cached": round(hits)},
        "usage_tokens": {
            "prompt": sum(row.prompt_tokens for row in answers),
            "cached": sum(cached) if cached else None,
        },
    }


def prediction(answers: Sequence[EngineAnswer]) -> dict[str, Any] | None:
    """Predicted against found tokens, request by request; None where nothing was predicted.

    `exact` is the share of answers whose prediction is within one block of the picker's (64
    tokens) of what the engine reports.
    """
    pairs = [
        (answer.predicted, answer.cached_tokens)
        for answer in answers
        if answer.predicted is not None and answer.cached_tokens is not None
    ]
    if not any(predicted for predicted, _ in pairs):
        return None
    errors = [predicted - counted for predicted, counted in pairs]
    return {
        "predicted_tokens": sum(predicted for predicted, _ in pairs),
        "found_tokens": sum(counted for _, counted in pairs),
        "mean_absolute_error_tokens": round(statistics.mean(abs(error) for error in errors), 1),
        "within_a_block": round(sum(abs(error) <= 64 for error in errors) / len(errors), 4),
        "too_high": sum(error > 64 for error in errors),
        "too_low": sum(error < -64 for error in errors),
    }


def labels(text: str, family: str) -> list[dict[str, str]]:
    """Labels of every sample of a family, read without the picker's parser."""
    return [
        dict(_PAIR.findall(line[len(family) : line.rindex("}")]))
        for line in text.splitlines()
        if line.startswith(family + "{")
    ]


def values(text: str, name: str) -> list[float]:
    """A family's samples in the order of the page, read without the picker's parser."""
    return [
        float(line.rsplit(" ", 1)[1])
        for line in text.splitlines()
        if line.startswith((name + "{", name + " "))
    ]


def value(text: str, name: str) -> float | None:
    """Sum of a family's samples; None if there is none."""
    samples = values(text, name)
    return sum(samples) if samples else None


def engine_ms(before: Sequence[str], after: Sequence[str]) -> dict[str, float]:
    """Mean milliseconds of requests in the engines' own queues and prefills, between two readings of pages."""
    means = {}
    for part in ("queue", "prefill"):
        family = f"vllm:request_{part}_time_seconds"
        seconds, requests = (
            sum((value(page, f"{family}_{kind}") or 0.0) for page in after)
            - sum((value(page, f"{family}_{kind}") or 0.0) for page in before)
            for kind in ("sum", "count")
        )
        means[part] = round(1e3 * seconds / requests, 1) if requests else 0.0
    return means


def server_ms(before: Sequence[str], after: Sequence[str], requests: int) -> float:
    """CPU milliseconds of the engines' HTTP servers for each request, between two readings of pages."""
    seconds = sum(value(page, "process_cpu_seconds_total") or 0.0 for page in after)
    seconds -= sum(value(page, "process_cpu_seconds_total") or 0.0 for page in before)
    return round(1e3 * seconds / requests, 1)


def waits_ms(answers: Sequence[EngineAnswer], engines: Sequence[str]) -> dict[str, float] | None:
    """Delay of first tokens by what is there before them, by least squares over a run.

    Args:
        engines: The engine of each answer.

    Returns:
        Milliseconds for each request ahead at the same engine whose first token is not there yet,
        and for each 100 uncached tokens; None where all requests are alike.
    """
    rows = [
        (row.began_s, row.began_s + row.ttft_s, engine, row.prompt_tokens - row.cached_tokens)
        for row, engine in zip(answers, engines, strict=True)
        if row.status == 200 and row.cached_tokens is not None
    ]
    ahead = [
        sum(began < row[0] < first and engine == row[2] for began, first, engine, _ in rows)
        for row in rows
    ]
    uncached = [0.01 * row[3] for row in rows]
    waits = [1e3 * (first - began) for began, first, _, _ in rows]
    if len(rows) < _FEWEST_ROWS:
        return None
    aa, uu = statistics.variance(ahead), statistics.variance(uncached)
    au = statistics.covariance(ahead, uncached)
    aw, uw = statistics.covariance(ahead, waits), statistics.covariance(uncached, waits)
    alike = aa * uu - au * au
    if alike <= 0.0:
        return None
    return {
        "ahead": round((uu * aw - au * uw) / alike, 2),
        "hundred_tokens": round((aa * uw - au * aw) / alike, 2),
    }


def differences(
    text: str, *, adapters: Sequence[str], models: Mapping[str, str | None]
) -> list[str]:
    """Differences between a real page, the picker's reading of it, and the plan.

    Args:
        text: The metrics page of an engine that has served every adapter.
        adapters: Adapters it was started with.
        models: Its `/v1/models`: parent by id; None for a base model.
    """
    load = metrics_page.read(text.encode(), 0.0)
    if not isinstance(load, Load):
        return [f"the page is unreadable: {load}"]
    cache = labels(text, "vllm:cache_config_info")[0]
    adapters_running = [
        label.get("running_lora_adapters", "") for label in labels(text, "vllm:lora_requests_info")
    ]
    slots = [label.get("max_lora") for label in labels(text, "vllm:lora_requests_info")]
    ever = {name for names in adapters_running for name in names.split(",") if name}
    checks = {
        "engine": (load.engine, "vllm"),
        "kv blocks": (load.kv_blocks, int(cache["num_gpu_blocks"])),
        "block tokens": (load.block_tokens, int(cache["block_size"])),
        "kv tokens": (load.kv_tokens, int(cache["kv_cache_size_tokens"])),
        "adapter slots": (load.adapter_slots, int(slots[0]) if slots and slots[0] else None),
        "running": (load.running, value(text, "vllm:num_requests_running")),
        "waiting": (load.waiting, value(text, "vllm:num_requests_waiting")),
        "kv usage": (load.kv_usage, value(text, "vllm:kv_cache_usage_perc")),
        "prefix queries": (load.prefix_queries, value(text, "vllm:prefix_cache_queries_total")),
        "prefix hits": (load.prefix_hits, value(text, "vllm:prefix_cache_hits_total")),
        "finished": (load.counters.finished, value(text, "vllm:request_success_total")),
        "steps": (load.counters.steps, value(text, "vllm:iteration_tokens_total_count")),
        "adapters ever in a batch": (sorted(ever), sorted(adapters)),
        "adapters of /v1/models": (
            sorted(name for name, parent in models.items() if parent),
            sorted(adapters),
        ),
    }
    return [
        f"{what}: {label!r} is not {other!r}"
        for what, (label, other) in checks.items()
        if label != other
    ]


def pool_differences(endpoints: Sequence[Mapping[str, Any]], *, model: str) -> list[str]:
    """Differences between a running picker's view of its engines and the engines.

    Args:
        endpoints: Of `/debug/pool`.
        model: The base model.
    """
    problems = []
    for label in endpoints:
        checks = {
            "engine": (label["engine"], "vllm"),
            "failure": (label["failure"], ""),
            "models": (label["models"], [model]),
            "adapters": (label["model_adapters"], sorted(tiny.ADAPTERS)),
            "requests in flight": (label["in_flight"], 0),
        }
        problems += [f"{what}: {a!r} is not {b!r}" for what, (a, b) in checks.items() if a != b]
    return problems
