"""Real pickers stand for one Lease: exactly one is ready, and another when it ends."""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal

import aiohttp
import grpc
import pytest
from grpc_health.v1 import health_pb2

from tests.support import kube, kube_picker, serving

PORT = 8000
ENGINE = f"127.2.0.1:{PORT}"
EXT_PROC = "envoy.service.ext_proc.v3.ExternalProcessor"

#: A busy machine renews within these. How long a failover takes is tested in virtual time, in
#: tests/election.
DURATION_S, RENEW_S, RETRY_S = 10, 8.0, 0.5

NAMES = {"liveness", "readiness", "", EXT_PROC}
SERVING, NOT_SERVING, UNKNOWN = "SERVING", "NOT_SERVING", "SERVICE_UNKNOWN"


def rights():
    """Rights that the component of the manifests adds."""
    path = kube.MANIFESTS / "components" / "leader-election" / "rbac.yaml"
    (role,) = (
        document for document in kube.documents(path.read_text()) if document["kind"] == "Role"
    )
    return role["rules"]


async def place(api, cluster, *, electing=True):
    """A namespace with a pool, and the kubeconfig of a picker for it."""
    namespace = await api.namespace("election")
    await api.create(kube.pool("vllm", namespace, (PORT,)))
    await api.create(kube.pod("vllm-0", namespace, "127.2.0.1", labels={"app": "vllm"}))
    rules = kube.picker_rules() + (rights() if electing else [])
    access = await api.account(namespace, rules)
    return namespace, cluster.write_kubeconfig(namespace, access, namespace)


def candidate(where, *flags, **more):
    """A picker that stands for election, with the upstream picker's flags."""
    namespace, kubeconfig = where
    lease = f"namespace: {namespace}, duration_s: {DURATION_S}, renew_s: {RENEW_S}"
    return kube_picker.picker(
        kubeconfig,
        *("--pool-name", "vllm", "--pool-namespace", namespace, "--ha-enable-leader-election"),
        *flags,
        config=f"cluster: {{lease: {{{lease}, retry_s: {RETRY_S}}}}}",
        **more,
    )


def lease(namespace):
    """The Lease that stands for the pool, as the upstream picker calls it."""
    return {
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": {"namespace": namespace, "name": f"epp-{namespace}-vllm.llm-d.ai"},
    }


async def health(picker, name):
    """Health of a name."""
    port = re.search(r"gRPC health on (\d+)", picker.child.ready_line)[1]
    async with grpc.aio.insecure_channel(f"{serving.LOCAL}:{port}") as channel:
        check = channel.unary_unary(
            serving.CHECK,
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )
        answer = await check(health_pb2.HealthCheckRequest(service=name))
    return health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)


async def metric(picker):
    """The gauge of a picker."""
    url = f"http://{serving.LOCAL}:{picker.pages}/metrics"
    async with aiohttp.ClientSession() as http, http.get(url) as answer:
        return float(re.search(r"^extproc_leader (\S+)$", await answer.text(), re.MULTILINE)[1])


async def announced(picker):
    """True if it printed that it is ready."""
    return any("extproc is ready" in line for line in picker.child.last_lines)


async def ready(pickers):
    """Those of them that are ready. Never two: a Lease has one holder."""
    result = [item for item in pickers if await item.ready()]
    assert len(result) <= 1
    return result


async def leader(pickers):
    """The one that is ready, once it is."""
    (result,) = await pickers[0].until(lambda: ready(pickers), bool)
    return result


@pytest.fixture(scope="module")
def where(live, api, cluster, crds):
    return live.run(place(api, cluster))


@pytest.fixture(scope="module")
def three(live, where):
    """Three replicas. Tests that end some come last."""

    @contextlib.asynccontextmanager
    async def replicas():
        async with contextlib.AsyncExitStack() as stack:
            # They drain for longer than any of these tests.
            ones = [candidate(where, "--drain-timeout", "60s") for _ in range(3)]
            pickers = await asyncio.gather(*map(stack.enter_async_context, ones))
            yield pickers
            for item in pickers:
                await item.child.stop(signal.SIGINT)

    with live.holding(replicas()) as pickers:
        yield pickers


