from __future__ import annotations

import json

import msgspec
import pytest

from extproc.decision import Decision, DirectResponse, Rejection
from extproc.endpoint import Endpoint, ServedModels
from extproc.pool import inference_policy
from extproc.request import HttpRequest, InferenceRequest
from extproc.routing import pool_match, pool_selector
from extproc.routing.pool_match import PoolMatch
from extproc.routing.pool_selector import PoolRoute, PoolSelector
from tests.support.pool_fixture import PoolFixture

A, B, C = "10.0.0.1:8000", "10.0.0.2:8000", "10.0.0.3:8000"


def chat(model="m", *, host="x.example", path="/v1/chat/completions", subset=None, **headers):
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": "hi"}]}).encode()
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return HttpRequest(
        {":method": "POST", ":path": path, ":authority": host, **named}, body, subset=subset
    )


def get(path, host="x.example"):
    return HttpRequest({":method": "GET", ":path": path, ":authority": host})


def build_pool(address, *bases, adapters=(), max_model_len=None):
    """A pool of one endpoint, which lists models if there are any."""
    pool = PoolFixture({address: None} if address else {})
    if bases:
        member = pool.store.pool.members[0]
        pool.store.observe_models(
            member.endpoint, ServedModels(frozenset(bases), frozenset(adapters), max_model_len)
        )
    return pool


def board(*pools, **settings):
    return PoolSelector(
        [PoolRoute(name, pool.director, claim) for name, pool, claim in pools], **settings
    )


def went(routed):
    assert isinstance(routed.outcome, Decision), routed.outcome
    return routed.pool, routed.outcome.endpoints[0].address


@pytest.mark.parametrize(
    ("claim", "request_", "holds"),
    [
        (PoolMatch(hosts=("x.example",)), chat(), True),
        (PoolMatch(hosts=("x.example",)), chat(host="X.example:8080"), True),
        (PoolMatch(hosts=("*.example",)), chat(), True),
        (PoolMatch(hosts=("*.example",)), chat(host="example"), False),
        (PoolMatch(hosts=("y.example", "x.example")), chat(), True),
        (PoolMatch(hosts=("y.example",)), chat(), False),
        (PoolMatch(paths=("/v1",)), chat(), True),
        (PoolMatch(paths=("/v1/",)), chat(path="/v1?x=1"), True),
        (PoolMatch(paths=("/v",)), chat(), False),
        (PoolMatch(paths=("/",)), chat(), True),
        (PoolMatch(headers={"x-team": "a"}), chat(x_team="a"), True),
        (PoolMatch(headers={"x-team": "a"}), chat(x_team="b"), False),
        (PoolMatch(hosts=("x.example",), headers={"x-team": "a"}), chat(), False),
    ],
)
def test_matches_require_every_condition(claim, request_, holds):
    """Every kind of condition must hold, and of one kind any."""
    index = pool_match.MatchIndex([claim])
    routes = index.find_routes(request_.headers)
    assert list(index.positions(routes, request_.headers)) == [0] * holds


def test_a_single_pool_takes_all_requests():
    """A single pool without a claim is not asked about models."""
    only = board(("p", build_pool(A, "other"), PoolMatch()))
    assert went(only.route(chat(), 1.0)) == ("p", A)
    assert only.default_pool == "p"


def test_pools_with_a_match_come_first_in_order():
    """The first claim that fits takes the request; pools without a claim come after."""
    two = board(
        ("open", build_pool(A), PoolMatch()),
        ("host", build_pool(B), PoolMatch(hosts=("x.example",))),
        ("model", build_pool(C), PoolMatch(models=("m-*",))),
    )
    assert went(two.route(chat("m-1"), 1.0)) == ("host", B)
    assert went(two.route(chat("m-1", host="y"), 1.0)) == ("model", C)
    assert went(two.route(chat("other", host="y"), 1.0)) == ("open", A)
    assert two.default_pool == ""
    assert two.route(chat("m-1"), 1.0).outcome.pool == "host"


def test_adapters_and_model_headers_match_as_models():
    """A claim on models sees the name the engine is to serve."""
    two = board(
        ("a", build_pool(A), PoolMatch(models=("m",))),
        ("b", build_pool(B), PoolMatch(models=("n",))),
    )
    assert went(two.route(chat("m", x_llm_d_model_name_rewrite="n"), 1.0)) == ("b", B)


