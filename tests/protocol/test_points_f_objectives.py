"""Section F of the checklist: objectives and rewrites, as requests meet them."""

from __future__ import annotations

import collections
import json
from collections.abc import Mapping

import pytest

from extproc.decision import Decision
from extproc.pool.inference_policy import InferencePolicy, RewriteRule, TargetModel
from extproc.request import HttpRequest
from tests.support import ext_proc_script
from tests.support.peer import DecodedReply
from tests.support.pool_fixture import PoolFixture, load

OBJECTIVE, OLD_OBJECTIVE = "x-llm-d-inference-objective", "x-gateway-inference-objective"
REWRITE, OLD_REWRITE = "x-llm-d-model-name-rewrite", "x-gateway-model-name-rewrite"
PATH = "/v1/completions"


def rule(models: str, *targets: str | tuple[str, int | None]) -> RewriteRule:
    pairs = [(target, None) if isinstance(target, str) else target for target in targets]
    return RewriteRule(tuple(models.split()), tuple(TargetModel(*pair) for pair in pairs))


def build_pool(*rules: RewriteRule, full: bool = False, **priorities: int) -> PoolFixture:
    queued = PoolFixture({ext_proc_script.ADDRESS: load(9, 0.95) if full else load(0, 0.1)})
    queued.store.set_policy(InferencePolicy(priorities, rules))
    return queued


def says(
    held: PoolFixture, body: Mapping[str, str], headers: Mapping[str, str] = {}
) -> list[DecodedReply]:
    """Everything that is said about a request, in full duplex."""
    talk = ext_proc_script.Talk(held.decide)
    talk.hear(ext_proc_script.request_headers({**ext_proc_script.PLAIN, ":path": PATH, **headers}))
    return talk.hear(ext_proc_script.request_body(json.dumps(body).encode(), ends=True))


def model_sent(held: PoolFixture, model: str | None, headers: Mapping[str, str] = {}) -> str:
    """The model in the body that is handed on."""
    named = {} if model is None else {"model": model}
    route, piece = says(held, {**named, "prompt": "x"}, headers)
    assert piece.body is not None
    # Either it was not edited, or its length is sent (docs/reference/protocol-conformance.md#point-27).
    length = dict(route.sets).get("content-length", str(len(piece.body)))
    assert length == str(len(piece.body))
    return str(json.loads(piece.body)["model"])


def priority_of(held: PoolFixture, headers: Mapping[str, str]) -> int:
    talk = ext_proc_script.Talk(held.decide)
    talk.hear(ext_proc_script.request_headers({**ext_proc_script.PLAIN, ":path": PATH, **headers}))
    talk.hear(ext_proc_script.request_body(b'{"model": "m", "prompt": "x"}', ends=True))
    outcome = held.decide(talk.decided[0])
    assert isinstance(outcome, Decision)
    return outcome.request.priority


@pytest.mark.parametrize(
    ("headers", "priority"),
    [
        ({OBJECTIVE: "gold"}, 5),
        ({OLD_OBJECTIVE: "gold"}, 5),
        ({OBJECTIVE: "gold", OLD_OBJECTIVE: "lead"}, 5),
        ({OBJECTIVE: "lead", OLD_OBJECTIVE: "gold"}, -5),
        ({OBJECTIVE: "tin", OLD_OBJECTIVE: "gold"}, 0),
    ],
)
def test_042_objective_under_its_old_and_new_name(headers: dict[str, str], priority: int):
    """The old header works; where both are there the new one wins."""
    assert priority_of(build_pool(gold=5, lead=-5), headers) == priority


@pytest.mark.parametrize(
    ("headers", "model"),
    [
        ({OLD_REWRITE: "old"}, "old"),
        ({REWRITE: "new"}, "new"),
        ({OLD_REWRITE: "old", REWRITE: "new"}, "new"),
    ],
)
def test_042_rewrite_under_its_old_and_new_name(headers: dict[str, str], model: str):
    """The old header works; where both are there the new one wins, and neither goes on."""
    assert model_sent(build_pool(), "m", headers) == model
    route, _ = says(build_pool(), {"model": "m", "prompt": "x"}, headers)
    assert route.removes == tuple(sorted(headers))


def test_042_fairness_under_its_old_and_new_name():
    """Both names of the fairness header are the picker's own and do not go on."""
    headers = {"x-llm-d-inference-fairness-id": "a", "x-gateway-inference-fairness-id": "b"}
    route, _ = says(build_pool(), {"model": "m", "prompt": "x"}, headers)
    assert route.removes == tuple(sorted(headers))


def test_072_sheddable_and_saturated_is_dropped():
    """Priority below 0 and every endpoint full: 429 in the reference's words."""
    (reply,) = says(
        build_pool(full=True, batch=-1), {"model": "m", "prompt": "x"}, {OBJECTIVE: "batch"}
    )
    assert reply == ext_proc_script.refuse(
        429,
        message="inference error: ResourceExhausted - system saturated, sheddable request dropped",
        kind="rate_limit_error",
        reason="rejected-saturated",
        retry_after="1",
    )


