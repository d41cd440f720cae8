"""`python -m bench.real_vllm`: see the package."""

from __future__ import annotations

import argparse
import asyncio
import itertools
import signal
import sys
from pathlib import Path
from typing import Any

import aiohttp

from bench import rig
from bench.real_vllm import counters, install, replicas, report, runs, tiny, workload
from extproc.demo import stack
from extproc.errors import ConfigError

STRATEGIES = ("round-robin", "prefix-hash", "adaptive")
GROUPS = (12, 24)
#: Groups of each adapter.
ADAPTER_GROUPS = 3
#: The run whose text is not four bytes a token.
OTHER_TEXT = "12 groups, 2.5 bytes a token"
SEED = 7
REQUEST_TIMEOUT_S = 120.0
#: Everything after the installation; many times what it takes on two free cores.
TOTAL_TIMEOUT_S = 2400.0


async def compare(python: Path, model: Path) -> dict[str, Any]:
    """Every run on real engines through the picker, then on simulated ones as it was routed.

    The simulated engines get the same requests on the same replicas in the same order, because
    what a picker chooses depends on time; so only the engines differ.
    """
    plan = {
        f"{groups} groups": workload.asks([replicas.MODEL], groups, seed=SEED) for groups in GROUPS
    }
    plan["adapters"] = workload.asks(tiny.ADAPTERS, ADAPTER_GROUPS, seed=SEED)
    order = list(itertools.product(STRATEGIES, plan))
    # Only where something is predicted; and the simulated engine counts other tokens in it.
    plan[OTHER_TEXT] = workload.asks([replicas.MODEL], GROUPS[0], seed=SEED, tail="q")
    real: dict[str, dict[str, Any]] = {strategy: {} for strategy in STRATEGIES}
    simulated: dict[str, dict[str, Any]] = {strategy: {} for strategy in STRATEGIES}
    places: dict[tuple[str, str], list[int]] = {}
    differences: list[str] = []
    timeout = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        print("starting two real engines", flush=True)
        async with (
            stack.stack() as children,
            replicas.real(children, session, python=python, model=model) as engines,
        ):
            for strategy, name in [*order, ("adaptive", OTHER_TEXT)]:
                figures, went = await runs.routed(session, engines, strategy, plan[name])
                real[strategy][name] = figures
                # The engine of a request is unknown only when it failed, which is reported anyway.
                places[strategy, name] = [
                    engines.index(address) if address else 0 for address in went
                ]
                print(f"{strategy:12} {name:29} {report.line(figures)}", flush=True)
            for engine in engines:
                served = await replicas.text(session, engine)
                listed = await replicas.models(session, engine)
                differences += counters.differences(served, adapters=tiny.ADAPTERS, models=listed)
        print("the same requests on the same replicas, simulated", flush=True)
        async with stack.stack() as children:
            engines = await replicas.simulated(children)
            for strategy, name in order:
                figures = await runs.replayed(session, engines, plan[name], places[strategy, name])
                simulated[strategy][name] = figures
                print(f"{strategy:12} {name:29} {report.line(figures)}", flush=True)
    prompt = real[STRATEGIES[0]][f"{GROUPS[0]} groups"]
    tokens = prompt["counter_tokens"]["prompt"] / prompt["requests"]
    return {
        "prompt_tokens": round(tokens),
        "ideal_hit_ratio": round(workload.ideal(tokens, replicas.BLOCK_TOKENS), 4),
        "real": real,
        "simulated": simulated,
        "page_differences": differences,
    }


async def _bounded(python: Path, model: Path) -> dict[str, Any]:
    """`compare` with an end, also when it is asked to end: children go with the blocks."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    async with asyncio.timeout(TOTAL_TIMEOUT_S):
        return await compare(python, model)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.real_vllm", description=__doc__)
    install.add_flags(parser)
    parser.add_argument("--write", action="store_true", help="write bench/results/real_vllm.json")
    args = parser.parse_args()
    try:
        python, model, installed = install.prepare(args)
        figures = asyncio.run(_bounded(python, model))
    except ConfigError as error:
        print(f"bench.real_vllm: {error}", file=sys.stderr)
        return 2
    except asyncio.CancelledError:
        return 130
    print(report.table(figures))
    problems = report.problems(figures)
    for problem in problems:
        print(f"WRONG: {problem}")
    if args.write:
        settings = {
            **installed,
            "replicas": replicas.COUNT,
            "kv_tokens": replicas.BLOCKS * replicas.BLOCK_TOKENS,
            "block_tokens": replicas.BLOCK_TOKENS,
            "shared_tokens": workload.SHARED_TOKENS,
            "own_tokens": workload.OWN_TOKENS,
            "requests_of_a_group": workload.REQUESTS_PER_GROUP,
            "at_once": runs.AT_ONCE,
            "seed": SEED,
        }
        path = rig.write("real_vllm", "python -m bench.real_vllm --write", {**settings, **figures})
        print(f"wrote {path.relative_to(rig.ROOT)}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
