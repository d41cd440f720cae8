import msgspec
import pytest

from extproc.decision import NO_ENDPOINTS, SATURATED, Decision
from extproc.errors import ConfigError
from extproc.request import InferenceRequest
from extproc.scheduling import registry
from extproc.scheduling.load_bounds import MaxWaiting
from extproc.scheduling.load_scorers import InFlight, QueueScorer
from extproc.scheduling.pickers import MaxScorePicker
from extproc.scheduling.profile import SchedulerProfile
from tests.scheduling import builders

FLEET = builders.candidates(
    {"a": {"waiting": 8, "in_flight": 2}, "b": {"waiting": 2, "in_flight": 5}}
)


class Says:
    """A plugin of every role that gives one fixed answer, or raises it."""

    kind = "says"
    needs = frozenset()

    def __init__(self, answer):
        self.answer = answer

    def score(self, context, candidates):
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def filter(self, context, candidates):
        return self.score(context, candidates)

    def pick(self, context, candidates, totals, *, count):
        return self.score(context, candidates)


QUEUE = ((QueueScorer(), 2.0),)


def profile(*, filters=(), scorers=QUEUE, picker=None):
    return SchedulerProfile("p", tuple(filters), tuple(scorers), picker or MaxScorePicker())


def run(**parts):
    return profile(**parts).run(builders.context(), FLEET)


def test_decision_carries_every_step():
    """Candidates, those left by each filter, the scores, the totals and the picker."""
    filters = (MaxWaiting(max_waiting_requests=50), MaxWaiting(max_waiting_requests=5))
    scheduler_profile = profile(filters=filters, scorers=((QueueScorer(), 2.0), (InFlight(), 1.0)))
    decision = scheduler_profile.run(
        msgspec.structs.replace(builders.context(), blocks=[1, 2]), FLEET
    )
    assert decision.candidates == FLEET
    assert [(f.name, builders.names(f.survivors)) for f in decision.filters] == [
        ("max-waiting", ["a", "b"]),
        ("max-waiting", ["b"]),
    ]
    assert builders.names(decision.scored_candidates) == ["b"]
    assert [(s.name, s.weight, s.scores) for s in decision.scores] == [
        ("queue-scorer", 2.0, [1.0]),
        ("in-flight", 1.0, [1.0]),
    ]
    assert decision.totals == [3.0]
    assert (decision.profile, decision.picker, decision.block_hashes) == (
        "p",
        "max-score-picker",
        [1, 2],
    )
    assert builders.names(decision.endpoints) == ["b"]
    assert decision.degraded == ""


def test_matched_tokens_are_those_of_the_first_endpoint():
    """The decision says how much of the prompt its endpoint is believed to hold."""
    cached = builders.candidates({"a": {"matched_tokens": 64}, "b": {"in_flight": 3}})
    assert (
        profile(scorers=((InFlight(), 1.0),)).run(builders.context(), cached).matched_tokens == 64
    )


def test_fallbacks_are_named_in_order():
    """Count asks for the best endpoint and those to try after it."""
    assert builders.names(profile().run(builders.context(), FLEET, count=5).endpoints) == ["b", "a"]


def test_no_candidates_is_503():
    """Without candidates there is nothing to filter."""
    assert profile().run(builders.context(), []) == NO_ENDPOINTS


def test_no_survivors_is_429():
    """Filters that remove all endpoints refuse the request.

    Source: docs/reference/protocol-conformance.md#point-73.
    """
    assert run(filters=[MaxWaiting(max_waiting_requests=1), Says(RuntimeError())]) == SATURATED


@pytest.mark.parametrize(
    "answer",
    [
        ZeroDivisionError("the prompt"),
        None,
        builders.candidates({"z": {}}),
        [FLEET[0], FLEET[1], FLEET[0]],
    ],
)
def test_a_filter_that_raises_is_skipped(answer):
    """A filter that raises, brings in a stranger or repeats a candidate is skipped and named."""
    decision = run(filters=[Says(answer)])
    assert builders.names(decision.endpoints) == ["b"]
    assert decision.degraded.startswith("filter says raised ")
    assert "prompt" not in decision.degraded


@pytest.mark.parametrize("answer", [ZeroDivisionError("x"), [1.0], None, ["a", "b"]])
def test_a_scorer_that_raises_is_skipped(answer):
    """A scorer that raises or answers nonsense does not count, and the rest decides."""
    decision = run(scorers=((Says(answer), 9.0), (QueueScorer(), 1.0)))
    assert builders.names(decision.endpoints) == ["b"]
    assert [s.name for s in decision.scores] == ["queue-scorer"]
    assert decision.degraded.startswith("scorer says raised ")


