"""One, two and four pickers of the same fleet: simulated, and behind a real Envoy.

    python -m bench.replicas [--only NAME ...] [--seeds N] [--jobs N] [--write]
    python -m bench.replicas --shared [--only NAME ...] [--seeds N] [--jobs N] [--write]
    python -m bench.replicas --real [--rounds N] [--write]

Simulated, each request goes to one of the pickers at random. Ratios are to one picker, seed by seed,
with half of the 95 % interval. Pickers that shared all they know at once would be one picker, so one
picker is also the bound of what exact sharing could gain. `--shared` has pickers that tell each other.

For real, one Envoy spreads requests over `extproc serve` processes before four simulated engines.
Hit ratios are the engines' own counters; figures are medians over rounds.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from concurrent import futures
from multiprocessing import get_context
from typing import Any

import msgspec
import uvloop

from bench import agreement, rig, sending
from bench.proof import SCENARIOS
from extproc.cli import simulation, stack
from extproc.sim.virtual import report, scenario

COUNTS = (1, 2, 4)

#: Multi-turn prompts at saturation, unlike engines with users who think, and a shared prefix that
#: half of all want; with a trace also the Mooncake conversations.
NAMES = ("l4-800", "heterogeneous", "hot-prefix", "k6-s1", "mooncake-70")

#: Of these, the ones on which pickers that talk are measured, and after how long they have talked.
TALKED, DELAYS_S = ("l4-800", "hot-prefix", "k6-s1"), (None, 0.0, 0.005)

FIGURES = ("hit_ratio", "ttft_mean_s", "ttft_p99_s", "e2e_mean_s", "requests_per_s")

PARTS = ("simulated", "shared", "real", "real_load_average")

#: What the bar is on, and how far from one picker it may be (issue 5).
JUDGED, BOUND = ("hit_ratio", "ttft_p99_s"), 0.05


def once(name: str, count: int, seed: int, delay_s: float | None = None) -> dict[str, float]:
    """One simulated run of the default strategy; of pickers that talk where there is a delay."""
    path = SCENARIOS / f"{name}.yaml"
    plan = simulation.plan(path, strategies=["adaptive"], configs=(), seeds=(seed,))
    picking = msgspec.structs.replace(plan.scenario.picking, replicas=count, share_delay_s=delay_s)
    whole = msgspec.structs.replace(plan.scenario, picking=picking)
    summary = simulation.run(whole, plan.columns[0], seed=seed, trace=plan.trace)
    return {figure: report.FIGURES[figure](summary) for figure in FIGURES}


def simulated(names: Sequence[str], *, seeds: int, jobs: int) -> dict[str, Any]:
    """Every scenario with every count of pickers."""
    tasks = [(name, n, seed) for name in names for n in COUNTS for seed in range(1, seeds + 1)]
    with futures.ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        found = dict(zip(tasks, pool.map(once, *zip(*tasks, strict=True)), strict=True))
    told: dict[str, Any] = {}
    for name in names:
        rows = told[name] = {}
        for n in COUNTS:
            runs = [found[name, n, seed] for seed in range(1, seeds + 1)]
            alone = [found[name, 1, seed] for seed in range(1, seeds + 1)]
            rows[str(n)] = {
                "mean": {f: round(statistics.fmean(run[f] for run in runs), 4) for f in FIGURES},
                "ratio": {f: _ratio(runs, alone, f) for f in FIGURES},
            }
        print(name, {n: row["ratio"] for n, row in rows.items()}, flush=True)
    return told


def shared(names: Sequence[str], *, seeds: int, jobs: int) -> dict[str, Any]:
    """Pickers that do not talk, and that tell each other of requests after some delay."""
    talks = [(1, None), *((n, delay_s) for n in COUNTS[1:] for delay_s in DELAYS_S)]
    tasks = [(name, n, seed, d) for name in names for n, d in talks for seed in range(1, seeds + 1)]
    with futures.ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        found = dict(zip(tasks, pool.map(once, *zip(*tasks, strict=True)), strict=True))
    told: dict[str, Any] = {}
    for name in names:
        rows = told[name] = []
        alone = [found[name, 1, seed, None] for seed in range(1, seeds + 1)]
        for n, delay_s in talks:
            runs = [found[name, n, seed, delay_s] for seed in range(1, seeds + 1)]
            rows.append(
                {
                    "pickers": n,
                    "delay_s": delay_s,
                    "seeds": seeds,
                    "mean": {
                        f: round(statistics.fmean(run[f] for run in runs), 4) for f in FIGURES
                    },
                    "ratio": {f: _ratio(runs, alone, f) for f in FIGURES},
                }
            )
            print(name, rows[-1], flush=True)
    return told


def _ratio(
    runs: Sequence[Mapping[str, float]], alone: Sequence[Mapping[str, float]], figure: str
) -> list[float]:
    """Mean of the ratios seed by seed, and half of their interval."""
    told = report.interval(run[figure] / one[figure] for run, one in zip(runs, alone, strict=True))
    return [round(told.mean, 3), round(told.half, 3)]


async def behind_envoy(whole: scenario.Scenario, count: int, *, seed: int) -> dict[str, float]:
    """One run through Envoy; everything anew, so that caches and counters begin empty."""
    async with stack.stack() as children:
        addresses = await agreement.started(children, whole)
        grpc = [stack.free_port() for _ in range(count)]
        text = agreement.settings_text("adaptive", seed=seed, addresses=addresses)
        for port in grpc:
            await children.extproc(
                *("--config-text", text, "--host", "127.0.0.1", "--secure-serving=false"),
                *("--drain-timeout", "0s", "--grpc-port", str(port)),
                *("--grpc-health-port", "0", "--metrics-port", "0"),
            )
        ports = stack.EnvoyPorts(stack.free_port(), stack.free_port(), grpc[0])
        template = rig.ROOT / "envoy" / rig.TEMPLATES["fds"]
        config = stack.envoy_config(template, ports, plaintext=True)
        for cluster in config["static_resources"]["clusters"]:
            if cluster["name"] == "extproc":
                each = [f"127.0.0.1:{port}" for port in grpc]
                cluster["load_assignment"] = stack.assignment("extproc", each)
                cluster["lb_policy"] = "ROUND_ROBIN"
        await children.envoy(config)
        results, late_s = await sending.play(
            whole,
            url=f"http://127.0.0.1:{ports.listener}",
            ports=[int(address.rpartition(":")[2]) for address in addresses],
            seed=seed,
        )
        return await agreement.measured(results, addresses, late_s)


async def real(rounds: int) -> dict[str, Any]:
    """Every count in turn, round after round, so that the machine's moods meet all alike."""
    whole = agreement.scaled(agreement.SCENARIOS["closed"], agreement.SPEED)
    found: dict[int, list[dict[str, float]]] = {n: [] for n in COUNTS}
    for seed in range(1, rounds + 1):
        for n in COUNTS:
            found[n].append(await behind_envoy(whole, n, seed=seed))
            print(seed, n, found[n][-1], flush=True)
    figures = ("hit_ratio", "ttft_mean_s", "ttft_p99_s", "requests_per_s", "timers_late_ms")
    return {
        str(n): {
            "rounds": len(runs),
            **{f: round(statistics.median(run[f] for run in runs), 4) for f in figures},
        }
        for n, runs in found.items()
    }