@pytest.mark.parametrize(
    ("priority", "full"), [(0, True), (1, True), (-1, False)], ids=["0", "1", "room"]
)
def test_072_others_are_routed(priority: int, *, full: bool):
    """Priority 0 and above is routed to full endpoints, and below 0 while there is room."""
    queued = build_pool(full=full, it=priority)
    route, _ = says(queued, {"model": "m", "prompt": "x"}, {OBJECTIVE: "it"})
    assert route.metadata == ext_proc_script.destination_metadata(ext_proc_script.ADDRESS)


def test_072_no_endpoints_stays_503():
    """No ready endpoint is 503 whatever the priority, as the protocol says (the reference: 429)."""
    queued = PoolFixture({})
    queued.store.set_policy(InferencePolicy({"batch": -1}))
    (reply,) = says(queued, {"model": "m", "prompt": "x"}, {OBJECTIVE: "batch"})
    assert reply.status == 503


@pytest.mark.parametrize(
    ("headers", "priority"),
    [({OBJECTIVE: "gold"}, 4), ({OBJECTIVE: "plain"}, 0), ({OBJECTIVE: "unknown"}, 0), ({}, 0)],
)
def test_081_the_objective_gives_the_priority(headers: dict[str, str], priority: int):
    """A known objective gives its own, one without priority 0, an unknown or missing one 0."""
    assert priority_of(build_pool(gold=4, plain=0), headers) == priority


def test_082_objectives_of_other_pools_are_unknown():
    """The policy of a pool is all that counts: a name of another pool's has priority 0."""
    theirs, ours = build_pool(gold=4), build_pool()
    assert priority_of(theirs, {OBJECTIVE: "gold"}) == 4
    assert priority_of(ours, {OBJECTIVE: "gold"}) == 0


@pytest.mark.parametrize(
    ("rules", "model"),
    [
        ((rule("", "any"), rule("m", "exact")), "exact"),
        ((rule("m", "older"), rule("m", "newer")), "older"),
        ((rule("n", "other"), rule("k m", "first"), rule("m", "second")), "first"),
        ((rule("", "older any"), rule("", "newer any")), "older any"),
        ((rule("n", "other"),), "m"),
    ],
    ids=["exact beats generic", "older beats newer", "list order", "generic by age", "no match"],
)
def test_083_precedence_of_rules(rules: tuple[RewriteRule, ...], model: str):
    """Exact before generic, then the order of the policy: age of the object, place in its list."""
    assert model_sent(build_pool(*rules), "m") == model


def test_084_a_rule_beats_the_header():
    """A rule for the body's model overrides the header, which counts alone."""
    assert model_sent(build_pool(rule("m", "ruled")), "m", {REWRITE: "named"}) == "ruled"
    assert model_sent(build_pool(rule("", "ruled")), "m", {REWRITE: "named"}) == "ruled"
    assert model_sent(build_pool(rule("n", "ruled")), "m", {REWRITE: "named"}) == "named"
    assert model_sent(build_pool(), "m", {REWRITE: "named"}) == "named"


def test_084_a_missing_model_is_supplied():
    """Header or generic rule name what the body does not; only then is it a 400."""
    assert model_sent(build_pool(), None, {REWRITE: "named"}) == "named"
    assert model_sent(build_pool(rule("", "ruled")), None) == "ruled"
    (reply,) = says(build_pool(rule("m", "ruled")), {"prompt": "x"})
    assert reply.status == 400


def drawn(*targets: str | tuple[str, int | None]) -> collections.Counter[str]:
    """Decisions for each target in 1,000 tries."""
    queued = build_pool(rule("m", *targets))
    raw = HttpRequest({":path": PATH}, b'{"model": "m", "prompt": "x"}')
    outcomes = [queued.decide(raw) for _ in range(1000)]
    return collections.Counter(decision.request.model for decision in outcomes)


def test_085_without_weights_targets_are_equally_likely():
    """Two targets without weight: half each, within five standard deviations of 1,000."""
    assert abs(drawn("a", "b")["a"] - 500) <= 79


def test_085_in_proportion():
    """70 to 30: 700 of 1,000, within five standard deviations."""
    assert abs(drawn(("a", 70), ("b", 30))["a"] - 700) <= 73


def test_085_mixed_draws_only_the_weighted():
    """If any target has a weight, those without are never drawn."""
    assert set(drawn(("a", 3), ("b", None), ("c", 1))) == {"a", "c"}


def test_085_weights_that_sum_to_zero_count_alike():
    """Weights of 0 alone: all alike."""
    assert set(drawn(("a", 0), ("b", 0))) == {"a", "b"}


def test_087_without_objects_priority_is_0():
    """Nothing was ever decreed: requests that name an objective are routed at priority 0."""
    queued = PoolFixture({ext_proc_script.ADDRESS: load(9, 0.95)})
    assert priority_of(queued, {OBJECTIVE: "batch"}) == 0
    assert model_sent(queued, "m", {OBJECTIVE: "batch"}) == "m"
