"""Bounds that no picker can beat in a scenario, computed without a simulation.

Every prompt meets an idle engine, the fastest of the fleet, that has every block which any request
before it had: then its first token takes the iterations of what is left. And the fleet is never idle,
every block is computed once in all of it, and its batches are as large as engines and the client's
limit allow, alike on engines that are alike (tokens per second are concave in the batch, so unlike
batches answer less): then answers end at the rate of the work. No order of requests and no knowledge
of the future comes below.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence

from extproc.simulator import profiles, simulation_runs
from extproc.simulator.fleet import workloads
from extproc.simulator.fleet.sim_request import KEY_TOKENS, RequestSpec


def bounds(plan: simulation_runs.SimulationPlan, *, seed: int) -> dict[str, float]:
    """Bounds of one run.

    Returns:
        `ttft_mean_s` and `ttft_p99_s`, both at least, and `requests_per_s`, at most.
    """
    fleet = [p for engines in plan.scenario.fleet for p in [engines.resolved()] * engines.count]
    # The trace's rows are read as a run reads them.
    rows = simulation_runs.trace_rows(plan.trace)
    source = workloads.sessions(plan.scenario.workload, random.Random(seed * 2 + 1), rows)
    works = [(work, left) for session in source for work, left in find_uncached(session.specs)]
    client = plan.scenario.client
    return find_bounds(
        fleet, serve_once(works), most_open=client.users or client.concurrency or math.inf
    )


def find_uncached(works: Sequence[RequestSpec]) -> Iterator[tuple[RequestSpec, int]]:
    """Every request of a session with the tokens that its own answers before put into the cache."""
    answered = 0
    for work in works:
        yield work, answered
        answered = work.output_tokens


def serve_once(works: Sequence[tuple[RequestSpec, int]]) -> Iterator[tuple[RequestSpec, int]]:
    """Every request with the prompt tokens that must be computed for it, and no others."""
    cached: set[int] = set()
    for work, answered in works:
        full = (work.prompt_tokens - 1) // KEY_TOKENS
        keys = work.keys[:full]
        fresh = sum(key not in cached for key in keys) * KEY_TOKENS
        cached.update(work.keys[: work.prompt_tokens // KEY_TOKENS])
        rest = work.prompt_tokens - full * KEY_TOKENS
        yield work, max(rest, fresh + rest - answered)


def find_bounds(
    fleet: Sequence[profiles.EngineProfile],
    works: Iterator[tuple[RequestSpec, int]],
    *,
    most_open: float,
) -> dict[str, float]:
    best = profiles.EngineProfile(
        name="best",
        base_s=min(p.base_s for p in fleet),
        prefill_s_per_token=min(p.prefill_s_per_token for p in fleet),
        decode_s_per_seq=min(p.decode_s_per_seq for p in fleet),
        context_s_per_token=min(p.context_s_per_token for p in fleet),
        kv_tokens=max(p.kv_tokens for p in fleet),
        token_budget=max(p.token_budget for p in fleet),
        max_num_seqs=max(p.max_num_seqs for p in fleet),
    )
    speed = sum(best.base_s / p.base_s for p in fleet)
    batch: float = best.max_num_seqs
    if len(set(fleet)) == 1:
        batch = min(batch, most_open / len(fleet))
    firsts: list[float] = []
    work_s = 0.0
    for work, computed in works:
        steps = math.ceil(computed / best.token_budget)
        prefill = computed * best.prefill_s_per_token
        firsts.append(steps * best.base_s + prefill)
        decodes = work.output_tokens - 1
        context = work.prompt_tokens + 0.5 * decodes
        step_s = best.base_s / batch + best.decode_s_per_seq
        work_s += prefill + decodes * (step_s + context * best.context_s_per_token)
    firsts.sort()
    return {
        "ttft_mean_s": sum(firsts) / len(firsts),
        "ttft_p99_s": firsts[math.ceil(0.99 * len(firsts)) - 1],
        "requests_per_s": len(firsts) / (work_s / speed),
    }
