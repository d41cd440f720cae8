"""Pools, pods and policies of a real API server, with the rights that the manifests give."""

from __future__ import annotations

import random

import pytest

from extproc.discovery.kubernetes import settings
from tests.support import kube, kube_follow

pytestmark = pytest.mark.usefixtures("crds")

A, B, C = "127.2.0.1", "127.2.0.2", "127.2.0.3"
LABELS = {"app": "vllm"}


async def test_060_ready_pods_of_the_pool(api, place):
    """Ready pods with all labels; not unready ones, other labels, or another namespace."""
    namespace, _ = place
    key = f"{namespace}/vllm"
    await api.create(kube.pool("vllm", namespace, labels={"app": "vllm", "tier": "gpu"}))
    both = {"app": "vllm", "tier": "gpu", "more": "x"}
    await api.create(kube.pod("a", namespace, A, labels=both))
    await api.create(kube.pod("unready", namespace, B, labels=both, ready=False))
    await api.create(kube.pod("other", namespace, C, labels=LABELS))
    elsewhere = await api.namespace("elsewhere")
    await api.create(kube.pod("a", elsewhere, "127.2.0.4", labels=both))
    async with kube_follow.pool(place) as result:
        (endpoint,) = result.pools[key].endpoints
        assert (endpoint.address, endpoint.name) == (f"{A}:8000", "a")
        assert endpoint.labels.items() >= both.items()
        assert "forbidden" not in result.kinds


async def test_061_ranks(api, place):
    """Every target port is an endpoint, unless the pod's annotation names fewer (point 62)."""
    namespace, _ = place
    key = f"{namespace}/vllm"
    await api.create(kube.pool("vllm", namespace, (3000, 3002, 3004), labels=LABELS))
    few = {"llm-d.ai/active-ports": "3004, 3000,9"}
    old = {"inference.networking.k8s.io/active-ports": "3002"}
    await api.create(kube.pod("a", namespace, A, labels=LABELS))
    await api.create(kube.pod("b", namespace, B, labels=LABELS, annotations=few))
    await api.create(kube.pod("c", namespace, C, labels=LABELS, annotations=old))
    async with kube_follow.pool(place) as result:
        await result.has(
            key,
            *(f"{A}:{port}" for port in (3000, 3002, 3004)),
            *(f"{B}:3000", f"{B}:3004", f"{C}:3002"),
        )
        names = {endpoint.address: endpoint.name for endpoint in result.pools[key].endpoints}
        assert names[f"{B}:3004"] == "b-rank-2"
        patch = {"metadata": {"annotations": {"llm-d.ai/active-ports": "3002"}}}
        await api.patch(kube.pod("b", namespace, B, labels=LABELS), patch)
        await result.until(lambda: f"{B}:3002" in result.addresses(key))
        assert f"{B}:3000" not in result.addresses(key)


async def test_063_pods_come_and_go(api, place):
    """Added, ready, unready, relabelled, deleted and replaced pods are followed."""
    namespace, _ = place
    key = f"{namespace}/vllm"
    await api.create(kube.pool("vllm", namespace, labels=LABELS))
    a = kube.pod("a", namespace, A, labels=LABELS)
    b = kube.pod("b", namespace, B, labels=LABELS, ready=False)
    async with kube_follow.pool(place) as result:
        await result.has(key)
        await api.create(a)
        await result.has(key, f"{A}:8000")
        uid = result.pools[key].endpoints[0].uid
        await api.create(b)
        await api.set_status(b | {"status": kube.status(B)})
        await result.has(key, f"{A}:8000", f"{B}:8000")
        await api.set_status(b)
        await result.has(key, f"{A}:8000")
        await api.patch(a, {"metadata": {"labels": {"app": "other"}}})
        await result.has(key)
        await api.patch(a, {"metadata": {"labels": LABELS}})
        await result.has(key, f"{A}:8000")
        await api.delete(a)
        await api.create(a | {"metadata": a["metadata"] | {"name": "c"}})
        await result.until(
            lambda: (
                bool(result.pools[key].endpoints[:1]) and result.pools[key].endpoints[0].uid != uid
            )
        )
        await result.has(key, f"{A}:8000")


