"""Compares the default strategy with routing rules of other systems and of papers (`peer_rules`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench import rig
from bench.arena import ablation, peer_rules, score
from extproc.simulator.fleet import scenario

#: Rules of `peer_rules` by what tables call them: where they come from, their costs and pickers.
RULES: Mapping[str, tuple[str, Mapping[str, object]]] = {
    "dynamo": ("NVIDIA Dynamo, KV router", {"cost": {"kind": peer_rules.DynamoCost.kind}}),
    "dynamo, temperature 0.3": (
        "the same, `--router-temperature`",
        {
            "cost": {"kind": peer_rules.DynamoCost.kind},
            "picker": {"kind": peer_rules.SoftmaxPicker.kind},
        },
    ),
    "load-aware": (
        "vLLM production-stack, `loadaware`",
        {"cost": {"kind": peer_rules.LoadAwareCost.kind}},
    ),
    "aibrix-prefix": (
        "AIBrix, `prefix-cache`",
        {"cost": {"kind": peer_rules.AibrixPrefixCost.kind}},
    ),
    "session-gate": (
        "LMetric for first turns, further ones stay",
        {"cost": {"kind": peer_rules.SessionGateCost.kind}},
    ),
    "preble": (
        "E2 of [Preble](https://arxiv.org/abs/2407.00023), without evictions",
        {"cost": {"kind": peer_rules.PrebleCost.kind}},
    ),
    "shortest-expected-delay": (
        "index rule for unlike servers",
        {"cost": {"kind": peer_rules.ExpectedDelayCost.kind}},
    ),
    "cache-aware": (
        "SGLang router, `cache_aware`",
        {"cost": {"kind": peer_rules.CacheAwareCost.kind}},
    ),
    "time-to-drain": (
        "SMG, `least_load`, with the request's own tokens",
        {"cost": {"kind": peer_rules.TimeToDrainCost.kind}},
    ),
    "mooncake": (
        "[Mooncake](https://arxiv.org/abs/2407.00079), algorithm 1 without transfers",
        {"cost": {"kind": peer_rules.MooncakeCost.kind}},
    ),
    "join-idle-queue": (
        "join-idle-queue, the longest match of idle ones",
        {"cost": {"kind": peer_rules.IdleQueueCost.kind}},
    ),
    "dual-map": (
        "[DualMap](https://arxiv.org/abs/2602.06502)",
        {"cost": {"kind": peer_rules.DualMapCost.kind}},
    ),
    "power-of-k": (
        "two random choices and the longest match",
        {"picker": {"kind": peer_rules.PowerOfKPicker.kind}},
    ),
}

#: Ratio to the default from which on a rule counts as better.
_BETTER = 0.95

_FIRST = "ttft_mean_s"

#: Source of a rule that the scheduler has as a strategy.
_STRATEGY = "[strategies](../reference/strategies.md)"


def variants() -> list[scenario.Variant]:
    """The rules of `RULES` as strategies."""
    file = str(Path(peer_rules.__file__).resolve().relative_to(rig.ROOT))
    return [
        scenario.Variant(
            name=name,
            settings={
                "scheduling": {"plugin_files": [file], "profile": {"name": "rule", **profile}}
            },
        )
        for name, (_, profile) in RULES.items()
    ]


def record(rows: Sequence[score.ScenarioRow], *, repeats: int = 1) -> dict[str, Any]:
    """Ratios of rules and published strategies to the default, ready for JSON; above 1 they lose."""
    names = (*score.PUBLISHED, *RULES)
    return {
        "scenarios": len(rows),
        "repeats": repeats,
        "seeds": [min(row.seed for row in rows), max(row.seed for row in rows)],
        "rules": {
            name: {
                **{figure: ablation.ratios(rows, figure, name) for figure in ablation.FIGURES},
                "better": sum(
                    score.ratio(row, _FIRST, name, [score.ADAPTIVE]) < _BETTER for row in rows
                ),
            }
            for name in names
        },
        "best": {
            figure: ablation.interval(
                [score.ratio(row, figure, score.ADAPTIVE, names) for row in rows]
            )
            for figure in ablation.FIGURES
        },
    }


def block(entry: Mapping[str, Any]) -> str:
    """One row for each rule, those with the earliest first tokens first."""
    figures = ablation.FIGURES
    rows = sorted(entry["rules"].items(), key=lambda item: item[1][_FIRST]["mean"])
    best = ", ".join(f"{entry['best'][figure]['mean']:.2f}" for figure in figures)
    low, high = entry["seeds"]
    return "\n".join(
        [
            "| rule | of | " + " | ".join(figures.values()) + " | TTFT better by 5 % |",
            "|---" * (3 + len(figures)) + "|",
            *(
                f"| `{name}` | {RULES[name][0] if name in RULES else _STRATEGY} | "
                + " | ".join(ablation.cell(values[figure]) for figure in figures)
                + f" | {values['better']} |"
                for name, values in rows
            ),
            "",
            (
                f"`adaptive` over the best of all {len(rows)} in each scenario, in the same figures: "
                f"{best}. `{entry['command']}`, {entry['date']}, commit {entry['commit']}: "
                f"{entry['scenarios']} scenarios, seeds {low} to {high}{ablation.repeats(entry)}."
            ),
        ]
    )
