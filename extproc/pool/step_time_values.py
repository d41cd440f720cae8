"""Step times as numbers: their mean over a pool, comparison, and the unknowns of least squares.

The unknowns a, b, c, d and l are those of `step_time_estimator`.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Final

import msgspec

from extproc.endpoint import DEFAULT_STEP_TIMES, StepTimeModel

#: Bounds of a, b, c, d and l: beyond them a row was not what it seemed.
BOUNDS: Final = ((1e-4, 2.0), (1e-7, 1e-2), (1e-7, 5e-2), (1e-9, 1e-4), (1e-3, 60.0))

#: How far beyond them a row, or a mean over engines whose speeds differ, may lie (a factor).
SLACK: Final = 10.0

#: Share by which an engine may differ from its pool and count as equal, however many windows show
#: it: pickers that do not talk agree on the endpoint of a conversation where costs are equal. Where
#: half of the engines have half the speed, p99 of first tokens is 0.70 s with 0.2 and 0.58 s with 0.4
#: (`python -m bench.proof --only heterogeneous --columns adaptive --seeds 8`).
_ALIKE = 0.4


def pool_mean(rates: Sequence[StepTimeModel]) -> StepTimeModel:
    """Mean step times of the engines with evidence: the prior of a new engine.

    Its `evidence` is how many those are if there are several, else 0: one engine is no pool.
    """
    shown = [model for model in rates if model.evidence]
    if not shown:
        return DEFAULT_STEP_TIMES
    count = len(shown)
    means = [sum(column) / count for column in zip(*map(unknowns_of, shown), strict=True)]
    facts = StepTimeModel(
        output_tokens=sum(model.output_tokens for model in shown) / count,
        context_tokens=sum(model.context_tokens for model in shown) / count,
        evidence=float(count) if count > 1 else 0.0,
    )
    return from_unknowns(means, facts)


def scaled(rates: StepTimeModel, factor: float) -> StepTimeModel:
    """Rates with every time but that of adapter loads times a factor."""
    *times, loading = unknowns_of(rates)
    return from_unknowns([*(factor * value for value in times), loading], rates)


def bounded(rates: StepTimeModel) -> StepTimeModel:
    """Rates not far beyond `BOUNDS`: those of counters that contradict each other drift."""
    pairs = zip(BOUNDS, unknowns_of(rates), strict=True)
    values = [min(high * SLACK, max(low / SLACK, value)) for (low, high), value in pairs]
    return from_unknowns(values, rates)


def shrunk(shown: float, prior: float, *, noise: float) -> float:
    """Estimate between a prior and what was shown: the prior where those are alike.

    Args:
        noise: Squared share by which what was shown errs.
    """
    if shown == prior:
        return prior
    off = (shown - prior) / min(shown, prior)
    return prior + (shown - prior) * max(0.0, 1.0 - (_ALIKE * _ALIKE + noise) / (off * off))


def are_close(first: StepTimeModel, second: StepTimeModel) -> bool:
    """True if no step time differs by more than a twentieth."""
    pairs = zip(unknowns_of(first), unknowns_of(second), strict=True)
    return all(abs(mine - other) <= 0.05 * other for mine, other in pairs)


def seconds_of(unknowns: Sequence[float], row: Sequence[float]) -> float:
    """Seconds that a row takes by step times, adapter loads apart."""
    seconds: float = sum(map(operator.mul, unknowns[:-1], row))
    return seconds


def unknowns_of(rates: StepTimeModel) -> tuple[float, float, float, float, float]:
    """The unknowns of rates."""
    return (
        rates.step_s,
        rates.prefill_s,
        rates.decode_s,
        rates.context_s,
        rates.adapter_load_s,
    )


def from_unknowns(unknowns: Sequence[float], facts: StepTimeModel) -> StepTimeModel:
    """Rates of these unknowns, everything else taken from `facts`."""
    step_s, prefill_s, decode_s, context_s, adapter_load_s = unknowns
    return msgspec.structs.replace(
        facts,
        step_s=step_s,
        prefill_s=prefill_s,
        decode_s=decode_s,
        context_s=context_s,
        adapter_load_s=adapter_load_s,
    )
