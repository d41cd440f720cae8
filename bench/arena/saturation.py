"""Saturation of a scenario's fleet: the rate of sessions that a published strategy can answer.

It is found with LMetric, pickers that see everything, and without drift, so that it belongs to fleet
and traffic alone. Rates that are recorded in `bench/results/arena_rates.json` are taken from there:
then scenarios stay the same when strategies or the simulator change.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import random
from collections.abc import Sequence

import msgspec

from bench import rig
from bench.arena import scenarios
from extproc.simulator import simulation_runs
from extproc.simulator.fleet import scenario, simulation

#: The strategy that requests are sent with.
REFERENCE = "lmetric"

#: A rate is too high where fewer than this share of the sessions are answered at it.
_KEEPS_UP = 0.9

#: Offered above the highest rate that was answered so far.
_OVERLOAD = 1.5

#: Growth of the answered rate below which a search ends, and the runs it takes at most.
_GROWTH, _MOST_RUNS = 1.05, 5

RECORD = "arena_rates"


@dataclasses.dataclass(frozen=True)
class IdleTimes:
    """Times of the mean request on the mean engine of a fleet, alone and without a cache."""

    ttft_s: float
    tpot_s: float


def idle_times(drawn: scenarios.ArenaScenario) -> IdleTimes:
    """Times of an idle engine, means over engines and over sampled requests."""
    engines = [p for group in drawn.fleet for p in [group.resolved()] * group.count]
    prompt = output = 0.0
    for workload, share in drawn.parts:
        source = workload.source(random.Random(drawn.seed))
        specs = [spec for _ in range(100) for spec in next(source).specs]
        prompt += share * sum(spec.prompt_tokens for spec in specs) / len(specs)
        output += share * sum(spec.output_tokens for spec in specs) / len(specs)
    context = prompt + output / 2
    tpot = _mean([p.base_s + p.decode_s_per_seq + p.context_s_per_token * context for p in engines])
    ttft = _mean([1.5 * p.base_s + p.prefill_s_per_token * prompt for p in engines])
    return IdleTimes(ttft, tpot)


def find_rate(drawn: scenarios.ArenaScenario) -> float:
    """Sessions per second that the fleet answers when it is offered more, three digits.

    Overload of one and a half times what was answered before is offered, until that brings no more:
    with all sessions at once caches would hold less of each than they do at the rate that is sought.
    """
    fleet = [msgspec.structs.replace(group, has_metrics=True) for group in drawn.fleet]
    calm = dataclasses.replace(drawn, drift="", fleet=fleet, picking=scenario.Picking())
    offered = _OVERLOAD * scenarios.estimate_rate(calm.fleet, calm.parts, calm.seed)
    best = 0.0
    for _ in range(_MOST_RUNS):
        answered = _answered_rate(calm, offered)
        if answered >= _KEEPS_UP * offered:
            best = max(best, answered)
            offered *= _OVERLOAD
            continue
        if answered < _GROWTH * best:
            break
        best, offered = answered, _OVERLOAD * answered
    return float(f"{best:.3g}")


def recorded(drawn: scenarios.ArenaScenario) -> float | None:
    """The recorded rate of a scenario; None without one."""
    return _records().get(str(drawn.seed), {}).get(drawn.key)


@functools.cache
def _records() -> dict[str, dict[str, float]]:
    """Rates by key of the scenario, by seed."""
    path = rig.RESULTS / f"{RECORD}.json"
    return json.loads(path.read_text())["rates"] if path.exists() else {}


def _answered_rate(drawn: scenarios.ArenaScenario, rate_per_s: float) -> float:
    """Sessions per second that are answered, without the last ones, which find engines empty."""
    variant = scenario.Variant(name=REFERENCE, strategy=REFERENCE)
    column = simulation_runs.column(variant, folder=rig.ROOT, where="arena")
    run = simulation.Simulation(drawn.at_rate(rate_per_s), column.settings, seed=drawn.seed).run()
    ends = sorted(sent.sent_at + sent.took_s for sent in run.requests if not sent.failure)
    begin = min(sent.sent_at for sent in run.requests)
    last = len(ends) * 85 // 100
    return (last + 1) / (ends[last] - begin) / drawn.requests_per_session


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