def shared_block(result: Mapping[str, Any]) -> str:
    """What telling each other comes to, as the README shows it."""
    lines = [
        "| workload | pickers | told after | hit ratio | to one picker | TTFT p99, s | to one picker |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, rows in result["shared"].items():
        for row in rows:
            delay_s, (hits, waits) = row["delay_s"], (row["ratio"][f] for f in JUDGED)
            after = "never" if delay_s is None else f"{1000 * delay_s:.0f} ms"
            lines.append(
                f"| {name} | {row['pickers']} | {after if row['pickers'] > 1 else ''} "
                f"| {row['mean']['hit_ratio']:.3f} | {hits[0]:.3f} ± {hits[1]:.3f} "
                f"| {row['mean']['ttft_p99_s']:.2f} | {waits[0]:.2f} ± {waits[1]:.2f} |"
            )
    return "\n".join(
        [*lines, "", f"`python -m bench.replicas --shared --seeds {row['seeds']} --write`"]
    )


def block(result: Mapping[str, Any]) -> str:
    """A result as the README shows it."""
    lines = [
        "| workload | pickers | hit ratio | to one picker | TTFT p99, s | to one picker |",
        "|---|---|---|---|---|---|",
    ]
    for name, rows in result["simulated"].items():
        for n, row in rows.items():
            hits, waits = (row["ratio"][figure] for figure in JUDGED)
            lines.append(
                f"| {name} | {n} | {row['mean']['hit_ratio']:.3f} | {hits[0]:.3f} ± {hits[1]:.3f} "
                f"| {row['mean']['ttft_p99_s']:.2f} | {waits[0]:.2f} ± {waits[1]:.2f} |"
            )
    for n, row in result.get("real", {}).items():
        one = result["real"]["1"]
        lines.append(
            f"| real Envoy | {n} | {row['hit_ratio']:.3f} | {row['hit_ratio'] / one['hit_ratio']:.3f} "
            f"| {row['ttft_p99_s']:.2f} | {row['ttft_p99_s'] / one['ttft_p99_s']:.2f} |"
        )
    return "\n".join([*lines, "", f"`{result['command']}`, {result['date']}."])


def main(given: argparse.Namespace) -> None:
    began, busy = time.monotonic(), os.getloadavg()[0]
    path = rig.RESULTS / "replicas.json"
    kept = msgspec.json.decode(path.read_bytes()) if path.exists() else {}
    told = {part: kept[part] for part in PARTS if part in kept}
    if given.real:
        told["real"] = uvloop.run(real(given.rounds))
        told["real_load_average"] = round(busy, 1)
    elif given.shared:
        names = [name for name in given.only if name in TALKED]
        ran = shared(names, seeds=given.seeds, jobs=given.jobs)
        told["shared"] = told.get("shared", {}) | ran
    else:
        names = [n for n in given.only if "mooncake" not in n or os.environ.get("EXTPROC_TRACES")]
        ran = simulated(names, seeds=given.seeds, jobs=given.jobs)
        told["simulated"] = told.get("simulated", {}) | ran
    print(f"{time.monotonic() - began:.0f} s", flush=True)
    if given.write:
        rig.write("replicas", "python -m bench.replicas [--real] --write", told)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=NAMES, default=list(NAMES))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--shared", action="store_true")
    parser.add_argument("--real", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--write", action="store_true")
    main(parser.parse_args())
