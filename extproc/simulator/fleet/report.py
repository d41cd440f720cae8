"""Many runs in numbers: means with intervals, ratios to a baseline, tables.

Intervals are 95 % confidence intervals of the mean over seeds (Student t). Ratios are taken seed by
seed, because every strategy meets the same requests with the same seed, and averaged after.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from extproc.errors import ConfigError
from extproc.simulator.fleet.run_metrics import DistributionSummary, PerEndpoint, RunSummary
from extproc.simulator.fleet.scenario import Scenario

#: 97.5 % quantiles of Student's t for 1 to 30 degrees of freedom (NIST/SEMATECH e-Handbook of
#: Statistical Methods, 1.3.6.7.2); above, the normal distribution's 1.96.
_T = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
_NORMAL = 1.960

_TIMES = ("ttft", "tpot", "itl", "e2e")
_MOMENTS = ("mean", "p50", "p90", "p95", "p99")


class Interval(msgspec.Struct, frozen=True):
    """A mean over seeds.

    Attributes:
        mean: NaN where no run has a value.
        half: Half of the 95 % interval's width; NaN with fewer than two values.
    """

    mean: float
    half: float


class Run(msgspec.Struct, frozen=True):
    """One strategy with one seed.

    Attributes:
        seed: Seed of all random numbers.
    """

    strategy: str
    seed: int
    summary: RunSummary


class Column(msgspec.Struct, frozen=True):
    """One strategy over all seeds.

    Attributes:
        figures: By name; see `FIGURES`.
        ratios: The same figures over the baseline's, seed by seed; empty without a baseline.
        endpoints: Means over seeds.
        ttft_quantiles_s: Time to first token at 0, 1, ..., 100 percent; mean over seeds
            that answered any request.
    """

    strategy: str
    figures: Mapping[str, Interval]
    ratios: Mapping[str, Interval]
    endpoints: Sequence[PerEndpoint]
    ttft_quantiles_s: Sequence[float]


class Report(msgspec.Struct, frozen=True):
    """Results of a scenario. NaN is null in JSON.

    Attributes:
        baseline: Strategy that ratios refer to; empty for none.
        runs: Every run, by strategy and seed.
    """

    scenario: Scenario
    baseline: str
    columns: Sequence[Column]
    runs: Sequence[Run]


def _figures() -> dict[str, Callable[[RunSummary], float]]:
    figures: dict[str, Callable[[RunSummary], float]] = {
        "requests": lambda s: float(s.requests),
        "failed": lambda s: float(sum(s.failed.values())),
        "duration_s": lambda s: s.duration_s,
        "requests_per_s": lambda s: s.requests_per_s,
        "output_tokens_per_s": lambda s: s.output_tokens_per_s,
        "total_tokens_per_s": lambda s: s.total_tokens_per_s,
    }
    for what in (*_TIMES, "token"):
        for moment in _MOMENTS:
            figures[f"{what}_{moment}_s"] = _moment(f"{what}_s", moment)
    return figures | {
        "held_mean_s": lambda s: s.held_s,
        "hit_ratio": lambda s: s.hit_ratio,
        "predicted_ratio": lambda s: s.predicted_ratio,
        "requests_max_over_mean": lambda s: s.requests_max_over_mean,
        "tokens_max_over_mean": lambda s: s.tokens_max_over_mean,
        "preemptions": lambda s: float(sum(endpoint.preemptions for endpoint in s.endpoints)),
        "replica_s": lambda s: s.scaling.replica_s if s.scaling else math.nan,
        "mean_replicas": lambda s: s.scaling.mean_replicas if s.scaling else math.nan,
        "mean_available": lambda s: s.scaling.mean_available if s.scaling else math.nan,
        "cold_starts": lambda s: float(s.scaling.cold_starts) if s.scaling else math.nan,
        "to_least_s": lambda s: s.scaling.to_least_s if s.scaling else math.nan,
    }


def _moment(what: str, moment: str) -> Callable[[RunSummary], float]:
    def read_figure(summary: RunSummary) -> float:
        spread: DistributionSummary = getattr(summary, what)
        value: float = getattr(spread, moment)
        return value

    return read_figure


#: Every figure of a column, and where a summary has it. Names end in their unit.
FIGURES: Mapping[str, Callable[[RunSummary], float]] = _figures()


def interval(values: Iterable[float]) -> Interval:
    """Mean and half width of the 95 % confidence interval; NaN values are left out."""
    known = [value for value in values if not math.isnan(value)]
    if not known:
        return Interval(math.nan, math.nan)
    mean = statistics.fmean(known)
    freedom = len(known) - 1
    if not freedom:
        return Interval(mean, math.nan)
    t = _T[freedom - 1] if freedom <= len(_T) else _NORMAL
    return Interval(mean, t * statistics.stdev(known, mean) / math.sqrt(len(known)))


def report(scenario: Scenario, runs: Sequence[Run], *, baseline: str = "") -> Report:
    """Aggregate runs into a report.

    Args:
        scenario: What was simulated; its strategies give the order.
        runs: In any order; each strategy with the same seeds.
        baseline: Strategy that ratios refer to; empty for none.

    Raises:
        ConfigError: The baseline is not among the strategies.
    """
    names = [variant.name for variant in scenario.variants]
    if baseline and baseline not in names:
        raise ConfigError(
            "baseline",
            wanted=f"one of {', '.join(names)}",
            got=baseline,
            fix="name a strategy that is run",
        )
    by_name: dict[str, dict[int, RunSummary]] = {name: {} for name in names}
    for run in runs:
        by_name[run.strategy][run.seed] = run.summary
    base = by_name.get(baseline, {})
    ordered = sorted(runs, key=lambda run: (names.index(run.strategy), run.seed))
    columns = [_column(name, by_name[name], base) for name in names]
    return Report(scenario, baseline, columns, ordered)


def encoded(result: Report) -> bytes:
    """A report as indented JSON."""
    return msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n"


def _column(name: str, mine: Mapping[int, RunSummary], base: Mapping[int, RunSummary]) -> Column:
    summaries = list(mine.values())
    ratios = {
        figure: interval(
            _over(read_figure(mine[seed]), read_figure(base[seed]))
            for seed in sorted(mine.keys() & base.keys())
        )
        for figure, read_figure in FIGURES.items()
        if base
    }
    return Column(
        strategy=name,
        figures={
            figure: interval(read_figure(summary) for summary in summaries)
            for figure, read_figure in FIGURES.items()
        },
        ratios=ratios,
        endpoints=_endpoints(summaries),
        ttft_quantiles_s=[
            interval(values).mean
            for values in zip(*filter(None, (s.ttft_quantiles_s for s in summaries)), strict=True)
        ],
    )


def _endpoints(summaries: Sequence[RunSummary]) -> list[PerEndpoint]:
    endpoints = []
    for same in zip(*(summary.endpoints for summary in summaries), strict=True):
        tokens = sum(endpoint.prompt_tokens for endpoint in same)
        hits = sum(endpoint.prompt_tokens * endpoint.hit_ratio for endpoint in same)
        endpoints.append(
            PerEndpoint(
                requests=statistics.fmean(endpoint.requests for endpoint in same),
                prompt_tokens=tokens / len(same),
                hit_ratio=hits / tokens if tokens else 0.0,
                preemptions=statistics.fmean(endpoint.preemptions for endpoint in same),
            )
        )
    return endpoints


def _over(value: float, base: float) -> float:
    return value / base if base else math.nan
