import functools
import itertools
from functools import cached_property
from typing import ClassVar

import msgspec
import pytest

from extproc.decision import CostResult
from extproc.scheduling.framework import Signal
from extproc.testing import contract

NOTHING = frozenset()


class Plugin(msgspec.Struct, frozen=True, forbid_unknown_fields=True, dict=True):
    """A plugin whose answers come from the test."""

    kind: ClassVar[str] = "odd"
    needs: ClassVar[frozenset[Signal]] = NOTHING


def scorer(answer, needs=NOTHING):
    """Build a scorer class from a function of context and candidates."""

    class Odd(Plugin, frozen=True):
        def score(self, turn, candidates):
            return answer(turn, candidates)

    Odd.needs = needs
    return Odd


def complaint(check, cls):
    with pytest.raises(AssertionError) as raised:
        check(cls)
    return str(raised.value)


def test_a_valid_scorer_passes():
    """A plugin that keeps the contract passes."""
    contract.check_scorer(scorer(lambda turn, them: [1 / (1 + c.in_flight) for c in them]))


def by_place(turn, them):
    return [at / len(them) for at in range(len(them))]


def sorts(turn, them):
    them.sort(key=lambda c: c.in_flight)
    return [0.5] * len(them)


def headers(turn, them):
    turn.headers["x-seen"] = "1"
    return [0.5] * len(them)


TICKS = itertools.count()


@pytest.mark.parametrize(
    ("answer", "wanted"),
    [
        (lambda turn, them: [0.5], "odd with 2 endpoints, some of them scraped: expected 2 scores"),
        (lambda turn, them: [2.0] * len(them), "expected numbers from 0 to 1, got [2.0]"),
        (lambda turn, them: [float("nan")] * len(them), "finite numbers, got [nan]"),
        (lambda turn, them: ["1"] * len(them), "finite numbers, got ['1']"),
        (lambda turn, them: (0.5,) * len(them), "expected a list of scores, got tuple"),
        (lambda turn, them: None, "expected a list of scores, got NoneType"),
        (lambda turn, them: [1 / 0], "expected an answer, got ZeroDivisionError"),
        (lambda turn, them: [c.load.waiting / 100 for c in them], "got TypeError"),
        (by_place, "the same result for each endpoint in any order"),
        (sorts, "unchanged order of the candidates"),
        (headers, "unchanged context and candidates"),
        (lambda turn, them: [turn.rng.random()] * len(them), "the same call (seed 2"),
        (lambda turn, them: [next(TICKS) % 7 / 7] * len(them), "the same call (seed 1"),
    ],
)
def test_invalid_scorers_are_reported(answer, wanted):
    """An error names the broken rule, the situation and the value."""
    assert wanted in complaint(contract.check_scorer, scorer(answer))


@pytest.mark.parametrize("fill", [0.0, 1.0])
def test_unknown_values_may_not_score_best_or_worst(fill):
    """A scorer that takes an unknown value for empty or full is refused."""

    def answer(turn, them):
        waiting = [c.load.waiting for c in them]
        return [fill if w is None else 0.1 + 0.8 * w / 60 for w in waiting]

    odd = scorer(answer, frozenset({Signal.WAITING}))
    assert "never scraped between the worst" in complaint(contract.check_scorer, odd)


def test_declarations_are_checked():
    """Kind, needs, frozen and strict parameters, and defaults for all of them."""

    class Loose(msgspec.Struct):
        kind: ClassVar[str] = "loose"
        needs: ClassVar[frozenset[Signal]] = NOTHING

    class Ignores(msgspec.Struct, frozen=True):
        kind: ClassVar[str] = "ignores"
        needs: ClassVar[frozenset[Signal]] = NOTHING

    class Asks(Plugin, frozen=True):
        size: int

        def score(self, turn, candidates):
            return [0.5] * len(candidates)

    class Shouts(Plugin, frozen=True):
        kind: ClassVar[str] = "LOUD"

    class Greedy(Plugin, frozen=True):
        needs: ClassVar[list[str]] = ["waiting"]

    for cls, wanted in (
        (Loose, "frozen=True"),
        (Ignores, "forbid_unknown_fields=True"),
        (Asks, "Asks: expected a plugin that can be built without parameters"),
        (Shouts, "a kind in lower case"),
        (Greedy, "needs as a frozenset of Signal"),
    ):
        assert wanted in complaint(contract.check_scorer, cls)
    contract.check_scorer(functools.partial(Asks, size=3))


def filtering(answer, needs=NOTHING):
    class Odd(Plugin, frozen=True):
        def filter(self, turn, candidates):
            return answer(turn, candidates)

    Odd.needs = needs
    return Odd


@pytest.mark.parametrize(
    ("answer", "wanted"),
    [
        (
            lambda turn, them: [msgspec.structs.replace(c) for c in them],
            "only candidates of the call",
        ),
        (lambda turn, them: them[::-1], "every candidate once at most, in the order of the call"),
        (
            lambda turn, them: [them[0], them[0]],
            "every candidate once at most, in the order of the call",
        ),
        (lambda turn, them: them[:1], "in any order"),
        (lambda turn, them: [c for c in them if turn.rng.random() < 0.5], "same call"),
    ],
)
def test_invalid_filters_are_reported(answer, wanted):
    """A filter must return candidates of the call, in their order, and the same ones for an equal context."""
    assert wanted in complaint(contract.check_filter, filtering(answer))