async def test_120_exactly_one_of_three_is_ready(api, where, three):
    """It holds the Lease under the upstream picker's name, and its gauge says so."""
    first = await leader(three)
    for _ in range(5):
        assert await ready(three) == [first]
    assert sorted([await metric(item) for item in three]) == [0.0, 0.0, 1.0]
    assert await metric(first) == 1.0
    await first.until(lambda: announced(first), bool)
    assert [await announced(picker) for picker in three] == [picker is first for picker in three]
    spec = (await api.get(lease(where[0])))["spec"]
    assert spec["holderIdentity"]
    assert spec["leaseDurationSeconds"] == DURATION_S


async def test_006_readiness_is_the_leaders(three):
    """`readiness`, the ext_proc name and the empty one serve at the leader only."""
    first = await leader(three)
    for item in three:
        text = {await health(item, name) for name in NAMES - {"liveness"}}
        assert text == {SERVING if item is first else NOT_SERVING}
        assert await health(item, "liveness") == SERVING


async def test_013_unknown_health_names(three):
    """With an election other names are unknown, in the answer and not as a gRPC error."""
    await leader(three)
    for item in three:
        assert await health(item, "inference-extension") == UNKNOWN
        assert await health(item, "whatever") == UNKNOWN


async def test_120_followers_watch_pools(three):
    """They know the pool, and would pick if they were asked."""
    for item in three:
        await item.knows([ENGINE])
        assert await item.pick() == ENGINE


@pytest.mark.slow
async def test_120_failover_after_a_crash_and_after_an_end(api, where, three):
    """A killed leader is replaced after the Lease's duration, one that drains at once."""
    first = await leader(three)
    before = (await api.get(lease(where[0])))["spec"]
    await first.child.stop(signal.SIGKILL)
    left = [item for item in three if item is not first]
    for item in left:
        await item.knows([ENGINE])
        # Outside a pod, a replica without a connection does not drain.
        assert await item.pick() == ENGINE
    second = await leader(left)
    after = (await api.get(lease(where[0])))["spec"]
    assert after["leaseTransitions"] == before["leaseTransitions"] + 1
    assert after["holderIdentity"] not in {"", before["holderIdentity"]}
    (third,) = (entry for entry in left if entry is not second)
    second.child.process.send_signal(signal.SIGTERM)
    assert await leader([third]) is third
    # It drains, and serves what still comes.
    assert [await health(second, name) for name in ("liveness", "")] == [SERVING, NOT_SERVING]
    assert await second.pick() == ENGINE
    # A second signal ends the drain.
    assert await second.child.stop() == 0
    assert any("election: resigned" in line for line in second.child.last_lines)


async def test_120_a_lease_taken_by_another_holder(api, cluster, crds):
    """Another holder ends readiness at the next look; once it goes silent, we are back."""
    where = await place(api, cluster)
    async with candidate(where) as picker:
        await picker.until(picker.ready, bool)
        result = picker.child.line("election: follows: somebody")
        taken = {"holderIdentity": "somebody", "leaseDurationSeconds": 2}
        await api.patch(lease(where[0]), {"spec": taken})
        await picker.until(picker.ready, lambda values: not values)
        await result
        await picker.until(picker.ready, bool)


@pytest.mark.slow
async def test_120_readiness_ends_with_the_api_server(api, cluster, crds):
    """A leader that cannot renew gives up, serves on, and comes back."""
    if not cluster.stoppable:
        pytest.skip("the API server is not ours to stop")
    where = await place(api, cluster)
    async with candidate(where) as picker:
        await picker.until(picker.ready, bool)
        cluster.stop()
        try:
            await picker.until(picker.ready, lambda result: not result)
            assert await health(picker, "liveness") == SERVING
            assert await picker.pick() == ENGINE
        finally:
            await cluster.restart()
        await picker.until(picker.ready, bool)


async def test_120_without_rights(api, cluster, crds):
    """No leader is elected, and the log says which rights are missing."""
    where = await place(api, cluster, electing=False)
    async with candidate(where, ready="election: failed") as picker:
        result = picker.child.ready_line
        assert 'resources: ["leases"], verbs: ["get", "create", "update"]' in result
        await picker.knows([ENGINE])
        assert not await picker.ready()
