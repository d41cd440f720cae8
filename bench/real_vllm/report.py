"""Reports the runs: predictions of the picker, a line, a table for the docs, problems."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from bench.real_vllm import counters

#: Real and simulated hit ratios further apart than this are not the same engine.
TOLERANCE = 0.03


def belief(page: str) -> dict[str, float] | None:
    """Tokens the picker predicted and the engines found, by its own metrics; None if it did not."""
    predicted = counters.value(page, "extproc_prefix_predicted_tokens_total") or 0.0
    if not predicted:
        return None
    observed = counters.value(page, "extproc_prefix_observed_tokens_total") or 0.0
    return {
        "predicted_tokens": round(predicted),
        "observed_tokens": round(observed),
        "ratio": round(predicted / observed, 3) if observed else 0.0,
    }


def believed(page: str) -> dict[str, list[float]]:
    """Time of an iteration (ms) and room for prefixes (tokens) that the picker believes each engine has."""
    steps = counters.values(page, "extproc_endpoint_step_seconds")
    return {
        "step_ms": [round(1e3 * seconds, 2) for seconds in steps],
        "capacity_tokens": counters.values(page, "extproc_prefix_capacity_tokens"),
    }


def line(run: Mapping[str, Any]) -> str:
    """One run in a few words."""
    text = (
        f"hit ratio {run['hit_ratio']:.3f}, wall {run['wall_s']:.2f} s, "
        f"TTFT p50 {run['ttft_p50_ms']} ms, {run['failed']} failed"
    )
    known = run.get("prediction")
    if known is not None:
        text += f", predicted {known['predicted_tokens']} of {known['found_tokens']} cached tokens"
    return text


def table(figures: Mapping[str, Any]) -> str:
    """Hit ratios of both kinds of engines, beside each other, in Markdown."""
    rows = [
        "| requests | strategy | hit ratio | simulated | predicted / found | wall | TTFT p50 |",
        "|---|---|---|---|---|---|---|",
    ]
    real, simulated = figures["real"], figures["simulated"]
    names = dict.fromkeys(name for runs in real.values() for name in runs)
    for name, strategy in itertools.product(names, real):
        if name in real[strategy]:
            run, other = real[strategy][name], simulated[strategy].get(name)
            ratio = f"{other['hit_ratio']:.3f}" if other else ""
            known = run["prediction"]
            shown = f"{known['predicted_tokens'] / known['found_tokens']:.3f}" if known else ""
            rows.append(
                f"| {run['requests']}, {name} | `{strategy}` | {run['hit_ratio']:.3f} "
                f"| {ratio} | {shown} "
                f"| {run['wall_s']:.1f} s | {run['ttft_p50_ms']:.0f} ms |"
            )
    return "\n".join(rows)


def largest_difference(result: Mapping[str, Any]) -> float:
    """Largest difference of the hit ratios of real and simulated engines."""
    return max(
        abs(result["real"][strategy][name]["hit_ratio"] - run["hit_ratio"])
        for strategy, runs in result["simulated"].items()
        for name, run in runs.items()
    )


def block(result: Mapping[str, Any]) -> str:
    """The text of `docs/benchmarks` about a result as it was written."""
    machine, apart = result["machine"], largest_difference(result)
    wrong = problems(result)
    refused = f" (pip: {result['pip_refused']})" if result["pip_refused"] else ""
    return "\n".join(
        [
            table(result),
            "",
            f"{result['vllm']} with torch {result['torch']}{refused}, {result['replicas']} replicas "
            f"of {result['kv_tokens']} KV tokens in blocks of {result['block_tokens']}, "
            f"{result['at_once']} requests at once; {result['date']}, {machine['cores']} cores of "
            f"{machine['cpu']}. Prompts have {result['prompt_tokens']} tokens, of which a group "
            f"shares {result['shared_tokens']}; with room for all, every request but the first of "
            f"its group would find them: {result['ideal_hit_ratio']:.3f}. Real and simulated hit "
            f"ratios are at most {apart:.3f} apart. "
            + ("Contradictions: " + "; ".join(wrong) if wrong else "No contradiction was found."),
        ]
    )


def problems(figures: Mapping[str, Any]) -> list[str]:
    """Results that contradict the claim that picker, engines and simulation agree."""
    lines = [f"metrics page: {real}" for real in figures["page_differences"]]
    for kind in ("real", "simulated"):
        for strategy, runs in figures[kind].items():
            for name, run in runs.items():
                where = f"{kind}, {strategy}, {name}"
                if run["failed"]:
                    lines.append(f"{where}: {run['failed']} requests failed")
                counted, usage = run["counter_tokens"], run["usage_tokens"]
                if counted != usage:
                    lines.append(f"{where}: the counters say {counted}, the answers {usage}")
    for strategy, runs in figures["real"].items():
        for name, run in runs.items():
            lines += [f"{strategy}, {name}, picker: {real}" for real in run["picker_differences"]]
    for strategy, runs in figures["simulated"].items():
        for name, run in runs.items():
            real, other = figures["real"][strategy][name]["hit_ratio"], run["hit_ratio"]
            if abs(real - other) > TOLERANCE:
                lines.append(
                    f"{strategy}, {name}: hit ratio {real} on real engines, {other} on simulated ones"
                )
    return lines
