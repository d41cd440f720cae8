"""Objectives and rewrites through the director."""

from __future__ import annotations

import collections
import json
import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.decision import Decision, DirectResponse, Rejection
from extproc.endpoint import ServedModels
from extproc.pool import inference_policy
from extproc.pool.inference_policy import InferencePolicy, RewriteRule, TargetModel
from extproc.request import HttpRequest
from extproc.routing import request_preparer
from extproc.routing.pool_selector import PoolRoute, PoolSelector
from extproc.scheduling.load_bounds import ConcurrencyDetector, UtilizationDetector
from extproc.scheduling.pickers import RoundRobin
from extproc.scheduling.profile import SchedulerProfile
from tests.support.pool_fixture import PoolFixture, load

PATH = "/v1/chat/completions"
NEW, OLD = "x-llm-d-model-name-rewrite", "x-gateway-model-name-rewrite"
OBJECTIVE = "x-llm-d-inference-objective"


def rule(models: str, *targets: str | tuple[str, int | None]) -> RewriteRule:
    """A rule for models written with blanks between them; a target is a name or a weighted one."""
    pairs = [(target, None) if isinstance(target, str) else target for target in targets]
    return RewriteRule(tuple(models.split()), tuple(TargetModel(*pair) for pair in pairs))


def build_pool(
    *rules: RewriteRule, loads=None, profile="round-robin", **priorities: int
) -> PoolFixture:
    queued = PoolFixture(loads or {"10.0.0.1:1": load(0, 0.0)}, profile=profile)
    queued.store.set_policy(InferencePolicy(priorities, rules))
    return queued


def ask(model: str | None = "m", headers: dict[str, str] | None = None, **more: object):
    body = {"messages": [{"role": "user", "content": "hello"}], **more}
    if model is not None:
        body = {"model": model, **body}
    return HttpRequest({":path": PATH, **(headers or {})}, json.dumps(body).encode())


def decided(held: PoolFixture, raw: HttpRequest) -> Decision:
    outcome = held.decide(raw)
    assert isinstance(outcome, Decision), outcome
    return outcome


def sent(held: PoolFixture, raw: HttpRequest) -> str | None:
    """The model in the body the engine gets."""
    splice = decided(held, raw).body_edit
    body = raw.body if splice is None else splice.apply(raw.body)
    return json.loads(body).get("model")


def test_an_objective_shows_in_the_decision():
    """Name and priority, where the pool has it."""
    request = decided(build_pool(gold=5), ask(headers={OBJECTIVE: "gold"})).request
    assert (request.objective, request.priority) == ("gold", 5)
    request = decided(build_pool(gold=5), ask(headers={OBJECTIVE: "lead"})).request
    assert (request.objective, request.priority) == ("", 0)


def test_a_target_is_routed_and_hashed_under_its_own_name():
    """Canaries and requests that name the target themselves share prefixes; bytes around stay."""
    queued = build_pool(rule("m", "n"), profile="balanced")
    text = [{"role": "user", "content": "x" * 9000}]
    renamed = decided(queued, ask("m", messages=text))
    assert renamed.block_hashes == decided(queued, ask("n", messages=text)).block_hashes
    assert renamed.request.model == "n"
    assert (renamed.model_rewrite, renamed.client_model) == ("n", "m")
    raw = ask("m", messages=text)
    assert renamed.body_edit is not None
    assert renamed.body_edit.apply(raw.body) == raw.body.replace(b'"m"', b'"n"')


def test_a_target_may_be_an_adapter():
    """Endpoints are chosen by who serves the target, also under KubeAI's kind of name."""
    loads = {"10.0.0.1:1": load(0, 0.0), "10.0.0.2:1": load(0, 0.0)}
    queued = build_pool(rule("m", "sql"), rule("k", "base_sql"), loads=loads)
    first, second = queued.store.pool.members
    queued.store.observe_models(first.endpoint, ServedModels(frozenset({"base"}), frozenset()))
    queued.store.observe_models(
        second.endpoint, ServedModels(frozenset({"base"}), frozenset({"sql"}))
    )
    for name in ("m", "k"):
        decision = decided(queued, ask(name))
        assert decision.endpoints[0].address == "10.0.0.2:1"
        assert (decision.model_rewrite, decision.client_model) == ("sql", name)


def test_a_rewrite_to_the_same_name_changes_nothing():
    """The part of a canary that stays is routed as ever, and the answer is left alone."""
    decision = decided(build_pool(rule("m", "m")), ask("m"))
    assert (decision.model_rewrite, decision.body_edit, decision.client_model) == ("", None, "")


def test_rules_do_not_chain():
    """The target of one rule is not looked up again."""
    assert sent(build_pool(rule("a", "b"), rule("b", "c")), ask("a")) == "b"