def test_degraded_names_the_exception_type():
    """Only the type of the exception is reported, because its message may quote the prompt."""
    decision = run(scorers=((Says(ZeroDivisionError("secret")), 1.0),))
    assert decision.degraded == "scorer says raised ZeroDivisionError"


@pytest.mark.parametrize("answer", [ZeroDivisionError(), [], [2], [-1], [0, 0], [0, 1], None])
def test_a_picker_that_raises_falls_back_to_the_fewest_in_flight(answer):
    """An invalid pick, or one that raises, falls back to the endpoint with the fewest requests."""
    decision = run(picker=Says(answer))
    assert builders.names(decision.endpoints) == ["a"]
    assert decision.degraded.startswith("picker says raised ")


def test_every_plugin_error_is_reported():
    """Several broken plugins are all named."""
    broken = Says(ValueError())
    decision = run(filters=[broken], scorers=((broken, 1.0),), picker=broken)
    assert decision.degraded.count("ValueError") == 3


@pytest.mark.parametrize(
    ("raw", "scores"),
    [
        ([2.0, -1.0], [1.0, 0.0]),
        ([float("nan"), 0.25], [0.25, 0.25]),
        ([float("nan"), float("nan")], [0.5, 0.5]),
        ([float("inf"), float("-inf")], [1.0, 0.0]),
    ],
)
def test_scores_are_cut_and_nan_is_neutral(raw, scores):
    """Scores outside 0..1 are cut; what is no number counts as the mean of the others."""
    decision = run(scorers=((Says(raw), 1.0),))
    assert decision.scores[0].scores == scores
    assert decision.degraded == ""


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf")])
def test_weights_are_finite_and_not_negative(weight):
    """A weight that cannot be summed is a configuration error."""
    with pytest.raises(ConfigError, match="in-flight"):
        profile(scorers=((InFlight(), weight),))


def test_an_unknown_kind_names_the_nearest():
    """An unknown kind is an error that says where, what there is and what was likely meant."""
    assert registry.find(registry.SCORERS, "in-flight", where="x") is InFlight
    with pytest.raises(ConfigError, match=r"config\.yaml: .*did you mean queue-depth\?"):
        registry.find(registry.SCORERS, "queue-dept", where="config.yaml")


def test_decisions_are_values():
    """The same turn gives an equal decision."""
    assert run() == run()
    assert isinstance(run(), Decision)
    assert msgspec.structs.asdict(run())["totals"] == [0.0, 2.0]


class RememberingScorer(Says):
    """A scorer that asks for keys and tells the client who serves."""

    def keys(self, context):
        return {"session": context.headers["x-session-id"]}

    def answer_headers(self, context, chosen):
        return [("x-served-by", chosen.name)]


class Wide(MaxScorePicker):
    """A picker that is configured with the number of endpoints to name."""

    max_num_of_endpoints: int = 2


def test_decision_contains_plugin_keys_and_answer_headers():
    """Keys that a plugin remembers and headers for the client are in the decision."""
    scheduler_profile = profile(scorers=((RememberingScorer([1.0, 0.0]), 1.0),))
    context = msgspec.structs.replace(builders.context(), headers={"x-session-id": "s"})
    decision = scheduler_profile.run(context, FLEET)
    assert decision.plugin_keys == {"session": "s"}
    assert decision.answer_headers == (("x-served-by", "a"),)


def test_keys_that_raise_are_skipped():
    """A plugin that cannot say its keys costs only them."""
    decision = profile(scorers=((RememberingScorer([1.0, 0.0]), 1.0),)).run(
        builders.context(), FLEET
    )
    assert decision.plugin_keys == {}
    assert decision.answer_headers == (("x-served-by", "a"),)
    assert decision.degraded == "keys of says raised KeyError"


def test_a_picker_may_widen_the_number_of_endpoints():
    """The larger of the requested number of endpoints and that of the picker counts."""
    decision = run(picker=Wide())
    assert builders.names(decision.endpoints) == ["b", "a"]


def test_a_decision_without_its_prompt_has_everything_else():
    """Only prompt and blocks go, and a pool is named where it named none."""
    fields = {name: f"value of {name}" for name in Decision.__struct_fields__}
    fields["request"] = InferenceRequest(api="chat", model="m", prompt=b"prompt")
    fields["disaggregation"] = None
    decision = Decision(**fields)
    request = InferenceRequest(api="chat", model="m")
    slim = decision.without_prompt("other")
    assert msgspec.structs.asdict(slim) == fields | {"request": request, "block_hashes": ()}
    unnamed = msgspec.structs.replace(decision, pool="")
    assert unnamed.without_prompt("other").pool == "other"
