"""Tables of the arena for `docs/benchmarks/arena.md`, and the record they are made from."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from bench.arena import ablation, knowledge, peers, score, traffic

#: What people read, by figure.
NAMES = {
    "ttft_mean_s": "TTFT, mean",
    "ttft_p99_s": "TTFT, p99",
    "e2e_mean_s": "latency, mean",
    "e2e_p99_s": "latency, p99",
    "goodput": "goodput",
    "requests_per_s": "throughput",
}

#: Figures of the bar on bad scenarios.
BAD_FIGURES = ("ttft_mean_s", "ttft_p99_s", "e2e_mean_s", "goodput")

#: Scenarios that are listed as the worst.
_WORST = 10


def record(rows: Sequence[score.ScenarioRow], *, repeats: int = 1) -> dict[str, Any]:
    """Scores of a set, ready for JSON."""
    return {
        "scenarios": len(rows),
        "repeats": repeats,
        "seeds": [min(row.seed for row in rows), max(row.seed for row in rows)],
        "figures": {figure: _figure(rows, figure) for figure in score.FIGURES},
        "worse_5_percent_in_any": {
            name: round(score.share_worse(rows, BAD_FIGURES, ours=name), 4)
            for name in (score.ADAPTIVE, score.EXCHANGING, score.CLAIRVOYANT)
        },
        "worse_with_balanced": round(score.share_worse(rows, BAD_FIGURES, others=score.OTHERS), 4),
        "kinds": {
            kind: _figures([row for row in rows if kind in row.kinds])
            for kind in (*traffic.KINDS, "LoRA")
        },
        "traits": {
            trait: _figures([row for row in rows if trait in row.traits])
            for trait in sorted({trait for row in rows for trait in row.traits})
        },
        "rows": [
            {
                "seed": row.seed,
                "groups": [*row.kinds, *row.traits],
                **{
                    name: [
                        _rounded(score.ratio(row, figure, name, score.PUBLISHED))
                        for figure in BAD_FIGURES
                    ]
                    for name in (score.ADAPTIVE, score.EXCHANGING, score.CLAIRVOYANT)
                },
            }
            for row in rows
        ],
        "worst": _worst(rows),
    }


def _figures(rows: Sequence[score.ScenarioRow]) -> dict[str, Any]:
    """Scores of some scenarios, by figure; and of mean TTFT over the clairvoyant's, by column."""
    scores: dict[str, Any] = {
        figure: _short(score.score(rows, figure, others=score.PUBLISHED)) for figure in BAD_FIGURES
    }
    scores["over_clairvoyant"] = {
        name: _rounded(
            score.score(rows, BAD_FIGURES[0], ours=name, others=[score.CLAIRVOYANT]).mean
        )
        for name in (score.ADAPTIVE, score.EXCHANGING)
    }
    return scores


def _figure(rows: Sequence[score.ScenarioRow], figure: str) -> dict[str, Any]:
    """Scores of one figure: adaptive against the best published and the clairvoyant, and the others."""
    others = {
        name: score.score(
            rows, figure, ours=name, others=[p for p in score.PUBLISHED if p != name]
        ).mean
        for name in score.OTHERS
    }
    return {
        "published": _short(score.score(rows, figure, others=score.PUBLISHED)),
        "with_balanced": _short(score.score(rows, figure, others=score.OTHERS)),
        "exchanging": _short(
            score.score(rows, figure, ours=score.EXCHANGING, others=score.PUBLISHED)
        ),
        "clairvoyant": _short(score.score(rows, figure, others=[score.CLAIRVOYANT])),
        "others": {name: _rounded(mean) for name, mean in others.items()},
    }


def _short(scored: score.FigureScore) -> dict[str, float | None]:
    return {name: _rounded(value) for name, value in dataclasses.asdict(scored).items()}


def _rounded(value: float) -> float | None:
    return None if math.isnan(value) else round(value, 4)


def _worst(rows: Sequence[score.ScenarioRow]) -> list[dict[str, Any]]:
    """Scenarios with the largest mean of the ratios in TTFT, its p99 and latency."""
    wanted = ("ttft_mean_s", "ttft_p99_s", "e2e_mean_s")

    def ratios(row: score.ScenarioRow) -> dict[str, float]:
        values = {
            figure: score.ratio(row, figure, score.ADAPTIVE, score.PUBLISHED) for figure in wanted
        }
        return {figure: round(value, 4) for figure, value in values.items() if value == value}  # noqa: PLR0124 - NaN

    known = [(row, values) for row in rows if len(values := ratios(row)) == len(wanted)]
    known.sort(key=lambda entry: -math.prod(entry[1].values()))
    return [{"seed": row.seed, "title": row.title, **values} for row, values in known[:_WORST]]


