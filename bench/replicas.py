"""One, two and four pickers of the same fleet: simulated, and behind a real Envoy.

    python -m bench.replicas [--only NAME ...] [--seeds N] [--jobs N] [--write]
    python -m bench.replicas --real [--exchange WAY ...] [--rounds N] [--write]

Simulated, each request goes to one of the pickers at random. Ratios are to one picker, seed by seed,
with half of the 95 % interval. Pickers that shared all they know at once would be one picker, so one
picker is also the bound of what exact sharing could gain. Several are measured as they are by
themselves, and telling each other of their requests after some delay. With --only, the other
workloads stay as they were written. Traces are read from the folder in $EXTPROC_TRACES.

For real, one Envoy spreads requests over `extproc serve` processes before four simulated engines.
They exchange their requests directly, through a real Redis or Valkey from the PATH, or not at all. Hit
ratios are the engines' own counters; figures are medians over rounds, in each of which every kind has
its turn, beside a single picker. With --exchange, the other ways stay as they were written.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent import futures
from multiprocessing import get_context
from typing import Any

import msgspec
import uvloop

from bench import agreement, rig, sending
from bench.proof import SCENARIOS
from extproc.demo import stack
from extproc.simulator import simulation_runs
from extproc.simulator.fleet import report, run_metrics, scenario
from extproc.simulator.fleet.workloads import TraceWorkload

COUNTS = (1, 2, 4)

#: Ways in which real pickers exchange their requests.
NONE = "none"
EXCHANGES = (NONE, "redis", "direct")

#: Multi-turn prompts at saturation, unlike engines with users who think, a shared prefix that half of
#: all want, and caches just as large as what users need; with a trace also the Mooncake conversations.
NAMES = ("l4-800", "heterogeneous", "hot-prefix", "k6-s1", "mooncake-70")

#: Requests of a trace that are sent (count); the rest would only take longer.
TRACED = 3000

#: Seconds until pickers know each other's requests; None: never. 2 ms is a server on the same machine,
#: 20 ms one that is far away.
DELAYS_S = (None, 0.002, 0.02)

#: Pickers, and after how long they have talked.
KINDS = ((1, None), *((count, delay_s) for delay_s in DELAYS_S for count in COUNTS[1:]))

FIGURES = ("hit_ratio", "ttft_mean_s", "ttft_p99_s", "e2e_mean_s", "requests_per_s")

PARTS = ("simulated", "real", "real_load_average")

#: What the bar is on, and how far from one picker it may be (issue 5).
JUDGED, BOUND = ("hit_ratio", "ttft_p99_s"), 0.05


def once(name: str, count: int, seed: int, delay_s: float | None = None) -> dict[str, float]:
    """One simulated run of the default strategy; of pickers that talk where there is a delay."""
    path = SCENARIOS / f"{name}.yaml"
    plan = simulation_runs.plan(path, strategies=["adaptive"], configs=(), seeds=(seed,))
    picking = msgspec.structs.replace(plan.scenario.picking, replicas=count, share_delay_s=delay_s)
    definition = msgspec.structs.replace(plan.scenario, picking=picking)
    if isinstance(definition.workload, TraceWorkload):
        short = msgspec.structs.replace(definition.workload, requests=TRACED)
        definition = msgspec.structs.replace(definition, workload=short)
    summary = simulation_runs.run(definition, plan.columns[0], seed=seed, trace=plan.trace)
    return {figure: report.FIGURES[figure](summary) for figure in FIGURES}


def simulated(name: str, *, seeds: int, jobs: int) -> list[dict[str, Any]]:
    """One scenario with every kind of pickers."""
    tasks = [(name, n, seed, d) for n, d in KINDS for seed in range(1, seeds + 1)]
    with futures.ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        results = dict(zip(tasks, pool.map(once, *zip(*tasks, strict=True)), strict=True))
    alone = [results[name, 1, seed, None] for seed in range(1, seeds + 1)]
    rows = []
    for n, delay_s in KINDS:
        runs = [results[name, n, seed, delay_s] for seed in range(1, seeds + 1)]
        rows.append(
            {
                "pickers": n,
                "told_after_s": delay_s,
                "seeds": seeds,
                "mean": {f: round(statistics.fmean(run[f] for run in runs), 4) for f in FIGURES},
                "ratio": {f: _ratio(runs, alone, f) for f in FIGURES},
            }
        )
        print(name, rows[-1], flush=True)
    return rows


def _ratio(
    runs: Sequence[Mapping[str, float]], alone: Sequence[Mapping[str, float]], figure: str
) -> list[float]:
    """Mean of the ratios seed by seed, and half of their interval."""
    interval = report.interval(
        run[figure] / single[figure] for run, single in zip(runs, alone, strict=True)
    )
    return [round(interval.mean, 3), round(interval.half, 3)]


async def behind_envoy(
    definition: scenario.Scenario, count: int, *, seed: int, exchange: str
) -> tuple[dict[str, float], list[float]]:
    """One run through Envoy; everything anew, so that caches and counters begin empty.

    Returns:
        Figures, and the seconds to the first token of every request.
    """
    async with stack.stack() as children:
        addresses = await agreement.started(children, definition)
        grpc = [stack.free_port() for _ in range(count)]
        tree = msgspec.json.decode(
            agreement.settings_text("adaptive", seed=seed, addresses=addresses)
        )
        pages = [0] * count
        if exchange == "redis":
            tree["peer_sync"] = {"url": await _server(children)}
        elif exchange == "direct":
            pages = [stack.free_port() for _ in range(count)]
            tree["peer_sync"] = {"peers": [f"127.0.0.1:{port}" for port in pages]}
        for n, port in enumerate(grpc):
            # As `world.World` seeds them: pickers that share a seed herd.
            text = msgspec.json.encode(tree | {"seed": tree["seed"] + n}).decode()
            await children.extproc(
                *("--config-text", text, "--host", "127.0.0.1", "--secure-serving=false"),
                *("--drain-timeout", "0s", "--grpc-port", str(port)),
                *("--grpc-health-port", "0", "--metrics-port", str(pages[n])),
            )
        ports = stack.EnvoyPorts(stack.free_port(), stack.free_port(), grpc[0])
        template = rig.ROOT / "envoy" / rig.TEMPLATES["fds"]
        config = stack.envoy_config(template, ports, plaintext=True)
        for cluster in config["static_resources"]["clusters"]:
            if cluster["name"] == "extproc":
                listeners = [f"127.0.0.1:{port}" for port in grpc]
                cluster["load_assignment"] = stack.assignment("extproc", listeners)
                cluster["lb_policy"] = "ROUND_ROBIN"
        await children.envoy(config)
        results, late_s = await sending.play(
            definition,
            url=f"http://127.0.0.1:{ports.listener}",
            ports=[int(address.rpartition(":")[2]) for address in addresses],
            seed=seed,
        )
        values = await agreement.measured(results, addresses, late_s)
        return values, [request.first_s for request in results.requests]


def _dated(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows with the day they were measured on: not all of a file are measured at once."""
    return [row | {"date": time.strftime("%Y-%m-%d")} for row in rows]


