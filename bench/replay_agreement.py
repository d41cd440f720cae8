"""Compares `extproc replay` of recorded runs with what clients measured: `bench.agreement --replay`."""

from __future__ import annotations

import argparse
import collections
import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench import rig
from bench.agreement import (
    DRAWS,
    LATE_MS,
    SCENARIOS,
    mean,
    offline,
    real,
    scaled,
)
from extproc.simulator import replay
from extproc.simulator.fleet import scenario

#: How far estimates may be off and how many decisions must agree (issue 16), the pace
#: of the engines, the share of the mean time to the first token by which timers may be late, and the
#: measured time per output token over that of the engines' profile.
REPLAY_BOUND, REPLAY_AGREEMENT = 0.15, 0.99
REPLAY_SPEED, REPLAY_STRATEGIES = 1.0, ("round-robin", "adaptive")
REPLAY_LATE_RATIO, REPLAY_SLOWNESS = 0.02, 1.05


async def replayed(
    definition: scenario.Scenario, strategy: str, *, speed: float, seed: int
) -> dict[str, float]:
    """A real run that is recorded, and what a replay of the recording says of it."""
    paced = scaled(definition, speed)
    expected = mean(offline(paced, strategy, seed=seed, draws=DRAWS))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "decisions.jsonl"
        measured = await real(paced, strategy, seed=seed, record=str(path))
        loaded = replay.load(path, strategies=(), configs=())
    again = replay.scenario_of(loaded, range(1, DRAWS + 1))
    estimated_s = replay.simulate_as_recorded(loaded, again).summary.ttft_s.mean
    started = replay.with_recorded_start(loaded, again)
    runs = [replay.simulate(started, loaded.columns[0], seed=seed) for seed in again.seeds]
    own_s = statistics.fmean(run.summary.ttft_s.mean for run in runs)
    (agreement,) = loaded.agreements
    return {
        "decisions": agreement.decisions,
        "agreement": round(agreement.ratio, 4),
        "by_chance": agreement.by_chance,
        "ttft_mean_s": round(measured["ttft_mean_s"], 4),
        "estimated_ttft_mean_s": round(estimated_s, 4),
        "ratio": round(estimated_s / measured["ttft_mean_s"], 3),
        "ratio_of_new_decisions": round(own_s / measured["ttft_mean_s"], 3),
        "timers_late_ms": round(measured["timers_late_ms"], 1),
        "slowness": round(measured["tpot_mean_s"] / expected["tpot_mean_s"], 3),
    }


def is_late(row: Mapping[str, float]) -> bool:
    """True if a machine was too late for a run to count: its timers, or the engines on it.

    Engines are late where an output token took longer than their profile says.
    """
    return (
        row["timers_late_ms"] > max(LATE_MS, REPLAY_LATE_RATIO * 1e3 * row["ttft_mean_s"])
        or row["slowness"] > REPLAY_SLOWNESS
    )


def is_replay_met(result: Mapping[str, Any]) -> bool:
    """True if a result has runs, and each is within the bounds."""
    return bool(result["runs"]) and all(
        abs(row["ratio"] - 1.0) <= REPLAY_BOUND and row["agreement"] >= REPLAY_AGREEMENT
        for row in result["runs"]
    )


async def replay_all(args: argparse.Namespace) -> bool:
    """Record every combination, and print what its replay says; returns whether the bar is met.

    Runs that count are made once, others again behind the rest, until the time is over.
    """
    ends_at, longest_s, busy = time.monotonic() + 60.0 * args.minutes, 0.0, os.getloadavg()[0]
    waiting = collections.deque(itertools.product(args.seeds, args.strategy, args.scenario))
    runs: list[dict[str, Any]] = []
    discarded = 0
    while waiting and time.monotonic() + longest_s < ends_at:
        began = time.monotonic()
        seed, strategy, name = waiting.popleft()
        row = await replayed(SCENARIOS[name], strategy, speed=args.speed, seed=seed)
        longest_s = max(longest_s, time.monotonic() - began)
        note = ""
        if is_late(row):
            discarded, note = discarded + 1, "  the machine was late: not counted"
            waiting.append((seed, strategy, name))
        else:
            runs.append({"scenario": name, "strategy": strategy, "seed": seed, **row})
        print(f"{name:9}{strategy:13}{row}{note}", flush=True)
    seeds = " ".join(map(str, args.seeds))
    words = f"--speed {args.speed:g} --seeds {seeds} --minutes {args.minutes:g} --write"
    result = {"load_average_before": round(busy, 1), "discarded": discarded, "runs": runs}
    is_met = is_replay_met(result)
    print(
        f"{_replay_summary(result)}: {'met' if is_met else 'MISSED'}; {len(waiting)} without a run"
    )
    if args.write and runs:
        rig.write("replay", f"python -m bench.agreement --replay {words}", result)
    return is_met


def _replay_summary(result: Mapping[str, Any]) -> str:
    ratios = [row["ratio"] for row in result["runs"]]
    agreement = min((row["agreement"] for row in result["runs"]), default=0.0)
    return (
        f"{len(ratios)} runs, estimated / measured mean TTFT {min(ratios, default=0.0):.3f} to "
        f"{max(ratios, default=0.0):.3f}, decisions alike {agreement:.1%} or more"
    )


def replay_ratios(result: Mapping[str, Any]) -> str:
    """Estimated over measured mean TTFT of all runs, and those of new decisions out of bounds."""
    ratios = ", ".join(f"{row['ratio']:.2f}" for row in result["runs"])
    return f"{ratios}; {_new_decisions(result)}"


def _new_decisions(result: Mapping[str, Any]) -> str:
    """Ratios of new decisions that are out of bounds."""
    runs = result["runs"]
    ratios = [row["ratio_of_new_decisions"] for row in runs]
    outside = [f"{ratio:.3f}" for ratio in ratios if abs(ratio - 1.0) > REPLAY_BOUND]
    count = len(outside) or "none"
    text = f"with new decisions, {count} of {len(runs)} outside of {100 * REPLAY_BOUND:g} %"
    return f"{text} ({', '.join(outside)})" if outside else text


def replay_block(result: Mapping[str, Any]) -> str:
    """Replays of real runs as `docs/benchmarks` shows them."""
    lines = [
        "| workload | strategy | decisions alike | mean TTFT measured, ms | estimated | new decisions | timers late, ms | TPOT |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['scenario']} | `{row['strategy']}` | {row['agreement']:.1%} of {row['decisions']} | "
        f"{1e3 * row['ttft_mean_s']:.0f} | {1e3 * row['estimated_ttft_mean_s']:.0f} "
        f"({row['ratio']:.3f}) | {row['ratio_of_new_decisions']:.3f} | {row['timers_late_ms']:g} | {row['slowness']:.3f} |"
        for row in result["runs"]
    ]
    machine = result["machine"]
    text = (
        f"`{result['command']}`, {result['date']}, {machine['cores']} cores of {machine['cpu']} at a "
        f"load average of {result['load_average_before']:g} before; {result['discarded']} runs were "
        "discarded, as the machine was late. TPOT is over that of the engines' profile. "
        f"The bar is {'met' if is_replay_met(result) else 'missed'} with the recorded decisions; "
        f"{_new_decisions(result)}."
    )
    return "\n".join([*lines, "", text])
