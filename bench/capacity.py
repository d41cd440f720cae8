"""Simulates tenants and priorities while requests wait for capacity.

    python -m bench.capacity [--only PART ...] [--seeds N] [--jobs N] [--write]

Parts are `tenants`, `overload`, `overload-chat`, `frontier` and `beside`; with --only the others stay
as written.

Capacity is what the fleet completes at the same offer without holding, when every engine has a queue
of its own that never ends: output tokens and requests per second from `SINCE_S` on. Alone is the same
traffic of one tenant at the same times with an otherwise idle fleet. Times to the first token count
from the client and include every wait; a request that was refused counts as refused, and not there.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent import futures
from multiprocessing import get_context
from typing import Any

import msgspec

from bench import rig
from bench.proof import SCENARIOS
from extproc.simulator import simulation_runs
from extproc.simulator.fleet import run_metrics, simulation, workloads

PARTS = ("tenants", "overload", "overload-chat", "frontier", "beside")

#: Engines are full by then (virtual seconds).
SINCE_S = 30.0

#: `busy_s` for the frontier of goodput and p99; 0.1 is the default.
FRONTIER_S = (0.025, 0.1, 0.5, 2.0)

#: Scenarios without tenants or priorities, and what holding makes of them.
BESIDE = ("l4-1600", "k6-s1", "unique", "heterogeneous")

#: Longest wait there (seconds), so that no request is refused.
PATIENCE_S = 600.0

#: Tenant whose bar it is, by scenario.
JUDGED = {"tenants": "small", "overload": "interactive", "overload-chat": "interactive"}


def once(
    name: str,
    seed: int,
    *,
    column: str = "holding",
    alone: bool = False,
    busy_s: float | None = None,
    until_s: float | None = None,
) -> dict[str, Any]:
    """One run: goodput, and the times of every tenant."""
    plan = simulation_runs.plan(
        SCENARIOS / f"{name}.yaml", strategies=[column], configs=(), seeds=(seed,)
    )
    definition, settings = plan.scenario, plan.columns[0].settings
    assert settings is not None, "the clairvoyant picker has no flow control"
    if alone:
        assert isinstance(definition.workload, workloads.Groups)
        groups = [group for group in definition.workload.groups if group.tenant == JUDGED[name]]
        definition = msgspec.structs.replace(definition, workload=workloads.Groups(groups=groups))
    if busy_s is not None:
        holding = msgspec.structs.replace(settings.flow_control, busy_s=busy_s)
        settings = msgspec.structs.replace(settings, flow_control=holding)
    until_s = until_s or definition.until_s
    definition = msgspec.structs.replace(definition, until_s=until_s)
    run = simulation.Simulation(definition, settings, seed=seed).run()
    over = [request for request in run.requests if request.failure != run_metrics.UNFINISHED]
    done = [request for request in over if not request.failure]
    counted = [request for request in done if request.sent_at + request.took_s >= SINCE_S]
    span_s = until_s - SINCE_S
    figures: dict[str, Any] = {
        "output_tokens_per_s": sum(request.work.output_tokens for request in counted) / span_s,
        "requests_per_s": len(counted) / span_s,
    }
    for tenant in sorted({request.work.tenant for request in over}):
        ended = [request for request in over if request.work.tenant == tenant]
        first = run_metrics.spread([request.first_s for request in ended if not request.failure])
        figures[tenant] = {
            "ended": len(ended),
            "refused": sum(bool(request.failure) for request in ended),
            "ttft_mean_s": first.mean,
            "ttft_p95_s": first.p95,
            "ttft_p99_s": first.p99,
        }
    return figures


Run = Callable[..., Sequence[dict[str, Any]]]


def judged(run: Run, name: str) -> dict[str, Any]:
    """A scenario without holding, with it, and with the judged tenant alone."""
    rows = {
        "alone": run(name, alone=True),
        "adaptive": run(name, column="adaptive"),
        "holding": run(name),
    }
    return {kind: _mean(row) for kind, row in rows.items()} | {
        "ratios": ratios(name, _mean(rows["holding"]), rows)
    }


def ratios(name: str, held: dict[str, Any], rows: dict[str, Any]) -> dict[str, float]:
    """Ratios that the bars are on."""
    alone, without = _mean(rows["alone"]), _mean(rows["adaptive"])
    tenant = JUDGED[name]
    values = {
        key: held[key] / without[key] for key in ("output_tokens_per_s", "requests_per_s")
    } | {key: held[tenant][key] / alone[tenant][key] for key in ("ttft_p95_s", "ttft_p99_s")}
    return {key: round(value, 3) for key, value in values.items()}


def frontier(run: Run) -> dict[str, Any]:
    """Goodput against p99 over `busy_s`, in shorter runs."""
    return {
        f"{busy_s:g}": _mean(run("overload", busy_s=busy_s, until_s=120.0)) for busy_s in FRONTIER_S
    }


def once_beside(name: str, seed: int, *, held: bool) -> dict[str, float]:
    """One run of the default strategy on a scenario of the proof."""
    plan = simulation_runs.plan(
        SCENARIOS / f"{name}.yaml", strategies=["adaptive"], configs=(), seeds=(seed,)
    )
    column = plan.columns[0]
    assert column.settings is not None, "the clairvoyant picker has no flow control"
    holding = msgspec.structs.replace(
        column.settings.flow_control, enabled=held, timeout_s=PATIENCE_S
    )
    settings = msgspec.structs.replace(column.settings, flow_control=holding)
    column = msgspec.structs.replace(column, settings=settings)
    summary = simulation_runs.run(plan.scenario, column, seed=seed, trace=plan.trace)
    return {
        "requests_per_s": summary.requests_per_s,
        "hit_ratio": summary.hit_ratio,
        "ttft_mean_s": summary.ttft_s.mean,
        "ttft_p99_s": summary.ttft_s.p99,
        "e2e_mean_s": summary.e2e_s.mean,
        "failed": sum(summary.failed.values()),
    }


def beside(spread: Callable[..., Sequence[dict[str, Any]]]) -> dict[str, Any]:
    """The same strategy with and without flow control, without a request for turns."""
    return {
        name: {
            column: _mean(spread(functools.partial(once_beside, name, held=held)))
            for column, held in (("adaptive", False), ("holding", True))
        }
        for name in BESIDE
    }


def _mean(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Means over the seeds, key by key."""
    return {
        key: _mean([run[key] for run in runs])
        if isinstance(value, dict)
        else round(statistics.fmean(run[key] for run in runs), 3)
        for key, value in runs[0].items()
    }


