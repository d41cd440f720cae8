"""One picker for several pools of a namespace, behind a real Envoy."""

from __future__ import annotations

import pytest

from extproc.demo import stack
from tests.kubernetes.conformance import stands
from tests.kubernetes.conformance.gateway import GatewayPool, Rule
from tests.support import kube

NAMES = ("alpha", "beta", "gamma", "delta")


def asking(model):
    return b'{"model": "%b", "prompt": "hello"}' % model.encode()


@pytest.fixture(scope="module")
def port():
    return stack.free_port("0.0.0.0")


@pytest.fixture(scope="module")
def stand(live, api, crds, port):
    """Pods for all pools, and two pickers that know them in different ways."""
    with live.holding(stands.stand(api)) as item:
        live.run(_build(item, port))
        yield item


async def _build(item, port):
    for name in NAMES:
        await item.deploy(name, [port], replicas=2)
    every = [address for name in NAMES for address in item.addresses(name, [port])]
    item.pools += [GatewayPool(name, every, stack.free_port()) for name in ("written", "brought")]
    for name in ("alpha", "beta", "gamma"):
        await item.api.create(kube.pool(name, item.namespace, [port]))
    await item.start_picker("written", item.pools[0].picker, config=_written(item.namespace))
    allowed = ", ".join(
        f"{{pools: ['{item.namespace}/{name}'], {limit}}}"
        for name, limit in (
            ("alpha", "hosts: ['{name}.example.com', '*.{name}.example.com']"),
            ("beta", "headers: {x-tier: batch}"),
            ("gamma", "models: [special, another]"),
            ("delta", "models: [new]"),
        )
    )
    where = f"{{discover_pools: namespace, namespace: {item.namespace}, match_rules: [{allowed}]}}"
    await item.start_picker("brought", item.pools[1].picker, config=f"cluster: {where}")
    claims = {
        "alpha": {"extproc/hosts": "alpha.example.com, *.alpha.example.com"},
        "beta": {"extproc/headers": "x-tier=batch"},
        "gamma": {"extproc/models": "special,another"},
    }
    for name, claim in claims.items():
        pool = kube.pool(name, item.namespace)
        await item.api.patch(pool, {"metadata": {"annotations": claim}})
    hosts = ("alpha.example.com", "beta.example.com", "any.example.com")
    rules = {
        name: [Rule(host, "/", {name: 1}) for host in hosts] for name in ("written", "brought")
    }
    await item.start_gateways(rules)


def _written(namespace):
    pools = [
        f"{{name: {name}, match: {match}, "
        f"kubernetes: {{inference_pool: {name}, namespace: {namespace}}}}}"
        for name, match in (
            ("alpha", "{hosts: [alpha.example.com]}"),
            ("beta", "{headers: {x-tier: batch}}"),
            ("gamma", "{models: [special]}"),
        )
    ]
    return f"pools: [{', '.join(pools)}]"


BOTH = pytest.mark.parametrize("through", ["written", "brought"])


def is_from_pool(name):
    """True if a pod of a pool answered."""
    return lambda answer: answer.pod.partition("-")[0] == name


@BOTH
async def test_pools_by_host_header_and_model(stand, through):
    """Each request goes to the pool that claims it, by host, by header or by model."""
    asks = {
        "alpha": ("alpha.example.com", {}, asking("m")),
        "beta": ("any.example.com", {"x-tier": "batch"}, asking("m")),
        "gamma": ("any.example.com", {}, asking("special")),
    }
    for name, (host, more, body) in asks.items():
        how = {"through": through, "more": more, "body": body}
        # Claims were written while the pickers ran.
        await stand.until(is_from_pool(name), host, "/v1/completions", **how)
        answers = await stand.many(20, 4, host, "/v1/completions", **how)
        assert {answer.pod for answer in answers} == {f"{name}-0", f"{name}-1"}


@BOTH
async def test_a_request_without_a_matching_pool(stand, through):
    """Without a pool that fits it is 404, and says where claims stand."""
    answer = await stand.ask("any.example.com", "/v1/completions", through=through)
    assert answer.status == 404


async def test_pools_come_and_go(stand, port):
    """A picker of every pool takes a new one up at once, and leaves one that is deleted."""
    pool = kube.pool("delta", stand.namespace, [port])
    pool["metadata"]["annotations"] = {"extproc/models": "new"}
    how = {"through": "brought", "body": asking("new")}
    assert (await stand.ask("any.example.com", "/v1/completions", **how)).status == 404
    await stand.api.create(pool)
    await stand.until(is_from_pool("delta"), "any.example.com", "/v1/completions", **how)
    await stand.api.delete(pool)
    await stand.until(
        lambda answer: answer.status == 404, "any.example.com", "/v1/completions", **how
    )


async def test_annotations_beyond_the_match_rules_are_ignored(stand, port):
    """A pool that comes first by name, and claims what others serve, is ignored and reported."""
    how = {"through": "brought", "body": asking("special")}
    for name in ("a-first", "delta"):
        pool = kube.pool("delta", stand.namespace, [port])
        pool["metadata"]["name"] = name
        pool["metadata"]["annotations"] = {
            "extproc/models": "*",
            "extproc/hosts": "any.example.com,alpha.example.com",
        }
        refused = stand.pickers["brought"].child.line(f"/{name} matches nothing")
        await stand.api.create(pool)
        await refused
        answers = await stand.many(20, 4, "any.example.com", "/v1/completions", **how)
        assert all(map(is_from_pool("gamma"), answers))
        host = {**how, "body": asking("m")}
        answers = await stand.many(20, 4, "alpha.example.com", "/v1/completions", **host)
        assert all(map(is_from_pool("alpha"), answers))
        await stand.api.delete(pool)


async def test_065_a_deleted_pool_and_only_that_pool(stand, port):
    """A pool that the file names answers 503 while its object is gone; the others serve on."""
    pool = kube.pool("alpha", stand.namespace, [port])
    requested = ("alpha.example.com", "/v1/completions")
    how = {"through": "written", "body": asking("m")}
    await stand.api.delete(pool)
    gone = await stand.until(lambda answer: answer.status == 503, *requested, **how)
    assert gone.headers["x-llm-d-request-dropped-reason"] == "rejected-no-endpoints"
    batch = await stand.ask(
        "any.example.com", "/v1/completions", through="written", more={"x-tier": "batch"}
    )
    assert (batch.status, is_from_pool("beta")(batch)) == (200, True)
    await stand.api.create(pool)
    await stand.until(is_from_pool("alpha"), *requested, **how)
