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
from extproc.scheduling.estimated_time import EstimatedTime
from extproc.simulator import simulation_runs
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
    """Recorded frontier of a scenario; None where there is none."""
    path = rig.RESULTS / "frontier" / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def scenarios() -> list[str]:
    """Scenarios with a missed bar, and those with a record."""
    missed = {outcome.bar.scenario for outcome in bars.outcomes() if not outcome.met}
    written = {path.stem for path in (rig.RESULTS / "frontier").glob("*.json")}
    return sorted(missed | written)


def points(count: int, *, seed: int = 1) -> list[Point]:
    """The default and so many others around it."""
    rng, default = random.Random(seed), EstimatedTime()
    drawn_points: list[Point] = [
        {name: getattr(default, name) for name in FACTORS} | {"tie_share": 0.05}
    ]
    for _ in range(count):
        drawn = {
            name: float(
                f"{getattr(default, name) * math.exp(rng.uniform(*map(math.log, span))):.3g}"
            )
            for name, span in FACTORS.items()
        }
        drawn_points.append(drawn | {"tie_share": rng.choice(TIES)})
    return drawn_points


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
    """Figures of a run that are recorded."""
    values = (run.requests_per_s, run.ttft_s.mean, run.ttft_s.p99, run.e2e_s.mean)
    return dict(zip(FIGURES, values, strict=True))


def means(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    """Means over the seeds, six digits."""
    return {name: float(f"{fmean(row[name] for row in rows):.6g}") for name in rows[0]}


def measure(name: str, *, count: int, seeds: Sequence[int]) -> dict | None:
    """Simulate every point of a scenario; None where its trace is not there."""
    path = proof.SCENARIOS / f"{name}.yaml"
    definition = simulation_runs.read(path)
    if isinstance(definition.workload, TraceWorkload) and not os.environ.get("EXTPROC_TRACES"):
        print(f"{name}: left out, EXTPROC_TRACES does not name the folder of the traces")
        return None
    began = time.monotonic()
    against = sorted(
        {outcome.against for outcome in bars.outcomes() if outcome.bar.scenario == name}
    )
    plan = simulation_runs.plan(path, strategies=[*against, "clairvoyant"], configs=(), seeds=seeds)

    def mean(column: simulation_runs.SimulationColumn) -> dict[str, float]:
        return means(
            [
                figures(simulation_runs.run(plan.scenario, column, seed=seed, trace=plan.trace))
                for seed in plan.scenario.seeds
            ]
        )

    columns = {column.name: mean(column) for column in plan.columns}
    measured = []
    for weights in points(count):
        column = simulation_runs.column(variant(weights), folder=path.parent, where=str(path))
        measured.append({"weights": weights, "figures": mean(column)})
    print(f"{name}: {len(measured)} points in {time.monotonic() - began:.0f} s", flush=True)
    return {
        "title": definition.title,
        "seeds": list(plan.scenario.seeds),
        "columns": columns,
        "limits": means([limits.bounds(plan, seed=seed) for seed in plan.scenario.seeds]),
        "points": measured,
    }


def best(measured: Sequence[dict], figure: str) -> list[dict]:
    """Points that no other beats in both throughput and a time, by falling throughput."""
    front: list[dict] = []
    for point in sorted(
        measured, key=lambda p: (-p["figures"]["requests_per_s"], p["figures"][figure])
    ):
        if not front or point["figures"][figure] < front[-1]["figures"][figure]:
            front.append(point)
    return front


def bar_values(name: str, recorded: dict) -> list[tuple[bars.Bar, float]]:
    """The bars of a scenario, each with the value it asks for with these seeds."""
    return [
        (outcome.bar, outcome.bar.wanted * recorded["columns"][outcome.against][outcome.bar.figure])
        for outcome in bars.outcomes()
        if outcome.bar.scenario == name and outcome.bar.figure in FIGURES
    ]


def table(*names: str) -> str:
    """Tables of scenarios: columns, the points that no other beats, and the limits."""
    parts = []
    for name in names:
        recorded = result(name)
        if recorded is not None:
            parts += [*_rows(name, recorded), "", *_distances(name, recorded), ""]
            parts += [
                f"`{recorded['command']}`, {recorded['date']}, commit {recorded['commit']}.",
                "",
            ]
    return "\n".join(parts).rstrip()


def _rows(name: str, recorded: dict) -> list[str]:
    """One table."""
    seeds = ", ".join(map(str, recorded["seeds"]))
    rows = [
        f"**{recorded['title']}** ({name}, {len(recorded['points'])} points, seeds {seeds})",
        "",
    ]
    rows += ["| | req/s | TTFT mean, ms | p99 | answer mean, s | weights |", "|---" * 6 + "|"]
    rows += [_row(column, figures) for column, figures in recorded["columns"].items()]
    default, *others = recorded["points"]
    rows.append(_row("adaptive", default["figures"], default["weights"]))
    front = [
        point
        for point in others
        if any(
            point in best(recorded["points"], figure) for figure in ("ttft_mean_s", "ttft_p99_s")
        )
    ]
    front.sort(key=lambda point: -point["figures"]["requests_per_s"])
    rows += [_row("found", point["figures"], point["weights"]) for point in front]
    return [*rows, _row("limit", recorded["limits"])]


def _row(label: str, figures: Point, weights: Point | None = None) -> str:
    cells = [
        f"{figures[name] * factor:.{digits}f}" if name in figures else ""
        for name, factor, digits in zip(FIGURES, (1, 1e3, 1e3, 1), (1, 0, 0, 2), strict=True)
    ]
    weights_text = ", ".join(f"{name} {value:g}" for name, value in (weights or {}).items())
    return f"| {label} | " + " | ".join(cells) + f" | {weights_text} |"


def _distances(name: str, recorded: dict) -> list[str]:
    """Distance of each bar from the best points and from the limit."""
    rows = [
        "| bar | asks for | adaptive | best found | clairvoyant | limit | |",
        "|---" * 7 + "|",
    ]
    for bar, value in bar_values(name, recorded):
        figure, pick = bar.figure, max if bar.at_least else min
        values = [row["figures"][figure] for row in recorded["points"]]
        known, limit = recorded["columns"]["clairvoyant"][figure], recorded["limits"].get(figure)
        ratios = [
            f"{reached_value / value:.3f} x" for reached_value in (values[0], pick(values), known)
        ]
        reached = pick(values) >= value if bar.at_least else pick(values) <= value
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
        measured = measure(name, count=args.points, seeds=args.seeds)
        if measured is None:
            continue
        for figure in ("ttft_mean_s", "ttft_p99_s"):
            for point in best(measured["points"], figure):
                print(f"  {figure:12} {point['figures']} {point['weights']}", flush=True)
        print(f"  limits {measured['limits']}", flush=True)
        if args.write:
            (rig.RESULTS / "frontier").mkdir(exist_ok=True)
            seeds = " ".join(map(str, args.seeds))
            command = f"python -m bench.frontier --only {name} --points {args.points}"
            rig.write(f"frontier/{name}", f"{command} --seeds {seeds} --write", measured)


if __name__ == "__main__":
    main()