def measure(parts: Sequence[str] = PARTS, *, seeds: int = 5, jobs: int = 2) -> dict[str, Any]:
    """Some parts anew; the others as they were written."""
    figures: dict[str, Any] = {"seeds": {}}
    written = rig.RESULTS / "capacity.json"
    if written.exists() and set(parts) != set(PARTS):
        before = json.loads(written.read_text())
        figures["seeds"] = before["seeds"]
        figures |= {part: before[part] for part in PARTS if part in before}
    figures["seeds"] |= dict.fromkeys(parts, seeds)
    with futures.ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:

        def spread(task: Callable[[int], dict[str, Any]]) -> list[dict[str, Any]]:
            return list(pool.map(task, range(1, seeds + 1)))

        def run(name: str, **facts: Any) -> list[dict[str, Any]]:
            return spread(functools.partial(once, name, **facts))

        for part in parts:
            began = time.monotonic()
            match part:
                case "frontier":
                    figures[part] = frontier(run)
                case "beside":
                    figures[part] = beside(spread)
                case _:
                    figures[part] = judged(run, part)
            print(part, f"{time.monotonic() - began:.0f} s", flush=True)
            for kind, row in figures[part].items():
                print(" ", kind, row, flush=True)
    return figures


def block(result: dict[str, Any]) -> str:
    """A result as `docs/benchmarks` shows it."""
    lines = [
        "| | alone | without flow control | with flow control | ratio |",
        "|---|---|---|---|---|",
    ]
    parts = (
        ("tenants", "a tenant beside one that sends 10 x as much, together 2 x the capacity", 95),
        ("overload", "priority at a third of the capacity, 3 x offered for 5 minutes", 99),
        ("overload-chat", "the same with the lengths of chats, 2 minutes", 99),
    )
    for part, label, percent in parts:
        if part in result:
            lines += _judged(result[part], JUDGED[part], label, percent)
    lines += ["", "| `busy_s` | requests per second | priority, mean to the first token | p99 |"]
    lines += ["|---|---|---|---|"]
    for busy_s, row in result["frontier"].items():
        mine = row[JUDGED["overload"]]
        rate = row["requests_per_s"]
        mean, late = mine["ttft_mean_s"], mine["ttft_p99_s"]
        lines.append(f"| {busy_s} s | {rate:.1f} | {mean:.2f} s | {late:.2f} s |")
    lines += ["", "| scenario | without flow control | with flow control | hits |"]
    lines += ["|---|---|---|---|"]
    for name, row in result["beside"].items():
        cells = [
            f"{cell['requests_per_s']:.1f} per s, {cell['ttft_mean_s']:.2f} s, {cell['e2e_mean_s']:.1f} s"
            for cell in (row["adaptive"], row["holding"])
        ]
        hits = f"{row['adaptive']['hit_ratio']:.2f}, {row['holding']['hit_ratio']:.2f}"
        lines.append(f"| {name} | {' | '.join(cells)} | {hits} |")
    seeds = ", ".join(f"{part} {result['seeds'][part]}" for part in PARTS if part in result)
    return "\n".join([*lines, "", f"`{result['command']}`, {result['date']}; seeds: {seeds}."])


def _judged(rows: dict[str, Any], tenant: str, label: str, percent: int) -> list[str]:
    """Two rows: the time of the tenant that is judged, and what is served."""
    kinds = ("alone", "adaptive", "holding")
    times = " | ".join(f"{rows[kind][tenant][f'ttft_p{percent}_s']:.2f} s" for kind in kinds)
    rates = " | ".join(f"{rows[kind]['requests_per_s']:.1f}" for kind in kinds[1:])
    late, served = rows["ratios"][f"ttft_p{percent}_s"], rows["ratios"]["output_tokens_per_s"]
    return [
        f"| {label}: p{percent} to the first token | {times} | {late:.2f} of alone |",
        f"| all requests per second, and tokens served | | {rates} | {served:.3f} of capacity |",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    figures = measure(args.only, seeds=args.seeds, jobs=args.jobs)
    if args.write:
        rig.write("capacity", "python -m bench.capacity --write", figures)


if __name__ == "__main__":
    main()