def _days(rows: Iterable[Mapping[str, Any]]) -> str:
    """The first and the last day of rows."""
    days = sorted({row["date"] for row in rows})
    return days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"


def written(recorded: Mapping[str, Any], rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of real runs, and those written before that were not run again."""
    fresh = {(row["pickers"], row["exchange"]) for row in rows}
    before = [
        row for row in recorded.get("real", ()) if (row["pickers"], row["exchange"]) not in fresh
    ]
    return sorted(
        [*before, *rows], key=lambda row: (EXCHANGES.index(row["exchange"]), row["pickers"])
    )


async def _server(children: stack.Stack) -> str:
    """Start a server that keeps nothing; its URL."""
    program = shutil.which("redis-server") or shutil.which("valkey-server")
    if program is None:
        raise SystemExit("neither redis-server nor valkey-server is on the PATH")
    port = stack.free_port()
    words = ("--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no")
    await children.start("redis", [program, *words], ready="Ready to accept connections")
    return f"redis://127.0.0.1:{port}"


async def real(rounds: int, kinds: Sequence[tuple[int, str]]) -> list[dict[str, Any]]:
    """Every kind in turn, round after round, so that the machine's moods meet all alike.

    Args:
        rounds: How often each has its turn.
        kinds: Pickers, and how they exchange requests; one picker first.
    """
    definition = agreement.scaled(agreement.SCENARIOS["closed"], agreement.SPEED)
    by_kind: dict[tuple[int, str], list[dict[str, float]]] = {kind: [] for kind in kinds}
    firsts: dict[tuple[int, str], list[float]] = {kind: [] for kind in kinds}
    for seed in range(1, rounds + 1):
        # Not always the same one first.
        for n, exchange in (*kinds[seed % len(kinds) :], *kinds[: seed % len(kinds)]):
            run, first_s = await behind_envoy(definition, n, seed=seed, exchange=exchange)
            by_kind[n, exchange].append(run)
            firsts[n, exchange] += first_s
            print(f"round {seed}, {n} pickers, exchange: {exchange}: {run}", flush=True)
    figures = ("hit_ratio", "ttft_mean_s", "ttft_p99_s", "requests_per_s", "timers_late_ms")
    alone = by_kind[1, NONE]
    return [
        {
            "pickers": n,
            "exchange": exchange,
            "rounds": len(runs),
            "requests": len(firsts[n, exchange]),
            "median": {f: round(statistics.median(run[f] for run in runs), 4) for f in figures},
            "ttft_p99_of_all_s": round(run_metrics.spread(firsts[n, exchange]).p99, 4),
            "ttft_p99_of_all_ratio": round(
                run_metrics.spread(firsts[n, exchange]).p99
                / run_metrics.spread(firsts[1, NONE]).p99,
                3,
            ),
            "ratios": {
                f: [round(run[f] / single[f], 3) for run, single in zip(runs, alone, strict=True)]
                for f in JUDGED
            },
        }
        for (n, exchange), runs in by_kind.items()
    ]


def block(result: Mapping[str, Any]) -> str:
    """Simulated runs as `docs/benchmarks` shows them."""
    lines = [
        "| workload | replicas | delay | hit ratio | to one replica | TTFT p99, s | to one replica |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, rows in result["simulated"].items():
        for row in rows:
            delay_s, (hits, waits) = row["told_after_s"], (row["ratio"][f] for f in JUDGED)
            after = "no synchronization" if delay_s is None else f"{1000 * delay_s:.0f} ms"
            lines.append(
                f"| {name} | {row['pickers']} | {after if row['pickers'] > 1 else ''} "
                f"| {row['mean']['hit_ratio']:.3f} | {hits[0]:.3f} ± {hits[1]:.3f} "
                f"| {row['mean']['ttft_p99_s']:.2f} | {waits[0]:.2f} ± {waits[1]:.2f} |"
            )
    days = _days(row for rows in result["simulated"].values() for row in rows)
    return "\n".join([*lines, "", f"`{result['command']}`, {days}."])


def real_block(result: Mapping[str, Any]) -> str:
    """Real runs as `docs/benchmarks` shows them."""
    if "real" not in result:
        return "Nothing measured yet."
    lines = [
        "| replicas | exchange | day | rounds | hit ratio | by round | TTFT p99, s | by round | all rounds |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in result["real"]:
        median, (hits, waits) = row["median"], (row["ratios"][f] for f in JUDGED)
        all_s, ratio = row["ttft_p99_of_all_s"], row["ttft_p99_of_all_ratio"]
        way = "" if row["pickers"] == 1 else row["exchange"]
        lines.append(
            f"| {row['pickers']} | {way} | {row['date']} | {row['rounds']} "
            f"| {median['hit_ratio']:.3f} | {_spread(hits)} "
            f"| {median['ttft_p99_s']:.2f} | {_spread(waits)} | {all_s:.2f}, {ratio:.2f} |"
        )
    days = _days(result["real"])
    return "\n".join([*lines, "", f"`python -m bench.replicas --real --write`, {days}."])


def _spread(ratios: Sequence[float]) -> str:
    """Median, smallest and largest."""
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def main(args: argparse.Namespace) -> None:
    began, busy = time.monotonic(), os.getloadavg()[0]
    path = rig.RESULTS / "replicas.json"
    recorded = msgspec.json.decode(path.read_bytes()) if path.exists() else {}
    parts = {part: recorded[part] for part in PARTS if part in recorded}

    def write() -> None:
        if args.write:
            rig.write("replicas", "python -m bench.replicas --write", parts)

    if args.real:
        kinds = [(1, NONE), *((n, exchange) for exchange in args.exchange for n in COUNTS[1:])]
        parts["real"] = written(parts, _dated(uvloop.run(real(args.rounds, kinds))))
        parts["real_load_average"] = round(busy, 1)
        write()
    else:
        for name in args.only:
            if "mooncake" in name and not os.environ.get("EXTPROC_TRACES"):
                print(f"{name}: left out, EXTPROC_TRACES does not name the folder of the traces")
                continue
            rows = _dated(simulated(name, seeds=args.seeds, jobs=args.jobs))
            parts["simulated"] = parts.get("simulated", {}) | {name: rows}
            write()
    print(f"{time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=NAMES, default=list(NAMES))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--real", action="store_true")
    parser.add_argument("--exchange", nargs="+", choices=EXCHANGES, default=list(EXCHANGES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--write", action="store_true")
    main(parser.parse_args())
