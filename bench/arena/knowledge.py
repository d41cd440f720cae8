"""Value of information: the default strategy with one input of its cost exact, beside itself.

A picker estimates what is on an engine. Here it is given the truth of one input at a time, and decides
by the same cost. What first tokens gain says what better estimates of that input could gain at most.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from bench import rig
from bench.arena import ablation, scenarios, score, tournament
from extproc.config.settings import Settings
from extproc.decision import Decision, Rejection
from extproc.endpoint import AdapterResidency, Candidate
from extproc.scheduling.framework import SchedulingContext
from extproc.scheduling.profile import SchedulerProfile
from extproc.simulator import lora, simulation_runs
from extproc.simulator.fleet import scenario, simulation
from extproc.simulator.fleet.engine_node import EngineNode
from extproc.simulator.fleet.picker import ExtprocPicker, SimPicker, engine_address
from extproc.simulator.fleet.sim_request import RequestSpec, SimRequest

#: Replaces an input of a candidate: the candidate, its engine, the request and the time.
_Reveal = Callable[[Candidate, EngineNode, RequestSpec, float], Candidate]

_replace = msgspec.structs.replace


def _answer(c: Candidate, node: EngineNode, work: RequestSpec, now: float) -> Candidate:
    """Length of the answer."""
    del node, now
    return _replace(c, rates=_replace(c.rates, output_tokens=float(work.output_tokens)))


def _prefix(c: Candidate, node: EngineNode, work: RequestSpec, now: float) -> Candidate:
    """Tokens that the cache has, or will have when requests that are there have been computed."""
    del now
    engine, size = node.engine, node.engine.profile.block_tokens
    limit = (work.prompt_tokens - 1) // size
    depth = engine.pool.match(work.keys, limit)
    if engine.pool.host is not None:
        depth += engine.pool.host.match(work.keys, depth, limit)
    for other in node.requests.values():
        depth = max(depth, _common(other.work.keys, work.keys, limit))
    return _replace(c, matched_tokens=depth * size)


def _common(keys: Sequence[int], others: Sequence[int], limit: int) -> int:
    """Blocks that two chains have in common: equal keys are equal prompts up to there."""
    low, high = 0, min(len(keys), len(others), limit)
    while low < high:
        middle = (low + high + 1) // 2
        if keys[middle - 1] == others[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low


def _speed(c: Candidate, node: EngineNode, work: RequestSpec, now: float) -> Candidate:
    """Step times, the usual context and the load time of an adapter."""
    del work, now
    machine = node.engine.profile
    contexts = [job.context for job in node.engine.outstanding() if not job.waiting]
    rates = _replace(
        c.rates,
        step_s=machine.base_s,
        prefill_s=machine.prefill_s_per_token,
        decode_s=machine.decode_s_per_seq,
        context_s=machine.context_s_per_token,
        adapter_load_s=machine.lora_load_s,
    )
    if contexts:
        rates = _replace(rates, context_tokens=sum(contexts) / len(contexts))
    return _replace(c, rates=rates)


def _queue(c: Candidate, node: EngineNode, work: RequestSpec, now: float) -> Candidate:
    """Requests there, those of other pickers included, tokens they wait for, and the metrics of now."""
    del work
    jobs, size = list(node.engine.outstanding()), node.engine.profile.block_tokens
    queued = 0
    for job in jobs:
        left = job.prompt_left
        # An engine that dies at this moment has jobs without requests.
        sim_request = node.requests.get(job.id)
        if job.waiting and sim_request is not None:
            spec = sim_request.work
            left -= size * node.engine.pool.match(spec.keys, (spec.prompt_tokens - 1) // size)
        queued += max(0, left)
    # An engine without metrics shows its queue, too.
    return _replace(
        c,
        load=_replace(node.page(now), extra=c.load.extra),
        age_s=0.0,
        estimated_requests=float(len(jobs)),
        queued_tokens=float(queued),
        unscraped_tokens=0.0,
        page=None,
    )


def _adapter(c: Candidate, node: EngineNode, work: RequestSpec, now: float) -> Candidate:
    """Residency of the adapter of the request."""
    del now
    if not work.adapter:
        return c
    return _replace(c, residency=_RESIDENCY[node.engine.slots.fit(work.adapter)])


_RESIDENCY: Mapping[lora.SlotFit, AdapterResidency] = {
    lora.SlotFit.RESIDENT: AdapterResidency.RESIDENT,
    lora.SlotFit.EMPTY: AdapterResidency.ROOM,
    lora.SlotFit.SWAP: AdapterResidency.EVICTABLE,
    lora.SlotFit.NONE: AdapterResidency.FULL,
}

#: Nothing is known better, but pickers have other seeds: what chance alone does.
CHANCE, _LUCK = "another seed", 500

#: Traits of scenarios that have columns of their own.
GROUPS = (
    "a single picker",
    "several pickers",
    "alike engines",
    "unlike engines",
    "fresh metrics",
    "old metrics",
)

_SHORT = ("ttft_mean_s", "ttft_p99_s")

_BESIDE = (score.ADAPTIVE, score.CLAIRVOYANT)

_ONE_BY_ONE: Mapping[str, tuple[_Reveal, ...]] = {
    "answer": (_answer,),
    "prefix": (_prefix,),
    "speed": (_speed,),
    "queue": (_queue,),
    "adapter": (_adapter,),
}

#: What is known, by name, and how.
KNOWN: Mapping[str, tuple[_Reveal, ...]] = {
    **_ONE_BY_ONE,
    "all of these": tuple(reveal for (reveal,) in _ONE_BY_ONE.values()),
    CHANCE: (),
}


class _KnowingProfile(SchedulerProfile, frozen=True, dict=True, kw_only=True):
    """A profile that sees candidates as they are."""

    reveal: Callable[[Candidate, float], Candidate]

    def run(
        self, context: SchedulingContext, candidates: Sequence[Candidate], *, count: int = 1
    ) -> Decision | Rejection:
        """See `SchedulerProfile`."""
        revealed = [self.reveal(c, context.now) for c in candidates]
        return super().run(context, revealed, count=count)


class _KnowingSimulation(simulation.Simulation):
    """A simulation whose pickers are shown inputs.

    Args:
        reveals: How each of them is shown.
        luck: Added to the seeds of the pickers.
    """

    def __init__(
        self,
        definition: scenario.Scenario,
        settings: Settings,
        *,
        seed: int,
        reveals: Sequence[_Reveal],
        luck: int = 0,
    ) -> None:
        self._luck = luck
        super().__init__(definition, settings, seed=seed)
        self._reveals = reveals
        self._by_address = {engine_address(n): node for n, node in enumerate(self.nodes)}
        for picker in self.pickers:
            assert isinstance(picker, ExtprocPicker)
            director = picker.parts.director
            before = director.routing.profile
            values = {name: getattr(before, name) for name in before.__struct_fields__}
            profile = _KnowingProfile(**values, reveal=self._reveal)
            director.reconfigure(_replace(director.routing, profile=profile))

    def _picker(self, settings: Settings | None, *, seed: int, waits: bool) -> SimPicker:
        return super()._picker(settings, seed=seed + self._luck, waits=waits)

    def _go(self, sim_request: SimRequest) -> None:
        self._work = sim_request.work
        super()._go(sim_request)

    def _reveal(self, c: Candidate, now: float) -> Candidate:
        node = self._by_address[c.endpoint.address]
        for reveal in self._reveals:
            c = reveal(c, node, self._work, now)
        return c


def rows(
    seeds: Sequence[int], *, jobs: int, progress: Callable[[str], None] = lambda _: None
) -> list[score.ScenarioRow]:
    """The default on every scenario, the clairvoyant, and the default that knows, by what it knows."""
    strategies = [scenario.Variant(name=name, strategy=name) for name in _BESIDE]
    played = tournament.tournament(seeds, strategies, jobs=jobs, progress=progress)
    rates = tournament.find_rates(seeds, jobs=jobs, may_test=False)
    calls = {
        f"{seed}-{scenarios.draw(seed).key}-{rates[seed]:g}-known-{n}": functools.partial(
            play, seed, known, rate_per_s=rates[seed]
        )
        for seed in seeds
        for n, known in enumerate(KNOWN)
    }
    folder = tournament.FOLDER / tournament.sources()
    results = iter(
        tournament.cached(
            folder, list(calls), list(calls.values()), jobs=jobs, progress=progress
        ).values()
    )
    return [
        dataclasses.replace(row, columns={**row.columns, **{name: next(results) for name in KNOWN}})
        for row in played
    ]


def play(seed: int, known: str, *, rate_per_s: float) -> dict[str, float | None]:
    """Figures of the default strategy on a scenario, some of its inputs exact."""
    drawn = scenarios.draw(seed)
    variant = scenario.Variant(name=score.ADAPTIVE, strategy=score.ADAPTIVE)
    column = simulation_runs.column(variant, folder=rig.ROOT, where="arena")
    assert column.settings is not None
    run = _KnowingSimulation(
        drawn.at_rate(rate_per_s * drawn.load),
        column.settings,
        seed=seed,
        reveals=KNOWN[known],
        luck=_LUCK if known == CHANCE else 0,
    )
    return tournament.figures(drawn, run.run())


def record(played: Sequence[score.ScenarioRow]) -> dict[str, Any]:
    """Ratios to the default by what is known, ready for JSON; below 1 the knowledge pays."""
    groups = {group: [row for row in played if group in row.traits] for group in GROUPS}
    return {
        "scenarios": len(played),
        "seeds": [min(row.seed for row in played), max(row.seed for row in played)],
        "known": {
            name: {
                "figures": {
                    figure: ablation.ratios(played, figure, name) for figure in ablation.FIGURES
                },
                "worse_5_percent_in_any": score.share_worse(
                    played, list(ablation.FIGURES), ours=name, others=[score.ADAPTIVE]
                ),
                "groups": {
                    group: {figure: ablation.ratios(those, figure, name) for figure in _SHORT}
                    for group, those in groups.items()
                },
            }
            for name in (*KNOWN, score.CLAIRVOYANT)
        },
        "group_sizes": {group: len(those) for group, those in groups.items()},
    }


def block(entry: Mapping[str, Any]) -> str:
    """One row for each input, over all scenarios and over those of each group."""
    figures = ablation.FIGURES
    known = entry["known"].items()
    sizes = entry["group_sizes"]
    names = list(entry["known"]["answer"]["groups"])
    low, high = entry["seeds"]
    return "\n".join(
        [
            "| exact | " + " | ".join(figures.values()) + " | worse than 1.05 in any |",
            "|---" * (2 + len(figures)) + "|",
            *(
                f"| {name} | "
                + " | ".join(ablation.cell(values["figures"][figure]) for figure in figures)
                + f" | {values['worse_5_percent_in_any']:.0%} |"
                for name, values in known
            ),
            "",
            "| exact; TTFT, mean and p99 | "
            + " | ".join(f"{name} ({sizes[name]})" for name in names)
            + " |",
            "|---" * (1 + len(names)) + "|",
            *(
                f"| {name} | "
                + " | ".join(
                    ", ".join(f"{values['groups'][group][figure]['mean']:.2f}" for figure in _SHORT)
                    if sizes[group]
                    else ""
                    for group in names
                )
                + " |"
                for name, values in known
            ),
            "",
            (
                f"`{entry['command']}`, {entry['date']}, commit {entry['commit']}: "
                f"{entry['scenarios']} scenarios, seeds {low} to {high}."
            ),
        ]
    )
