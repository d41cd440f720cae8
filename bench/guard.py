"""Measures what the guard around a foreign plugin adds to each call.

    python -m bench.guard [--endpoints 100] [--calls 20000]

Bare and guarded calls take turns in blocks, so that a slow moment of the machine hits both; the
figure is the median of the blocks' differences.
"""

from __future__ import annotations

import argparse
import json
import statistics
from time import perf_counter

from extproc.scheduling.load_scorers import InFlight
from extproc.scheduling.pickers import MaxScorePicker
from extproc.scheduling.plugin_guard import GuardedPlugin, GuardFactory, PluginCounters
from extproc.testing import builders, probes

_BLOCK = 100


def spent_us(act) -> float:
    """Microseconds of one call, mean of a block."""
    started = perf_counter()
    for _ in range(_BLOCK):
        act()
    return (perf_counter() - started) / _BLOCK * 1e6


def compare(bare, guarded, calls: int) -> dict:
    """Medians of both and of their difference (us per call)."""
    pairs = [(spent_us(bare), spent_us(guarded)) for _ in range(calls // _BLOCK)]
    return {
        "bare_us": round(statistics.median(bare for bare, _ in pairs), 2),
        "guarded_us": round(statistics.median(guarded for _, guarded in pairs), 2),
        "guard_us": round(statistics.median(guarded - bare for bare, guarded in pairs), 2),
    }


def main() -> None:
    """Measure a scorer, a picker and an observer, each with and without its guard; print JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--endpoints", type=int, default=100)
    parser.add_argument("--calls", type=int, default=20000)
    args = parser.parse_args()
    there, turn = builders.loaded_candidates(args.endpoints), probes.probe_context()
    totals = [0.5] * args.endpoints
    guards = GuardFactory(perf_counter, PluginCounters())
    result = {"endpoints": args.endpoints}
    scorer = InFlight()
    held = GuardedPlugin(scorer, guards)
    result["score"] = compare(
        lambda: scorer.score(turn, there), lambda: held.score(turn, there), args.calls
    )
    picker = MaxScorePicker()
    picking = GuardedPlugin(picker, guards)
    result["pick"] = compare(
        lambda: picker.pick(turn, there, totals, count=1),
        lambda: picking.pick(turn, there, totals, count=1),
        args.calls,
    )
    print(json.dumps(result))


if __name__ == "__main__":
    main()
