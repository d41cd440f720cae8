"""The API server goes away and comes back: picks go on, and nothing is lost or doubled."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.support import kube, kube_picker

PORT = 8000
PODS = 6


@pytest.fixture(scope="module", autouse=True)
def stoppable(ours, crds):
    return ours


@pytest.fixture
def place(live, api, cluster):
    """A namespace with a pool of ready pods, and the kubeconfig of a picker for it."""
    return live.run(_place(api, cluster))


async def _place(api, cluster):
    namespace = await api.namespace("outage")
    await api.create(kube.pool("vllm", namespace, (PORT,)))
    for number in range(PODS):
        await api.create(engine(namespace, number))
    access = await api.account(namespace, kube.picker_rules())
    return namespace, cluster.write_kubeconfig(namespace, access, namespace)


def engine(namespace, number, *, ready=True):
    """A pod of the pool."""
    address = f"127.1.0.{number + 1}"
    return kube.pod(f"vllm-{number}", namespace, address, labels={"app": "vllm"}, ready=ready)


def addresses(*numbers):
    return [f"127.1.0.{number + 1}:{PORT}" for number in numbers]


def serving(place):
    namespace, kubeconfig = place
    return kube_picker.picker(kubeconfig, "--pool-name", "vllm", "--pool-namespace", namespace)


async def test_063_picks_go_on_while_the_api_server_is_away(api, cluster, place):
    """All picks of an outage are served, by all endpoints; afterwards changes arrive again."""
    namespace, _ = place
    async with serving(place) as picker:
        await picker.knows(addresses(*range(PODS)))
        cluster.stop()
        picks = Counter([await picker.pick() for _ in range(300)])
        assert set(picks) == set(addresses(*range(PODS)))
        await cluster.restart()
        # Before it has found the API server again: a pod less, one more, one that is not ready,
        # and one that was replaced under its name.
        await api.delete(engine(namespace, 0))
        await api.create(engine(namespace, PODS))
        await api.set_status(engine(namespace, 1, ready=False))
        await api.delete(engine(namespace, 2))
        moved = engine(namespace, 2)
        moved["status"] = kube.status("127.1.0.99")
        await api.create(moved)
        wanted = [*addresses(3, 4, 5, PODS), f"127.1.0.99:{PORT}"]
        await picker.knows(wanted)
        picks = Counter([await picker.pick() for _ in range(100)])
        assert set(picks) == set(wanted)


async def test_063_outages_one_after_the_other(api, cluster, place):
    """Two restarts, with a change in each gap: the pool is exact after both."""
    namespace, _ = place
    async with serving(place) as picker:
        await picker.knows(addresses(*range(PODS)))
        for gone in range(2):
            cluster.stop()
            assert await picker.pick()
            await cluster.restart()
            await api.delete(engine(namespace, gone))
            await picker.knows(addresses(*range(gone + 1, PODS)))


async def test_063_a_picker_that_starts_during_an_outage(cluster, place):
    """It is not ready and picks nobody, and becomes ready when the API server is there."""
    cluster.stop()
    try:
        async with kube_picker.picker(
            place[1],
            "--pool-name",
            "vllm",
            "--pool-namespace",
            place[0],
            ready="kubernetes: disconnected",
        ) as picker:
            assert not await picker.ready()
            assert await picker.pick() == ""
            await cluster.restart()
            await picker.until(picker.ready, bool)
            await picker.knows(addresses(*range(PODS)))
            assert await picker.pick() in addresses(*range(PODS))
    finally:
        await cluster.restart()
