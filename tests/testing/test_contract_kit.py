import functools
import itertools
import sys
from functools import cached_property
from typing import ClassVar

import msgspec
import pytest

from extproc.decision import CostResult
from extproc.scheduling.framework import Signal
from extproc.testing import contract

NOTHING = frozenset()


class ScriptedPlugin(msgspec.Struct, frozen=True, forbid_unknown_fields=True, dict=True):
    """A plugin whose answers come from the test."""

    kind: ClassVar[str] = "odd"
    needs: ClassVar[frozenset[Signal]] = NOTHING


def scorer(answer, needs=NOTHING):
    """Build a scorer class from a function of context and candidates."""

    class OddScorer(ScriptedPlugin, frozen=True):
        def score(self, context, candidates):
            return answer(context, candidates)

    OddScorer.needs = needs
    return OddScorer


def complaint(check, cls):
    with pytest.raises(AssertionError) as raised:
        check(cls)
    return str(raised.value)


def test_a_valid_scorer_passes():
    """A plugin that keeps the contract passes."""
    contract.check_scorer(scorer(lambda context, items: [1 / (1 + c.in_flight) for c in items]))


def by_place(context, items):
    return [at / len(items) for at in range(len(items))]


def sorts(context, items):
    items.sort(key=lambda c: c.in_flight)
    return [0.5] * len(items)


def headers(context, items):
    context.headers["x-seen"] = "1"
    return [0.5] * len(items)


TICKS = itertools.count()


@pytest.mark.parametrize(
    ("answer", "wanted"),
    [
        (
            lambda context, items: [0.5],
            "odd with 2 endpoints, some of them scraped: expected 2 scores",
        ),
        (lambda context, items: [2.0] * len(items), "expected numbers from 0 to 1, got [2.0]"),
        (lambda context, items: [float("nan")] * len(items), "finite numbers, got [nan]"),
        (lambda context, items: ["1"] * len(items), "finite numbers, got ['1']"),
        (lambda context, items: (0.5,) * len(items), "expected a list of scores, got tuple"),
        (lambda context, items: None, "expected a list of scores, got NoneType"),
        (lambda context, items: [1 / 0], "expected an answer, got ZeroDivisionError"),
        (lambda context, items: sys.exit(0), "expected an answer, got SystemExit: 0"),
        (lambda context, items: [c.load.waiting / 100 for c in items], "got TypeError"),
        (by_place, "the same result for each endpoint in any order"),
        (sorts, "unchanged order of the candidates"),
        (headers, "unchanged context and candidates"),
        (lambda context, items: [context.rng.random()] * len(items), "the same call (seed 2"),
        (lambda context, items: [next(TICKS) % 7 / 7] * len(items), "the same call (seed 1"),
    ],
)
def test_invalid_scorers_are_reported(answer, wanted):
    """An error names the broken rule, the situation and the value."""
    assert wanted in complaint(contract.check_scorer, scorer(answer))


@pytest.mark.parametrize("fill", [0.0, 1.0])
def test_unknown_values_may_not_score_best_or_worst(fill):
    """A scorer that takes an unknown value for empty or full is refused."""

    def answer(context, items):
        waiting = [c.load.waiting for c in items]
        return [fill if w is None else 0.1 + 0.8 * w / 60 for w in waiting]

    odd = scorer(answer, frozenset({Signal.WAITING}))
    assert "never scraped between the worst" in complaint(contract.check_scorer, odd)


@pytest.mark.parametrize("fill", [0.0, 1.0])
def test_unknown_extra_metrics_may_not_score_best_or_worst(fill):
    """The metrics that a scorer declares have values in the check."""

    def answer(context, items):
        known = [c.load.extra.get("offload") for c in items]
        return [fill if value is None else 0.1 + 0.8 * value for value in known]

    odd = scorer(answer, frozenset({Signal.EXTRA}))
    assert "expected extra_metrics as a frozenset of names, because needs has" in complaint(
        contract.check_scorer, odd
    )
    odd.extra_metrics = frozenset({"offload"})
    assert "never scraped between the worst" in complaint(contract.check_scorer, odd)


CALLS = ("first", "reversed", "unknown values")


@pytest.mark.parametrize("call", CALLS)
def test_exits_are_reported_in_every_check(call):
    """A plugin that exits breaks the contract, in the calls of every check."""

    def answer(context, items):
        reads = {
            "first": True,
            "reversed": len(items) > 1 and items[0].endpoint.name > items[1].endpoint.name,
            "unknown values": len(items) == 200,
        }
        return sys.exit() if reads[call] else [0.5] * len(items)

    odd = scorer(answer, frozenset({Signal.WAITING}))
    assert "expected an answer, got SystemExit" in complaint(contract.check_scorer, odd)


