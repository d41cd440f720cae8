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
from extproc.testing.probes import demand, probe_context, short

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
_APART = 0.07


def check_filter(make: Callable[[], Filter]) -> None:
    """Check that a filter returns some of the candidates in their order.

    The result must not depend on the order of the candidates or on the seed, and must be the same
    for an equal context. A filter that reads scraped signals only must return all candidates while
    none was scraped.

    Args:
        make: The filter class, or a function that returns a new filter.

    Raises:
        AssertionError: The filter breaks a rule.
    """
    plugin = probes.declared(make)
    for there, about, known in _situations(plugin):
        places = {id(candidate): at for at, candidate in enumerate(there)}

        def check_answer(
            result: Sequence[Candidate], places: Mapping[int, int] = places, about: str = about
        ) -> None:
            demand(
                all(id(candidate) in places for candidate in result),
                about,
                "only candidates of the call",
            )
            order = [places[id(candidate)] for candidate in result]
            demand(
                order == sorted(set(order)),
                about,
                "every candidate once at most, in the order of the call",
                order,
            )

        result = probes.stable_answer(make, _keep, there, about=about, check_answer=check_answer)
        back = builders.names(_keep(make(), probe_context(), there[::-1])[::-1])
        _same(builders.names(result) == back, builders.names(result), back, about=about)
        if not known and plugin.needs and plugin.needs <= SCRAPED:
            demand(
                len(result) == len(there),
                about,
                "all candidates, because nothing is known of them",
                len(result),
            )


def check_scorer(make: Callable[[], Scorer]) -> None:
    """Check that a scorer returns a finite number from 0 to 1 for each candidate.

    The scores must not depend on the order of the candidates or on the seed, and must be the same
    for an equal context. Of candidates that differ in scraped values only, those with unknown values
    must score neither best nor worst.

    Args:
        make: The scorer class, or a function that returns a new scorer.

    Raises:
        AssertionError: The scorer breaks a rule.
    """
    plugin = probes.declared(make)
    for there, about, _ in _situations(plugin):

        def check_answer(scores: object, size: int = len(there), about: str = about) -> None:
            numbers = _numbers(scores, size, "scores", about)
            wrong = [score for score in numbers if not 0 <= score <= 1]
            demand(not wrong, about, "numbers from 0 to 1", wrong)

        scores = probes.stable_answer(make, _score, there, about=about, check_answer=check_answer)
        back = make().score(probe_context(), there[::-1])[::-1]
        _same(_close(scores, back), scores, back, about=about)
    if plugin.needs & SCRAPED:
        _check_neutral(plugin)


def check_cost(make: Callable[[], CostModel]) -> None:
    """Check that a cost model returns a finite number for each candidate.

    Each term must have one number per candidate. The costs must not depend on the order of the
    candidates or on the seed, and must be the same for an equal context.

    Args:
        make: The class of the cost model, or a function that returns a new one.

    Raises:
        AssertionError: The cost model breaks a rule.
    """
    plugin = probes.declared(make)
    for there, about, _ in _situations(plugin):

        def check_answer(priced: CostResult, size: int = len(there), about: str = about) -> None:
            demand(isinstance(priced, CostResult), about, "a CostResult", type(priced).__name__)
            for name, numbers in (("costs", priced.costs), *priced.terms):
                _numbers(list(numbers), size, name, about)

        costs = probes.stable_answer(
            make, _price, there, about=about, check_answer=check_answer
        ).costs
        back = make().cost(probe_context(), there[::-1]).costs[::-1]
        _same(_close(costs, back), costs, back, about=about)


