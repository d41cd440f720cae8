"""Models through the director: candidates, rejections and rewritten names."""

from __future__ import annotations

import json

import msgspec
import pytest

from extproc.decision import Decision, Rejection
from extproc.endpoint import AdapterResidency, ServedModels
from extproc.request import HttpRequest
from extproc.routing.routing_config import RoutingSettings
from extproc.scheduling import registry
from tests.support.pool_fixture import PoolFixture, load

PATH = "/v1/chat/completions"


def models(base: str, *adapters: str) -> ServedModels:
    return ServedModels(frozenset({base}), frozenset(adapters))


def build_pool(
    *listed: ServedModels | None, strategy: str = "round-robin", **settings: bool
) -> PoolFixture:
    """Endpoints 10.0.0.0, 10.0.0.1, ... that listed these."""
    queued = PoolFixture(
        {f"10.0.0.{at}:1": load(0, 0.0) for at in range(len(listed))}, profile=strategy
    )
    for member, served in zip(queued.store.pool.members, listed, strict=True):
        if served is not None:
            queued.store.observe_models(member.endpoint, served)
    routing = queued.director.routing
    wanted = RoutingSettings(stale_after_s=60.0, **settings)
    queued.director.reconfigure(msgspec.structs.replace(routing, settings=wanted))
    return queued


def ask(model: str, *, path: str = PATH, subset: tuple[str, ...] | None = None, **more: object):
    """A chat request; `headers` go beside the path."""
    headers = more.pop("headers", {})
    assert isinstance(headers, dict)
    body = {"model": model, "messages": [{"role": "user", "content": "hello"}], **more}
    return HttpRequest({":path": path, **headers}, json.dumps(body).encode(), subset=subset)


def decided(held: PoolFixture, raw: HttpRequest) -> Decision:
    outcome = held.decide(raw)
    assert isinstance(outcome, Decision), outcome
    return outcome


def places(decision: Decision) -> list[int]:
    return [int(candidate.endpoint.ip[-1]) for candidate in decision.candidates]


def test_a_model_is_routed_to_endpoints_that_serve_it():
    """Endpoints that list the model, or list nothing, are candidates; the others are reported."""
    queued = build_pool(models("a"), models("b", "lora"), None)
    decision = decided(queued, ask("lora"))
    assert places(decision) == [1, 2]
    assert [endpoint.address for endpoint in decision.excluded_by_model] == ["10.0.0.0:1"]
    assert not decision.model_unlisted
    everybody = decided(build_pool(models("a"), models("a")), ask("a"))
    assert places(everybody) == [0, 1]
    assert not everybody.excluded_by_model


def test_an_unlisted_model_goes_to_unknown_endpoints_or_to_all():
    """`pass` keeps all endpoints for a model that none lists, as upstream does."""
    assert places(decided(build_pool(models("a"), None), ask("x"))) == [1]
    decision = decided(build_pool(models("a"), models("b")), ask("x"))
    assert places(decision) == [0, 1]
    assert decision.model_unlisted
    assert not decision.excluded_by_model


def test_reject_is_a_404_once_all_models_are_listed():
    """`reject` waits for the last list; then the answer names what there is."""
    raw = ask("x")
    assert places(decided(build_pool(models("a"), None, reject_unlisted=True), raw)) == [1]
    outcome = build_pool(models("b", "l"), models("a"), reject_unlisted=True).decide(raw)
    assert outcome == Rejection(
        404,
        "the model `x` does not exist; there are: a, b, l",
        code="model_not_found",
        cause="unknown-model",
    )


def test_reject_considers_allowed_endpoints_only():
    """A subset without an endpoint of the model is answered like an unknown model."""
    queued = build_pool(models("a"), models("b"), reject_unlisted=True)
    outcome = queued.decide(ask("a", subset=("10.0.0.1",)))
    assert isinstance(outcome, Rejection)
    assert outcome.status == 404
    rejection = queued.decide(ask("a", subset=("10.0.0.9",)))
    assert isinstance(rejection, Rejection)
    assert rejection.status == 503


def test_the_404_is_bounded():
    """Neither a long name nor many models make a long answer."""
    many = models("m", *(f"adapter-{at:03}" for at in range(300)))
    outcome = build_pool(many, reject_unlisted=True).decide(ask("x" * 500))
    assert isinstance(outcome, Rejection)
    assert "and 281 more" in outcome.message
    assert len(outcome.message) < 600


