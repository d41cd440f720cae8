"""KV events beside the estimate, at cache pressure: every scenario of `bench/scenarios`, simulated.

    python -m bench.match_sources [--only NAME ...] [--seeds N] [--jobs N] [--write]

The adaptive strategy with four kinds of knowledge of prefix caches: `exact`, the engines' events;
`corrected`, the estimate as it is; `routed`, the estimate without correction by counters and without
the engines' cache sizes; and the clairvoyant picker, which knows caches, queues, answer lengths and outages.

Caches are a third of the working set. A run with ample caches measures it: the tokens of blocks that
no request is using and one will use again, at most at any time. Engines have a third of those, and what
running requests hold at most besides, but never more than in the scenario, nor less than two of
its longest requests. Where nothing is used again caches stay as they are, and
only the first two kinds are run. Of traces the first 3,000
requests are sent; scenarios without a trace in $EXTPROC_TRACES are left out.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from collections.abc import Mapping, Sequence
from concurrent import futures
from functools import partial
from multiprocessing import get_context
from typing import Any

import msgspec

from bench import rig
from bench.proof import SCENARIOS, names
from extproc.prefix_cache.cache_model import CacheModel
from extproc.simulator import simulation_runs
from extproc.simulator.fleet import report, scenario, simulation
from extproc.simulator.fleet.engine_node import EngineNode
from extproc.simulator.fleet.sim_request import KEY_TOKENS
from extproc.simulator.fleet.workloads import TraceWorkload

#: Requests of a trace that are sent (count).
TRACED = 3000

FIGURES = (
    "requests",
    "failed",
    "hit_ratio",
    "predicted_ratio",
    "ttft_mean_s",
    "ttft_p99_s",
    "e2e_mean_s",
)

_EVENTS = {"kv_events": {"enabled": True}}
KINDS: Mapping[str, scenario.Variant] = {
    "exact": scenario.Variant(name="exact", strategy="adaptive", settings=_EVENTS),
    "corrected": scenario.Variant(name="corrected", strategy="adaptive"),
    "routed": scenario.Variant(name="routed", strategy="adaptive"),
    "clairvoyant": scenario.Variant(name="clairvoyant", strategy=scenario.CLAIRVOYANT),
}

#: Exact may be worse than the estimate by this much, and reach this much of the clairvoyant's hits.
MARGIN, OF_CLAIRVOYANT = 0.01, 0.97

#: Tokens of an ample cache.
_AMPLE = 1 << 26


def simulate(
    definition: scenario.Scenario,
    kind: str,
    seed: int,
    trace: str,
    peaks: dict[EngineNode, int] | None = None,
) -> simulation.Simulation:
    """Run a scenario with a kind of knowledge; returns it when it is over.

    `peaks` takes the most tokens that running requests hold of each engine.
    """
    column = simulation_runs.column(KINDS[kind], folder=SCENARIOS, where=definition.title)
    if kind == "routed":
        # In a process of its own: nothing of the engines reaches the estimate.
        CacheModel.observe_load = lambda *_, **__: None  # type: ignore[method-assign]
        CacheModel.observe_usage = lambda *_, **__: None  # type: ignore[method-assign]
    rows = simulation_runs.trace_rows(trace)
    running = simulation.Simulation(definition, column.settings, seed=seed, rows=rows)
    if peaks is not None:
        for node in running.nodes:
            node.add_block_listener(partial(_note_peak, node, peaks))
    running.run()
    return running


def _note_peak(node: EngineNode, peaks: dict[EngineNode, int], _: object) -> None:
    used = node.engine.pool.used * node.profile.block_tokens
    peaks[node] = max(peaks.get(node, 0), used)


def with_caches(definition: scenario.Scenario, kv_tokens: int) -> scenario.Scenario:
    """A scenario with caches of another size."""
    fleet = []
    for group in definition.fleet:
        longest = min(group.resolved().max_model_len, kv_tokens)
        changed = {"kv_tokens": float(kv_tokens), "max_model_len": float(longest)}
        fleet.append(msgspec.structs.replace(group, set={**group.set, **changed}))
    return msgspec.structs.replace(definition, fleet=fleet)


def sized(name: str) -> tuple[scenario.Scenario, str, dict[str, int]]:
    """A scenario with its caches, its trace, and the tokens that they were sized by."""
    plan = simulation_runs.plan(
        SCENARIOS / f"{name}.yaml", strategies=["adaptive"], configs=(), seeds=()
    )
    definition = plan.scenario
    if isinstance(definition.workload, TraceWorkload):
        short = msgspec.structs.replace(definition.workload, requests=TRACED)
        definition = msgspec.structs.replace(definition, workload=short)
    peaks: dict[EngineNode, int] = {}
    ample = simulate(with_caches(definition, _AMPLE), "corrected", 1, plan.trace, peaks)
    requests = [request for request in ample.metrics.requests if not request.failure]
    last_use: dict[int, float] = {}
    for request in requests:
        for key in request.work.keys:
            last_use[key] = max(last_use.get(key, 0.0), request.sent_at)
    #: Changes of tokens that wait to be used again, by time.
    waits: list[tuple[float, int]] = []
    since: dict[int, float] = {}
    for request in sorted(requests, key=lambda request: request.sent_at):
        ended_at = request.sent_at + request.took_s
        for key in request.work.keys:
            before = since.pop(key, None)
            if before is not None and before < request.sent_at:
                waits += (before, KEY_TOKENS), (request.sent_at, -KEY_TOKENS)
            if last_use[key] > request.sent_at:
                since[key] = ended_at if before is None else max(before, ended_at)
    idle, active = _peak(waits), sum(peaks.values())
    engines = sum(group.count for group in definition.fleet)
    longest = max(request.work.prompt_tokens + request.work.output_tokens for request in requests)
    own = min(group.resolved().kv_tokens for group in definition.fleet)
    cache = min(own, max(active // engines + idle // 3 // engines, 2 * longest))
    figures = {"working_set": idle, "running": active, "own": own, "cache": cache if idle else own}
    return (with_caches(definition, cache) if idle else definition), plan.trace, figures


def _peak(changes: list[tuple[float, int]]) -> int:
    """Largest sum of changes up to a time."""
    total = most = 0
    for _, change in sorted(changes):
        total += change
        most = max(most, total)
    return most


def once(definition: scenario.Scenario, kind: str, seed: int, trace: str) -> dict[str, float]:
    """Figures of a run."""
    summary = simulate(definition, kind, seed, trace).metrics.summary()
    return {figure: report.FIGURES[figure](summary) for figure in FIGURES}


def measure(name: str, *, seeds: int, jobs: int) -> dict[str, Any] | None:
    """All kinds on a scenario, with the same seeds; None without its trace."""
    definition = simulation_runs.read(SCENARIOS / f"{name}.yaml")
    if isinstance(definition.workload, TraceWorkload) and not os.environ.get("EXTPROC_TRACES"):
        print(f"{name}: left out, EXTPROC_TRACES does not name the folder of the traces")
        return None
    began = time.monotonic()
    definition, trace, tokens = sized(name)
    chosen = list(KINDS) if tokens["working_set"] else ["exact", "corrected"]
    tasks = [(kind, seed) for seed in range(1, seeds + 1) for kind in chosen]
    # A process for each run: `routed` changes the classes that it uses.
    with futures.ProcessPoolExecutor(
        jobs, mp_context=get_context("spawn"), max_tasks_per_child=1
    ) as pool:
        waiting = {task: pool.submit(once, definition, *task, trace) for task in tasks}
        runs = {task: future.result() for task, future in waiting.items()}
    print(f"{name}: {tokens}, {time.monotonic() - began:.0f} s", flush=True)
    kinds = {}
    for kind in chosen:
        own = [runs[kind, seed] for seed in range(1, seeds + 1)]
        base = [runs["corrected", seed] for seed in range(1, seeds + 1)]
        kinds[kind] = {
            "mean": {f: _short(report.interval(run[f] for run in own).mean) for f in FIGURES},
            "ratio": {f: _ratio(own, base, f) for f in FIGURES},
        }
        print(f"  {kind:12} {kinds[kind]['mean']}", flush=True)
    return {"seeds": seeds, "tokens": tokens, "kinds": kinds, "date": time.strftime("%Y-%m-%d")}


def _short(value: float) -> float | None:
    return float(f"{value:.5g}") if value == value else None  # noqa: PLR0124 - NaN


def _ratio(
    runs: Sequence[Mapping[str, float]], base: Sequence[Mapping[str, float]], figure: str
) -> list[float | None]:
    """Geometric mean of the ratios to the corrected estimate by seed, and half of their interval.

    The arithmetic mean of ratios exceeds 1 where both figures vary alike.
    """
    known = report.interval(
        math.log(run[figure] / other[figure])
        for run, other in zip(runs, base, strict=True)
        if run[figure] and other[figure]
    )
    ratio = math.exp(known.mean)
    return [_short(ratio), _short(ratio * known.half)]


def verdicts(row: Mapping[str, Any]) -> list[str]:
    """Parts of the bar that a scenario misses."""
    exact, missed = row["kinds"]["exact"], []
    for figure in ("ttft_mean_s", "ttft_p99_s"):
        ratio = exact["ratio"][figure][0]
        if ratio is not None and ratio > 1.0 + MARGIN:
            missed.append(figure)
    hits = exact["ratio"]["hit_ratio"][0]
    if hits is not None and hits < 1.0 - MARGIN:
        missed.append("hit_ratio")
    if "clairvoyant" not in row["kinds"]:
        return missed
    best = row["kinds"]["clairvoyant"]["mean"]["hit_ratio"]
    if exact["mean"]["hit_ratio"] < OF_CLAIRVOYANT * best:
        missed.append("clairvoyant")
    return missed


def block(result: Mapping[str, Any]) -> str:
    """The result as `docs/benchmarks` shows it."""
    head = (
        *("scenario", "cache, tokens", "hit ratio: routed", "corrected", "exact", "clairvoyant"),
        *("TTFT mean, s: routed", "corrected", "exact, to corrected"),
        *("TTFT p99, s: corrected", "exact, to corrected", "bar"),
    )
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    words = {
        "ttft_mean_s": "TTFT mean",
        "ttft_p99_s": "TTFT p99",
        "hit_ratio": "hit ratio",
        "clairvoyant": "hits of the clairvoyant",
    }
    for name, row in sorted(result["scenarios"].items()):
        hits = [
            _number(row, kind, "hit_ratio", ".3f")
            for kind in ("routed", "corrected", "exact", "clairvoyant")
        ]
        missed = verdicts(row)
        lines.append(
            f"| {name} | {row['tokens']['cache']} | {' | '.join(hits)} "
            f"| {_number(row, 'routed', 'ttft_mean_s', '.3g')} "
            f"| {_number(row, 'corrected', 'ttft_mean_s', '.3g')} | {_cell(row, 'ttft_mean_s')} "
            f"| {_number(row, 'corrected', 'ttft_p99_s', '.3g')} | {_cell(row, 'ttft_p99_s')} "
            f"| {'**' + ', '.join(words[part] for part in missed) + '**' if missed else 'met'} |"
        )
    rows = result["scenarios"].values()
    days = sorted({row["date"] for row in rows})
    period = " to ".join(dict.fromkeys((days[0], days[-1])))
    seeds = sorted({row["seeds"] for row in rows})
    count = len([row for row in rows if not verdicts(row)])
    caption = (
        f"{count} of {len(rows)} scenarios meet the bar. `{result['command']}`, {period}; "
        f"seeds: {' or '.join(map(str, seeds))}."
    )
    return "\n".join([*lines, "", caption])


def _number(row: Mapping[str, Any], kind: str, figure: str, form: str) -> str:
    value = row["kinds"].get(kind, {"mean": {figure: None}})["mean"][figure]
    return "" if value is None else format(value, form)


def _cell(row: Mapping[str, Any], figure: str) -> str:
    mean, half = row["kinds"]["exact"]["ratio"][figure]
    if mean is None:
        return ""
    return f"{mean:.3f}" if half is None else f"{mean:.3f} ± {half:.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", default=names(), metavar="NAME")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    path = rig.RESULTS / "match_sources.json"
    recorded = msgspec.json.decode(path.read_bytes()) if path.exists() else {}
    scenarios = dict(recorded.get("scenarios", {}))
    for name in args.only:
        row = measure(name, seeds=args.seeds, jobs=args.jobs)
        if row is None:
            continue
        scenarios[name] = row
        if args.write:
            rig.write(
                "match_sources", "python -m bench.match_sources --write", {"scenarios": scenarios}
            )


if __name__ == "__main__":
    main()
