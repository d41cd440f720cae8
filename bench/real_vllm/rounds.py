"""`python -m bench.real_vllm.rounds`: strategies on real engines with tight caches, in paired rounds.

In each round, every strategy gets the same requests, from empty caches and behind a picker that
knows nothing yet; the order of the strategies rotates. `affinity` is perfect affinity: no picker,
each group of prompts always goes to the same of two engines, and both have as many tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import shlex
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import aiohttp

from bench import agreement, rig, slices
from bench.real_vllm import install, replicas, report, runs, workload
from bench.real_vllm.__main__ import REQUEST_TIMEOUT_S, SEED
from extproc.demo import stack

RESULT: Final = "real_vllm_rounds"

#: The strategy without a picker.
AFFINITY: Final = "affinity"
STRATEGIES: Final = ("round-robin", AFFINITY, "least-request", "balanced", "lmetric", "adaptive")

ROUNDS: Final = 6

#: Seconds one round of one workload may take; some ten times what it takes on two free cores.
_ROUND_TIMEOUT_S: Final = 900.0

#: Wanted of `adaptive`: share of the hits between round robin and perfect affinity, and times to the
#: first token over those of least-request.
WANTED_HITS: Final = 0.9
WANTED_TTFT: Final = 1.0

#: What is kept of a run.
_FIGURES_STORED: Final = (
    *("failed", "hit_ratio", "ttft_mean_ms", "ttft_p50_ms", "ttft_p95_ms", "wall_s", "engine_ms"),
    *("requests_by_replica", "preemptions", "prediction", "believed", "server_ms", "waits_ms"),
)


def rotated(number: int) -> tuple[str, ...]:
    """The strategies in the order of a round: each is first, and last, equally often."""
    at = number % len(STRATEGIES)
    return STRATEGIES[at:] + STRATEGIES[:at]


async def measure_round(
    session: aiohttp.ClientSession, engines: Sequence[str], name: str, number: int
) -> dict[str, Any]:
    """One round of one workload: a run of each strategy, by its name."""
    tight = workload.tight(replicas.MODEL, seed=SEED + number)[name]
    how = {"at_once": tight.at_once, "in_bursts": tight.in_bursts}
    figures: dict[str, Any] = {}
    for strategy in rotated(number):
        if strategy == AFFINITY:
            places = [ask.group % len(engines) for ask in tight.asks]
            run = await runs.replayed(session, engines, tight.asks, places, **how)
        else:
            run, _ = await runs.routed(session, engines, strategy, tight.asks, **how)
        print(f"{name:16} {strategy:14} {report.line(run)}", flush=True)
        figures[strategy] = {key: run[key] for key in _FIGURES_STORED if key in run}
    return figures


def way(run: Mapping[str, Any]) -> dict[str, float]:
    """Hits of each strategy of a round: 0 is round robin, 1 perfect affinity."""
    least, most = run["round-robin"]["hit_ratio"], run[AFFINITY]["hit_ratio"]
    return {name: (row["hit_ratio"] - least) / (most - least) for name, row in run.items()}


def summarize(rounds: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Medians over the rounds of a workload, by strategy; ratios are taken within a round."""
    ways = [way(row) for row in rounds]
    return {
        strategy: {
            "hit_ratio": _median(row[strategy]["hit_ratio"] for row in rounds),
            "way": _median(row[strategy] for row in ways),
            "fuller": _median(
                max(row[strategy]["requests_by_replica"])
                / sum(row[strategy]["requests_by_replica"])
                for row in rounds
            ),
            **{
                key: _median(row[strategy][f"{key}_ms"] for row in rounds)
                for key in ("ttft_p50", "ttft_p95")
            },
            **{
                f"{key}_ratio": _median(
                    row[strategy][f"{key}_ms"] / row["least-request"][f"{key}_ms"] for row in rounds
                )
                for key in ("ttft_p50", "ttft_p95")
            },
        }
        for strategy in STRATEGIES
    }


def _median(values: Iterable[float]) -> float:
    return round(statistics.median(values), 3)