def test_exits_of_constructors_and_optional_methods_are_reported():
    """A plugin may exit neither when it is built nor when a decision is committed."""

    class Leaves(AlternatingScorer, frozen=True):
        def __post_init__(self):
            raise SystemExit

    class Forgets(AlternatingScorer, frozen=True):
        def on_committed(self, decision, now):
            raise SystemExit

    message = complaint(contract.check_scorer, Leaves)
    assert "Leaves: expected a plugin that can be built without parameters, got SystemEx" in message
    message = complaint(contract.check_scorer, Forgets)
    assert "answer_headers to accept any decision, got SystemExit" in message


def test_answers_of_other_types_are_reported():
    """Those that a check cannot read, too."""

    class Priced(ScriptedPlugin, frozen=True):
        def cost(self, context, candidates):
            return CostResult("odd", "s", 5, 7)

    class Named(ScriptedPlugin, frozen=True):
        def score(self, context, candidates):
            return [0.5] * len(candidates)

        def answer_headers(self, context, chosen):
            return [5]

    message = complaint(contract.check_cost, Priced)
    assert "expected an answer of the types of its role, got CostResult" in message
    message = complaint(contract.check_scorer, Named)
    assert "answer_headers: expected pairs of text, got [5]" in message


def test_an_interrupt_is_no_breach():
    """An interrupt of the user ends the check."""

    def answer(context, items):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        contract.check_scorer(scorer(answer))


def test_declarations_are_checked():
    """Kind, needs, frozen and strict parameters, and defaults for all of them."""

    class Loose(msgspec.Struct):
        kind: ClassVar[str] = "loose"
        needs: ClassVar[frozenset[Signal]] = NOTHING

    class Ignores(msgspec.Struct, frozen=True):
        kind: ClassVar[str] = "ignores"
        needs: ClassVar[frozenset[Signal]] = NOTHING

    class Asks(ScriptedPlugin, frozen=True):
        size: int

        def score(self, context, candidates):
            return [0.5] * len(candidates)

    class Shouts(ScriptedPlugin, frozen=True):
        kind: ClassVar[str] = "LOUD"

    class Greedy(ScriptedPlugin, frozen=True):
        needs: ClassVar[list[str]] = ["waiting"]

    class Raises(ScriptedPlugin, frozen=True):
        @property
        def needs(self):
            raise AttributeError("bound")

    for cls, wanted in (
        (Loose, "frozen=True"),
        (Ignores, "forbid_unknown_fields=True"),
        (Asks, "Asks: expected a plugin that can be built without parameters"),
        (Shouts, "a kind in lower case"),
        (Greedy, "needs as a frozenset of Signal"),
        (Raises, "needs and extra_metrics that can be read, got AttributeError: bound"),
    ):
        assert wanted in complaint(contract.check_scorer, cls)
    contract.check_scorer(functools.partial(Asks, size=3))


def filtering(answer, needs=NOTHING):
    class OddFilter(ScriptedPlugin, frozen=True):
        def filter(self, context, candidates):
            return answer(context, candidates)

    OddFilter.needs = needs
    return OddFilter


@pytest.mark.parametrize(
    ("answer", "wanted"),
    [
        (
            lambda context, items: [msgspec.structs.replace(c) for c in items],
            "only candidates of the call",
        ),
        (
            lambda context, items: items[::-1],
            "every candidate once at most, in the order of the call",
        ),
        (
            lambda context, items: [items[0], items[0]],
            "every candidate once at most, in the order of the call",
        ),
        (lambda context, items: items[:1], "in any order"),
        (lambda context, items: [c for c in items if context.rng.random() < 0.5], "same call"),
    ],
)
def test_invalid_filters_are_reported(answer, wanted):
    """A filter must return candidates of the call, in their order, and the same ones for an equal context."""
    assert wanted in complaint(contract.check_filter, filtering(answer))


def test_a_filter_of_scraped_values_lets_unknown_pass():
    """A filter must not drop candidates whose signals are unknown."""

    def answer(context, items):
        return [c for c in items if c.load.waiting is not None]

    contract.check_filter(filtering(answer))
    scraped = filtering(answer, frozenset({Signal.WAITING}))
    assert "all candidates, because nothing is known" in complaint(contract.check_filter, scraped)


def pricing(answer):
    class OddCost(ScriptedPlugin, frozen=True):
        def cost(self, context, candidates):
            return answer(candidates)

    return OddCost


def test_costs():
    """A cost model must return finite costs and terms in the order of the candidates."""
    contract.check_cost(pricing(lambda items: CostResult("odd", "s", [c.in_flight for c in items])))
    for answer, wanted in (
        (lambda entries: [1.0] * len(entries), "a CostResult, got list"),
        (lambda them: CostResult("odd", "s", [float("inf")] * len(them)), "costs that are finite"),
        (lambda them: CostResult("odd", "s", [1.0] * len(them), [("wait", [])]), "1 wait"),
        (lambda them: CostResult("odd", "s", list(range(len(them)))), "in any order"),
    ):
        assert wanted in complaint(contract.check_cost, pricing(answer))