async def test_060_a_pod_that_is_being_deleted(api, place):
    """A pod with a deletion timestamp is out at once, ready or not."""
    namespace, _ = place
    key = f"{namespace}/vllm"
    await api.create(kube.pool("vllm", namespace, labels=LABELS))
    a = kube.pod("a", namespace, A, labels=LABELS)
    a["metadata"]["finalizers"] = ["test.example.com/hold"]
    await api.create(a)
    async with kube_follow.pool(place) as result:
        await result.has(key, f"{A}:8000")
        await api.delete(a)
        await result.has(key)
        queued = await api.get(a)
        assert queued["metadata"]["deletionTimestamp"]
        assert queued["status"]["conditions"][0]["status"] == "True"
        await api.patch(a, {"metadata": {"finalizers": None}})


async def test_064_selector_and_ports_change_live(api, place):
    """Another selector or other ports of the pool are in force at once."""
    namespace, _ = place
    key = f"{namespace}/vllm"
    pool = kube.pool("vllm", namespace, labels=LABELS)
    await api.create(pool)
    await api.create(kube.pod("a", namespace, A, labels=LABELS))
    await api.create(kube.pod("b", namespace, B, labels={"app": "other"}))
    async with kube_follow.pool(place) as result:
        await result.has(key, f"{A}:8000")
        await api.patch(pool, {"spec": {"targetPorts": [{"number": 9000}, {"number": 9001}]}})
        await result.has(key, f"{A}:9000", f"{A}:9001")
        await api.patch(pool, {"spec": {"selector": {"matchLabels": {"app": "other"}}}})
        await result.has(key, f"{B}:9000", f"{B}:9001")
        await api.patch(pool, {"spec": {"appProtocol": "kubernetes.io/h2c"}})
        await result.until(lambda: result.pools[key].app_protocol == "kubernetes.io/h2c")


async def test_065_the_pool_is_deleted_and_comes_back(api, place):
    """A pool that is gone is said to be, without endpoints; it may come back."""
    namespace, _ = place
    key = f"{namespace}/vllm"
    pool = kube.pool("vllm", namespace, labels=LABELS)
    await api.create(kube.pod("a", namespace, A, labels=LABELS))
    async with kube_follow.pool(place) as result:
        assert not result.pools[key].exists
        await api.create(pool)
        await result.has(key, f"{A}:8000")
        await api.delete(pool)
        await result.until(lambda: not result.pools[key].exists)
        assert result.addresses(key) == []
        await api.create(pool)
        await result.has(key, f"{A}:8000")


@pytest.mark.usefixtures("ours")
async def test_066_pods_by_label_need_no_crd(api, place, crds):
    """Selector and ports are enough: no definition is installed, and none is asked for."""
    namespace, kubeconfig = place
    await api.undefine(crds)
    try:
        await api.create(kube.pod("a", namespace, A, labels=LABELS))
        source = settings.PodSelector(namespace, "vllm", LABELS, (8000, 8001))
        async with kube_follow.following(kubeconfig, source) as result:
            await result.has(f"{namespace}/vllm", f"{A}:8000", f"{A}:8001")
            assert result.kinds == ["synced"]
    finally:
        await api.define(crds)


async def test_064_the_older_pool(api, place):
    """A pool of the older group is followed where that group is asked for."""
    namespace, kubeconfig = place
    item = kube.older_pool(namespace, LABELS)
    await api.create(item)
    await api.create(kube.pod("a", namespace, A, labels=LABELS))
    ref = settings.InferencePoolRef(namespace, "vllm", settings.OLD_POOL_GROUP)
    async with kube_follow.following(kubeconfig, ref) as result:
        await result.has(f"{namespace}/vllm", f"{A}:8000")
        await api.patch(item, {"spec": {"targetPortNumber": 8001}})
        await result.has(f"{namespace}/vllm", f"{A}:8001")


async def test_long_lists_are_read_in_pages(api, place):
    """A list of several pages is read whole before any of it is published."""
    namespace, _ = place
    await api.create(kube.pool("vllm", namespace, labels=LABELS))
    hosts = [f"127.2.4.{number + 1}" for number in range(23)]
    for number, host in enumerate(hosts):
        await api.create(kube.pod(f"pod-{number}", namespace, host, labels=LABELS))
    async with kube_follow.pool(place, page=5) as result:
        assert result.addresses(f"{namespace}/vllm") == sorted(f"{host}:8000" for host in hosts)


