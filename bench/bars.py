"""Bars of the adaptive strategy: scenario, figure, the column it is compared with, the ratio.

Ratios are of means over the seeds; both columns ran with the same seeds and the same offered load.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from bench import rig

#: Strategies that compete where the best of all is the bar; `clairvoyant` knows too much to count.
OWN = frozenset({"adaptive", "clairvoyant"})


@dataclass(frozen=True)
class Bar:
    """One ratio that is wanted.

    `against` is a column, or nothing for the best other column in that figure. With `at_least` the
    ratio must not be smaller than `wanted`, else not larger.
    """

    scenario: str
    figure: str
    against: str
    wanted: float
    at_least: bool = False


def _both(scenario: str, against: str, *wanted: tuple[str, float]) -> list[Bar]:
    return [
        Bar(scenario, figure, against, limit, figure == "requests_per_s")
        for figure, limit in wanted
    ]


BARS: list[Bar] = [
    *_both(
        "lora-base", "queue-kv", ("requests_per_s", 1.0), ("ttft_mean_s", 1.0), ("ttft_p95_s", 1.0)
    ),
    *_both(
        "lora-10", "maximum", ("requests_per_s", 1.05), ("ttft_mean_s", 0.8), ("ttft_p95_s", 0.8)
    ),
    *_both("lora-4", "queue-kv", ("requests_per_s", 1.0), ("ttft_p95_s", 1.0)),
    *(
        bar
        for most in (800, 1600, 3200, 8000)
        for bar in _both(
            f"l4-{most}",
            "prefix-hash",
            ("requests_per_s", 1.1),
            ("ttft_mean_s", 0.8),
            ("ttft_p99_s", 0.5),
        )
    ),
    *(
        bar
        for scenario in ("k6-s1", "k6-s2")
        for bar in (
            Bar(scenario, "e2e_mean_s", "prefix-hash", 0.95),
            Bar(scenario, "e2e_p95_s", "least-load", 1.0),
        )
    ),
    *(
        Bar(scenario, figure, "", 0.9)
        for scenario in ("mooncake-70", "mooncake-95")
        for figure in ("ttft_mean_s", "ttft_p99_s")
    ),
    *(
        Bar(
            scenario,
            figure,
            "",
            1 / 1.02 if figure == "requests_per_s" else 1.02,
            figure == "requests_per_s",
        )
        for scenario in ("heterogeneous", "failures", "cold-start", "hot-prefix", "unique")
        for figure in ("requests_per_s", "ttft_mean_s", "ttft_p99_s", "e2e_mean_s")
    ),
]


@dataclass(frozen=True)
class Outcome:
    """A bar, the column it was held against, both values, their ratio, and the clairvoyant's."""

    bar: Bar
    against: str
    adaptive: float
    other: float
    clairvoyant: float | None

    @property
    def ratio(self) -> float:
        return self.adaptive / self.other

    @property
    def met(self) -> bool:
        return self.ratio >= self.bar.wanted if self.bar.at_least else self.ratio <= self.bar.wanted


def result(scenario: str) -> dict | None:
    """Result of `bench.proof` for a scenario; None where there is none."""
    path = rig.RESULTS / "proof" / f"{scenario}.json"
    return json.loads(path.read_text()) if path.exists() else None


def outcomes() -> list[Outcome]:
    """Every bar whose scenario has a result."""
    rows = []
    for bar in BARS:
        recorded = result(bar.scenario)
        if recorded is None:
            continue
        values = {name: row[bar.figure][0] for name, row in recorded["columns"].items()}
        best = max if bar.at_least else min
        against = bar.against or best(set(values) - OWN, key=values.__getitem__)
        rows.append(
            Outcome(bar, against, values["adaptive"], values[against], values.get("clairvoyant"))
        )
    return rows
