"""Contract of scheduling plugins, with a check for each role.

Each check takes the class, or any function that makes a new plugin of it, and raises an
`AssertionError` that says what was wanted, what came and in which situation. Situations are 1 to
1000 endpoints about which much, little or nothing is known.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from extproc.decision import CostResult, Decision
from extproc.endpoint import Candidate
from extproc.scheduling.context import SchedulingContext
from extproc.scheduling.framework import CostModel, Filter, Observer, Picker, Plugin, Scorer, Signal
from extproc.testing import builders, probes
from extproc.testing.probes import demand, probe_context, short

#: How many endpoints there are.
SIZES = (1, 2, 7, 100, 1000)

#: How many endpoints a picker is asked for; more than there are, too.
COUNTS = (1, 3, 2000)

#: Signals that come from a metrics page only, and so may be unknown.
SCRAPED = frozenset({Signal.WAITING, Signal.RUNNING, Signal.KV_USAGE, Signal.ADAPTERS})

#: Difference that summing in another order may make.
_ROUNDING = 1e-9
#: Picks from which shares are taken, and how far the shares of two such runs may lie apart: five
#: standard deviations of the difference.
_PICKS = 3000
_APART = 0.07


def check_filter(make: Callable[[], Filter]) -> None:
    """A filter keeps some of the candidates in their order, whatever their order is.

    The same again for the same turn, whatever the seed. One that reads nothing but metrics pages
    keeps everybody while nothing is known.

    Raises:
        AssertionError: It does not.
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
                "candidates it was given",
            )
            order = [places[id(candidate)] for candidate in result]
            demand(order == sorted(set(order)), about, "each once and in their order", order)

        result = probes.stable_answer(make, _keep, there, about=about, check_answer=check_answer)
        back = builders.names(_keep(make(), probe_context(), there[::-1])[::-1])
        _same(builders.names(result) == back, builders.names(result), back, about=about)
        if not known and plugin.needs and plugin.needs <= SCRAPED:
            demand(len(result) == len(there), about, "everybody, for nothing is known", len(result))


def check_scorer(make: Callable[[], Scorer]) -> None:
    """A scorer gives each candidate a finite number of 0 to 1, in whatever order they come.

    The same again for the same turn, whatever the seed. Of candidates that differ in scraped
    values only, an unknown one is neither best nor worst.

    Raises:
        AssertionError: It does not.
    """
    plugin = probes.declared(make)
    for there, about, _ in _situations(plugin):

        def check_answer(scores: object, size: int = len(there), about: str = about) -> None:
            numbers = _numbers(scores, size, "scores", about)
            wrong = [score for score in numbers if not 0 <= score <= 1]
            demand(not wrong, about, "numbers of 0 to 1", wrong)

        scores = probes.stable_answer(make, _score, there, about=about, check_answer=check_answer)
        back = make().score(probe_context(), there[::-1])[::-1]
        _same(_close(scores, back), scores, back, about=about)
    if plugin.needs & SCRAPED:
        _check_neutral(plugin)


def check_cost(make: Callable[[], CostModel]) -> None:
    """A cost model gives each candidate a finite number, in whatever order they come.

    Terms are as many as candidates. The same again for the same turn, whatever the seed.

    Raises:
        AssertionError: It does not.
    """
    plugin = probes.declared(make)
    for there, about, _ in _situations(plugin):

        def check_answer(priced: CostResult, size: int = len(there), about: str = about) -> None:
            demand(isinstance(priced, CostResult), about, "a Priced", type(priced).__name__)
            for name, numbers in (("costs", priced.costs), *priced.terms):
                _numbers(list(numbers), size, name, about)

        costs = probes.stable_answer(
            make, _price, there, about=about, check_answer=check_answer
        ).costs
        back = make().cost(probe_context(), there[::-1]).costs[::-1]
        _same(_close(costs, back), costs, back, about=about)


def check_picker(make: Callable[[], Picker]) -> None:
    """A picker names different positions, as many as asked for if there are.

    The same again for the same seed, and over many turns each endpoint gets the same share in
    whatever order they come.

    Raises:
        AssertionError: It does not.
    """
    plugin = probes.declared(make)
    for there, about, _ in _situations(plugin):
        for count in COUNTS:
            _check_picks(make, there, count, about=f"{about}, asked for {count}")
    forth, back = (_shares(make, step) for step in (1, -1))
    apart = max(abs(first - other) for first, other in zip(forth, back, strict=True))
    _same(apart <= _APART, forth, back, about=f"{plugin.kind} with 4 endpoints and {_PICKS} turns")


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
        demand(inside, about, f"positions of 0 to {size - 1}", order)
        demand(len(set(places)) == len(places), about, "nobody twice", order)
        demand(totals == before, about, "totals left as they are", "a change")

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
    """Unknown is neither best nor worst (the rule of `scheduling.unknown`)."""
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
    """A list of so many finite numbers.

    Raises:
        AssertionError: It is none.
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
    actual = f"{short(forth)}, and {short(back)} when they come backwards"
    demand(equal, about, "the same for each endpoint in whatever order they come", actual)
