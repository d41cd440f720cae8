"""The upstream picker's flags, as its Deployments give them, over a real API server."""

from __future__ import annotations

import pytest

from tests.support import kube, kube_picker

A, B = "127.3.0.1", "127.3.0.2"
LABELS = {"app": "vllm", "tier": "gpu"}


@pytest.fixture
def place(live, api, crds, cluster):
    """A namespace with two pods, and who may look into it."""
    return live.run(_place(api, cluster))


async def _place(api, cluster):
    namespace = await api.namespace("flags")
    for name, address in (("a", A), ("b", B)):
        await api.create(kube.pod(name, namespace, address, labels=LABELS))
    access = await api.account(namespace, kube.picker_rules())
    return namespace, cluster.write_kubeconfig(namespace, access, namespace)


async def test_015_two_pickers_with_other_pool_names(api, place):
    """Two pickers with equal flags but the pool's name each serve their own pool."""
    namespace, kubeconfig = place
    await api.create(kube.pool("one", namespace, (8000,), labels=LABELS))
    await api.create(kube.pool("two", namespace, (9000,), labels=LABELS))
    for name, port in (("one", 8000), ("two", 9000)):
        words = ("--pool-name", name, "--pool-namespace", namespace, "--zap-encoder", "json")
        async with kube_picker.picker(kubeconfig, *words) as picker:
            assert await picker.pool() == [f"{A}:{port}", f"{B}:{port}"]
            assert await picker.pick() in {f"{A}:{port}", f"{B}:{port}"}


async def test_066_standalone(api, place):
    """Selector and target ports instead of a pool; pods are followed all the same."""
    namespace, kubeconfig = place
    words = ("--endpoint-selector", "app=vllm,tier=gpu", "--endpoint-target-ports", "8000,8001")
    async with kube_picker.picker(kubeconfig, *words, "--pool-namespace", namespace) as picker:
        await picker.knows([f"{host}:{port}" for host in (A, B) for port in (8000, 8001)])
        await api.delete(kube.pod("a", namespace, A, labels=LABELS))
        await picker.knows([f"{B}:8000", f"{B}:8001"])
        assert await picker.pick() in {f"{B}:8000", f"{B}:8001"}


async def test_064_the_older_group(api, place):
    """--pool-group names the group of the pool, with its one port."""
    namespace, kubeconfig = place
    item = kube.older_pool(namespace, LABELS)
    await api.create(item)
    words = ("--pool-name", "vllm", "--pool-namespace", namespace)
    group = ("--pool-group", "inference.networking.x-k8s.io")
    async with kube_picker.picker(kubeconfig, *words, *group) as picker:
        await picker.knows([f"{A}:8000", f"{B}:8000"])
        await api.patch(item, {"spec": {"targetPortNumber": 8001}})
        await picker.knows([f"{A}:8001", f"{B}:8001"])


async def test_006_readiness_follows_the_pool(api, place):
    """Ready with the pool, not without it, and ready again: no restart in between."""
    namespace, kubeconfig = place
    pool = kube.pool("vllm", namespace, (8000,), labels=LABELS)
    await api.create(pool)
    words = ("--pool-name", "vllm", "--pool-namespace", namespace)
    async with kube_picker.picker(kubeconfig, *words) as picker:
        assert await picker.ready()
        await api.delete(pool)
        await picker.until(picker.ready, lambda ready: not ready)
        assert await picker.pick() == ""
        await api.create(pool)
        await picker.until(picker.ready, bool)
        await picker.knows([f"{A}:8000", f"{B}:8000"])
