"""Scores of a strategy over scenarios: ratios to the best published strategy of each of them.

A ratio is written so that below 1 is better in every figure: of rates it is the other one's over ours.
The best published strategy is taken per scenario and figure. That is strict: the best of several
strategies that are equally good is the luckiest of them.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

#: Published strategies.
PUBLISHED = (
    "lmetric",
    "prefix-hash",
    "weighted",
    "least-request",
    "least-load",
    "filter-chain",
)

#: Published strategies and `balanced`, a weighted sum of our own.
OTHERS = (*PUBLISHED, "balanced")

ADAPTIVE, CLAIRVOYANT = "adaptive", "clairvoyant"

#: `adaptive` whose pickers exchange their requests, also where those of the scenario do not.
EXCHANGING = "adaptive, exchanging"

#: Figures of a run, and whether more of it is better.
FIGURES: Mapping[str, bool] = {
    "ttft_mean_s": False,
    "ttft_p99_s": False,
    "e2e_mean_s": False,
    "e2e_p99_s": False,
    "goodput": True,
    "requests_per_s": True,
}

#: Shares of saturation from which throughput is a figure: below, all answer what they are sent.
SATURATED = 1.0

_RESAMPLES = 2000

Figures = Mapping[str, float | None]


@dataclass(frozen=True)
class ScenarioRow:
    """One scenario: what it is, and the figures of each strategy."""

    seed: int
    title: str
    kinds: Sequence[str]
    load: float
    columns: Mapping[str, Figures]
    traits: Sequence[str] = ()


@dataclass(frozen=True)
class FigureScore:
    """Ratios of one figure over scenarios.

    Attributes:
        scenarios: How many have a ratio.
        mean: Geometric mean; NaN without scenarios.
        low: Lower end of its 95 % interval, by bootstrap over scenarios.
        high: Upper end.
        worst: Largest ratio.
        worst_seed: Its scenario; 0 without scenarios.
        over_2: Share of scenarios above 1.02.
        over_5: Share of scenarios above 1.05.
    """

    scenarios: int
    mean: float
    low: float
    high: float
    worst: float
    worst_seed: int
    over_2: float
    over_5: float


def ratio(row: ScenarioRow, figure: str, ours: str, others: Iterable[str]) -> float:
    """Ratio of a strategy to the best of others in one figure; NaN where there is none."""
    more_is_better = FIGURES[figure]
    mine = row.columns[ours].get(figure)
    theirs = [row.columns[name].get(figure) for name in others if name in row.columns]
    known = [value for value in theirs if value]
    if not known or mine is None or (figure == "requests_per_s" and row.load < SATURATED):
        return math.nan
    if more_is_better:
        # A goodput of nothing would be an infinite ratio: one request in a hundred stands for it.
        return max(known) / max(mine, 0.01 * max(known))
    return mine / min(known)


def average(runs: Sequence[Figures]) -> Figures:
    """Mean of each figure over runs of a scenario; None where a run has none."""
    if len(runs) == 1:
        return runs[0]
    values = {name: [run[name] for run in runs] for name in runs[0]}
    return {
        name: None if None in those else sum(value or 0.0 for value in those) / len(those)
        for name, those in values.items()
    }


def score(
    rows: Sequence[ScenarioRow], figure: str, *, ours: str = ADAPTIVE, others: Iterable[str]
) -> FigureScore:
    """The ratios of one figure in numbers."""
    names = list(others)
    ratios = [(ratio(row, figure, ours, names), row.seed) for row in rows]
    known = [(value, seed) for value, seed in ratios if not math.isnan(value)]
    if not known:
        return FigureScore(0, math.nan, math.nan, math.nan, math.nan, 0, 0.0, 0.0)
    logs = [math.log(value) for value, _ in known]
    low, high = interval(logs)
    worst, seed = max(known)
    return FigureScore(
        scenarios=len(known),
        mean=math.exp(sum(logs) / len(logs)),
        low=math.exp(low),
        high=math.exp(high),
        worst=worst,
        worst_seed=seed,
        over_2=sum(value > 1.02 for value, _ in known) / len(known),
        over_5=sum(value > 1.05 for value, _ in known) / len(known),
    )


def interval(values: Sequence[float], *, seed: int = 1) -> tuple[float, float]:
    """95 % interval of a mean: percentiles over means of values drawn with replacement."""
    rng = random.Random(seed)
    means = sorted(sum(rng.choices(values, k=len(values))) / len(values) for _ in range(_RESAMPLES))
    return means[round(0.025 * _RESAMPLES)], means[round(0.975 * _RESAMPLES) - 1]


def share_worse(
    rows: Sequence[ScenarioRow],
    figures: Iterable[str],
    *,
    ours: str = ADAPTIVE,
    others: Iterable[str] = PUBLISHED,
) -> float:
    """Share of scenarios in which any of the figures is above 1.05 of the best of the others."""
    names, beside = list(figures), list(others)
    bad = sum(any(ratio(row, figure, ours, beside) > 1.05 for figure in names) for row in rows)
    return bad / len(rows) if rows else math.nan
