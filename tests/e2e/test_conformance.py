"""Cases of the gateway conformance suite: pods are addresses, ranks are ports."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter

import pytest

from tests.e2e import backend, http1, installation

SELECTION = "test-epp-endpoint-selection"
SERVED = "x-conformance-test-served-endpoint"
BODY = b'{"model":"conformance-fake-model","prompt":"Write as if you were a critic: San Francisco"}'
PODS = ["127.0.0.2", "127.0.0.3", "127.0.0.4"]


@pytest.fixture(scope="module")
def ranks(live):
    with live.holding(_all_ranks()) as result:
        yield result


@pytest.fixture(scope="module")
def place(live, ranks):
    with live.holding(
        installation.installed(
            *ranks.values(),
            template="override-host.yaml",
            change=_test_gateway,
            arguments=["--config-text", installation.UNSCRAPED, "--conformance-testing"],
        )
    ) as item:
        yield item


def _test_gateway(config):
    """Let the selection header in, and report who served."""
    installation.keep_selection(config)
    policy = installation.cluster(config, "engines")["load_balancing_policy"]["policies"][0]
    policy["typed_extension_config"]["typed_config"]["selected_host_key"] = {
        "key": "envoy.lb",
        "path": [{"key": "x-gateway-destination-endpoint-served"}],
    }


@contextlib.asynccontextmanager
async def _all_ranks():
    """Three pods with three ranks each: address by (pod, rank)."""
    async with contextlib.AsyncExitStack() as backends:
        result = {}
        for pod, host in enumerate(PODS):
            for rank in range(3):
                item = await backends.enter_async_context(backend.backend(host))
                result[pod, rank] = item.address
        yield result


async def ask(fixture, selection, path="/primary-gateway-test"):
    return await http1.ask(fixture.port, path, BODY, headers=[(SELECTION, selection)])


async def hundred(fixture, selection, path):
    """100 requests, 10 at once: who answered how often."""
    places = asyncio.Semaphore(10)

    async def item():
        async with places:
            answer = await ask(fixture, selection, path)
            assert answer.status == 200
            return answer.json()["by"]

    return Counter(await asyncio.gather(*(item() for _ in range(100))))


@pytest.mark.parametrize("chosen", [[1], [0, 1], [0, 1, 2]])
async def test_057_selected_pods_only(place, ranks, chosen):
    """100 requests at concurrency 10 stay on the pods that the header names, and reach each."""
    by = await hundred(place, ",".join(PODS[pod] for pod in chosen), "/primary-gateway-test")
    assert {address.partition(":")[0] for address in by} == {PODS[pod] for pod in chosen}


async def test_058_one_rank(place, ranks):
    """A header with a port always hits that rank."""
    by = await hundred(place, ranks[0, 1], "/primary-gateway-dp-test")
    assert set(by) == {ranks[0, 1]}


async def test_058_two_ranks_of_one_pod(place, ranks):
    """Two ranks of one pod are both hit, and no other."""
    named = {ranks[1, 0], ranks[1, 2]}
    assert set(await hundred(place, ",".join(named), "/primary-gateway-dp-test")) == named


async def test_058_any_rank_of_a_pod_and_one_rank_of_another(place, ranks):
    """A bare address means all ranks of the pod, next to one rank of another."""
    by = await hundred(place, f"{PODS[0]},{ranks[2, 1]}", "/primary-gateway-dp-test")
    assert set(by) == {ranks[0, 0], ranks[0, 1], ranks[0, 2], ranks[2, 1]}


async def test_056_foreign_addresses_are_ignored(place, ranks):
    """Addresses of another pool are ignored as long as one is ours."""
    answer = await ask(place, f"10.1.2.3,{ranks[0, 0]},10.1.2.4:80")
    assert answer.json()["by"] == ranks[0, 0]


async def test_048_only_foreign_addresses(place, ranks):
    """A header that names no endpoint of the pool is a 503 with its reason, not another endpoint."""
    answer = await ask(place, "10.1.2.3")
    assert answer.status == 503
    assert answer.head.get("content-type") == "application/json"
    assert answer.head.get("x-llm-d-request-dropped-reason") == "rejected-no-endpoints"
    assert answer.head.get("retry-after") == "1"
    assert answer.json()["error"]["message"] == (
        "inference error: ServiceUnavailable - failed to find endpoint candidates for serving "
        "the request"
    )


async def test_090_the_served_endpoint_is_reported(place, ranks):
    """The endpoint that Envoy says it took stands in the answer."""
    answer = await ask(place, ranks[2, 2], "/destination-endpoint-served-test")
    assert answer.head.get(SERVED) == answer.json()["by"] == ranks[2, 2]
