"""Searches other weights of `adaptive` in the scenarios whose bars it misses.

    python -m bench.frontier [--only SCENARIO ...] [--points N] [--seeds N ...] [--write]

A search draws weights at random, always the same ones, around the default; each is simulated with
the same requests. Beside them stand the columns of `bench.proof` with the same seeds and the bounds
of `bench.limits`. Nothing is measured in real time.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import time
from collections.abc import Sequence
from statistics import fmean

from bench import bars, limits, proof, rig
from extproc.simulator import simulation_runs
from extproc.scheduling.costs.estimated_time import EstimatedTime
from extproc.simulator.fleet import run_metrics, scenario
from extproc.simulator.fleet.workloads import TraceWorkload

#: Drawn within these factors of the default, evenly in their logarithm.
FACTORS = {
    "own_share": (1 / 4, 8.0),
    "others_share": (1 / 4, 8.0),
    "waiting_share": (1 / 8, 3.0),
    "waste_share": (1 / 4, 4.0),
    "crowding": (1 / 8, 2.0),
}

#: How near costs must be to be told apart by the hash of the conversation.
TIES = (0.0, 0.02, 0.05, 0.1)

#: Throughput at most, the others at least.
FIGURES = ("requests_per_s", "ttft_mean_s", "ttft_p99_s", "e2e_mean_s")

Point = dict[str, float]


def result(name: str) -> dict | None:
    """What was written of a scenario; None while nothing was."""
    path = rig.RESULTS / "frontier" / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def scenarios() -> list[str]:
    """Those with a missed bar, and those that were written before."""
    missed = {one.bar.scenario for one in bars.outcomes() if not one.met}
    written = {path.stem for path in (rig.RESULTS / "frontier").glob("*.json")}
    return sorted(missed | written)


def points(count: int, *, seed: int = 1) -> list[Point]:
    """The default and so many others around it."""
    rng, default = random.Random(seed), EstimatedTime()
    found: list[Point] = [{name: getattr(default, name) for name in FACTORS} | {"tie_share": 0.05}]
    for _ in range(count):
        drawn = {
            name: float(
                f"{getattr(default, name) * math.exp(rng.uniform(*map(math.log, span))):.3g}"
            )
            for name, span in FACTORS.items()
        }
        found.append(drawn | {"tie_share": rng.choice(TIES)})
    return found


def variant(weights: Point) -> scenario.Variant:
    """Adaptive with other weights."""
    cost = {name: value for name, value in weights.items() if name != "tie_share"}
    profile = {
        "name": "adaptive",
        "cost": {"kind": EstimatedTime.kind, "params": cost},
        "picker": {"kind": "rendezvous", "params": {"tie_share": weights["tie_share"]}},
    }
    return scenario.Variant(name="adaptive", settings={"scheduling": {"profile": profile}})


def figures(run: run_metrics.RunSummary) -> dict[str, float]:
    """What is kept of a run."""
    values = (run.requests_per_s, run.ttft_s.mean, run.ttft_s.p99, run.e2e_s.mean)
    return dict(zip(FIGURES, values, strict=True))


def means(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    """Means over the seeds, six digits."""
    return {name: float(f"{fmean(row[name] for row in rows):.6g}") for name in rows[0]}


def measure(name: str, *, count: int, seeds: Sequence[int]) -> dict | None:
    """Simulate every point of a scenario; None where its trace is not there."""
    path = proof.SCENARIOS / f"{name}.yaml"
    whole = simulation_runs.read(path)
    if isinstance(whole.workload, TraceWorkload) and not os.environ.get("EXTPROC_TRACES"):
        print(f"{name}: left out, EXTPROC_TRACES does not name the folder of the traces")
        return None
    began = time.monotonic()
    against = sorted({one.against for one in bars.outcomes() if one.bar.scenario == name})
    plan = simulation_runs.plan(path, strategies=[*against, "clairvoyant"], configs=(), seeds=seeds)

    def mean(column: simulation_runs.SimulationColumn) -> dict[str, float]:
        return means(
            [
                figures(simulation_runs.run(plan.scenario, column, seed=seed, trace=plan.trace))
                for seed in plan.scenario.seeds
            ]
        )

    columns = {column.name: mean(column) for column in plan.columns}
    told = []
    for weights in points(count):
        column = simulation_runs.column(variant(weights), folder=path.parent, where=str(path))
        told.append({"weights": weights, "figures": mean(column)})
    print(f"{name}: {len(told)} points in {time.monotonic() - began:.0f} s", flush=True)
    return {
        "title": whole.title,
        "seeds": list(plan.scenario.seeds),
        "columns": columns,
        "limits": means([limits.of(plan, seed=seed) for seed in plan.scenario.seeds]),
        "points": told,
    }


def best(told: Sequence[dict], figure: str) -> list[dict]:
    """The points nobody beats in both throughput and a time, by falling throughput."""
    kept: list[dict] = []
    for one in sorted(told, key=lambda p: (-p["figures"]["requests_per_s"], p["figures"][figure])):
        if not kept or one["figures"][figure] < kept[-1]["figures"][figure]:
            kept.append(one)
    return kept


def wanted(name: str, told: dict) -> list[tuple[bars.Bar, float]]:
    """The bars of a scenario, each with the value it asks for with these seeds."""
    return [
        (one.bar, one.bar.wanted * told["columns"][one.against][one.bar.figure])
        for one in bars.outcomes()
        if one.bar.scenario == name and one.bar.figure in FIGURES
    ]


def table(*names: str) -> str:
    """What was found of some scenarios: columns, the points nobody beats, and the limits."""
    parts = []
    for name in names:
        told = result(name)
        if told is not None:
            parts += [*_rows(name, told), "", *_distances(name, told), ""]
            parts += [f"`{told['command']}`, {told['date']}, commit {told['commit']}.", ""]
    return "\n".join(parts).rstrip()


def _rows(name: str, told: dict) -> list[str]:
    """One table."""
    seeds = ", ".join(map(str, told["seeds"]))
    rows = [f"**{told['title']}** ({name}, {len(told['points'])} points, seeds {seeds})", ""]
    rows += ["| | req/s | TTFT mean, ms | p99 | answer mean, s | weights |", "|---" * 6 + "|"]
    rows += [_row(column, figures) for column, figures in told["columns"].items()]
    default, *others = told["points"]
    rows.append(_row("adaptive", default["figures"], default["weights"]))
    kept = [
        one
        for one in others
        if any(one in best(told["points"], figure) for figure in ("ttft_mean_s", "ttft_p99_s"))
    ]
    kept.sort(key=lambda one: -one["figures"]["requests_per_s"])
    rows += [_row("found", one["figures"], one["weights"]) for one in kept]
    return [*rows, _row("limit", told["limits"])]


def _row(what: str, figures: Point, weights: Point | None = None) -> str:
    cells = [
        f"{figures[name] * factor:.{digits}f}" if name in figures else ""
        for name, factor, digits in zip(FIGURES, (1, 1e3, 1e3, 1), (1, 0, 0, 2), strict=True)
    ]
    said = ", ".join(f"{name} {value:g}" for name, value in (weights or {}).items())
    return f"| {what} | " + " | ".join(cells) + f" | {said} |"


def _distances(name: str, told: dict) -> list[str]:
    """How far each bar is from what was found, and from the limit."""
    rows = [
        "| bar | asks for | adaptive | best found | clairvoyant | limit | |",
        "|---" * 7 + "|",
    ]
    for bar, value in wanted(name, told):
        figure, pick = bar.figure, max if bar.at_least else min
        found = [one["figures"][figure] for one in told["points"]]
        known, limit = told["columns"]["clairvoyant"][figure], told["limits"].get(figure)
        ratios = [f"{each / value:.3f} x" for each in (found[0], pick(found), known)]
        reached = pick(found) >= value if bar.at_least else pick(found) <= value
        beyond = limit is not None and (limit < value if bar.at_least else limit > value)
        verdict = "beyond the limit" if beyond else "reached" if reached else "not reached"
        last = "" if limit is None else f"{limit / value:.3f} x"
        rows.append(f"| {figure} | {value:.4g} | " + " | ".join([*ratios, last, verdict]) + " |")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", metavar="SCENARIO")
    parser.add_argument("--points", type=int, default=40)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    for name in args.only or scenarios():
        told = measure(name, count=args.points, seeds=args.seeds)
        if told is None:
            continue
        for figure in ("ttft_mean_s", "ttft_p99_s"):
            for one in best(told["points"], figure):
                print(f"  {figure:12} {one['figures']} {one['weights']}", flush=True)
        print(f"  limits {told['limits']}", flush=True)
        if args.write:
            (rig.RESULTS / "frontier").mkdir(exist_ok=True)
            seeds = " ".join(map(str, args.seeds))
            command = f"python -m bench.frontier --only {name} --points {args.points}"
            rig.write(f"frontier/{name}", f"{command} --seeds {seeds} --write", told)


if __name__ == "__main__":
    main()
