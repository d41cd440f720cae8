"""The gateway suite's behaviors with traffic, re-created.

Source: docs/spec/protocol.md#gateway-conformance-tests.

Pods are objects whose addresses are loopback addresses, with servers behind; the gateways are a
real Envoy; every pool has a picker of its own, which knows the pool's name and nothing else.
"""

from __future__ import annotations

import asyncio
from collections import Counter

import msgspec
import pytest

from extproc.demo import stack
from tests.kubernetes.conformance import stands
from tests.kubernetes.conformance.gateway import Rule

PRIMARY, SECONDARY = "primary.example.com", "secondary.example.com"

#: The same pools behind a gateway that lists no endpoints.
DIRECT = "direct.example.com"
EITHER = pytest.mark.parametrize("host", [PRIMARY, DIRECT])

PRIMARY_SERVERS, SECONDARY_SERVERS = (
    "primary-inference-model-server",
    "secondary-inference-model-server",
)

RULES = {
    "primary": [
        Rule(PRIMARY, "/destination-endpoint-served-test", {"primary": 1}),
        Rule(PRIMARY, "/primary-gateway-test", {"primary": 1}),
        Rule(PRIMARY, "/primary-gateway-dp-test", {"dp": 1}),
        Rule(PRIMARY, "/weighted-two-pools-test", {"primary": 70, "secondary": 30}),
        Rule(DIRECT, "/primary-gateway-test", {"primary.direct": 1}),
        Rule(DIRECT, "/primary-gateway-dp-test", {"dp.direct": 1}),
        Rule(DIRECT, "/primary", {"primary.direct": 1}),
        Rule(PRIMARY, "/test-primary-gateway", {"primary": 1}),
        Rule(PRIMARY, "/primary", {"primary": 1}),
        Rule(PRIMARY, "/secondary", {"secondary": 1}),
        Rule("appprotocol-h2c.example.com", "/inferencepool-app-protocol-h2c", {"h2c": 1}),
        Rule("appprotocol-http.example.com", "/inferencepool-app-protocol-http", {"http": 1}),
        Rule("appprotocol-default.example.com", "/inferencepool-app-protocol-default", {"http": 1}),
        *(
            Rule(f"port-{which}.example.com", f"/test-port-{which}", {"primary": 1})
            for which in ("unspecified", "matching", "non-matching")
        ),
    ],
    "secondary": [
        Rule(SECONDARY, "/failopen-pool-test", {"secondary": 1}),
        Rule(SECONDARY, "/test-secondary-gateway", {"secondary": 1}),
    ],
}


@pytest.fixture(scope="module")
def ports():
    """Five ports that are free on every loopback address: two of the servers, three ranks."""
    return [stack.free_port("0.0.0.0") for _ in range(5)]


@pytest.fixture(scope="module")
def stand(live, api, crds, ports):
    with live.holding(stands.stand(api)) as item:
        live.run(_build(item, ports))
        yield item


async def _build(item, ports):
    http, h2c, *ranks = ports
    for name in (PRIMARY_SERVERS, SECONDARY_SERVERS):
        await item.deploy(name, [http])
    await item.deploy("appprotocol", [http, h2c])
    await item.deploy("dp", ranks)
    built = [
        await item.pool("primary", [http], deployment=PRIMARY_SERVERS),
        await item.pool("secondary", [http], deployment=SECONDARY_SERVERS, failureMode="FailOpen"),
        await item.pool("http", [http], deployment="appprotocol", appProtocol="http"),
        await item.pool("h2c", [h2c], deployment="appprotocol", appProtocol="kubernetes.io/h2c"),
        await item.pool("dp", ranks, deployment="dp"),
    ]
    async with asyncio.TaskGroup() as group:
        for pool in built:
            group.create_task(item.start_picker(pool.name, pool.picker))
    item.pools += [
        msgspec.structs.replace(pool, name=f"{pool.name}.direct", direct=True)
        for pool in built
        if pool.name in {"primary", "dp"}
    ]
    await item.start_gateways(RULES)


async def test_080_fail_open(stand):
    """1: the pod that the header names, and with the pool's own picker gone any of its pods.

    The suite takes the endpoints from the picker's Service; here the picker is killed.
    """
    pod = stand.pods[SECONDARY_SERVERS][0]
    requested = (SECONDARY, "/failopen-pool-test")
    answer = await stand.ask(*requested, selection=pod.host, through="secondary")
    assert (answer.status, answer.pod) == (200, pod.name)
    await stand.stop_picker("secondary")
    for _ in range(6):
        answer = await stand.ask(*requested, selection=pod.host, through="secondary")
        assert (answer.status, answer.pod[:9]) == (200, "secondary")
    await stand.start_picker("secondary")
    again = await stand.until(
        lambda answer: stands.SERVED in answer.headers,
        *requested,
        selection=pod.host,
        through="secondary",
    )
    assert again.pod == pod.name


