"""Runs every scenario of `bench/scenarios`; the results go to `bench/results/proof`.

    python -m bench.proof [--only NAME ...] [--columns NAME ...] [--seeds N] [--jobs N] [--write]

Nothing is measured in real time: the same tree, scenario and seed give the same numbers anywhere.
With --columns only these are run, and the others stay as they were written; with --write, scenarios
without a record are left out.
The traces are read from the folder in $EXTPROC_TRACES; scenarios that need one are left out, with a
line that says so, where it is not set.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from pathlib import Path

from bench import bars, rig
from extproc.simulator import simulation_runs
from extproc.simulator.fleet import report
from extproc.simulator.fleet.workloads import TraceWorkload

SCENARIOS = Path(__file__).resolve().parent / "scenarios"

#: Figures of a column that are recorded; `extproc simulate` shows the others.
RECORDED = (
    "requests",
    "failed",
    "requests_per_s",
    "output_tokens_per_s",
    "total_tokens_per_s",
    "ttft_mean_s",
    "ttft_p50_s",
    "ttft_p95_s",
    "ttft_p99_s",
    "tpot_mean_s",
    "itl_p50_s",
    "itl_p99_s",
    "e2e_mean_s",
    "e2e_p50_s",
    "e2e_p90_s",
    "e2e_p95_s",
    "token_mean_s",
    "hit_ratio",
    "predicted_ratio",
    "requests_max_over_mean",
    "tokens_max_over_mean",
    "preemptions",
)


def names() -> list[str]:
    """Every scenario but the example of the guide."""
    return sorted(path.stem for path in SCENARIOS.glob("*.yaml") if path.stem != "example")


def measure(name: str, *, columns: list[str], seeds: int | None, jobs: int) -> dict | None:
    """Run a scenario; None where its trace is not there."""
    path = SCENARIOS / f"{name}.yaml"
    definition = simulation_runs.read(path)
    if isinstance(definition.workload, TraceWorkload) and not os.environ.get("EXTPROC_TRACES"):
        print(f"{name}: left out, EXTPROC_TRACES does not name the folder of the traces")
        return None
    wanted = tuple(definition.seeds)[:seeds] if seeds else ()
    plan = simulation_runs.plan(path, strategies=columns, configs=(), seeds=wanted)
    began = time.monotonic()
    runs = list(simulation_runs.runs(plan, jobs=jobs))
    results = report.report(plan.scenario, runs)
    print(f"{name}: {len(runs)} runs in {time.monotonic() - began:.0f} s", flush=True)
    return {
        "title": definition.title,
        "seeds": list(plan.scenario.seeds),
        "columns": {
            column.strategy: {
                key: [_short(column.figures[key].mean), _short(column.figures[key].half)]
                for key in RECORDED
            }
            for column in results.columns
        },
    }


def merged(name: str, figures: dict) -> dict:
    """The columns that were run, in the place of those that were written."""
    before = bars.result(name)
    assert before is not None, f"{name} has no record"
    assert before["seeds"] == figures["seeds"], "the seeds differ; run it without --columns"
    assert before["title"] == figures["title"], "the scenario differs; run it without --columns"
    return figures | {"columns": before["columns"] | figures["columns"]}


def _short(value: float) -> float | None:
    """Six digits, and nothing for what is not there."""
    return None if math.isnan(value) else float(f"{value:.6g}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", default=names(), metavar="NAME")
    parser.add_argument("--columns", nargs="+", default=[], metavar="NAME")
    parser.add_argument("--seeds", type=int)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    for name in args.only:
        if args.write and args.columns and bars.result(name) is None:
            print(f"{name}: left out, it has no record to merge with; run it without --columns")
            continue
        figures = measure(name, columns=args.columns, seeds=args.seeds, jobs=args.jobs)
        if figures is None:
            continue
        for strategy, row in figures["columns"].items():
            shown = {key: row[key][0] for key in ("requests_per_s", "ttft_mean_s", "ttft_p99_s")}
            print(f"  {strategy:16} {shown}", flush=True)
        if args.write:
            if args.columns:
                figures = merged(name, figures)
            rig.write(f"proof/{name}", f"python -m bench.proof --only {name} --write", figures)


if __name__ == "__main__":
    main()
