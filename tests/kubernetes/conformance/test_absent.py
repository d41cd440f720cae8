"""The gateway suite's behaviors about what is missing or refused.

Source: docs/spec/protocol.md#gateway-conformance-tests.

Conditions in the status of routes and pools are a gateway controller's to write. What is left to an
endpoint picker: it serves a pool that is there and no other, tells by its readiness whether there
is one, and minds neither what a controller writes into the status nor which routes there are.
"""

from __future__ import annotations

import asyncio

import grpc
import pytest
from grpc_health.v1 import health_pb2

from extproc.demo import stack
from tests.kubernetes.conformance import stands
from tests.kubernetes.conformance.gateway import GatewayPool, Rule
from tests.support import kube, serving

HOST, OTHER = "primary.example.com", "secondary.example.com"
PRIMARY = "primary-inference-model-server"

#: What the suite's probes ask for.
PROBE = "inference-extension"

RULES = {
    "primary": [
        Rule(HOST, "/invalid-epp-test", {"nobody": 1}),
        Rule(HOST, "/missing-epp-ref", {"alone": 1}),
        Rule(HOST, "/later", {"later": 1}),
        Rule(HOST, "/no-such-pool"),
        Rule(HOST, "/", {"primary": 1}),
    ],
    "secondary": [Rule(OTHER, "/", {"primary": 1})],
}


@pytest.fixture(scope="module")
def port():
    return stack.free_port("0.0.0.0")


@pytest.fixture(scope="module")
def stand(live, api, crds, port):
    with live.holding(stands.stand(api)) as item:
        live.run(_build(item, port))
        yield item


async def _build(item, port):
    await item.deploy(PRIMARY, [port])
    built = [
        await item.pool("primary", [port], deployment=PRIMARY),
        await item.pool("alone", [port], deployment=PRIMARY, named=False),
    ]
    await item.pool("nobody", [port], deployment=PRIMARY)
    # The gateway knows where its picker would be; the pool itself comes later.
    later = GatewayPool("later", item.addresses(PRIMARY, [port]), stack.free_port())
    item.pools.append(later)
    async with asyncio.TaskGroup() as group:
        for pool in [*built, later]:
            group.create_task(item.start_picker(pool.name, pool.picker))
    await item.start_gateways(RULES)


async def probe(stand, name):
    """Answer to the probe of a Deployment."""
    where = f"{serving.LOCAL}:{stand.pickers[name].health}"
    async with grpc.aio.insecure_channel(where) as channel:
        check = channel.unary_unary(
            serving.CHECK,
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )
        answer = await check(health_pb2.HealthCheckRequest(service=PROBE))
    return health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)


async def test_065_reference_to_a_missing_pool(stand, port):
    """6: a picker whose pool is not there is not ready and answers 503; it serves once there is.

    The controller's part is the route's condition ResolvedRefs, and the 500 for a route that leads
    nowhere.
    """
    assert (await stand.ask(HOST, "/no-such-pool")).status == 500
    assert await probe(stand, "later") == "NOT_SERVING"
    refused = await stand.ask(HOST, "/later")
    assert refused.status == 503
    assert refused.headers["x-llm-d-request-dropped-reason"] == "rejected-no-endpoints"
    pool = kube.pool("later", stand.namespace, [port], labels={"app": PRIMARY})
    await stand.api.create(pool)
    await stand.until(lambda answer: answer.status == 200, HOST, "/later")
    assert await probe(stand, "later") == "SERVING"


async def test_065_status_of_the_pool_is_ignored(stand, port):
    """8: conditions that a controller writes on the pool change nothing, and we write none.

    Accepted=True itself is the controller's; a picker has no right to write a status.
    """
    pool = kube.pool("primary", stand.namespace)
    condition = {
        "type": "Accepted",
        "status": "True",
        "reason": "Accepted",
        "message": "",
        "lastTransitionTime": "2026-01-01T00:00:00Z",
    }
    parent = {"parentRef": {"name": "conformance-primary"}, "conditions": [condition]}
    await stand.api.set_status(pool | {"status": {"parents": [parent]}})
    answers = await stand.many(30, 5, HOST, "/accepted")
    assert {answer.pod for answer in answers} == {pod.name for pod in stand.pods[PRIMARY]}
    result = await stand.api.get(pool)
    assert result["status"]["parents"][0]["conditions"] == [condition]
    managers = {entry["manager"] for entry in result["metadata"]["managedFields"]}
    assert not any("extproc" in manager for manager in managers)


async def test_080_no_picker_at_all(stand):
    """11: where the picker's Service leads nowhere, a pool that fails closed answers 5xx.

    The controller's part is the pool's condition ResolvedRefs=False.
    """
    assert 500 <= (await stand.ask(HOST, "/invalid-epp-test", body=None)).status <= 504


async def test_060_a_pool_without_a_reference(stand):
    """12: a pool that names no picker is served by the picker that has its name."""
    assert await probe(stand, "alone") == "SERVING"
    answer = await stand.ask(HOST, "/missing-epp-ref", selection=stand.pods[PRIMARY][1].host)
    assert (answer.status, answer.pod) == (200, stand.pods[PRIMARY][1].name)


async def test_065_gateways_and_pool_are_deleted(stand):
    """14: two gateways share a pool; routes go one by one, then the pool: 503, and only that one.

    404 for routes that are gone, and the parents in the pool's status, are the gateway's part.
    """
    both = [(HOST, "primary"), (OTHER, "secondary")]
    for host, through in both:
        assert (await stand.ask(host, "/x", body=None, through=through)).status == 200
    stand.route("primary", RULES["primary"][:-1])
    await stand.until(lambda answer: answer.status == 404, HOST, "/x", body=None, through="primary")
    assert (await stand.ask(OTHER, "/x", body=None, through="secondary")).status == 200
    stand.route("secondary", [])
    await stand.until(
        lambda answer: answer.status == 404, OTHER, "/x", body=None, through="secondary"
    )
    stand.route("primary", RULES["primary"])
    await stand.until(lambda answer: answer.status == 200, HOST, "/x")
    await stand.api.delete(kube.pool("primary", stand.namespace))
    gone = await stand.until(lambda answer: answer.status == 503, HOST, "/x")
    assert gone.headers["x-llm-d-request-dropped-reason"] == "rejected-no-endpoints"
    assert await probe(stand, "primary") == "NOT_SERVING"
    assert (await stand.ask(HOST, "/missing-epp-ref")).status == 200
