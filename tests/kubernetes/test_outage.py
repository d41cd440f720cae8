"""The API server goes away and comes back: picks go on, and nothing is lost or doubled."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from tests.support import kube, kube_picker

pytestmark = pytest.mark.slow

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


def serving(fixture):
    namespace, kubeconfig = fixture
    return kube_picker.picker(kubeconfig, "--pool-name", "vllm", "--pool-namespace", namespace)


async def test_063_requests_are_routed_while_the_api_server_is_down(api, cluster, place):
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
    """It is not ready and picks no endpoint, and becomes ready when the API server is there."""
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
            assert "extproc is ready" not in await read_log(picker)
            reasons = await picker.page("/readyz")
            assert reasons.startswith("not ready\n")
            assert f"pods in namespace {place[0]} not in step for" in reasons
            assert "disconnected: Cannot connect" in reasons
            await cluster.restart()
            await picker.until(picker.ready, bool)
            await picker.until(lambda: read_log(picker), lambda text: "extproc is ready" in text)
            await picker.knows(addresses(*range(PODS)))
            assert await picker.pick() in addresses(*range(PODS))
    finally:
        await cluster.restart()


async def read_log(picker):
    """The latest output of the picker."""
    return "\n".join(picker.child.last_lines)


async def test_a_restart_of_the_api_server_is_no_missing_permission(api, cluster, place):
    """An API server that has just started knows no Roles yet; changes made then arrive."""
    namespace, _ = place
    async with serving(place) as picker:
        await picker.knows(addresses(*range(PODS)))
        for number in range(2):
            cluster.stop()
            await cluster.restart()
            await api.set_status(engine(namespace, number, ready=False))
            await picker.knows(addresses(*range(number + 1, PODS)))
        await picker.until(lambda: read_log(picker), lambda text: "connected: https" in text)
        assert "add to a Role" not in await read_log(picker)


async def watch_states(picker):
    """State of every watch that is not as it should be, by collection."""
    result = {}
    for line in (await picker.page("/metrics")).splitlines():
        name = re.fullmatch(
            r'extproc_discovery_watch_state{collection="([^".]*).*state="([^"]*)"} 1.0', line
        )
        if name and name[2] not in {"synced", "not-installed"}:
            result[name[1]] = name[2]
    return result


async def test_lost_permissions_are_shown_while_missing(api, cluster, place):
    """On the metrics page, in readiness, and as the last line of the log."""
    namespace, _ = place
    async with serving(place) as picker:
        await picker.knows(addresses(*range(PODS)))
        assert await watch_states(picker) == {}
        path = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{namespace}/rolebindings"
        (binding,) = (await api.call("GET", path))["items"]
        await api.call("DELETE", f"{path}/{binding['metadata']['name']}")
        cluster.stop()
        await cluster.restart()
        await picker.until(
            lambda: watch_states(picker), lambda observed: observed.get("pods") == "forbidden"
        )
        text = await picker.page("/readyz")
        assert text.startswith("ok\n")
        assert re.search(rf"pods in namespace {namespace} not in step for \d+ s: forbidden", text)
        assert "connected: https" not in (await read_log(picker)).partition("disconnected")[2]
        metadata = {key: binding["metadata"][key] for key in ("name", "namespace")}
        await api.call("POST", path, binding | {"metadata": metadata})
        await picker.until(lambda: watch_states(picker), lambda records: records == {})
        assert await picker.page("/readyz") == "ok\n"
        assert "connected: https" in (await read_log(picker)).rpartition("forbidden")[2]