async def test_every_pool_of_a_namespace(api, place):
    """All pools there are, each with its own pods; new ones appear, deleted ones go."""
    namespace, kubeconfig = place
    pools = [kube.pool(f"pool-{n}", namespace) for n in range(3)]
    for number, pool in enumerate(pools):
        await api.create(pool)
        labels = {"app": f"pool-{number}"}
        await api.create(kube.pod(f"a-{number}", namespace, f"127.2.1.{number + 1}", labels=labels))
    async with kube_follow.following(kubeconfig, settings.AllPools(namespace)) as result:
        for number in range(3):
            await result.has(f"{namespace}/pool-{number}", f"127.2.1.{number + 1}:8000")
        await api.delete(pools[0])
        await result.until(lambda: f"{namespace}/pool-0" not in result.pools)
        await api.create(kube.pool("pool-9", namespace, labels={"app": "pool-0"}))
        await result.has(f"{namespace}/pool-9", "127.2.1.1:8000")


async def test_every_pool_of_the_cluster(api, place, cluster):
    """With the component for it, pools of all namespaces, each with pods of its own alone."""
    rules = kube.picker_rules("components/cluster-wide")
    access = await api.account(place[0], [], everywhere=rules)
    kubeconfig = cluster.write_kubeconfig(f"{place[0]}-wide", access, place[0])
    homes = [await api.namespace("wide") for _ in range(2)]
    for number, home in enumerate(homes):
        await api.create(kube.pool("same", home))
        await api.create(kube.objective("batch", home, "same", -number))
        labels = {"app": "same"}
        await api.create(kube.pod("a", home, f"127.2.3.{number + 1}", labels=labels))
    async with kube_follow.following(kubeconfig, settings.AllPools()) as result:
        for number, home in enumerate(homes):
            await result.has(f"{home}/same", f"127.2.3.{number + 1}:8000")
            assert result.pools[f"{home}/same"].policy.priorities == {"batch": -number}
        assert "forbidden" not in result.kinds


async def test_slices_of_a_service(api, place, cluster):
    """EndpointSlices of a Service are a pool of their ready endpoints."""
    namespace, _ = place
    access = await api.account(namespace, kube.picker_rules("components/endpoint-slices"))
    kubeconfig = cluster.write_kubeconfig(f"{namespace}-slices", access, namespace)
    item = {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {
            "name": "vllm-abc",
            "namespace": namespace,
            "labels": {"kubernetes.io/service-name": "vllm"},
        },
        "addressType": "IPv4",
        # The API server takes no loopback addresses here.
        "endpoints": [
            {"addresses": ["10.1.0.1"], "conditions": {"ready": True}, "zone": "a"},
            {"addresses": ["10.1.0.2"], "conditions": {"ready": False}},
            {"addresses": ["10.1.0.3"], "conditions": {"ready": True, "terminating": True}},
        ],
        "ports": [{"name": "http", "port": 8000}],
    }
    await api.create(item)
    async with kube_follow.following(kubeconfig, settings.ServiceRef(namespace, "vllm")) as result:
        key = f"{namespace}/vllm"
        await result.until(lambda: "10.1.0.1:8000" in result.addresses(key))
        assert "10.1.0.2:8000" not in result.addresses(key)
        assert result.pools[key].endpoints[0].labels["topology.kubernetes.io/zone"] == "a"
        await api.patch(
            item, {"endpoints": [{"addresses": ["10.1.0.2"], "conditions": {"ready": True}}]}
        )
        await result.has(key, "10.1.0.2:8000")


async def test_missing_permissions_are_named(api, place, cluster):
    """Without the right to read pods the pool has none, and the log says what to grant."""
    namespace, _ = place
    rules = [rule for rule in kube.picker_rules() if rule["resources"] != ["pods"]]
    access = await api.account(namespace, rules)
    kubeconfig = cluster.write_kubeconfig(f"{namespace}-few", access, namespace)
    await api.create(kube.pool("vllm", namespace, labels=LABELS))
    ref = settings.InferencePoolRef(namespace, "vllm")
    async with kube_follow.following(kubeconfig, ref, start_s=0.5) as result:
        await result.until(lambda: "forbidden" in result.kinds)
        (fact,) = [fact for fact in result.facts if fact.kind == "forbidden"]
        assert "pods" in fact.detail
        assert 'verbs: ["list", "watch"]' in fact.detail


