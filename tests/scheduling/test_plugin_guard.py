import msgspec
import pytest

from extproc.decision import CostResult, Decision
from extproc.scheduling.framework import BypassedError, Observer
from extproc.scheduling.load_scorers import QueueScorer
from extproc.scheduling.pickers import MaxScorePicker
from extproc.scheduling.plugin_guard import GuardedPlugin, GuardFactory, GuardLimits, PluginCounters
from extproc.scheduling.profile import SchedulerProfile
from tests.scheduling import builders

FLEET = builders.candidates(
    {"a": {"waiting": 8, "in_flight": 2}, "b": {"waiting": 2, "in_flight": 5}}
)
MS = 2.0**-10  # about a millisecond, and sums of it are exact


class Slow:
    """A plugin of every role whose calls take a configured time on a clock of its own."""

    kind = "slow"
    needs = frozenset()

    def __init__(self):
        self.clock = 0.0
        self.takes = 0.0
        self.calls = 0
        self.raises = None
        self.decisions = []

    def stopwatch(self):
        return self.clock

    def score(self, context, candidates):
        self.calls += 1
        self.clock += self.takes
        if self.raises:
            raise self.raises
        return [1.0] * len(candidates)

    def filter(self, context, candidates):
        self.score(context, candidates)
        return candidates

    def cost(self, context, candidates):
        return CostResult("slow", "s", self.score(context, candidates))

    def pick(self, context, candidates, totals, *, count):
        self.score(context, candidates)
        return (0,)

    def on_committed(self, decision, now):
        self.score(None, [])
        self.decisions.append(decision)


class Bench:
    """A guarded slow plugin and a turn whose time the test sets."""

    def __init__(self, **limits):
        self.slow = Slow()
        self.counts = PluginCounters()
        limits = GuardLimits(**{"budget_s": 2 * MS, **limits})
        self.guarded = GuardedPlugin(
            self.slow, GuardFactory(self.slow.stopwatch, self.counts, limits)
        )
        self.now = 100.0

    def call(self, takes=0.0):
        """Score once; whether the plugin was asked."""
        self.slow.takes = takes
        try:
            self.guarded.score(self.turn, FLEET)
        except BypassedError:
            return False
        return True

    @property
    def turn(self):
        return msgspec.structs.replace(builders.context(), now=self.now)

    def calls(self, *takes):
        return [self.call(take) for take in takes]


def test_a_fast_plugin_is_always_called():
    """Calls within the budget, the budget itself included, count nothing."""
    bench = Bench()
    assert all(bench.calls(*[2 * MS, 1 * MS, 0.0] * 20))
    assert not bench.counts.overruns
    assert not bench.counts.bypasses


def test_three_overruns_in_ten_calls_bypass():
    """The third overrun among the last ten calls is the last call for a while."""
    bench = Bench()
    assert bench.calls(3 * MS, 0, 0, 0, 3 * MS, 0, 0, 0, 0, 3 * MS, 0) == [True] * 10 + [False]
    assert bench.counts.overruns == {("scorer", "slow"): 3}
    assert bench.counts.bypasses == {("scorer", "slow"): 1}


def test_rare_overruns_do_not_bypass():
    """One overrun in five calls never gathers three in ten."""
    bench = Bench()
    assert all(bench.calls(*[3 * MS, 0, 0, 0, 0] * 10))
    assert bench.counts.overruns == {("scorer", "slow"): 10}
    assert not bench.counts.bypasses


def test_after_a_bypass_a_trial_call_is_made():
    """The plugin is not asked for 30 s; a good trial clears it, and old overruns are forgotten."""
    bench = Bench()
    bench.calls(3 * MS, 3 * MS, 3 * MS)
    bench.now = 129.9
    assert bench.calls(0) == [False]
    bench.now = 130.0
    assert bench.calls(0, 3 * MS, 3 * MS, 0) == [True] * 4
    assert bench.counts.bypasses == {("scorer", "slow"): 1}


