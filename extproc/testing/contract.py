"""Contract of scheduling plugins, with a check for each role.

Each check takes the plugin class, or a function without arguments that returns a new plugin, and
raises an `AssertionError` with the rule, the value that broke it and the situation. Situations are
1 to 1000 endpoints whose signals are all, partly or not known.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from extproc.decision import CostResult, Decision
from extproc.endpoint import Candidate
from extproc.scheduling.framework import (
    CostModel,
    Filter,
    Observer,
    Picker,
    Plugin,
    SchedulingContext,
    Scorer,
    Signal,
)
from extproc.testing import builders, probes
from extproc.testing.probes import AnswerT, CallT, Role, demand, probe_context, short

#: Numbers of endpoints.
SIZES = (1, 2, 7, 100, 1000)

#: Numbers of endpoints that a picker must return; the last is more than there are.
COUNTS = (1, 3, 2000)

#: Signals that come from a metrics page only, and so may be unknown.
SCRAPED = frozenset(
    {Signal.WAITING, Signal.RUNNING, Signal.KV_USAGE, Signal.ADAPTERS, Signal.EXTRA}
)

#: Difference that summing in another order may make.
_ROUNDING = 1e-9
#: Picks from which shares are taken, and how far the shares of two such runs may lie apart: five
#: standard deviations of the difference.
_PICKS = 3000
_MAX_SHARE_DIFFERENCE = 0.07


def check_filter(make: Callable[[], Filter]) -> None:
    """Check that a filter returns some of the candidates in their order.

    The result must not depend on the order of the candidates or on the seed, and must be the same
    for an equal context. A filter that reads scraped signals only must return all candidates while
    none was scraped.
    """
    plugin = probes.build_checked(make)

    def call(
        plugin: Filter, context: SchedulingContext, candidates: list[Candidate]
    ) -> list[Candidate]:
        return list(plugin.filter(context, candidates))

    for candidates, about, is_scraped in _situations(plugin):
        position_of = {id(candidate): position for position, candidate in enumerate(candidates)}

        def check_answer(
            result: Sequence[Candidate],
            position_of: Mapping[int, int] = position_of,
            about: str = about,
        ) -> None:
            demand(
                all(id(candidate) in position_of for candidate in result),
                about,
                "only candidates of the call",
            )
            order = [position_of[id(candidate)] for candidate in result]
            demand(
                order == sorted(set(order)),
                about,
                "every candidate once at most, in the order of the call",
                order,
            )

        result = probes.stable_answer(
            make, call, candidates, about=about, check_answer=check_answer
        )
        reversed_result = builders.names(_answer_reversed(make, call, candidates, about)[::-1])
        _demand_order_independence(
            builders.names(result) == reversed_result,
            builders.names(result),
            reversed_result,
            about=about,
        )
        if not is_scraped and plugin.needs and plugin.needs <= SCRAPED:
            demand(
                len(result) == len(candidates),
                about,
                "all candidates, because nothing is known of them",
                len(result),
            )


def check_scorer(make: Callable[[], Scorer]) -> None:
    """Check that a scorer returns a finite number from 0 to 1 for each candidate.

    The scores must not depend on the order of the candidates or on the seed, and must be the same
    for an equal context. Of candidates that differ in scraped values only, those with unknown values
    must score neither best nor worst.
    """
    plugin = probes.build_checked(make)
    for candidates, about, _ in _situations(plugin):

        def check_answer(scores: object, size: int = len(candidates), about: str = about) -> None:
            numbers = _check_numbers(scores, size, "scores", about)
            out_of_range = [score for score in numbers if not 0 <= score <= 1]
            demand(not out_of_range, about, "numbers from 0 to 1", out_of_range)

        scores = probes.stable_answer(
            make, type(plugin).score, candidates, about=about, check_answer=check_answer
        )
        reversed_result = _answer_reversed(make, type(plugin).score, candidates, about)[::-1]
        _demand_order_independence(
            _is_close(scores, reversed_result), scores, reversed_result, about=about
        )
    if plugin.needs & SCRAPED:
        _check_neutral(plugin)


def check_cost(make: Callable[[], CostModel]) -> None:
    """Check that a cost model returns a finite number for each candidate.

    Each term must have one number per candidate. The costs must not depend on the order of the
    candidates or on the seed, and must be the same for an equal context.
    """
    plugin = probes.build_checked(make)
    for candidates, about, _ in _situations(plugin):

        def check_answer(
            result: CostResult, size: int = len(candidates), about: str = about
        ) -> None:
            demand(isinstance(result, CostResult), about, "a CostResult", type(result).__name__)
            for name, numbers in (("costs", result.costs), *result.terms):
                _check_numbers(list(numbers), size, name, about)

        costs = probes.stable_answer(
            make, type(plugin).cost, candidates, about=about, check_answer=check_answer
        ).costs
        reversed_result = _answer_reversed(make, type(plugin).cost, candidates, about).costs[::-1]
        _demand_order_independence(
            _is_close(costs, reversed_result), costs, reversed_result, about=about
        )


def check_picker(make: Callable[[], Picker]) -> None:
    """Check that a picker returns different positions of candidates, `count` of them if it can.

    The positions must be the same for an equal context and seed. Over many requests the share of
    each endpoint must not depend on the order of the candidates.
    """
    plugin = probes.build_checked(make)
    for candidates, about, _ in _situations(plugin):
        for count in COUNTS:
            _check_picks(make, candidates, count, about=f"{about}, count {count}")
    forward_result, reversed_result = (_shares(make, step) for step in (1, -1))
    difference = max(
        abs(first - other) for first, other in zip(forward_result, reversed_result, strict=True)
    )
    _demand_order_independence(
        difference <= _MAX_SHARE_DIFFERENCE,
        forward_result,
        reversed_result,
        about=f"{plugin.kind} with 4 endpoints and {_PICKS} requests",
    )


#: The check of each role, by the method that makes it.
CHECKS: Mapping[str, Callable[[Callable[[], Any]], None]] = {
    "filter": check_filter,
    "score": check_scorer,
    "cost": check_cost,
    "pick": check_picker,
}


def _situations(plugin: Plugin) -> Iterator[tuple[list[Candidate], str, bool]]:
    """Candidates, a description of the situation, and True if some of them were scraped."""
    for size in SIZES:
        for is_scraped in (True, False):
            candidates = builders.loaded_candidates(
                size, scraped=is_scraped, extra_metrics=probes.read_extra_metrics(plugin)
            )
            yield (
                candidates,
                probes.describe_situation(plugin, candidates, is_scraped=is_scraped),
                is_scraped,
            )


def _answer_reversed(
    make: Callable[[], Role],
    call: CallT[Role, AnswerT],
    candidates: list[Candidate],
    about: str,
) -> AnswerT:
    """Return the answer of a new plugin for the candidates in reversed order."""
    plugin = probes.build_plugin(make)
    return probes.call_plugin(call, plugin, probe_context(), candidates[::-1], about)


def _check_picks(
    make: Callable[[], Picker], candidates: list[Candidate], count: int, *, about: str
) -> None:
    size = len(candidates)
    totals = [float(position % 17) for position in range(size)]
    before = list(totals)

    def pick(plugin: Picker, context: SchedulingContext, candidates: list[Candidate]) -> list[int]:
        return plugin.pick(context, candidates, totals, count=count)

    def check_answer(order: object) -> None:
        position_of = _check_numbers(order, min(size, count), "positions", about)
        inside = all(isinstance(position, int) and 0 <= position < size for position in position_of)
        demand(inside, about, f"positions from 0 to {size - 1}", order)
        demand(len(set(position_of)) == len(position_of), about, "no position twice", order)
        demand(totals == before, about, "unchanged totals", "a change")

    probes.stable_answer(make, pick, candidates, about=about, check_answer=check_answer, seeds=(1,))


def _shares(make: Callable[[], Picker], step: int) -> list[float]:
    """Each endpoint's share of many picks, the candidates in their order or backwards."""
    loaded = builders.loaded_candidates(4)
    candidates, totals = loaded[::step], [1.0, 2.0, 3.0, 4.0][::step]
    context, plugin = probe_context(), probes.build_plugin(make)
    counts = {candidate.endpoint.address: 0 for candidate in loaded}
    with probes.report_errors(f"{plugin.kind} with 4 endpoints", f"{_PICKS} picks in a row"):
        for _ in range(_PICKS):
            endpoint = candidates[plugin.pick(context, candidates, totals, count=1)[0]].endpoint
            counts[endpoint.address] += 1
            if isinstance(plugin, Observer):
                plugin.on_committed(
                    Decision(context.request, [endpoint], candidates=candidates), context.now
                )
    return [round(count / _PICKS, 4) for count in counts.values()]