def check_picker(make: Callable[[], Picker]) -> None:
    """Check that a picker returns different positions of candidates, `count` of them if it can.

    The positions must be the same for an equal context and seed. Over many requests the share of
    each endpoint must not depend on the order of the candidates.

    Args:
        make: The picker class, or a function that returns a new picker.

    Raises:
        AssertionError: The picker breaks a rule.
    """
    plugin = probes.declared(make)
    for there, about, _ in _situations(plugin):
        for count in COUNTS:
            _check_picks(make, there, count, about=f"{about}, count {count}")
    forth, back = (_shares(make, step) for step in (1, -1))
    apart = max(abs(first - other) for first, other in zip(forth, back, strict=True))
    _same(
        apart <= _APART, forth, back, about=f"{plugin.kind} with 4 endpoints and {_PICKS} requests"
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
        for known in (True, False):
            there = builders.loaded_candidates(size, known=known)
            yield there, probes.situation(plugin, there, known=known), known


def _keep(plugin: Filter, turn: SchedulingContext, there: list[Candidate]) -> list[Candidate]:
    return list(plugin.filter(turn, there))


def _score(plugin: Scorer, turn: SchedulingContext, there: list[Candidate]) -> list[float]:
    return plugin.score(turn, there)


def _price(plugin: CostModel, turn: SchedulingContext, there: list[Candidate]) -> CostResult:
    return plugin.cost(turn, there)


def _check_picks(
    make: Callable[[], Picker], there: list[Candidate], count: int, *, about: str
) -> None:
    size = len(there)
    totals = [float(at % 17) for at in range(size)]
    before = list(totals)

    def pick(plugin: Picker, turn: SchedulingContext, candidates: list[Candidate]) -> list[int]:
        return plugin.pick(turn, candidates, totals, count=count)

    def check_answer(order: object) -> None:
        places = _numbers(order, min(size, count), "positions", about)
        inside = all(isinstance(at, int) and 0 <= at < size for at in places)
        demand(inside, about, f"positions from 0 to {size - 1}", order)
        demand(len(set(places)) == len(places), about, "no position twice", order)
        demand(totals == before, about, "unchanged totals", "a change")

    probes.stable_answer(make, pick, there, about=about, check_answer=check_answer, seeds=(1,))


def _shares(make: Callable[[], Picker], step: int) -> list[float]:
    """Each endpoint's share of many picks, the candidates in their order or backwards."""
    there = builders.loaded_candidates(4)
    candidates, totals = there[::step], [1.0, 2.0, 3.0, 4.0][::step]
    turn, plugin = probe_context(), make()
    counts = {candidate.endpoint.address: 0 for candidate in there}
    for _ in range(_PICKS):
        endpoint = candidates[plugin.pick(turn, candidates, totals, count=1)[0]].endpoint
        counts[endpoint.address] += 1
        if isinstance(plugin, Observer):
            plugin.on_committed(Decision(turn.request, [endpoint], candidates=candidates), turn.now)
    return [round(count / _PICKS, 4) for count in counts.values()]


def _check_neutral(plugin: Scorer) -> None:
    """Check that unknown values are imputed (`extproc.scheduling.normalization`)."""
    there = builders.identical_candidates(200)
    scores = plugin.score(probe_context(), there)
    low, high = min(scores), max(scores)
    unknown = [
        score
        for score, candidate in zip(scores, there, strict=True)
        if candidate.load.waiting is None
    ]
    demand(
        low == high or all(low < score < high for score in unknown),
        f"{plugin.kind} with 200 endpoints that differ in scraped values only",
        f"endpoints never scraped between the worst ({low:g}) and the best ({high:g})",
        unknown,
    )
    scores_of_unknown = plugin.score(probe_context(), builders.identical_candidates(9, known=False))
    demand(
        max(scores_of_unknown) - min(scores_of_unknown) <= _ROUNDING,
        f"{plugin.kind} with 9 endpoints of which nothing was scraped",
        "one score for all",
        scores_of_unknown,
    )


def _numbers(values: object, size: int, what: str, about: str) -> list[float]:
    """Return values that are a list of `size` finite numbers.

    Raises:
        AssertionError: They are not.
    """
    if not isinstance(values, list):
        raise AssertionError(f"{about}: expected a list of {what}, got {type(values).__name__}")  # noqa: TRY004 - the one error of a check
    demand(len(values) == size, about, f"{size} {what}", len(values))
    wrong = [
        value for value in values if not isinstance(value, int | float) or not math.isfinite(value)
    ]
    demand(not wrong, about, f"{what} that are finite numbers", wrong)
    return values


def _close(first: Sequence[float], second: Sequence[float]) -> bool:
    return len(first) == len(second) and all(
        math.isclose(a, b, rel_tol=_ROUNDING, abs_tol=_ROUNDING)
        for a, b in zip(first, second, strict=True)
    )


def _same(equal: object, forth: object, back: object, *, about: str) -> None:
    actual = f"{short(forth)}, and {short(back)} for the reversed order"
    demand(equal, about, "the same result for each endpoint in any order", actual)