def block(result: Mapping[str, Any]) -> str:
    """The tables of every recorded set."""
    parts: list[str] = []
    for name, entry in result["sets"].items():
        parts += [f"### The {name} set", "", *_scores(entry), "", *_kinds(entry), ""]
        parts += [*_listed(entry), ""]
        low, high = entry["seeds"]
        parts += [
            (
                f"`{entry['command']}`, {entry['date']}, commit {entry['commit']}: {entry['scenarios']} "
                f"scenarios, seeds {low} to {high}{ablation.repeats(entry)}."
            ),
            "",
        ]
    for name, entry in result.get("peers", {}).items():
        parts += [f"### Rules of other systems on the {name} set", "", peers.block(entry), ""]
    for name, entry in result["ablations"].items():
        parts += [f"### Ablation on the {name} set", "", ablation.block(entry), ""]
    for name, entry in result.get("knowledge", {}).items():
        parts += [f"### What knowledge is worth on the {name} set", "", knowledge.block(entry), ""]
    return "\n".join(parts).rstrip()


def _scores(entry: Mapping[str, Any]) -> list[str]:
    """One row for each figure."""
    rows = [
        "| figure | scenarios | adaptive / best published | worst | above 1.02 | above 1.05 | "
        "adaptive / best published or `balanced` | adaptive, exchanging / best published | "
        "adaptive / clairvoyant | "
        + " | ".join(f"`{name}` / best other" for name in score.OTHERS)
        + " |",
        "|---" * (9 + len(score.OTHERS)) + "|",
    ]
    for figure, label in NAMES.items():
        values = entry["figures"][figure]
        ours, exchanging = values["published"], values["exchanging"]
        if not ours["scenarios"]:
            continue
        others = " | ".join(f"{values['others'][name]:.2f}" for name in score.OTHERS)
        rows.append(
            f"| {label} | {ours['scenarios']} | {ours['mean']:.3f} ({ours['low']:.3f} to "
            f"{ours['high']:.3f}) | {ours['worst']:.2f} (seed {ours['worst_seed']}) | "
            f"{ours['over_2']:.0%} | {ours['over_5']:.0%} | {ablation.cell(values['with_balanced'])} | "
            f"{ablation.cell(exchanging)} | "
            f"{values['clairvoyant']['mean']:.3f} | "
            f"{others} |"
        )
    shares = ", ".join(
        f"`{name}` {share:.0%}" for name, share in entry["worse_5_percent_in_any"].items()
    )
    return [
        *rows,
        "",
        (
            f"Scenarios worse than 1.05 in TTFT, its p99, latency or goodput: {shares}; `adaptive` "
            f"beside published strategies and `balanced` {entry['worse_with_balanced']:.0%}."
        ),
    ]


def _kinds(entry: Mapping[str, Any]) -> list[str]:
    """One row for each kind of traffic, and for each trait."""
    rows = [
        "| scenarios with | count | "
        + " | ".join(NAMES[figure] for figure in BAD_FIGURES)
        + " | TTFT / clairvoyant | exchanging |",
        "|---" * (4 + len(BAD_FIGURES)) + "|",
    ]
    for kind, values in (entry["kinds"] | entry["traits"]).items():
        if not values["ttft_mean_s"]["scenarios"]:
            continue
        cells = " | ".join(
            ablation.cell(values[figure]) if values[figure]["scenarios"] else ""
            for figure in BAD_FIGURES
        )
        ours, exchanging = values["over_clairvoyant"].values()
        rows.append(
            f"| {kind} | {values['ttft_mean_s']['scenarios']} | {cells} | {ours:.2f} | "
            f"{exchanging:.2f} |"
        )
    return rows


def _listed(entry: Mapping[str, Any]) -> list[str]:
    """The worst scenarios."""
    rows = ["| seed | scenarios that are lost most | TTFT | p99 | latency |", "|---" * 5 + "|"]
    rows += [
        f"| {row['seed']} | {row['title']} | {row['ttft_mean_s']:.2f} | {row['ttft_p99_s']:.2f} | "
        f"{row['e2e_mean_s']:.2f} |"
        for row in entry["worst"]
    ]
    return rows