def test_a_hint_and_a_model_both_count():
    """Of the allowed ones those that serve; left out are the allowed others only."""
    queued = build_pool(models("a"), models("a"), models("b"), models("b"))
    decision = decided(queued, ask("a", subset=("10.0.0.1", "10.0.0.2")))
    assert places(decision) == [1]
    assert [endpoint.address for endpoint in decision.excluded_by_model] == ["10.0.0.2:1"]
    assert places(decided(queued, ask("a", subset=("10.0.0.2",)))) == [2]


def test_a_bodiless_request_goes_to_any_endpoint():
    """Nothing is asked of a model."""
    queued = build_pool(models("a"), models("b"), reject_unlisted=True)
    decision = decided(queued, HttpRequest({":method": "GET", ":path": "/v1/models"}))
    assert places(decision) == [0, 1]


def test_kubeai_names_become_names_of_the_engine():
    """`model_adapter`: holders of both, accounts under the adapter, and one value edited."""
    queued = build_pool(models("llama", "sql"), models("qwen", "sql"), models("llama"))
    raw = ask("llama_sql")
    decision = decided(queued, raw)
    assert places(decision) == [0]
    assert (decision.request.model, decision.request.adapter) == ("llama", "sql")
    assert decision.request.target == "sql"
    assert decision.model_rewrite == "sql"
    assert decision.body_edit is not None
    assert decision.body_edit.apply(raw.body) == raw.body.replace(b'"llama_sql"', b'"sql"')


@pytest.mark.parametrize("name", ["llama", "sql", "llama_other", "other_sql", "llama_sql_2", "_"])
def test_other_names_are_not_split(name: str):
    """A name that is listed, or whose parts are not both known, is not split."""
    queued = build_pool(models("llama", "sql", "llama_sql_2"), models("qwen"))
    decision = decided(queued, ask(name))
    assert decision.request.model == name
    assert (decision.model_rewrite, decision.body_edit) == ("", None)


def test_sglang_names_are_matched_and_unchanged():
    """`model:adapter` goes to who serves it, as the engine takes it: the body stays."""
    listed = models("llama", "sql"), models("llama"), models("qwen", "sql")
    queued = build_pool(*listed, strategy="balanced")
    text = [{"role": "user", "content": "x" * 5000}]
    decision = decided(queued, ask("llama:sql", messages=text))
    assert places(decision) == [0]
    assert (decision.request.model, decision.request.adapter) == ("llama", "sql")
    assert (decision.model_rewrite, decision.body_edit) == ("", None)
    assert len(decision.block_hashes) > 0
    same = decided(queued, ask("llama", lora_path="sql", messages=text))
    assert decision.block_hashes == same.block_hashes
    unlisted = decided(queued, ask("llama:other"))
    assert places(unlisted) == [0, 1]
    assert not unlisted.model_unlisted
    tagged = decided(build_pool(models("llama:8b"), models("llama")), ask("llama:8b"))
    assert (places(tagged), tagged.request.model) == ([0], "llama:8b")


def test_kubeai_names_can_be_turned_off():
    """Then the engine is asked for the whole name."""
    decision = decided(build_pool(models("llama", "sql"), kubeai_names=False), ask("llama_sql"))
    assert (decision.request.model, decision.model_rewrite) == ("llama_sql", "")


def test_both_names_of_an_adapter_share_blocks():
    """The engine hashes by the adapter, however the client called it."""
    queued = build_pool(models("llama", "sql"), strategy="balanced")
    prompt = [{"role": "user", "content": "x" * 5000}]
    first = decided(queued, ask("sql", messages=prompt))
    second = decided(queued, ask("llama_sql", messages=prompt))
    assert first.block_hashes == second.block_hashes
    assert len(first.block_hashes) > 0


#: Bodies by the surface that takes them, around one text.
SURFACES = {
    "/v1/chat/completions": lambda text: {"messages": [{"role": "user", "content": text}]},
    "/v1/completions": lambda text: {"prompt": text},
    "/v1/messages": lambda text: {
        "messages": [{"role": "user", "content": text}],
        "max_tokens": 9,
    },
    "/v1/responses": lambda text: {"input": text},
    "/v1/embeddings": lambda text: {"input": text},
    "/generate": lambda text: {"text": text},
}

#: What names an adapter in a body.
ADAPTER_FIELDS = {
    "its own name": lambda adapter: {"model": adapter},
    "model:adapter": lambda adapter: {"model": f"llama:{adapter}"},
    "model_adapter": lambda adapter: {"model": f"llama_{adapter}"},
    "lora_path": lambda adapter: {"model": "llama", "lora_path": adapter},
}