@pytest.mark.parametrize(
    ("adapter", "pool"), [("unlisted", "qwen"), ("sql", "llama"), ("own", "lab")]
)
def test_an_adapter_in_a_field_of_its_own_selects_where_a_pool_knows_it(adapter, pool):
    """SGLang need not list its adapters: without a pool that lists or matches one, the model decides."""
    three = board(
        ("llama", build_pool(A, "llama", adapters=("sql",)), PoolMatch()),
        ("qwen", build_pool(B, "qwen"), PoolMatch()),
        ("lab", build_pool(C), PoolMatch(models=("own", "lab"))),
    )
    body = {"text": "hi", "model": "qwen", "lora_path": adapter}
    headers = {":method": "POST", ":path": "/generate", ":authority": "x.example"}
    routed = three.route(HttpRequest(headers, json.dumps(body).encode()), 1.0)
    assert went(routed)[0] == pool
    body["model"] = "lab"
    routed = three.route(HttpRequest(headers, json.dumps(body).encode()), 1.0)
    assert went(routed)[0] == (pool if adapter != "unlisted" else "lab")


def test_pools_without_a_match_take_listed_models():
    """A request goes to the pool that lists its model or alias; an unlisted model is 404."""
    two = board(
        ("llama", build_pool(A, "llama", adapters=("sql",)), PoolMatch()),
        ("qwen", build_pool(B, "qwen"), PoolMatch()),
    )
    assert went(two.route(chat("qwen"), 1.0)) == ("qwen", B)
    assert went(two.route(chat("sql"), 1.0)) == ("llama", A)
    assert went(two.route(chat("llama_sql"), 1.0)) == ("llama", A)
    missing = two.route(chat("gpt"), 1.0)
    assert isinstance(missing.outcome, Rejection)
    assert (missing.outcome.status, missing.pool) == (404, "")
    assert "llama, qwen, sql" in missing.outcome.message


def test_a_pool_without_model_lists_may_serve():
    """Unknown beats none; only empty pools are a 503; a pool with endpoints and no list is tried."""
    listed, silent, empty = build_pool(A, "llama"), build_pool(B), build_pool("")
    three = board(("l", listed, PoolMatch()), ("s", silent, PoolMatch()), ("e", empty, PoolMatch()))
    assert went(three.route(chat("gpt"), 1.0)) == ("s", B)
    two = board(("l", listed, PoolMatch()), ("e", empty, PoolMatch()))
    assert two.route(chat("gpt"), 1.0).outcome.status == 503
    assert went(two.route(chat("llama"), 1.0)) == ("l", A)


def test_the_subset_hint_selects_among_pools():
    """The gateway's own choice of endpoints names the pool."""
    two = board(("a", build_pool(A), PoolMatch()), ("b", build_pool(B), PoolMatch()))
    assert went(two.route(chat(subset=(B,)), 1.0)) == ("b", B)
    assert went(two.route(chat(subset=("10.0.0.2",)), 1.0)) == ("b", B)
    assert two.route(chat(subset=(C,)), 1.0).outcome.status == 503


def test_a_request_that_cannot_be_parsed_is_refused_where_models_decide():
    """400 before any pool is looked for."""
    two = board(("a", build_pool(A), PoolMatch(models=("m",))), ("b", build_pool(B), PoolMatch()))
    raw = msgspec.structs.replace(chat(), body=b"{")
    assert two.route(raw, 1.0).outcome.status == 400


def test_a_rewrite_for_every_request_names_the_model_that_is_missing():
    """The pool that has such a rule takes what names no model; without one it is 400."""
    raw = msgspec.structs.replace(chat(), body=b'{"messages": [{"role": "user", "content": "x"}]}')
    plain, ruled = build_pool(A, "llama"), build_pool(B, "qwen")
    two = board(("a", plain, PoolMatch()), ("b", ruled, PoolMatch()))
    assert two.route(raw, 1.0).outcome.status == 400
    ruled.store.set_policy(
        inference_policy.InferencePolicy(
            {}, (inference_policy.RewriteRule((), (inference_policy.TargetModel("qwen"),)),)
        )
    )
    assert went(two.route(raw, 1.0)) == ("b", B)


def test_no_pool_matches():
    """Claims that do not fit and no open pool: 404 that says where to look."""
    selector = board(("a", build_pool(A), PoolMatch(hosts=("y",))))
    routed = selector.route(chat(), 1.0)
    assert routed.outcome.status == 404
    assert "`pools`" in routed.outcome.message
    assert selector.route_fallback(chat(), why="Bug").outcome.status == 404


def test_fallback_uses_the_pool_whose_headers_match():
    """A bug in one pool's decision is not another pool's request."""
    two = board(("a", build_pool(A), PoolMatch(hosts=("y",))), ("b", build_pool(B), PoolMatch()))
    routed = two.route_fallback(chat(), why="Bug")
    assert went(routed) == ("b", B)
    assert routed.outcome.degraded