def test_a_request_without_a_model_is_not_rewritten():
    """A generic rule is for requests for models, not for GET /health or unknown bodies."""
    queued = build_pool(rule("", "n"))
    for raw in (
        HttpRequest({":method": "GET", ":path": "/health"}),
        HttpRequest({":path": "/other"}, b'{"prompt": "x"}'),
    ):
        decision = decided(queued, raw)
        assert (decision.model_rewrite, decision.body_edit) == ("", None)


def test_a_generic_rule_supplies_a_missing_model():
    """The 400 for a missing model comes only after; the answer is left alone then."""
    queued = build_pool(rule("n", "chained"), rule("", "n"))
    decision = decided(queued, ask(None))
    assert sent(queued, ask(None)) == "n"
    assert decision.client_model == ""
    outcome = build_pool(rule("a", "b")).decide(ask(None))
    assert outcome == Rejection(400, "model not found in request body")
    outcome = queued.decide(HttpRequest({":path": PATH}, b"{}"))
    assert isinstance(outcome, Rejection)
    assert outcome.status == 400


def test_turns_of_a_session_stay_on_their_target():
    """With a session the draw is the same in every turn and in every replica."""
    rules = rule("m", ("a", 50), ("b", 50))
    first, other = build_pool(rules), build_pool(rules)
    models = set()
    for at in range(40):
        raw = ask("m", prompt_cache_key=f"conversation {at}")
        names = {sent(queued, raw) for queued in (first, other) for _ in range(3)}
        assert len(names) == 1
        models |= names
    assert models == {"a", "b"}


def test_sessions_are_drawn_in_proportion():
    """Of 1,000 sessions 300 go to 30 %, within five standard deviations."""
    queued = build_pool(rule("m", ("a", 70), ("b", 30)))
    drawn = collections.Counter(sent(queued, ask("m", user=f"u{at}")) for at in range(1000))
    assert 228 <= drawn["b"] <= 372


def test_a_higher_weight_moves_sessions_only_to_its_target():
    """A canary that grows takes sessions from the others, and moves none between these."""
    small = build_pool(rule("m", ("a", 80), ("b", 10), ("c", 10)))
    for targets in (
        [("a", 80), ("b", 10), ("c", 90)],
        [("c", 90), ("b", 10), ("a", 80)],
    ):
        large = build_pool(rule("m", *targets))
        moved = [(sent(small, raw), sent(large, raw)) for raw in SESSIONS]
        assert {new for old, new in moved if old != new} == {"c"}


SESSIONS = [ask("m", user=f"u{at}") for at in range(300)]


def test_sessions_without_weights_are_spread_evenly():
    """Three targets, 300 sessions: 100 each, within five standard deviations."""
    queued = build_pool(rule("m", "a", "b", "c"))
    drawn = collections.Counter(sent(queued, raw) for raw in SESSIONS)
    assert all(59 <= drawn[name] <= 141 for name in "abc")
    queued = build_pool(rule("m", ("a", 1), "b", ("c", 0)))
    assert {sent(queued, raw) for raw in SESSIONS} == {"a"}


@given(
    weights=st.lists(st.none() | st.integers(0, 1_000_000), min_size=1, max_size=6),
    share=st.floats(0, 1, exclude_max=True),
)
def test_any_weights_draw_a_target(weights, share):
    """A target is always drawn, and never one without weight where others have one."""
    targets = [TargetModel(str(at), weight) for at, weight in enumerate(weights)]
    drawn = request_preparer.weighted_choice(targets, share)
    assert drawn in targets
    assert drawn.weight or not sum(weight or 0 for weight in weights)


def test_a_policy_change_applies_at_once():
    """A policy of discovery applies from the next request on."""
    queued = build_pool(rule("m", "a"))
    assert sent(queued, ask()) == "a"
    queued.store.set_policy(InferencePolicy(rules=(rule("m", "b"),)))
    assert sent(queued, ask()) == "b"
    queued.store.set_policy(inference_policy.EMPTY_POLICY)
    assert sent(queued, ask()) == "m"


def test_discovered_policies_override_the_configuration():
    """The file's objectives and rules stand where no object says otherwise; exact beats generic."""
    queued = build_pool(rule("m", "object"), rule("", "object for all"), gold=5)
    configured = InferencePolicy({"gold": 1, "lead": -3}, (rule("m", "file"), rule("n", "file")))
    routing = msgspec.structs.replace(queued.director.routing, policy=configured)
    queued.director.reconfigure(routing)
    assert [sent(queued, ask(name)) for name in "mno"] == ["object", "file", "object for all"]
    for name, priority in (("gold", 5), ("lead", -3)):
        assert decided(queued, ask(headers={OBJECTIVE: name})).request.priority == priority
    assert queued.director.preparer.rewritten_models == {"m", "n"}
    targets = {"object", "object for all", "file"}
    assert queued.director.preparer.configured_models == {"m", "n"} | targets
    queued.store.set_policy(inference_policy.EMPTY_POLICY)
    assert sent(queued, ask()) == "file"


