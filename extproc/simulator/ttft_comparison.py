"""Comparison of two strategies by their time to the first token, and its result in words."""

from __future__ import annotations

import math
from collections.abc import Iterator

import msgspec

from extproc.simulator.fleet.report import Column, Report


class TtftComparison(msgspec.Struct, frozen=True):
    """Difference of two strategies in mean time to first token, over the same requests.

    Attributes:
        baseline: Strategy that it is compared with.
        ratio: Mean of the strategy over that of the baseline.
        low: Lower end of the 95 % interval of the ratio.
        high: Upper end.
        num_compared: Requests that both answered with every seed (count).
        unanswered: Share of all requests without an answer, mean over seeds, 0..1.
        baseline_unanswered: `unanswered` of the baseline.
    """

    strategy: str
    baseline: str
    ratio: float
    low: float
    high: float
    num_compared: int
    unanswered: float
    baseline_unanswered: float

    @property
    def is_noise(self) -> bool:
        """True if the interval has 1 in it."""
        return not (self.high < 1.0 or self.low > 1.0)

    @property
    def is_better(self) -> bool:
        """True if it is faster beyond noise, and answers as many requests."""
        return self.high < 1.0 and self.unanswered <= self.baseline_unanswered


def verdict_lines(result: Report) -> Iterator[str]:
    """Results of the comparisons of all strategies of a report with its baseline, by their seeds."""
    baseline = next((c for c in result.columns if c.strategy == result.baseline), None)
    if baseline is None:
        return
    num_seeds = len(result.scenario.seeds)
    if num_seeds < 2:
        yield "Verdict: none, as one seed does not show what is noise; write --seeds 5"
        return
    for column in result.columns:
        if column is not baseline:
            ratio = column.ratios["ttft_mean_s"]
            comparison = TtftComparison(
                column.strategy,
                baseline.strategy,
                ratio.mean,
                ratio.mean - ratio.half,
                ratio.mean + ratio.half,
                0,
                _unanswered(column),
                _unanswered(baseline),
            )
            yield verdict_line(comparison, basis=f"over {num_seeds} seeds")


def _unanswered(column: Column) -> float:
    failed = column.figures["failed"].mean
    return failed / max(1.0, failed + column.figures["requests"].mean)


def verdict_line(comparison: TtftComparison, *, basis: str = "") -> str:
    """Result of the comparison of a strategy with another one.

    Args:
        basis: Origin of the interval; empty for the requests that are compared.
    """
    name, percent = comparison.strategy, 100.0 * (comparison.ratio - 1.0)
    if math.isnan(percent):
        sides = (
            (name, comparison.unanswered),
            (comparison.baseline, comparison.baseline_unanswered),
        )
        silent = [side for side, unanswered in sides if unanswered >= 1.0]
        if silent:
            return f"Verdict: none, as {' and '.join(silent)} answered nothing"
        return f"Verdict: none, as no request was answered by both {name} and {comparison.baseline}"
    interval = (
        f"95 % interval {100 * comparison.low - 100:+.1f} to {100 * comparison.high - 100:+.1f} %, "
        + (basis or f"of the {count_of(comparison.num_compared, 'request')} that both answered")
    )
    if comparison.unanswered > comparison.baseline_unanswered:
        return (
            f"Verdict: {name} would leave {comparison.unanswered:.1%} of the requests unanswered, "
            f"{comparison.baseline} {comparison.baseline_unanswered:.1%}: it is no better whatever its "
            f"times; mean TTFT {percent:+.1f} %, {interval}"
        )
    if comparison.is_noise:
        return f"Verdict: {name} is no different: mean TTFT {percent:+.1f} %, which is noise: {interval}"
    word = "better" if percent < 0 else "worse"
    return f"Verdict: {name} would be {word}: mean TTFT {percent:+.1f} %, {interval}"


def count_of(number: int, noun: str) -> str:
    """A number of things, such as `2 engines`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