@pytest.mark.parametrize("path", SURFACES)
@pytest.mark.parametrize("fields", ADAPTER_FIELDS.values(), ids=ADAPTER_FIELDS)
def test_equal_prompts_of_two_adapters_share_no_block(path: str, fields):
    """The engine caches by adapter, so neither the base model's blocks nor another's are of use."""
    queued = build_pool(models("llama", "sql", "law"), strategy="balanced")
    body = SURFACES[path]("x" * 5000)
    named = [{"model": "llama"}, fields("sql"), fields("law")]
    raws = [
        HttpRequest({":path": path, ":method": "POST"}, json.dumps({**body, **names}).encode())
        for names in named
    ]
    base, sql, law = (decided(queued, raw).block_hashes for raw in raws)
    assert len(base) == len(sql) == len(law) > 0
    assert len({*base, *sql, *law}) == 3 * len(base)


def test_a_listed_adapter_is_recognized():
    """Residency is estimated for an adapter that was never in a batch."""
    queued = build_pool(models("a", "lora"), strategy="adaptive")
    assert decided(queued, ask("lora")).candidates[0].residency is AdapterResidency.ROOM
    assert decided(queued, ask("a")).candidates[0].residency is AdapterResidency.RESIDENT


def test_027_a_gateway_names_the_model_by_header():
    """The header beats the body, old and new name, and decides who serves."""
    queued = build_pool(models("a"), models("b"))
    for headers in (
        {"x-llm-d-model-name-rewrite": "b"},
        {"x-gateway-model-name-rewrite": "b"},
        {"x-gateway-model-name-rewrite": "a", "x-llm-d-model-name-rewrite": "b"},
    ):
        raw = ask("a", headers=headers)
        decision = decided(queued, raw)
        assert places(decision) == [1]
        assert decision.model_rewrite == "b"
        assert decision.body_edit is not None
        assert decision.body_edit.apply(raw.body) == raw.body.replace(b'"a"', b'"b"', 1)


def test_an_equal_model_header_edits_nothing():
    """The body is handed on as it came."""
    decision = decided(
        build_pool(models("a")), ask("a", headers={"x-llm-d-model-name-rewrite": "a"})
    )
    assert (decision.model_rewrite, decision.body_edit) == ("", None)


def test_a_header_supplies_a_missing_model():
    """On a surface that is known the name is put in; on others a body may be anything."""
    headers = {"x-llm-d-model-name-rewrite": "a"}
    queued = build_pool(models("a"))
    raw = HttpRequest({":path": "/v1/completions", **headers}, b'{"prompt": "x"}')
    decision = decided(queued, raw)
    assert decision.body_edit is not None
    assert decision.body_edit.apply(raw.body) == b'{"model":"a","prompt": "x"}'
    decision = decided(queued, HttpRequest({":path": "/upload", **headers}, b'{"prompt": "x"}'))
    assert (decision.model_rewrite, decision.body_edit) == ("a", None)


def test_a_header_may_name_a_kubeai_adapter():
    """The gateway's name is read like the client's."""
    raw = ask("x", headers={"x-llm-d-model-name-rewrite": "llama_sql"})
    decision = decided(build_pool(models("llama", "sql")), raw)
    assert decision.model_rewrite == "sql"
    assert decision.body_edit is not None
    assert json.loads(decision.body_edit.apply(raw.body))["model"] == "sql"


def test_an_unseen_body_is_not_edited():
    """Decided on headers: routed by the header's name, and it is said that nothing was edited."""
    raw = HttpRequest({":method": "POST", ":path": PATH, "x-llm-d-model-name-rewrite": "a"})
    decision = decided(build_pool(models("a"), models("b")), raw)
    assert places(decision) == [0]
    assert (decision.model_rewrite, decision.body_edit) == ("a", None)


@pytest.mark.parametrize("strategy", sorted(registry.profiles()))
def test_every_strategy_keeps_to_endpoints_of_the_model(strategy: str):
    """Every strategy chooses among those that serve."""
    queued = build_pool(models("a"), models("b"), models("b", "l"), models("a"), strategy=strategy)
    for _ in range(5):
        decision = decided(queued, ask("b"))
        assert decision.endpoints[0].ip in {"10.0.0.1", "10.0.0.2"}
        queued.director.reserve(decision, queued.now)


def test_prefix_hash_knows_an_adapter_by_either_name():
    """KubeAI's `model_adapter` and the engine's own name go to one place; the base has its own."""
    queued = build_pool(*(models("b", "lora") for _ in range(5)), strategy="prefix-hash")

    def chosen(model: str) -> list[str]:
        texts = [[{"role": "user", "content": f"question {at}"}] for at in range(20)]
        decisions = [decided(queued, ask(model, messages=text)) for text in texts]
        return [decision.endpoints[0].address for decision in decisions]

    assert chosen("lora") == chosen("b_lora") != chosen("b")
