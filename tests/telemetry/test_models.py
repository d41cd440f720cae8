"""Models in decisions, states, tables and metrics."""

import json

import msgspec

from extproc.cli import offline_explain
from extproc.config import settings
from extproc.decision import BodyEdit, Decision, model_not_found
from extproc.endpoint import Candidate, Endpoint, ServedModels
from extproc.request import HttpRequest, InferenceRequest
from extproc.telemetry import (
    decision_log,
    explanation,
    explanation_text,
    pool_state,
)
from extproc.telemetry.counters import ProcessCounters
from tests.support.metrics_pages import build_exposition, build_view
from tests.support.pool_fixture import PoolFixture

A, B = (Candidate(Endpoint(f"10.0.0.{n}:8000")) for n in (1, 2))
REQUEST = InferenceRequest(api="chat", model="llama", adapter="sql")


def decision(**more):
    return Decision(request=REQUEST, endpoints=[A.endpoint], candidates=[A], **more)


def listed(*models):
    """A pool whose endpoints listed these models."""
    pool_fixture = PoolFixture({f"10.0.0.{at}:8000": None for at in range(1, len(models) + 1)})
    for member, served in zip(pool_fixture.store.pool.members, models, strict=True):
        if served is not None:
            pool_fixture.store.observe_models(member.endpoint, served)
    return pool_fixture


TWO = listed(
    ServedModels(frozenset({"llama"}), frozenset({"sql", "math"})),
    ServedModels(frozenset({"qwen"})),
    None,
)


def test_the_choice_by_model_is_the_first_step():
    """Endpoints that do not serve the model are removed before the first filter."""
    document = explanation.explain(decision(excluded_by_model=[B.endpoint]))
    assert document["filters"][0] == {
        "name": "serves-model",
        "survivors": ["10.0.0.1:8000"],
        "dropped": ["10.0.0.2:8000"],
    }
    assert "serves-model     1  10.0.0.2:8000" in explanation_text.render_table(document)
    assert explanation.explain(decision())["filters"] == []


def test_a_rewrite_is_explained():
    """The name the engine is given, the client's, and whether the body has a place for it."""
    edited = decision(model_rewrite="sql", body_edit=BodyEdit(0, 1, b"x"), client_model="llama")
    document = explanation.explain(edited)
    assert document["model_rewrite"] == {"name": "sql", "client": "llama", "editable": True}
    shown = explanation_text.render_table(document)
    assert "rewrite: the engine is asked for sql in place of llama, in the body\n" in shown
    document = explanation.explain(decision(model_rewrite="sql"))
    shown = explanation_text.render_table(document)
    assert "the engine is asked for sql, but the body cannot be edited\n" in shown


def test_a_priority_is_explained():
    """The objective and its priority, where the pool has it."""
    request = InferenceRequest("chat", objective="batch", priority=-1)
    document = explanation.explain(msgspec.structs.replace(decision(), request=request))
    assert (document["request"]["objective"], document["request"]["priority"]) == ("batch", -1)
    assert ", priority -1 by objective batch" in explanation_text.render_table(document)
    assert "priority" not in explanation_text.render_table(explanation.explain(decision()))


def test_an_unlisted_model_is_explained():
    """A decision that passed it on says so."""
    document = explanation.explain(decision(model_unlisted=True))
    assert document["model_unlisted"] is True
    assert "no endpoint lists it" in explanation_text.render_table(document)


def test_the_ring_keeps_the_rewrite():
    """A decision of the past tells the same."""
    ring = decision_log.DecisionLog(10)
    ring.add("id", decision(model_rewrite="sql", excluded_by_model=[B.endpoint]), 1.0)
    record = ring.find("id")
    assert record is not None
    document = explanation.explain_record(record, 2.0)
    assert document["model_rewrite"]["name"] == "sql"
    assert document["excluded_by_model"] == ["10.0.0.2:8000"]


def test_models_of_a_pool_state_round_trip():
    """/debug/pool tells who serves what, and `extproc explain --state` decides by it."""
    document = json.loads(b"".join(pool_state.render_pool(TWO.store.pool, 1.0)))
    first, second, third = document["endpoints"]
    assert (first["models"], first["model_adapters"]) == (["llama"], ["math", "sql"])
    assert (second["models"], second["model_adapters"]) == (["qwen"], [])
    assert "models" not in third
    read = msgspec.convert(document, pool_state.PoolState)
    body = b'{"model": "llama_sql", "prompt": "x"}'
    raw = HttpRequest({":path": "/v1/completions"}, body)
    outcome = offline_explain.route_offline(settings.Settings(), read, raw, where="state")
    assert [candidate.endpoint.address for candidate in outcome.candidates] == [
        "10.0.0.1:8000",
        "10.0.0.3:8000",
    ]
    assert outcome.body_edit.apply(body) == body.replace(b"llama_sql", b"sql")


def test_metrics_of_models():
    """Listed names and polls of endpoints, and requests by result."""
    counters = ProcessCounters()
    counts = counters.for_pool("")
    counts.model_list_polls["10.0.0.1:8000", "ok"] += 2
    counts.record_unlisted()
    counts.record_rejection(model_not_found("x", ["y"]))
    counts.record_rewrite(edited=True)
    counts.record_rewrite(edited=False)
    page = build_exposition(counters, {"": build_view(TWO.store.pool)})
    shown = page.render().decode()
    for line in (
        'extproc_endpoint_models{endpoint="10.0.0.1:8000",pool=""} 3.0',
        'extproc_endpoint_models{endpoint="10.0.0.2:8000",pool=""} 1.0',
        'extproc_model_list_polls_total{endpoint="10.0.0.1:8000",pool="",result="ok"} 2.0',
        'extproc_model_rewrites_total{pool="",result="edited"} 1.0',
        'extproc_model_rewrites_total{pool="",result="unedited"} 1.0',
        'extproc_unknown_model_requests_total{pool=""} 2.0',
    ):
        assert line + "\n" in shown
    assert 'extproc_endpoint_models{endpoint="10.0.0.3:8000",pool=""}' not in shown
    counts.forget("10.0.0.1:8000")
    assert not counts.model_list_polls