def test_models_of_all_pools_are_listed():
    """Several pools: the picker answers /v1/models, adapters with their base model."""
    two = board(
        ("llama", build_pool(A, "llama", adapters=("sql",)), PoolMatch()),
        ("qwen", build_pool(B, "qwen"), PoolMatch(hosts=("q.example",))),
    )
    response = two.route(get("/v1/models?x=1", host="q.example"), 1.0).outcome
    assert isinstance(response, DirectResponse)
    content = json.loads(response.body)
    assert content["object"] == "list"
    assert [(entry["id"], entry["parent"]) for entry in content["data"]] == [
        ("llama", None),
        ("qwen", None),
        ("sql", "llama"),
    ]
    here = json.loads(two.route(get("/v1/models/"), 1.0).outcome.body)
    assert [entry["id"] for entry in here["data"]] == ["llama", "sql"]
    assert json.loads(two.route(get("/v1/models/sql"), 1.0).outcome.body)["root"] == "sql"
    assert two.route(get("/v1/models/gpt"), 1.0).outcome.status == 404


def test_listed_models_have_the_least_context_of_their_endpoints():
    """A prompt of that length fits wherever it goes; adapters have none, as in vLLM's list."""
    three = board(
        ("a", build_pool(A, "m", adapters=("sql",), max_model_len=8192), PoolMatch()),
        ("b", build_pool(B, "m", max_model_len=4096), PoolMatch()),
        ("c", build_pool("10.0.0.9:1", "m", "n"), PoolMatch()),
    )
    content = json.loads(three.route(get("/v1/models"), 1.0).outcome.body)
    lengths = {entry["id"]: entry["max_model_len"] for entry in content["data"]}
    assert lengths == {"m": 4096, "n": None, "sql": None}


def test_model_lists_go_to_an_engine_for_a_single_pool():
    """GET /v1/models goes to an engine there, unless the setting says otherwise."""
    known, unknown = build_pool(A, "m"), build_pool(B)
    assert went(board(("p", known, PoolMatch())).route(get("/v1/models"), 1.0)) == ("p", A)
    response = board(("p", known, PoolMatch()), list_models=True).route(get("/v1/models"), 1.0)
    assert isinstance(response.outcome, DirectResponse)
    both = board(("p", unknown, PoolMatch()), ("q", build_pool(""), PoolMatch()))
    assert went(both.route(get("/v1/models"), 1.0)) == ("p", B)
    off = board(("p", known, PoolMatch()), ("q", unknown, PoolMatch()), list_models=False)
    assert isinstance(off.route(get("/v1/models"), 1.0).outcome, Decision)


def test_unparsed_bodies_are_routed_by_their_headers():
    """Neither a broken body nor its model counts, over one pool and over several."""
    known, other = build_pool(A, "m"), build_pool(B, "n")
    broken = HttpRequest({":method": "POST", ":path": "/v1/completions"}, b"{")
    single = board(("p", known, PoolMatch()), parse_bodies=False)
    assert went(single.route(broken, 1.0)) == ("p", A)
    assert single.route(chat("n"), 1.0).outcome.request == InferenceRequest("opaque")
    both = board(("p", known, PoolMatch()), ("q", other, PoolMatch()), parse_bodies=False)
    assert went(both.route(broken, 1.0)) == ("p", A)
    assert went(both.route(chat("n"), 1.0)) == ("p", A)
    renamed = both.route(chat("m", x_llm_d_model_name_rewrite="n"), 1.0)
    assert went(renamed) == ("q", B)
    assert renamed.outcome.body_edit is None


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/v1/models", ""),
        ("/v1/models/", ""),
        ("/v1/models/a/b", "a/b"),
        ("/v1/models/a%2Fb", "a/b"),
        ("/v1/modelsx", None),
    ],
)
def test_paths_of_the_model_list(path, expected):
    """The list, one of its entries, or something else."""
    assert pool_selector.requested_model(path) == expected


def test_pools_can_be_replaced():
    """Requests go by the new pools from the next one on."""
    switch = board(("a", build_pool(A), PoolMatch()))
    switch.reconfigure([PoolRoute("b", build_pool(B).director)])
    assert went(switch.route(chat(), 1.0)) == ("b", B)
    switch.reconfigure([])
    assert switch.route(chat(), 1.0).outcome.status == 404


def test_an_endpoint_of_two_pools_has_an_account_in_each():
    """Pools do not see each other's requests but through scrapes."""
    first, other = build_pool(A), build_pool(A)
    two = board(("a", first, PoolMatch(hosts=("x.example",))), ("b", other, PoolMatch()))
    routed = two.route(chat(), 1.0)
    routed.director.reserve(routed.outcome, 1.0)
    assert first.store.pool.members[0].account.in_flight == 1
    assert other.store.pool.members[0].account.in_flight == 0
    assert isinstance(first.store.pool.members[0].endpoint, Endpoint)


def test_a_single_pool_without_a_match_takes_unlisted_models():
    """Others' claims on models change nothing of what it does with an unknown one."""
    special, open_ = build_pool(A, "special"), build_pool(B, "llama")
    switch = board(("s", special, PoolMatch(models=("special",))), ("o", open_, PoolMatch()))
    assert went(switch.route(chat("special"), 1.0)) == ("s", A)
    assert went(switch.route(chat("unheard-of"), 1.0)) == ("o", B)
