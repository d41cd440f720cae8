"""Simulates autoscaling under Wallaroo's load profiles and under a step load.

    python -m bench.scaling [--seeds 20] [--step-seeds 3] [--jobs N] [--write]

Virtual time: the machine matters to nothing but how long it takes.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any

import msgspec

from bench import published, rig
from extproc.simulator import simulation_runs
from extproc.simulator.fleet.run_metrics import RunSummary

STEP = "kubeai-step"
#: Seconds after which the published client, or its proxy, cut requests.
CUT_S = 300


def mean_of_responses_s(run: RunSummary) -> float:
    """As the published client counted: requests that were cut are responses after 300 s."""
    cut = run.failed.get("timeout", 0)
    return (run.e2e_s.mean * run.requests + CUT_S * cut) / (run.requests + cut)


def asked_at_s(run: RunSummary, replicas: int) -> float:
    """When so many replicas were first asked for."""
    assert run.scaling
    rows = zip(run.scaling.at_s, run.scaling.spec, strict=True)
    return next((at for at, spec in rows if spec >= replicas), math.nan)


#: What is averaged over the runs that have it, and not left out where one has none.
WHERE_THERE = frozenset({"retry_after_s"})

#: Of which the largest of all runs counts, and not the mean.
MOST = frozenset({"refused_latest_s", "retry_after_most_s"})

#: What is kept of every run, by name.
FIGURES: Mapping[str, Callable[[Any], float]] = {
    "responses_mean_s": mean_of_responses_s,
    "mean_s": lambda run: run.e2e_s.mean,
    "p95_s": lambda run: run.e2e_s.p95,
    "answered": lambda run: run.requests,
    "cut": lambda run: run.failed.get("timeout", 0) + run.failed.get("engine died", 0),
    "refused_429": lambda run: run.failed.get("rejected 429", 0),
    "refused_503": lambda run: run.failed.get("rejected 503", 0),
    "refused_latest_s": lambda run: run.refusals.latest_s if run.refusals else 0.0,
    "told_retry_after": lambda run: run.refusals.rejected if run.refusals else 0,
    "retry_after_most_s": lambda run: run.refusals.retry_after_most_s if run.refusals else 0,
    "retry_after_s": lambda run: run.refusals.retry_after_s.mean if run.refusals else math.nan,
    "available": lambda run: run.scaling.mean_available,
    "asked": lambda run: run.scaling.mean_replicas,
    "replica_s": lambda run: run.scaling.replica_s,
    "to_least_s": lambda run: run.scaling.to_least_s,
    "duration_s": lambda run: run.duration_s,
    "second_s": lambda run: asked_at_s(run, 2),
    "fourth_s": lambda run: asked_at_s(run, 4),
}


def measure(name: str, *, seeds: int, jobs: int) -> dict[str, dict[str, float]]:
    """Means over seeds, by strategy."""
    path = rig.ROOT / "bench" / "scenarios" / f"{name}.yaml"
    todo = simulation_runs.plan(path, strategies=(), configs=(), seeds=range(1, seeds + 1))
    summaries: dict[str, list[RunSummary]] = {column.name: [] for column in todo.columns}
    for run in simulation_runs.runs(todo, jobs=jobs):
        summaries[run.strategy].append(run.summary)
    means: dict[str, dict[str, float]] = {}
    for strategy, runs in summaries.items():
        values = {figure: [read(run) for run in runs] for figure, read in FIGURES.items()}
        for figure in WHERE_THERE:
            there = [value for value in values[figure] if not math.isnan(value)]
            values[figure] = there or [math.nan]
        for figure in MOST:
            values[figure] = [max(values[figure])]
        # A fourth replica of two was never asked for.
        known = {
            figure: value
            for figure, samples in values.items()
            if not math.isnan(value := fmean(samples))
        }
        means[strategy] = {figure: round(value, 2) for figure, value in known.items()}
    return means


def block(result: Mapping[str, Any]) -> str:
    """A result as `docs/benchmarks` shows it."""
    profiles = result["profiles"]
    lines = [
        "| 2 replicas at most | published policy | `adaptive` | `queue-depth`, 1, 0.5, 30 s |",
        "|---|---|---|---|",
        *(row for name in profiles for row in _profile(name, profiles[name])),
        "",
        "| a step | `kubeai`, 100 | `queue-depth`, 100, 50, 60 s | `adaptive` |",
        "|---|---|---|---|",
        *_step(result["step"]),
    ]
    seeds = f"means over {result['seeds']} and {result['step_seeds']} seeds"
    return "\n".join([*lines, "", f"`{result['command']}`, {result['date']}; {seeds}."])


def _profile(name: str, rows: Mapping[str, Mapping[str, float]]) -> Sequence[str]:
    every = {"wallaroo-a": "1 in 15 s", "wallaroo-b": "1 in 6 s", "wallaroo-c": "1 in 30 s"}[name]
    order = [rows[strategy] for strategy in ("published", "adaptive", "queue-depth")]
    there = published.WALLAROO[name][0]

    def row(label: str, cell: Callable[[Mapping[str, float]], str]) -> str:
        return f"| {every}: {label} | {' | '.join(cell(column) for column in order)} |"

    return [
        row(
            f"mean of all responses, s ({there:.0f})",
            lambda column: f"{column['responses_mean_s']:.0f}",
        ),
        row("p95 of responses, s", lambda column: f"{column['p95_s']:.0f}"),
        row("completed, cut", lambda column: f"{column['answered']:.1f}, {column['cut']:.1f}"),
        row(
            "rejected with 429, 503",
            lambda column: f"{column['refused_429']:.1f}, {column['refused_503']:.1f}",
        ),
        row("rejected after at most, Retry-After, s", _describe),
        row(
            "replicas available, requested",
            lambda column: f"{column['available']:.2f}, {column['asked']:.2f}",
        ),
        row(
            "replica seconds, s to zero",
            lambda column: f"{column['replica_s']:.0f}, {column['to_least_s']:.0f}",
        ),
    ]


def _describe(row: Mapping[str, float]) -> str:
    """When the last was refused, and the Retry-After of refused ones: mean and most."""
    if "retry_after_s" not in row:
        return "-"
    retry = f"{row['retry_after_s']:.0f} ({row['retry_after_most_s']:.0f} at most)"
    return f"{row['refused_latest_s']:.0f}, {retry}"


def _step(rows: Mapping[str, Mapping[str, float]]) -> Sequence[str]:
    order = [rows[strategy] for strategy in ("kubeai", "queue-depth", "adaptive")]
    labels = (
        ("second replica requested, s", "second_s", 0),
        ("fourth replica requested, s", "fourth_s", 0),
        ("all completed after, s", "duration_s", 0),
        ("mean of responses, s", "mean_s", 1),
        ("p95 of responses, s", "p95_s", 1),
        ("replica seconds until zero", "replica_s", 0),
        ("last response to zero, s", "to_least_s", 0),
    )
    return [
        f"| {label} | {' | '.join(f'{column[figure]:.{digits}f}' for column in order)} |"
        for label, figure, digits in labels
    ]


def main(args: argparse.Namespace) -> None:
    result = {
        "seeds": args.seeds,
        "step_seeds": args.step_seeds,
        "profiles": {
            name: measure(name, seeds=args.seeds, jobs=args.jobs) for name in published.WALLAROO
        },
        "step": measure(STEP, seeds=args.step_seeds, jobs=args.jobs),
    }
    print(msgspec.json.format(msgspec.json.encode(result), indent=1).decode())
    if args.write:
        rig.write("scaling", "python -m bench.scaling --write", result)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--step-seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--write", action="store_true")
    main(parser.parse_args())
