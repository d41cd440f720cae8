"""Checks of the adaptive strategy in virtual time that have no bar: bursts, seldom scrapes, endless caches.

    python -m bench.brain [--trace FILE] [--strategy NAME]... [--write]

FILE is the Mooncake conversation trace (JSON lines with timestamp, input_length, output_length and
hash_ids of 512-token blocks). Without it the trace is left out. Nothing is measured in real time, so
results do not depend on the machine: the same seed gives the same numbers.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Sequence
from pathlib import Path

from bench import rig
from extproc.config.pool_sections import SchedulingSection
from extproc.config.settings import PrefixSection, Settings
from extproc.simulator.fleet import scenario, simulation, traces
from extproc.simulator.fleet.sim_request import RequestSpec, SimSession
from extproc.simulator.fleet.workloads import FixedWorkload

ENGINES = 8

#: Tokens of a block of the trace, by which its publishers count hits.
TRACE_BLOCK = 512


def simulate(
    requests: Sequence[tuple[float, RequestSpec]],
    strategy: str,
    *,
    fleet: scenario.EngineGroup | None = None,
    scrape_s: float = 0.2,
    seed: int = 1,
) -> dict[str, float]:
    """Figures of a run of requests at their times, on eight L4 unless another fleet is named."""
    definition = scenario.Scenario(
        fleet=[fleet or scenario.EngineGroup(count=ENGINES)],
        workload=FixedWorkload([SimSession((spec,), at=at) for at, spec in requests]),
        picking=scenario.Picking(scrape_s=scrape_s),
    )
    settings = Settings(
        scheduling=SchedulingSection(strategy=strategy),
        prefix=PrefixSection(capacity_blocks=10**7),
    )
    metrics = simulation.Simulation(definition, settings, seed=seed).run()
    summary = metrics.summary()
    assert not summary.failed, summary.failed
    blocks = sum(-(-sent.work.prompt_tokens // TRACE_BLOCK) for sent in metrics.requests)
    return {
        "requests": summary.requests,
        "hit_ratio_tokens": summary.hit_ratio,
        "hit_ratio_blocks": sum(s.cached_tokens // TRACE_BLOCK for s in metrics.requests) / blocks,
        "max_over_mean_requests": summary.requests_max_over_mean,
        "max_over_mean_tokens": summary.tokens_max_over_mean,
        "ttft_mean_ms": summary.ttft_s.mean * 1e3,
        "ttft_p50_ms": summary.ttft_s.p50 * 1e3,
        "ttft_p99_ms": summary.ttft_s.p99 * 1e3,
    }


def mooncake(path: Path, strategy: str) -> dict[str, float]:
    """The conversation trace on eight H100 with caches nothing falls out of."""
    limits = {"kv_tokens": 200_000_000, "max_model_len": 400_000}
    fleet = scenario.EngineGroup(count=ENGINES, profile="h100-8b-bf16", set=limits)
    with path.open() as lines:
        requests = list(traces.read("mooncake", lines, where=str(path)))
    return simulate(requests, strategy, fleet=fleet)


def burst(strategy: str, *, distinct: bool) -> dict[str, float]:
    """A hundred new prompts of 2,000 tokens within 10 ms."""
    names = [(k + 1 if distinct else 1) << 20 for k in range(100)]
    return simulate(
        [
            (2.0 + 1e-4 * k, RequestSpec(2000, 100, range(name, name + 125)))
            for k, name in enumerate(names)
        ],
        strategy,
    )


def conversations(strategy: str, *, scrape_s: float, seed: int) -> dict[str, float]:
    """Multi-turn conversations at 60 % of what eight L4 carry, scraped every so often."""
    rng, now = random.Random(seed), 0.0
    lengths = [0] * 400
    requests = []
    for _ in range(4000):
        now += rng.expovariate(45.0)
        at = rng.randrange(len(lengths))
        lengths[at] += rng.randint(60, 260)
        if lengths[at] > 2000:
            lengths[at] = 100
        name = at << 20
        keys = range(name, name + lengths[at] // 16)
        output = min(400, max(4, round(rng.lognormvariate(4.0, 0.8))))
        requests.append((now, RequestSpec(lengths[at], output, keys, session=str(at))))
    return simulate(requests, strategy, scrape_s=scrape_s, seed=seed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--strategy", action="append")
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    results: dict[str, dict] = {}
    for strategy in args.strategy or ["adaptive", "lmetric", "balanced", "least-request"]:
        rows = results[strategy] = {}
        if args.trace:
            rows["mooncake"] = mooncake(args.trace, strategy)
        rows["burst of distinct"] = burst(strategy, distinct=True)
        rows["burst of one"] = burst(strategy, distinct=False)
        for name, scrape_s in (("scraped every 0.2 s", 0.2), ("scraped every 10 s", 10.0)):
            runs = [conversations(strategy, scrape_s=scrape_s, seed=seed) for seed in (1, 2, 3)]
            rows[name] = {key: statistics.mean(run[key] for run in runs) for key in runs[0]}
        for name, row in rows.items():
            print(strategy, name, {key: round(value, 3) for key, value in row.items()}, flush=True)
    if args.write:
        rig.write("brain", "python -m bench.brain --trace FILE --write", {"strategies": results})


if __name__ == "__main__":
    main()