def test_a_slow_trial_bypasses_at_once():
    """A plugin still slow at its trial costs one call in 30 s."""
    bench = Bench()
    bench.calls(3 * MS, 3 * MS, 3 * MS)
    bench.now = 130.0
    assert bench.calls(3 * MS, 0) == [True, False]
    bench.now = 159.0
    assert bench.calls(0) == [False]
    assert bench.counts.bypasses == {("scorer", "slow"): 2}


def test_two_instances_have_separate_counters():
    """One profile's slow instance does not take another's away."""
    bench = Bench()
    other = GuardedPlugin(bench.slow, bench.guarded.guards)
    bench.calls(3 * MS, 3 * MS, 3 * MS)
    assert bench.calls(0) == [False]
    assert other.score(bench.turn, FLEET) == [1.0, 1.0]


@pytest.mark.parametrize("role", ["filter", "scorer", "cost", "picker"])
def test_profile_continues_without_a_bypassed_plugin(role):
    """Every role: the decision stands, says so, and is the one without the plugin."""
    bench = Bench(max_overruns=1)
    guarded = bench.guarded
    profile = SchedulerProfile(
        "p",
        (guarded,) if role == "filter" else (),
        ((guarded, 9.0),) if role == "scorer" else ((QueueScorer(), 1.0),),
        guarded if role == "picker" else MaxScorePicker(),
        guarded if role == "cost" else None,
    )
    bench.slow.takes = 1.0
    assert profile.run(bench.turn, FLEET).degraded == ""
    decision = profile.run(bench.turn, FLEET)
    assert decision.degraded == f"{role} slow bypassed"
    if role in {"filter", "cost"}:
        assert builders.names(decision.endpoints) == ["b"]  # the shorter queue
    if role == "picker":
        assert builders.names(decision.endpoints) == ["a"]  # the fewest in flight
    assert bench.counts.bypasses == {(role, "slow"): 1}


@pytest.mark.parametrize("error", [ZeroDivisionError("secret"), SystemExit(3), GeneratorExit()])
def test_exceptions_are_counted_and_contained(error):
    """Even an exit costs the plugin's own contribution only."""
    bench = Bench()
    bench.slow.raises = error
    decision = SchedulerProfile("p", (), ((bench.guarded, 1.0),), MaxScorePicker()).run(
        bench.turn, FLEET
    )
    assert isinstance(decision, Decision)
    name = "ZeroDivisionError" if isinstance(error, Exception) else "PluginExitError"
    assert decision.degraded == f"scorer slow raised {name}"
    assert bench.counts.exceptions == {("scorer", "slow"): 1}


def test_keyboard_interrupts_are_not_caught():
    """A person's interrupt ends the command that runs a plugin."""
    bench = Bench()
    bench.slow.raises = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        bench.call()


def test_an_observer_that_raises_is_counted():
    """A committed decision stands whatever the plugin's memory does; slow memory is an overrun."""
    bench = Bench()
    decision = Decision(builders.context().request, [FLEET[0].endpoint])
    assert isinstance(bench.guarded, Observer)
    bench.guarded.on_committed(decision, 100.0)
    bench.slow.raises = ValueError()
    bench.slow.takes = 3 * MS
    for _ in range(4):
        bench.guarded.on_committed(decision, 100.0)
    assert bench.slow.decisions == [decision]
    assert bench.slow.calls == 4
    assert bench.counts.exceptions == {("observer", "slow"): 3}
    assert bench.counts.bypasses == {("observer", "slow"): 1}


def test_a_stateless_plugin_needs_no_observer():
    """The guard of a plugin without an observer method counts no exception after the choice."""
    guards = GuardFactory(lambda: 0.0, PluginCounters())
    GuardedPlugin(QueueScorer(), guards).on_committed(Decision(builders.context().request, []), 1.0)
    assert not guards.counts.exceptions