def beliefs(workloads: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Beliefs of `adaptive` about the replicas at the end of its runs, beside what they are."""
    runs_of_adaptive = [row["adaptive"] for rounds in workloads.values() for row in rounds]
    apart = [max(steps) / min(steps) for steps in _believed(runs_of_adaptive, "step_ms")]
    room = [tokens for pair in _believed(runs_of_adaptive, "capacity_tokens") for tokens in pair]
    predictions = [run["prediction"] for run in runs_of_adaptive if run.get("prediction")]
    if not (apart and room and predictions):
        return "No beliefs were recorded."
    ratio = _median(row["predicted_tokens"] / row["found_tokens"] for row in predictions)
    return (
        f"At the end of its runs, `adaptive` believed the iterations of the two equal replicas a "
        f"factor of {_median(apart):.2f} apart (median, {max(apart):.2f} at most) and their caches "
        f"to hold {_median(room):.0f} tokens (median, {min(room):.0f} to {max(room):.0f}); it had "
        f"predicted {ratio:.3f} of the cached tokens that the replicas found."
    )


def phases(workloads: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Part of the time to the first token of `adaptive` that its prompts spend in the engines, by workload."""
    parts = []
    for name, rounds in workloads.items():
        known = [row["adaptive"] for row in rounds if row["adaptive"].get("engine_ms")]
        if known:
            inside = _median(sum(row["engine_ms"].values()) for row in known)
            parts.append(
                f"{name} {inside:.0f} of {_median(row['ttft_mean_ms'] for row in known):.0f} ms"
            )
    if not parts:
        return ""
    return (
        f"Of the mean time to the first token of `adaptive`, so much passes in the queues and prefills "
        f"of the engines: {', '.join(parts)} (medians). The rest passes before and behind: in the "
        f"HTTP servers and tokenizers of the engines, in Envoy and in the client."
    )


def waits(workloads: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Delays of first tokens of `adaptive`, and CPU time of the HTTP servers of the engines, by workload."""
    parts = []
    for name, rounds in workloads.items():
        known = [row["adaptive"] for row in rounds if row["adaptive"].get("waits_ms")]
        if known:
            ahead = _median(row["waits_ms"]["ahead"] for row in known)
            tokens = _median(row["waits_ms"]["hundred_tokens"] for row in known)
            server = _median(row["server_ms"] for row in known)
            parts.append(f"{name} {ahead:.0f}, {tokens:.1f} and {server:.0f} ms")
    if not parts:
        return ""
    return (
        f"How much later a first token of `adaptive` comes for each request ahead at the same replica "
        f"whose first token is not there yet, and for each 100 uncached tokens (least squares over the "
        f"requests of a run), and the CPU time of a replica's HTTP server for each request: "
        f"{'; '.join(parts)} (medians)."
    )


def _believed(rows: Sequence[Mapping[str, Any]], key: str) -> list[list[float]]:
    """Beliefs of one kind of the runs that have it of both replicas."""
    pairs = [row.get("believed", {}).get(key, []) for row in rows]
    return [pair for pair in pairs if len(pair) == replicas.COUNT and min(pair) > 0.0]


def intervals(workloads: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Confidence intervals of 95 % of what is wanted of `adaptive`, over the rounds of each workload."""
    parts = []
    for name, rounds in workloads.items():
        hits = [way(row)["adaptive"] for row in rounds]
        p50, p95 = (
            [row["adaptive"][key] / row["least-request"][key] for row in rounds]
            for key in ("ttft_p50_ms", "ttft_p95_ms")
        )
        texts = [
            f"{low:.2f} to {high:.2f}"
            for _, low, high in (slices.confidence(values) for values in (hits, p50, p95))
        ]
        parts.append(f"{name} ({len(rounds)} rounds) {texts[0]}, {texts[1]} x and {texts[2]} x")
    return (
        f"95 % intervals of these medians of `adaptive`, by bootstrap over the rounds, of the way, p50 and "
        f"p95: {'; '.join(parts)}."
    )


def missed(workloads: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[str]:
    """Bars of `adaptive` that are missed, and requests that failed."""
    lines = []
    for name, rounds in workloads.items():
        row = summarize(rounds)["adaptive"]
        if row["way"] < WANTED_HITS:
            lines.append(f"{name}: {row['way']} of the hits, wanted {WANTED_HITS}")
        lines += [
            f"{name}: {key} {row[f'{key}_ratio']} x least-request, wanted {WANTED_TTFT}"
            for key in ("ttft_p50", "ttft_p95")
            if row[f"{key}_ratio"] > WANTED_TTFT
        ]
        failed = sum(run["failed"] for figures in rounds for run in figures.values())
        lines += [f"{name}: {failed} requests failed"] if failed else []
    return lines


def block(result: Mapping[str, Any]) -> str:
    """The text of `docs/benchmarks` about a result as it was written."""
    rows = [
        "| workload | strategy | hit ratio | of the way | fuller | TTFT p50 | ratio | p95 | ratio |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, rounds in result["workloads"].items():
        for strategy, row in summarize(rounds).items():
            rows.append(
                f"| {name} | `{strategy}` | {row['hit_ratio']:.3f} | {row['way']:.2f} "
                f"| {row['fuller']:.2f} | {row['ttft_p50']:.0f} ms | {row['ttft_p50_ratio']:.2f} x "
                f"| {row['ttft_p95']:.0f} ms | {row['ttft_p95_ratio']:.2f} x |"
            )
    machine, wrong = result["machine"], missed(result["workloads"])
    counts = sorted({len(rounds) for rounds in result["workloads"].values()})
    added = "".join(
        f"; more by `{more['command']}` at {more['commit']}, {more['date']}"
        for more in result.get("added", ())
    )
    text = (
        f"`{result['command']}`, {result['vllm']} with torch {result['torch']}, "
        f"{result['replicas']} replicas of {result['kv_tokens']} KV tokens in blocks of "
        f"{result['block_tokens']}; {result['date']}, {machine['cores']} cores of {machine['cpu']}{added}. "
        f"Medians of {' to '.join(map(str, counts))} rounds. Wanted of `adaptive`: {WANTED_HITS} of the way, and TTFT p50 "
        f"and p95 not above those of `least-request`. "
        + (f"Missed: {'; '.join(wrong)}." if wrong else "All are met.")
    )
    known = " ".join(
        filter(None, (about(result["workloads"]) for about in (intervals, beliefs, phases, waits)))
    )
    return "\n".join([*rows, "", text, "", known])


async def measure(
    python: Path,
    model: Path,
    names: Mapping[str, int],
    rounds: int,
    running: Sequence[str],
) -> dict[str, list[dict[str, Any]]]:
    """Rounds of some workloads, by name.

    Args:
        python: Of the virtualenv with vLLM.
        model: Folder of the model.
        names: Of workloads, and the number of the first round of each.
        rounds: Of each of them.
        running: Addresses of engines that run; empty starts them.
    """
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    timeout = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S)
    # A connection that waits for the next burst is closed by the engine, maybe just when it is used.
    connector = aiohttp.TCPConnector(force_close=True)
    async with (
        aiohttp.ClientSession(timeout=timeout, connector=connector) as session,
        contextlib.AsyncExitStack() as stays,
    ):
        if not running:
            children = await stays.enter_async_context(stack.stack())
            engines = replicas.real(children, session, python=python, model=model)
            running = await stays.enter_async_context(engines)
        for number, (name, first) in itertools.product(range(rounds), names.items()):
            async with asyncio.timeout(_ROUND_TIMEOUT_S):
                results[name].append(await measure_round(session, running, name, first + number))
    return results


def main() -> int:
    names = list(workload.tight(replicas.MODEL, seed=SEED))
    parser = argparse.ArgumentParser(prog="python -m bench.real_vllm.rounds", description=__doc__)
    install.add_flags(parser)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="of each workload (%(default)s)")
    parser.add_argument("--only", nargs="+", choices=names, default=names, help="these workloads")
    parser.add_argument(
        "--engines",
        default="",
        help="ip:port of both replicas, which run with the flags of this bench",
    )
    parser.add_argument("--write", action="store_true", help=f"write bench/results/{RESULT}.json")
    parser.add_argument(
        "--add",
        action="store_true",
        help="with --write: more rounds, with other requests, to those that are recorded",
    )
    args = parser.parse_args()
    python, model, installed = install.prepare(args)
    running = args.engines.split(",") if args.engines else ()
    recorded = _recorded() if args.add else {"workloads": {}}
    numbers = {name: len(recorded["workloads"].get(name, ())) for name in args.only}
    with agreement.has_priority():
        measured = asyncio.run(measure(python, model, numbers, args.rounds, running))
    workloads = recorded["workloads"] | {
        name: [*recorded["workloads"].get(name, ()), *rounds] for name, rounds in measured.items()
    }
    wrong = missed(workloads)
    for line in wrong:
        print(f"MISSED: {line}")
    print(intervals(workloads))
    if args.write:
        only = "" if args.only == names else f" --only {' '.join(map(shlex.quote, args.only))}"
        count = "" if args.rounds == ROUNDS else f" --rounds {args.rounds}"
        add = " --add" if args.add else ""
        command = f"python -m bench.real_vllm.rounds{only}{count} --write{add}"
        document = {
            **installed,
            "replicas": replicas.COUNT,
            "kv_tokens": replicas.BLOCKS * replicas.BLOCK_TOKENS,
            "block_tokens": replicas.BLOCK_TOKENS,
            "seed": SEED,
            "workloads": workloads,
        }
        path = _write(command, document, recorded if args.add else None)
        print(f"wrote {path.relative_to(rig.ROOT)}")
    return 1 if wrong else 0


def _recorded() -> dict[str, Any]:
    """The result as it was written."""
    recorded: dict[str, Any] = json.loads((rig.RESULTS / f"{RESULT}.json").read_text())
    return recorded


def _write(command: str, document: Mapping[str, Any], recorded: Mapping[str, Any] | None) -> Path:
    """Write a result; one that adds rounds to a recorded one keeps where and when that is of."""
    path = rig.write(RESULT, command, dict(document))
    if recorded is not None:
        now = _recorded()
        added = {key: now[key] for key in ("command", "commit", "date")}
        extended = {**recorded, **document, "added": [*recorded.get("added", ()), added]}
        path.write_text(json.dumps(extended, indent=2) + "\n")
    return path


if __name__ == "__main__":
    sys.exit(main())