@pytest.mark.slow
async def test_063_a_storm(api, cluster, place):
    """After 400 changes of 30 pods, through restarts and watches of a second, it is exact."""
    namespace, _ = place
    key = f"{namespace}/vllm"
    chance = random.Random(3)
    await api.create(kube.pool("vllm", namespace, (8000, 8001), labels=LABELS))
    alive: dict[int, bool] = {}

    async def change(number):
        address = f"127.2.2.{number + 1}"
        item = kube.pod(f"pod-{number}", namespace, address, labels=LABELS)
        if number not in alive:
            await api.create(item)
            alive[number] = True
        elif chance.random() < 0.4:
            await api.delete(item)
            del alive[number]
        else:
            alive[number] = not alive[number]
            await api.set_status(item | {"status": kube.status(address, ready=alive[number])})

    def exact():
        ready = sorted(number for number, entry in alive.items() if entry)
        return sorted(f"127.2.2.{number + 1}:{port}" for number in ready for port in (8000, 8001))

    async with kube_follow.pool(place, watch_s=1.0) as result:
        for step in range(400):
            if step % 150 == 149 and cluster.stoppable:
                cluster.stop()
                await cluster.restart()
            await change(chance.randrange(30))
        await result.has(key, *exact())
        assert len(exact()) > 10


async def test_pods_of_a_kubeai_model(api, place):
    """Their labels name the model and its adapters, their annotation the port; both followed."""
    namespace, kubeconfig = place
    key = f"{namespace}/llama"
    labels = {"model": "llama", "app.kubernetes.io/managed-by": "kubeai"}
    port = {"model-pod-port": "8003"}
    item = kube.pod("a", namespace, A, labels=labels, annotations=port)
    await api.create(item)
    await api.create(kube.pod("b", namespace, B, labels={"model": "llama"}))
    source = settings.PodSelector(namespace, "llama", {"model": "llama"}, ())
    async with kube_follow.following(kubeconfig, source) as result:
        await result.has(key, f"{A}:8003")
        models = result.pools[key].endpoints[0].models
        assert (models.bases, models.adapters) == ({"llama"}, set())
        await api.patch(item, {"metadata": {"labels": {"adapter.kubeai.org/sql": "5f3e"}}})
        await result.until(lambda: "sql" in result.pools[key].endpoints[0].models.adapters)
        await api.patch(item, {"metadata": {"labels": {"adapter.kubeai.org/sql": None}}})
        await result.until(lambda: not result.pools[key].endpoints[0].models.adapters)


@pytest.mark.slow
@pytest.mark.usefixtures("ours")
async def test_a_token_that_is_taken_away(api, cluster, place):
    """When the account is replaced and its token with it, the new one in the file is used."""
    namespace, _ = place
    key = f"{namespace}/vllm"
    await api.create(kube.pool("vllm", namespace, labels=LABELS))
    first, second = [await api.account(namespace, kube.picker_rules()) for _ in range(2)]
    token = cluster.folder / f"{namespace}.token"
    token.write_text(first.token)
    kubeconfig = cluster.folder / f"{namespace}-file.kubeconfig"
    kubeconfig.write_text(
        first.kubeconfig(namespace).replace(f"token: {first.token}", f"tokenFile: {token}")
    )
    ref = settings.InferencePoolRef(namespace, "vllm")
    async with kube_follow.following(kubeconfig, ref) as result:
        await result.has(key)
        account = {"apiVersion": "v1", "kind": "ServiceAccount"}
        name = kube.account_of(first)
        await api.delete(account | {"metadata": {"name": name, "namespace": namespace}})
        # What the server remembers of the token goes with it, and so does the watch.
        cluster.stop()
        await cluster.restart()
        token.write_text(second.token)
        await api.create(kube.pod("a", namespace, A, labels=LABELS))
        await result.has(key, f"{A}:8000")
        await result.until(lambda: "connected" in result.kinds)