def test_a_filter_of_scraped_values_lets_unknown_pass():
    """A filter must not drop candidates whose signals are unknown."""

    def answer(turn, them):
        return [c for c in them if c.load.waiting is not None]

    contract.check_filter(filtering(answer))
    scraped = filtering(answer, frozenset({Signal.WAITING}))
    assert "all candidates, because nothing is known" in complaint(contract.check_filter, scraped)


def pricing(answer):
    class Odd(Plugin, frozen=True):
        def cost(self, turn, candidates):
            return answer(candidates)

    return Odd


def test_costs():
    """A cost model must return finite costs and terms in the order of the candidates."""
    contract.check_cost(pricing(lambda them: CostResult("odd", "s", [c.in_flight for c in them])))
    for answer, wanted in (
        (lambda them: [1.0] * len(them), "a CostResult, got list"),
        (lambda them: CostResult("odd", "s", [float("inf")] * len(them)), "costs that are finite"),
        (lambda them: CostResult("odd", "s", [1.0] * len(them), [("wait", [])]), "1 wait"),
        (lambda them: CostResult("odd", "s", list(range(len(them)))), "in any order"),
    ):
        assert wanted in complaint(contract.check_cost, pricing(answer))


def picking(answer):
    class Odd(Plugin, frozen=True):
        def pick(self, turn, candidates, totals, *, count):
            return answer(turn, candidates, totals, count)

    return Odd


@pytest.mark.parametrize(
    ("answer", "wanted"),
    [
        (lambda turn, them, totals, count: [0], "count 3: expected 2 positions"),
        (lambda turn, them, totals, count: [0] * min(count, len(them)), "no position twice"),
        (lambda turn, them, totals, count: range(min(count, len(them))), "a list of positions"),
        (lambda turn, them, totals, count: [*range(1, 1 + min(count, len(them)))], "0 to 0"),
        (
            lambda turn, them, totals, count: [*range(min(count, len(them)))],
            "the same result for each",
        ),
        (
            lambda turn, them, totals, count: [*range(len(them))][: totals.sort() or count],
            "unchanged totals",
        ),
    ],
)
def test_invalid_pickers_are_reported(answer, wanted):
    """A picker must return different positions, and its shares must not depend on the order."""
    assert wanted in complaint(contract.check_picker, picking(answer))


def test_a_picker_may_be_random():
    """The rng of the context may be used, because it is seeded."""

    def answer(turn, them, totals, count):
        return turn.rng.sample(range(len(them)), min(count, len(them)))

    contract.check_picker(picking(answer))


class Remembers(Plugin, frozen=True):
    """Scores lower the endpoints that were chosen before."""

    @cached_property
    def addresses(self):
        return set()

    def score(self, turn, candidates):
        return [0.0 if c.endpoint.address in self.addresses else 1.0 for c in candidates]

    def on_committed(self, decision, now):
        self.addresses.add(decision.endpoints[0].address)


def test_state_may_change_in_on_committed():
    """An observer passes when its answers change with choices only."""
    contract.check_scorer(Remembers)


def test_on_committed_accepts_any_decision():
    """An observer that raises on a plain decision is refused."""

    class Picky(Remembers, frozen=True):
        def on_committed(self, decision, now):
            raise KeyError(decision.picker)

    message = complaint(contract.check_scorer, Picky)
    assert "answer_headers to accept any decision, got KeyError" in message


def test_keys_and_answer_headers_are_text():
    """Keys and response headers of a plugin must be text."""

    class Numbers(Remembers, frozen=True):
        def answer_headers(self, turn, chosen):
            return [("x-place", 5)]

    class Sessions(Remembers, frozen=True):
        def keys(self, turn):
            return {"session": turn.headers["x-session"]}

        def on_committed(self, decision, now):
            assert decision.plugin_keys == {"session": "s-1"}

    message = complaint(contract.check_scorer, Numbers)
    assert "answer_headers: expected pairs of text, got [('x-place', 5)]" in message
    contract.check_scorer(Sessions)


def test_state_is_not_shared_between_instances():
    """Instances of a plugin must not share state."""
    decisions = []

    class Shares(Plugin, frozen=True):
        def score(self, turn, candidates):
            return [1 / (1 + len(decisions))] * len(candidates)

        def on_committed(self, decision, now):
            decisions.append(decision)

    assert "a second instance: no shared state" in complaint(contract.check_scorer, Shares)


def test_an_invalid_answer_after_on_committed_is_reported():
    """The answer is checked again after a decision."""

    class Grows(Remembers, frozen=True):
        def score(self, turn, candidates):
            return [float(2 * len(self.addresses))] * len(candidates)

    assert "numbers from 0 to 1, got [2.0]" in complaint(contract.check_scorer, Grows)