def picking(answer):
    class OddPicker(ScriptedPlugin, frozen=True):
        def pick(self, context, candidates, totals, *, count):
            return answer(context, candidates, totals, count)

    return OddPicker


@pytest.mark.parametrize(
    ("answer", "wanted"),
    [
        (lambda context, items, totals, count: [0], "count 3: expected 2 positions"),
        (lambda context, items, totals, count: [0] * min(count, len(items)), "no position twice"),
        (
            lambda context, items, totals, count: range(min(count, len(items))),
            "a list of positions",
        ),
        (lambda context, items, totals, count: [*range(1, 1 + min(count, len(items)))], "0 to 0"),
        (
            lambda context, items, totals, count: [*range(min(count, len(items)))],
            "the same result for each",
        ),
        (
            lambda context, items, totals, count: [*range(len(items))][: totals.sort() or count],
            "unchanged totals",
        ),
    ],
)
def test_invalid_pickers_are_reported(answer, wanted):
    """A picker must return different positions, and its shares must not depend on the order."""
    assert wanted in complaint(contract.check_picker, picking(answer))


def test_a_picker_may_be_random():
    """The rng of the context may be used, because it is seeded."""

    def answer(context, items, totals, count):
        return context.rng.sample(range(len(items)), min(count, len(items)))

    contract.check_picker(picking(answer))


class AlternatingScorer(ScriptedPlugin, frozen=True):
    """Scores lower the endpoints that were chosen before."""

    @cached_property
    def addresses(self):
        return set()

    def score(self, context, candidates):
        return [0.0 if c.endpoint.address in self.addresses else 1.0 for c in candidates]

    def on_committed(self, decision, now):
        self.addresses.add(decision.endpoints[0].address)


def test_state_may_change_in_on_committed():
    """An observer passes when its answers change with choices only."""
    contract.check_scorer(AlternatingScorer)


def test_on_committed_accepts_any_decision():
    """An observer that raises on a plain decision is refused."""

    class Picky(AlternatingScorer, frozen=True):
        def on_committed(self, decision, now):
            raise KeyError(decision.picker)

    message = complaint(contract.check_scorer, Picky)
    assert "answer_headers to accept any decision, got KeyError" in message


def test_keys_and_answer_headers_are_text():
    """Keys and response headers of a plugin must be text."""

    class Numbers(AlternatingScorer, frozen=True):
        def answer_headers(self, context, chosen):
            return [("x-place", 5)]

    class Sessions(AlternatingScorer, frozen=True):
        def keys(self, turn):
            return {"session": turn.headers["x-session"]}

        def on_committed(self, decision, now):
            assert decision.plugin_keys == {"session": "s-1"}

    message = complaint(contract.check_scorer, Numbers)
    assert "answer_headers: expected pairs of text, got [('x-place', 5)]" in message
    contract.check_scorer(Sessions)


@pytest.mark.parametrize(
    "header", [("X-Upper", "v"), ("x-lines", "v\n1"), (":status", "200"), ("content-length", "1")]
)
def test_answer_headers_can_be_sent(header):
    """Headers that the guard drops while serving are reported."""

    class Answers(AlternatingScorer, frozen=True):
        def answer_headers(self, context, chosen):
            return [("x-place", "5"), header]

    message = complaint(contract.check_scorer, Answers)
    assert f"values in visible ASCII, got [{header}]" in message


def test_state_is_not_shared_between_instances():
    """Instances of a plugin must not share state."""
    decisions = []

    class Shares(ScriptedPlugin, frozen=True):
        def score(self, context, candidates):
            return [1 / (1 + len(decisions))] * len(candidates)

        def on_committed(self, decision, now):
            decisions.append(decision)

    assert "a second instance: no shared state" in complaint(contract.check_scorer, Shares)


def test_an_invalid_answer_after_on_committed_is_reported():
    """The answer is checked again after a decision."""

    class Grows(AlternatingScorer, frozen=True):
        def score(self, context, candidates):
            return [float(2 * len(self.addresses))] * len(candidates)

    assert "numbers from 0 to 1, got [2.0]" in complaint(contract.check_scorer, Grows)


def test_an_exit_after_many_picks_is_reported():
    """The shares of a picker are counted over many picks, each of which may fail."""
    picks = itertools.count()

    def answer(context, items, totals, count):
        if len(items) == 4 and next(picks) > 100:
            sys.exit()
        return context.rng.sample(range(len(items)), min(count, len(items)))

    message = complaint(contract.check_picker, picking(answer))
    assert "odd with 4 endpoints: expected 3000 picks in a row, got SystemExit" in message