async def test_090_destination_endpoint_served(stand, ports):
    """2: the endpoint that served is in the answer, and it is the one that was named."""
    for pod in stand.pods[PRIMARY_SERVERS]:
        answer = await stand.ask(PRIMARY, "/destination-endpoint-served-test", selection=pod.host)
        assert (answer.status, answer.pod) == (200, pod.name)
        assert answer.headers[stands.SERVED] == f"{pod.host}:{ports[0]}"


@EITHER
@pytest.mark.parametrize("chosen", [[2], [0, 1], [0, 1, 2]], ids=str)
async def test_057_following_the_picker(stand, chosen, host):
    """3: 100 requests, 10 at a time, stay on the pods that the header names and reach each."""
    pods = [stand.pods[PRIMARY_SERVERS][number] for number in chosen]
    selection = ",".join(pod.host for pod in pods)
    answers = await stand.many(100, 10, host, "/primary-gateway-test", selection=selection)
    assert {answer.pod for answer in answers} == {pod.name for pod in pods}


@EITHER
async def test_058_following_the_picker_to_ranks(stand, ports, host):
    """4: any rank of one pod; one rank of another; all pods with one of them limited to two."""
    first, second, third = stand.pods["dp"]
    low, middle, high = ports[2:]
    cases = [
        ([first.host], {(first.name, port) for port in ports[2:]}),
        (
            [first.host, f"{third.host}:{middle}"],
            {(first.name, port) for port in ports[2:]} | {(third.name, middle)},
        ),
        (
            [first.host, f"{second.host}:{low}", f"{second.host}:{high}", third.host],
            {(pod.name, port) for pod in (first, third) for port in ports[2:]}
            | {(second.name, low), (second.name, high)},
        ),
    ]
    for named, allowed in cases:
        answers = await stand.many(
            100, 10, host, "/primary-gateway-dp-test", selection=",".join(named)
        )
        assert {(answer.pod, answer.content["httpPort"]) for answer in answers} == allowed


async def test_056_weighted_across_two_pools(stand):
    """5: 200 requests over weights of 70 and 30; each picker ignores the other pool's pods."""
    selection = ",".join(
        pod.host for name in (PRIMARY_SERVERS, SECONDARY_SERVERS) for pod in stand.pods[name]
    )
    answers = await stand.many(200, 5, PRIMARY, "/weighted-two-pools-test", selection=selection)
    by = Counter(answer.pod.partition("-")[0] for answer in answers)
    # 4.5 standard deviations of a share of 0.7 in 200 are 0.146.
    assert abs(by["primary"] / 200 - 0.7) < 0.146
    assert by["primary"] + by["secondary"] == 200


async def test_015_two_gateways_two_pools(stand):
    """7: each gateway ends in its own pool."""
    first = await stand.ask(PRIMARY, "/test-primary-gateway", body=None)
    second = await stand.ask(SECONDARY, "/test-secondary-gateway", body=None, through="secondary")
    assert (first.status, first.pod.partition("-")[0]) == (200, "primary")
    assert (second.status, second.pod.partition("-")[0]) == (200, "secondary")


@pytest.mark.parametrize(
    ("which", "rank", "protocol"),
    [("h2c", 1, "HTTP/2.0"), ("http", 0, "HTTP/1.1"), ("default", 0, "HTTP/1.1")],
)
async def test_061_application_protocol(stand, ports, which, rank, protocol):
    """9: the port of the pool, spoken to as the pool says; who served is in the answer."""
    pod = stand.pods["appprotocol"][1]
    address = f"{pod.host}:{ports[rank]}"
    host, path = f"appprotocol-{which}.example.com", f"/inferencepool-app-protocol-{which}"
    answer = await stand.ask(host, path, selection=address)
    assert (answer.status, answer.content["protocol"]) == (200, protocol)
    assert answer.headers[stands.SERVED] == address


@pytest.mark.parametrize("which", ["unspecified", "matching", "non-matching"])
async def test_032_port_of_the_reference(stand, which):
    """10: a GET without a body is served; the port that the route names does not matter.

    That a gateway ignores the port of its backendRef is the gateway's part.
    """
    answer = await stand.ask(f"port-{which}.example.com", f"/test-port-{which}", body=None)
    assert (answer.status, answer.pod.partition("-")[0]) == (200, "primary")


@pytest.mark.parametrize(
    ("host", "which"), [(PRIMARY, "primary"), (PRIMARY, "secondary"), (DIRECT, "primary")]
)
async def test_032_rules_of_one_route(stand, host, which):
    """13: two rules of one route end in two pools, for a GET without a body."""
    answer = await stand.ask(host, f"/{which}", body=None)
    assert (answer.status, answer.pod.partition("-")[0]) == (200, which)
