"""Measures the speed of the offline simulator.

    python -m bench.simulator [--large] [--write]

One run of the default strategy: 8,000 requests on 8 engines, the median of three, or with `--large`
100,000 requests on 1,000 engines. A run uses one core, so the bar is on CPU seconds: they are what
a clock shows where the core is not shared. Both are recorded.
"""

from __future__ import annotations

import argparse
import os
import time

import msgspec

from bench import rig
from extproc.simulator import simulation_runs
from extproc.simulator.fleet import client, scenario, workloads

#: Requests per second and engine: three quarters of what an L4 with an 8B model can do here.
RATE_PER_S = 8


def a_scenario(engines: int, requests: int) -> scenario.Scenario:
    """KubeAI's repeated prompts, as in the published runs of eight L4, at an open rate."""
    return scenario.Scenario(
        title=f"{requests:,} requests on {engines:,} engines",
        fleet=[scenario.EngineGroup(count=engines, profile="l4-8b-fp8")],
        workload=workloads.Repeated(
            requests=requests,
            conversations=max(1, requests // 20),
            turns=10,
            prompt=workloads.Lengths(mean=150, deviation=150, shape="lognormal"),
            mean_prompt_tokens=832,
            output=workloads.Lengths(
                mean=76, deviation=70, shape="lognormal", lowest=4, highest=400
            ),
        ),
        client=client.Client(rate_per_s=RATE_PER_S * engines),
    )


def measure(engines: int, requests: int, runs: int) -> dict:
    """Seconds of a run; the median of several by CPU."""
    definition = a_scenario(engines, requests)
    column = simulation_runs.column(
        scenario.Variant(name="adaptive", strategy="adaptive"), folder=rig.ROOT, where="bench"
    )
    seeds = list(range(1, runs + 1))
    todo = simulation_runs.SimulationPlan(
        msgspec.structs.replace(definition, seeds=seeds), [column]
    )
    measured = []
    clocks = time.perf_counter(), time.process_time()
    for run in simulation_runs.runs(todo, jobs=1):
        now = time.perf_counter(), time.process_time()
        measured.append((now[1] - clocks[1], now[0] - clocks[0], run.summary))
        clocks = time.perf_counter(), time.process_time()
    cpu_s, wall_s, summary = sorted(measured, key=lambda row: row[0])[len(measured) // 2]
    return {
        "engines": engines,
        "requests": requests,
        "runs": runs,
        "cpu_s": round(cpu_s, 2),
        "wall_s": round(wall_s, 2),
        "load_average": round(os.getloadavg()[0], 1),
        "answered": summary.requests,
        "virtual_s": round(summary.duration_s, 1),
    }


def main(*, large: bool, write: bool) -> None:
    figures = measure(1000, 100_000, 1) if large else measure(8, 8_000, 3)
    print(figures)
    if write:
        name, flag = ("simulator_large", " --large") if large else ("simulator", "")
        rig.write(name, f"python -m bench.simulator{flag} --write", figures)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--large", action="store_true")
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    main(large=args.large, write=args.write)