def test_a_pool_matches_models_of_its_rewrites():
    """Of several pools an alias goes to the one whose rule takes it, and is listed there."""
    llama, qwen = build_pool(), build_pool(rule("alias", "qwen"))
    for queued, name in ((llama, "llama"), (qwen, "qwen")):
        (member,) = queued.store.pool.members
        queued.store.observe_models(member.endpoint, ServedModels(frozenset({name}), frozenset()))
    statuses = PoolSelector([PoolRoute("llama", llama.director), PoolRoute("qwen", qwen.director)])
    routed = statuses.route(ask("alias"), 100.0)
    assert routed.pool == "qwen"
    assert isinstance(routed.outcome, Decision)
    assert routed.outcome.model_rewrite == "qwen"
    response = statuses.route(HttpRequest({":method": "GET", ":path": "/v1/models"}), 100.0).outcome
    assert isinstance(response, DirectResponse)
    assert [entry["id"] for entry in json.loads(response.body)["data"]] == [
        "alias",
        "llama",
        "qwen",
    ]


LOW = {OBJECTIVE: "low"}


def shed(profile, *loads) -> bool:
    """True if a request of negative priority is dropped over endpoints with these loads."""
    addresses = {f"10.0.0.{at}:1": load for at, load in enumerate(loads)}
    queued = build_pool(loads=addresses, profile=profile, low=-1)
    outcome = queued.decide(ask(headers=LOW))
    if isinstance(outcome, Decision):
        return False
    assert (outcome.status, outcome.reason) == (429, "rejected-saturated")
    assert isinstance(queued.decide(ask()), Decision)
    return True


@pytest.mark.parametrize(
    ("loads", "dropped"),
    [
        ([load(5, 0.0), load(0, 0.8)], True),
        ([load(4, 0.79), load(9, 0.9)], False),
        ([load(9, 0.9), None], True),
        ([load(9, 0.9), load(0, 0.0, at=0.0)], True),
        ([load(1, 0.1), load(9, 0.9, at=0.0)], False),
        ([load(9, 0.9, at=0.0), None], False),
    ],
    ids=[
        "each is full in its way",
        "one has room",
        "one is unknown",
        "one is stale and the other full",
        "one is stale and the other is not full",
        "nobody is known",
    ],
)
def test_saturation_by_load(loads, dropped):
    """All endpoints at 5 waiting or 0.8 of the KV cache; unknown ones are as full as the others."""
    assert shed("adaptive", *loads) is dropped


def test_saturation_by_the_detector_of_the_profile():
    """Its thresholds count in place of the usual ones."""
    detector = UtilizationDetector(queue_depth_threshold=20)
    profile = SchedulerProfile("mine", (detector,), (), RoundRobin())
    assert not shed(profile, load(19, 0.0))
    assert shed(profile, load(20, 0.0))
    profile = SchedulerProfile("mine", (ConcurrencyDetector(),), (), RoundRobin())
    assert not shed(profile, load(99, 1.0))


def test_a_hint_to_saturated_endpoints_is_saturated():
    """Endpoints that may not be chosen provide no capacity."""
    queued = build_pool(loads={"10.0.0.1:1": load(9, 1.0), "10.0.0.2:1": load(0, 0.0)}, low=-1)
    raw = ask(headers=LOW)
    assert isinstance(queued.decide(raw), Decision)
    raw = msgspec.structs.replace(raw, subset=("10.0.0.1",))
    assert isinstance(queued.decide(raw), Rejection)


@pytest.mark.parametrize("strategy", ["filter-chain", "adaptive"])
def test_a_filter_tree_takes_priorities(strategy):
    """The gateway's tree drops by priority where the objective is known, by its name otherwise."""
    loads = {"10.0.0.1:1": load(6, 0.9)}
    queued = build_pool(loads=loads, profile=strategy, sheddable=1, batch=-1)
    assert isinstance(queued.decide(ask(headers={OBJECTIVE: "sheddable"})), Decision)
    assert isinstance(queued.decide(ask(headers={OBJECTIVE: "batch"})), Rejection)
    unknown = build_pool(loads=loads, profile=strategy).decide(
        ask(headers={OBJECTIVE: "sheddable"})
    )
    assert isinstance(unknown, Rejection if strategy == "filter-chain" else Decision)


def test_a_seed_decides_the_draws():
    """Draws use the random numbers of the director."""
    rules = rule("m", "a", "b", "c")

    def run() -> list[str | None]:
        queued = build_pool(rules)
        return [sent(queued, ask()) for _ in range(20)]

    assert run() == run()
    assert (
        request_preparer.weighted_choice(rules.targets, random.Random(1).random()) in rules.targets
    )
