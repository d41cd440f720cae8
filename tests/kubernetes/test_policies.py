"""Objectives and rewrites as objects of a cluster, in force on a real Envoy."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from extproc.demo import stack
from tests.kubernetes.conformance import stands
from tests.kubernetes.conformance.gateway import Rule
from tests.support import kube

HOST, PATH = "primary.example.com", "/v1/completions"
PAGE = 'vllm:num_requests_waiting{{model_name="m"}} {}\nvllm:kv_cache_usage_perc 0.1\n'


@pytest.fixture(scope="module")
def stand(live, api, crds):
    with live.holding(stands.stand(api)) as item:
        live.run(_build(item))
        yield item


async def _build(item):
    port = stack.free_port("0.0.0.0")
    await item.deploy("engine", [port], replicas=2)
    page(item, 0)
    pool = await item.pool("primary", [port], deployment="engine")
    await item.start_picker("primary", pool.picker, scrape=stands.SCRAPED)
    await item.start_gateways({"primary": [Rule(HOST, "/", {"primary": 1})]})


def page(item, waiting):
    """Metrics page of every pod."""
    for pod in item.pods["engine"]:
        pod.pages["/metrics"] = PAGE.format(waiting)


def body(model):
    """Spaces, key order and a number that no other writer would keep."""
    return b'{ "temperature": 1.0e0,\n "model" : "%b", "prompt":"a \\u00e9" }' % model.encode()


async def arriving(stand, model, **more):
    """The model in the body that reached a pod, all else of it unchanged."""
    answer = await stand.ask(HOST, PATH, body=body(model), arrives=b"", more=more)
    assert answer.status == 200
    sent = answer.content["body"].encode()
    result = json.loads(sent)["model"]
    assert sent == body(result)
    return result


def rule(model, *targets):
    """A rule for one model; for all of them without a name."""
    matches = {"matches": [{"model": {"value": model}}]} if model else {}
    return {**matches, "targets": [{"modelRewrite": name, **extra} for name, extra in targets]}


async def until_rewritten(stand, model, wanted, **more):
    """Wait until requests for a model arrive under another name."""
    await stand.until(
        lambda answer: (
            answer.status == 200 and json.loads(answer.content["body"])["model"] == wanted
        ),
        HOST,
        PATH,
        body=body(model),
        arrives=b"",
        more=more,
    )


async def test_083_084_rewrites_of_the_cluster(stand):
    """Exact rules beat generic ones, and both the header; a rule that is deleted is over."""
    header = {"x-gateway-model-name-rewrite": "by-header"}
    assert await arriving(stand, "a") == "a"
    assert await arriving(stand, "a", **header) == "by-header"
    rules = [rule("", ("any", {})), rule("a", ("exact", {}))]
    item = kube.rewrite("rules", stand.namespace, "primary", rules)
    await stand.api.create(item)
    await until_rewritten(stand, "a", "exact")
    assert await arriving(stand, "b") == "any"
    assert await arriving(stand, "a", **header) == "exact"
    await stand.api.delete(item)
    await until_rewritten(stand, "a", "a")
    assert await arriving(stand, "b") == "b"


async def test_085_weights_of_the_cluster(stand):
    """70 and 30 of 100 within bounds; other weights are in force at once."""
    targets = ("old", {"weight": 70}), ("new", {"weight": 30})
    item = kube.rewrite("canary", stand.namespace, "primary", [rule("split", *targets)])
    await stand.api.create(item)
    await stand.until(
        lambda answer: json.loads(answer.content["body"])["model"] != "split",
        HOST,
        PATH,
        body=body("split"),
        arrives=b"",
    )
    picks = Counter([await arriving(stand, "split") for _ in range(200)])
    # Five standard deviations of 30 % of 200.
    assert abs(picks["new"] - 60) <= 33
    assert picks.total() == picks["new"] + picks["old"]
    await stand.api.patch(item, {"spec": {"rules": [rule("split", ("new", {}))]}})
    await until_rewritten(stand, "split", "new")
    assert {await arriving(stand, "split") for _ in range(20)} == {"new"}
    await stand.api.delete(item)


async def test_072_objectives_of_the_cluster(stand):
    """While every engine is full, a negative objective is 429, until it is changed."""
    low = kube.objective("batch", stand.namespace, "primary", -1)
    await stand.api.create(low)
    await stand.api.create(kube.objective("gold", stand.namespace, "primary", 3))
    batch = {"x-gateway-inference-objective": "batch"}
    page(stand, 50)
    await stand.until(lambda answer: answer.status == 429, HOST, PATH, more=batch)
    for name in ("gold", "unknown"):
        more = {"x-llm-d-inference-objective": name}
        answer = await stand.ask(HOST, PATH, more=more)
        assert answer.status == 200
    await stand.api.patch(low, {"spec": {"priority": 0}})
    await stand.until(lambda answer: answer.status == 200, HOST, PATH, more=batch)
    page(stand, 0)