def test_a_plugin_cannot_modify_shared_lists():
    """It is given tuples, and its own list is copied."""

    class Keeps:
        kind = "keeps"
        needs = frozenset()
        scores = (0.5, 1.0)

        def score(self, context, candidates):
            assert isinstance(candidates, tuple)
            return self.scores

        def pick(self, turn, candidates, totals, *, count):
            assert isinstance(totals, tuple)
            return (1, 0)

    guarded = GuardedPlugin(Keeps(), GuardFactory(lambda: 0.0, PluginCounters()))
    assert guarded.score(builders.context(), FLEET) == [0.5, 1.0]
    assert guarded.pick(builders.context(), FLEET, [0.0, 1.0], count=1) == [1, 0]


def answering(**methods):
    """A guarded plugin with the given answers, and its counters."""
    plugin = type("Answers", (), {"kind": "answers", "needs": frozenset(), **methods})()
    guards = GuardFactory(lambda: 0.0, PluginCounters())
    return GuardedPlugin(plugin, guards), guards.counts


@pytest.mark.parametrize("order", [[1.0], ["0"], [None], None])
def test_positions_are_whole_numbers(order):
    """A pick that would fail only when it is used is the picker's fault."""
    guarded, counts = answering(pick=lambda *_, count: order)
    decision = SchedulerProfile("p", (), (), guarded).run(builders.context(), FLEET)
    assert builders.names(decision.endpoints) == ["a"]
    assert decision.degraded == "picker answers raised TypeError"
    assert counts.exceptions == {("picker", "answers"): 1}


@pytest.mark.parametrize(
    "priced",
    [
        CostResult("c", "s", [1.0]),
        CostResult("c", "s", [1.0, 2.0], [("wait", [1.0])]),
        CostResult("c", "s", ["x", 2.0]),
        None,
    ],
)
def test_costs_and_terms_are_numbers_as_many_as_candidates(priced):
    """A cost model that answers anything else is left out."""
    guarded, counts = answering(cost=lambda *_: priced)
    decision = SchedulerProfile("p", (), (), MaxScorePicker(), guarded).run(
        builders.context(), FLEET
    )
    assert decision.cost is None
    assert decision.degraded.startswith("cost answers raised ")
    assert counts.exceptions == {("cost", "answers"): 1}


@pytest.mark.parametrize(
    "headers",
    [[("x-a", 5)], [("X-A", "b")], [("x-a", "b\r\nx-b: c")], [("x a", "b")], [("", "b")], 5],
)
def test_answer_headers_can_be_sent(headers):
    """A header that no HTTP answer can carry is dropped."""
    guarded, counts = answering(
        score=lambda *_: [1.0, 0.0], answer_headers=lambda *_: headers, keys=lambda *_: {"k": 5}
    )
    decision = SchedulerProfile("p", (), ((guarded, 1.0),), MaxScorePicker()).run(
        builders.context(), FLEET
    )
    assert (decision.answer_headers, decision.plugin_keys) == ((), {})
    assert "answer of answers raised" in decision.degraded
    assert counts.exceptions == {("answerer", "answers"): 1, ("observer", "answers"): 1}


def test_keys_and_headers_pass_the_guard():
    """Keys, answer headers and the number of endpoints go through the guard."""
    guarded, counts = answering(
        score=lambda *_: [1.0, 0.0],
        pick=lambda *_, count: [0, 1][:count],
        answer_headers=lambda *_: [("x-a", "b c")],
        keys=lambda *_: {"k": "v"},
        max_num_of_endpoints=2,
    )
    decision = SchedulerProfile("p", (), ((guarded, 1.0),), guarded).run(builders.context(), FLEET)
    assert (decision.answer_headers, decision.plugin_keys) == ((("x-a", "b c"),), {"k": "v"})
    assert len(decision.endpoints) == 2
    assert not counts.exceptions
