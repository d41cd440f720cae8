"""Ablation of the default cost: each constant left out, beside the default on the same scenarios.

Random traffic seldom fills caches with conversations and has no media. So the constants of these have
rows of their own, on a published scenario and on that of `bench.encoder_caches`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bench import encoder_caches, proof
from bench.arena import score, tournament
from extproc.scheduling.estimated_time import EstimatedTime
from extproc.simulator import simulation_runs
from extproc.simulator.fleet import scenario

#: Constants, each with the value that leaves it out: a weight of nothing, room up to just below where
#: there is none, and crowding that never ends.
WITHOUT: Mapping[str, float] = {
    "own_share": 0.0,
    "others_share": 0.0,
    "waiting_share": 0.0,
    "waste_share": 0.0,
    "crowding": 0.0,
    "crowding_start": 0.95,
    "crowding_end": 1e9,
}

#: The published scenario of caches that are just too small for the conversations.
FULL = "k6-s1"

#: Constants that are left out there.
_FULL_WITHOUT = ("crowding", "crowding_start", "crowding_end")

#: The same for media.
MEDIA_WITHOUT: Mapping[str, float] = {"encoder_share": 0.0}

#: Images behind their question, the quarter of a prefill that the default takes encoding to be twice,
#: 16 images of 1,000 tokens kept by an engine, requests per second, and how many.
_MEDIA = ("behind", 0.5, 16, 26.0)
_MEDIA_REQUESTS, _MEDIA_SEEDS = 3000, range(3)

#: Figures of the table, and how it names them.
FIGURES = {
    "ttft_mean_s": "TTFT, mean",
    "ttft_p99_s": "TTFT, p99",
    "e2e_mean_s": "latency, mean",
    "goodput": "goodput",
}


def variants() -> list[scenario.Variant]:
    """The default, and the default without each of its constants."""
    default = scenario.Variant(name=score.ADAPTIVE, strategy=score.ADAPTIVE)
    return [default, *(_without(constant) for constant in WITHOUT)]


def record(rows: Sequence[score.ScenarioRow], *, repeats: int = 1) -> dict[str, Any]:
    """Ratios of each ablation to the default, ready for JSON; above 1 the constant pays."""
    return {
        "scenarios": len(rows),
        "repeats": repeats,
        "seeds": [min(row.seed for row in rows), max(row.seed for row in rows)],
        "constants": {
            constant: {figure: ratios(rows, figure, f"no {constant}") for figure in FIGURES}
            for constant in WITHOUT
        },
    }


def elsewhere(
    *, jobs: int, progress: Callable[[str], None] = lambda _: None
) -> dict[str, dict[str, Any]]:
    """Ratios of each ablation to the default over seeds, where the constant is made for: its rows."""
    seeds = simulation_runs.read(proof.SCENARIOS / f"{FULL}.yaml").seeds
    without: dict[str, tuple[str, Sequence[int], float]] = {
        name: (FULL, seeds, WITHOUT[name]) for name in _FULL_WITHOUT
    }
    without |= {name: ("media", _MEDIA_SEEDS, value) for name, value in MEDIA_WITHOUT.items()}
    calls: dict[str, Callable[[], object]] = {}
    for constant, (place, those, value) in without.items():
        for seed in those:
            for name, changed in (("default", {}), (constant, {constant: value})):
                play = _play_media if place == "media" else _play_full
                calls[f"ablation-{place}-{name}-{seed}"] = functools.partial(play, changed, seed)
    folder = tournament.FOLDER / tournament.sources()
    results = tournament.cached(
        folder, list(calls), list(calls.values()), jobs=jobs, progress=progress
    )

    def ratio(place: str, constant: str, seed: int, figure: str) -> float:
        changed, usual = (
            results[f"ablation-{place}-{name}-{seed}"][figure] for name in (constant, "default")
        )
        return changed / usual

    return {
        constant: {"on": place, "seeds": len(those)}
        | {
            figure: interval([ratio(place, constant, seed, figure) for seed in those])
            for figure in ("ttft_mean_s", "ttft_p99_s")
        }
        for constant, (place, those, _) in without.items()
    }


def _play_full(changed: Mapping[str, float], seed: int) -> dict[str, float]:
    """First tokens of the published scenario."""
    path = proof.SCENARIOS / f"{FULL}.yaml"
    plan = simulation_runs.plan(path, strategies=[score.ADAPTIVE], configs=(), seeds=[seed])
    column = simulation_runs.column(_variant("changed", changed), folder=path.parent, where=FULL)
    ttft_s = simulation_runs.run(plan.scenario, column, seed=seed, trace=plan.trace).ttft_s
    return {"ttft_mean_s": ttft_s.mean, "ttft_p99_s": ttft_s.p99}


def _play_media(changed: Mapping[str, float], seed: int) -> dict[str, float]:
    """First tokens of questions about images."""
    place, share, images, rate = _MEDIA
    fleet = encoder_caches.EncoderFleet(
        score.ADAPTIVE, place, requests_s=rate, seed=seed, share=share, most_images=images
    )
    fleet.change_cost(EstimatedTime(**changed))
    return fleet.run(_MEDIA_REQUESTS)


def block(entry: Mapping[str, Any]) -> str:
    """One row for each constant, and those where it is made for."""
    default = EstimatedTime()

    def row(constant: str, figures: Sequence[str], values: Mapping[str, Any]) -> str:
        cells = [cell(values[figure]) for figure in figures]
        return " | ".join([f"| `{constant}`", f"{getattr(default, constant):g}", *cells]) + " |"

    rows = [
        "| without | default | " + " | ".join(FIGURES.values()) + " |",
        "|---" * (2 + len(FIGURES)) + "|",
        *(row(constant, list(FIGURES), values) for constant, values in entry["constants"].items()),
    ]
    first = list(FIGURES)[:2]
    rows += [
        "",
        "| without | default | " + " | ".join(FIGURES[name] for name in first) + " | on |",
        "|---" * 5 + "|",
        *(
            f"{row(constant, first, values)} {values['on']}, {values['seeds']} seeds |"
            for constant, values in entry["elsewhere"].items()
        ),
    ]
    low, high = entry["seeds"]
    about = (
        f"`{entry['command']}`, {entry['date']}, commit {entry['commit']}: {entry['scenarios']} "
    )
    return "\n".join([*rows, "", f"{about}scenarios, seeds {low} to {high}{repeats(entry)}."])


def cell(values: Mapping[str, float]) -> str:
    """A mean with its interval, as tables have it."""
    return f"{values['mean']:.3f} ({values['low']:.3f} to {values['high']:.3f})"


def repeats(entry: Mapping[str, Any]) -> str:
    """Runs of each scenario, for the line below a table; empty for a single one."""
    return f", each played {entry['repeats']} times" if entry["repeats"] > 1 else ""


def _without(constant: str) -> scenario.Variant:
    return _variant(f"no {constant}", {constant: WITHOUT[constant]})


def _variant(name: str, changed: Mapping[str, float]) -> scenario.Variant:
    """The default strategy with some constants of its cost changed."""
    profile = {
        "name": score.ADAPTIVE,
        "cost": {"kind": EstimatedTime.kind, "params": dict(changed)},
        "picker": {"kind": "rendezvous"},
    }
    return scenario.Variant(name=name, settings={"scheduling": {"profile": profile}})


def ratios(rows: Sequence[score.ScenarioRow], figure: str, name: str) -> dict[str, float]:
    """Geometric mean and 95 % interval of a variant over the default."""
    return interval([score.ratio(row, figure, name, [score.ADAPTIVE]) for row in rows])


def interval(ratios: Sequence[float]) -> dict[str, float]:
    """Geometric mean of ratios and its 95 % interval, without those that are not there."""
    logs = [math.log(value) for value in ratios if not math.isnan(value)]
    if not logs:
        return {"mean": 1.0, "low": 1.0, "high": 1.0}
    low, high = score.interval(logs)
    mean = sum(logs) / len(logs)
    return {
        key: round(math.exp(value), 4)
        for key, value in (("mean", mean), ("low", low), ("high", high))
    }
