"""Ablation of the default cost: each constant left out, beside the default on the same scenarios."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from bench.arena import score
from extproc.scheduling.estimated_time import EstimatedTime
from extproc.simulator.fleet import scenario

#: Constants, each with the value that leaves it out: a weight of nothing, a cache that is never full,
#: room up to just below where there is none, and crowding that never ends. Random traffic has no
#: media, so that constants of encoders are not among them.
WITHOUT: Mapping[str, float] = {
    "own_share": 0.0,
    "others_share": 0.0,
    "waiting_share": 0.0,
    "waste_share": 0.0,
    "kv_ceiling": 1e9,
    "crowding": 0.0,
    "crowding_start": 0.95,
    "crowding_end": 1e9,
}

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


def record(rows: Sequence[score.ScenarioRow]) -> dict[str, Any]:
    """Ratios of each ablation to the default, ready for JSON; above 1 the constant pays."""
    return {
        "scenarios": len(rows),
        "seeds": [min(row.seed for row in rows), max(row.seed for row in rows)],
        "constants": {
            constant: {figure: _ratios(rows, figure, f"no {constant}") for figure in FIGURES}
            for constant in WITHOUT
        },
    }


def block(entry: Mapping[str, Any]) -> str:
    """One row for each constant."""
    default = EstimatedTime()
    rows = [
        "| without | default | " + " | ".join(FIGURES.values()) + " |",
        "|---" * (2 + len(FIGURES)) + "|",
    ]
    for constant, values in entry["constants"].items():
        cells = " | ".join(
            f"{values[figure]['mean']:.3f} ({values[figure]['low']:.3f} to {values[figure]['high']:.3f})"
            for figure in FIGURES
        )
        rows.append(f"| `{constant}` | {getattr(default, constant):g} | {cells} |")
    low, high = entry["seeds"]
    about = (
        f"`{entry['command']}`, {entry['date']}, commit {entry['commit']}: {entry['scenarios']} "
    )
    return "\n".join([*rows, "", f"{about}scenarios, seeds {low} to {high}."])


def _without(constant: str) -> scenario.Variant:
    profile = {
        "name": score.ADAPTIVE,
        "cost": {"kind": EstimatedTime.kind, "params": {constant: WITHOUT[constant]}},
        "picker": {"kind": "rendezvous"},
    }
    return scenario.Variant(name=f"no {constant}", settings={"scheduling": {"profile": profile}})


def _ratios(rows: Sequence[score.ScenarioRow], figure: str, name: str) -> dict[str, float]:
    """Geometric mean and 95 % interval of a variant over the default."""
    ratios = [score.ratio(row, figure, name, [score.ADAPTIVE]) for row in rows]
    logs = [math.log(value) for value in ratios if not math.isnan(value)]
    if not logs:
        return {"mean": 1.0, "low": 1.0, "high": 1.0}
    low, high = score.interval(logs)
    mean = sum(logs) / len(logs)
    return {
        key: round(math.exp(value), 4)
        for key, value in (("mean", mean), ("low", low), ("high", high))
    }
