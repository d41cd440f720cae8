"""Pools of a fake API server as a follower reports them."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from extproc.discovery.kubernetes import settings
from tests.discovery.kubernetes import builders, fake
from tests.discovery.kubernetes.follower_scene import KEY, FollowerScene, following


async def test_a_pool_is_reported_when_start_returns(tmp_path):
    """Endpoints, priorities and rewrites are there before the first request is served."""
    rules = [(["m"], {"n": None})]
    objects = (
        builders.pool(),
        builders.pod("b"),
        builders.objective(),
        builders.rewrite(rules=rules),
    )
    async with following(tmp_path, *objects) as scene:
        assert scene.names() == ["b"]
        assert scene.subject.synced
        assert scene.pools[KEY].policy.priorities == {"high": 1}
        assert [rule.models for rule in scene.pools[KEY].policy.rules] == [("m",)]
        assert scene.kinds() == ["synced"]


async def test_changes_are_reported(tmp_path):
    """Pods come, turn unready and go; the pool changes its ports and its selector."""
    async with following(tmp_path, builders.pool(), builders.pod("a")) as scene:
        scene.server.put(builders.pod("b", ip="10.0.0.2"))
        await scene.until_names("a", "b")
        scene.server.put(builders.pod("a", ready=False))
        await scene.until_names("b")
        scene.server.delete(builders.pod("b"))
        await scene.until_names()
        scene.server.put(builders.pod("a"), builders.pod("c", app="other", ip="10.0.0.3"))
        scene.server.put(builders.pool(ports=(8000, 8001)))
        await scene.until_names("a-rank-0", "a-rank-1")
        scene.server.put(builders.pool(app="other"))
        await scene.until_names("c")


async def test_a_deleted_pool_is_reported_and_may_return(tmp_path):
    """Its requests are refused until then."""
    async with following(tmp_path, builders.pool(), builders.pod("a")) as scene:
        scene.server.delete(builders.pool())
        await scene.until(lambda: not scene.pools[KEY].exists)
        scene.server.put(builders.pool())
        await scene.until_names("a")


async def test_pools_stay_while_the_api_server_is_unreachable(tmp_path):
    """One word when it goes, one when it is back; then the changes in between, none twice."""
    async with following(tmp_path, builders.pool(), builders.pod("a")) as scene:
        await scene.server.until_watched()
        await scene.server.stop()
        await scene.until_fact("disconnected")
        assert scene.names() == ["a"]
        scene.server.put(builders.pod("b", ip="10.0.0.2"))
        await scene.server.start()
        await scene.until_names("a", "b")
        await scene.until_fact("connected")
        assert scene.kinds() == ["synced", "disconnected", "connected"]
        assert [len(changed) for changed, _ in scene.reports] == [1, 1]


async def test_a_busy_api_server_is_retried_later(tmp_path):
    """429 and 500 are tried again; the start waits for it."""

    def prepare(server):
        async def busy(_):
            return fake.refuse(429, "too many requests", **{"Retry-After": "0"})

        async def broken(_):
            return fake.refuse(500, "etcd leader changed")

        server.answers.extend([busy, broken, busy])

    async with following(tmp_path, builders.pool(), builders.pod("a"), prepare=prepare) as scene:
        assert scene.names() == ["a"]


async def test_discovery_is_synced_only_once_its_pools_are_reported(tmp_path):
    """Readiness, xDS and saved states of pools go by it; a receiver may raise at first."""
    before = []

    class Scene(FollowerScene):
        """One whose receiver raises at the first report."""

        def on_pools(self, changed, removed):
            before.append(self.subject.synced)
            if len(before) == 1:
                raise LookupError
            super().on_pools(changed, removed)

    server = await fake.FakeApiServer().start()
    server.put(builders.pool(), builders.pod("a"))
    scene = Scene(server, tmp_path)
    await scene.subject.start()
    assert not scene.subject.synced
    running = asyncio.ensure_future(scene.subject.run())
    await scene.until_fact("synced")
    assert (before, scene.names(), scene.subject.synced) == ([False, False], ["a"], True)
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running
    await server.close()


async def test_start_without_an_api_server_continues_unready(tmp_path):
    """After a while start gives up waiting and says for what; run goes on trying."""
    server = await fake.FakeApiServer().start()
    server.put(builders.pool(), builders.pod("a"))
    scene = FollowerScene(server, tmp_path, start_s=0.1)
    await server.stop()
    await scene.subject.start()
    assert not scene.subject.synced
    fact = await scene.until_fact("unsynced")
    assert f"127.0.0.1:{server.port}" in fact.detail
    assert "pods in namespace default" in fact.detail
    assert set(scene.kinds()) <= {"disconnected", "unsynced"}
    running = asyncio.ensure_future(scene.subject.run())
    await server.start()
    await scene.until_names("a")
    await scene.until_fact("synced")
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running
    await server.close()


async def test_all_pools_of_a_cluster_are_discovered(tmp_path):
    """Pools of all namespaces come and go; each is published alone."""
    objects = [
        builders.pool("p", "one"),
        builders.pod("a", "one"),
        builders.pool("p", "two"),
        builders.pod("b", "two", ip="10.0.0.2"),
    ]
    async with following(tmp_path, *objects, sources=(settings.AllPools(),)) as scene:
        assert (scene.names("one/p"), scene.names("two/p")) == (["a"], ["b"])
        scene.reports.clear()
        scene.server.put(builders.pod("c", "two", ip="10.0.0.3"))
        await scene.until_names("b", "c", key="two/p")
        assert [set(changed) for changed, _ in scene.reports] == [{"two/p"}]
        scene.server.delete(builders.pool("p", "one"))
        await scene.until(lambda: "one/p" not in scene.pools)
        assert scene.reports[-1] == ({}, frozenset({"one/p"}))
        assert {path for path, _ in scene.server.requests if path.endswith("/pods")} == {
            "/api/v1/pods"
        }


async def test_a_service_is_discovered_from_its_endpoint_slices(tmp_path):
    """Slices alone are asked for: no pods, no CRDs."""
    backends = [builders.backend(), builders.backend("10.0.0.2", "b", ready=False)]
    sources = (settings.ServiceRef("default", "engines", "http"),)
    objects = [builders.slice_of(backends=backends)]
    async with following(tmp_path, *objects, sources=sources) as scene:
        assert scene.names("default/engines") == ["a"]
        scene.server.put(builders.slice_of(backends=[*backends, builders.backend("10.0.0.3", "c")]))
        await scene.until_names("a", "c", key="default/engines")
        assert {path for path, _ in scene.server.requests} == {
            "/apis/discovery.k8s.io/v1/namespaces/default/endpointslices"
        }


@pytest.mark.parametrize("port", ["", "80"])
async def test_a_service_whose_port_is_not_chosen_is_reported(tmp_path, port):
    """The ports to choose from are named once, and the pool is empty until there is one."""
    sources = (settings.ServiceRef("default", "engines", port),)
    ports, backends = {"http": 8000, "metrics": 9000}, [builders.backend()]
    several = builders.slice_of(ports=ports, backends=backends)
    async with following(tmp_path, several, sources=sources) as scene:
        assert scene.names("default/engines") == []
        assert scene.kinds() == ["port-missing", "synced"]
        assert scene.facts[0].detail == (
            "Service default/engines: its pods are ready, but no port is chosen: expected "
            "pool.kubernetes.port to be the name of a port, or its number on the pods, of "
            f"http 8000, metrics 9000, got {port!r}"
        )
        scene.server.put(builders.slice_of(ports={"": 80}, backends=backends))
        await scene.until_names("a", key="default/engines")
        assert len(scene.facts) == 2


async def test_pods_by_label_need_no_crd(tmp_path):
    """The selector is applied by the server; a pod that loses the label is gone."""
    sources = (settings.PodSelector("default", "sel", {"app": "vllm"}, (8000,)),)
    objects = [builders.pod("a"), builders.pod("b", app="other", ip="10.0.0.2")]
    async with following(tmp_path, *objects, sources=sources) as scene:
        assert scene.names("default/sel") == ["a"]
        scene.server.put(builders.pod("b", ip="10.0.0.2"), builders.pod("a", app="other"))
        await scene.until_names("b", key="default/sel")
        assert {path for path, _ in scene.server.requests} == {"/api/v1/namespaces/default/pods"}
        assert {query["labelSelector"] for _, query in scene.server.requests} == {"app=vllm"}


async def test_changes_are_coalesced(tmp_path):
    """A burst is published in batches, with the last state."""
    async with following(tmp_path, builders.pool(), builders.pod("a"), coalesce_s=0.05) as scene:
        await scene.server.until_watched()
        for at in range(200):
            scene.server.put(builders.pod("b", ip=f"10.0.1.{at}"))
        last = "10.0.1.199:8000"
        await scene.until(lambda: scene.pools[KEY].endpoints[-1].address == last)
        assert len(scene.reports) < 20