def _check_neutral(plugin: Scorer) -> None:
    """Check that unknown values are imputed (`extproc.scheduling.framework`)."""
    metrics = probes.read_extra_metrics(plugin)
    candidates = builders.identical_candidates(200, extra_metrics=metrics)
    about = f"{plugin.kind} with 200 endpoints that differ in scraped values only"
    scores = probes.call_plugin(type(plugin).score, plugin, probe_context(), candidates, about)
    low, high = min(scores), max(scores)
    unknown = [
        score
        for score, candidate in zip(scores, candidates, strict=True)
        if candidate.load.waiting is None
    ]
    demand(
        low == high or all(low < score < high for score in unknown),
        about,
        f"endpoints never scraped between the worst ({low:g}) and the best ({high:g})",
        unknown,
    )
    candidates = builders.identical_candidates(9, scraped=False)
    about = f"{plugin.kind} with 9 endpoints of which nothing was scraped"
    scores_of_unknown = probes.call_plugin(
        type(plugin).score, plugin, probe_context(), candidates, about
    )
    demand(
        max(scores_of_unknown) - min(scores_of_unknown) <= _ROUNDING,
        about,
        "one score for all",
        scores_of_unknown,
    )


def _check_numbers(values: object, size: int, what: str, about: str) -> list[float]:
    """Return values that are a list of `size` finite numbers; others break the contract."""
    if not isinstance(values, list):
        raise AssertionError(f"{about}: expected a list of {what}, got {type(values).__name__}")  # noqa: TRY004 - the one error of a check
    demand(len(values) == size, about, f"{size} {what}", len(values))
    not_finite = [
        value for value in values if not isinstance(value, int | float) or not math.isfinite(value)
    ]
    demand(not not_finite, about, f"{what} that are finite numbers", not_finite)
    return values


def _is_close(first: Sequence[float], second: Sequence[float]) -> bool:
    return len(first) == len(second) and all(
        math.isclose(a, b, rel_tol=_ROUNDING, abs_tol=_ROUNDING)
        for a, b in zip(first, second, strict=True)
    )


def _demand_order_independence(
    equal: object, forward_result: object, reversed_result: object, *, about: str
) -> None:
    actual = f"{short(forward_result)}, and {short(reversed_result)} for the reversed order"
    demand(equal, about, "the same result for each endpoint in any order", actual)
