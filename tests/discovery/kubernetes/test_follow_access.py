"""Rights, definitions and credentials of a follower: missing, lost, late and renewed."""

from __future__ import annotations

import asyncio

import pytest

from extproc.discovery.kubernetes import controller, reflector, settings
from extproc.errors import ConfigError
from tests.discovery.kubernetes import builders
from tests.discovery.kubernetes.follower_scene import KEY, REF, following
from tests.support.waiting import until


async def test_a_rotated_token_is_reloaded(tmp_path):
    """401 loads the credentials again, and the watch goes on."""

    def prepare(server):
        server.token = "first"

    async with following(tmp_path, builders.pool(), builders.pod("a"), prepare=prepare) as scene:
        await scene.server.until_watched()
        scene.server.token = "second"
        scene.server.drop()
        scene.server.put(builders.pod("b", ip="10.0.0.2"))
        await scene.until_fact("unauthorized")
        scene.server.kubeconfig(tmp_path)
        await scene.until_names("a", "b")
        await scene.until_fact("connected")


async def test_missing_permissions_are_reported(tmp_path):
    """The fact says what to add to which role; rights given later are noticed."""

    def prepare(server):
        server.forbidden.add(("", "pods"))

    objects = (builders.pool(), builders.pod("a"))
    async with following(tmp_path, *objects, prepare=prepare, start_s=0.2) as scene:
        fact = await scene.until_fact("forbidden")
        assert 'resources: ["pods"], verbs: ["list", "watch"]' in fact.detail
        assert "in namespace default" in fact.detail
        assert "add to a Role" in fact.detail
        assert not scene.subject.synced
        assert scene.reports == []
        scene.server.forbidden.clear()
        await scene.until_names("a")
        assert scene.subject.synced


async def test_without_permission_for_objectives_priority_is_0(tmp_path):
    """A pool does not wait for what only makes it better."""

    def prepare(server):
        server.forbidden.add(("llm-d.ai", "inferenceobjectives"))

    objects = (builders.pool(), builders.pod("a"), builders.objective())
    async with following(tmp_path, *objects, prepare=prepare) as scene:
        assert scene.names() == ["a"]
        assert scene.pools[KEY].policy.priorities == {}
        assert scene.kinds() == ["forbidden", "synced"]


async def test_crds_may_be_installed_later(tmp_path):
    """Without the CRDs priorities are 0, without a warning; installed later they count."""
    group = ("llm-d.ai", "inferenceobjectives")

    def prepare(server):
        server.absent.add(group)

    old = builders.objective("old", group=builders.OLD_GROUP, priority=7)
    new = builders.objective("new", priority=5)
    objects = (builders.pool(), builders.pod("a"), old, new)
    async with following(tmp_path, *objects, prepare=prepare) as scene:
        assert scene.kinds() == ["synced"]
        assert scene.pools[KEY].policy.priorities == {"old": 7}
        scene.server.absent.clear()
        await scene.until(lambda: scene.pools[KEY].policy.priorities == {"new": 5})


async def test_a_pool_is_discovered_once_its_crd_is_installed(tmp_path):
    """The pool asked for does not exist, says a fact; it is found when the CRD is there."""
    group = (builders.POOL_GROUP, "inferencepools")

    def prepare(server):
        server.absent.add(group)

    async with following(tmp_path, builders.pod("a"), prepare=prepare) as scene:
        assert not scene.pools[KEY].exists
        assert "not-installed" in scene.kinds()
        scene.server.absent.clear()
        scene.server.put(builders.pool())
        await scene.until_names("a")


async def test_a_short_404_for_a_crd_keeps_the_pools(tmp_path):
    """A server that has just started may answer 404 for CRDs; pools stand."""
    group = (builders.POOL_GROUP, "inferencepools")
    async with following(tmp_path, builders.pool(), builders.pod("a")) as scene:
        await scene.server.until_watched()
        scene.server.absent.add(group)
        scene.server.requests.clear()
        scene.server.drop()
        await scene.server.until(
            lambda requests: sum("inferencepools" in at for at, _ in requests) > 3
        )
        assert scene.names() == ["a"]
        scene.server.absent.clear()
        scene.server.put(builders.pool(ports=(9000,)))
        await scene.until(lambda: scene.pools[KEY].endpoints[0].address == "10.0.0.1:9000")


async def test_a_403_of_a_restarted_api_server_is_retried(tmp_path):
    """403 where a list was had before is tried again like a 503, and the version is kept."""
    async with following(tmp_path, builders.pool(), builders.pod("a")) as scene:
        await scene.server.until_watched()
        await scene.server.stop()
        scene.server.forbidden.update({("", "pods"), (builders.POOL_GROUP, "inferencepools")})
        scene.server.requests.clear()
        await scene.server.start()
        await scene.server.until(lambda requests: sum("/pods" in at for at, _ in requests) > 3)
        assert scene.names() == ["a"]
        scene.server.put(builders.pod("b", ip="10.0.0.2"))
        scene.server.forbidden.clear()
        await scene.until_names("a", "b")
        await scene.until_fact("connected")
        assert scene.kinds() == ["synced", "disconnected", "connected"]
        assert all(
            "watch" in query or query["limit"] == "1"
            for at, query in scene.server.requests
            if "/pods" in at
        )


async def test_lost_permissions_are_the_last_reported_state(tmp_path, monkeypatch):
    """No word of being connected while pods are forbidden; one once they are not."""
    monkeypatch.setattr(reflector, "_FORBIDDEN_GRACE_S", 0.05)
    async with following(tmp_path, builders.pool(), builders.pod("a")) as scene:
        await scene.server.until_watched()
        await scene.server.stop()
        await scene.until_fact("disconnected")
        scene.server.forbidden.add(("", "pods"))
        await scene.server.start()
        await scene.until_fact("forbidden")
        await scene.server.until_watched(5)
        # The lists of the others may still be on their way.
        await until(lambda: sum(s.is_unsynced for s in scene.subject.statuses) == 1)
        assert "connected" not in scene.kinds()
        assert scene.facts[-1].kind == "forbidden"
        assert "pods in namespace default" in scene.facts[-1].detail
        (pods,) = [status for status in scene.subject.statuses if status.is_unsynced]
        assert (pods.collection.title, pods.state) == ("pods in namespace default", "forbidden")
        assert scene.names() == ["a"]
        scene.server.forbidden.clear()
        await scene.until_fact("connected")
        assert not any(status.is_unsynced for status in scene.subject.statuses)


async def test_a_token_that_expires_in_an_outage_is_named(tmp_path):
    """The reason changes, and the log with it."""

    def prepare(server):
        server.token = "first"

    async with following(tmp_path, builders.pool(), builders.pod("a"), prepare=prepare) as scene:
        await scene.server.until_watched()
        await scene.server.stop()
        await scene.until_fact("disconnected")
        scene.server.token = "second"
        await scene.server.start()
        assert "401 Unauthorized" in (await scene.until_fact("unauthorized")).detail
        scene.server.kubeconfig(tmp_path)
        await scene.until_fact("connected")


@pytest.mark.parametrize("text", ["", "[]", "{", "contexts: 5", "current-context: x"])
def test_a_broken_kubeconfig_is_refused(tmp_path, text):
    """The error names the file and says what to do."""
    path = tmp_path / "kubeconfig"
    path.write_text(text)
    wanted = settings.KubernetesSettings(sources=(REF,), kubeconfig=str(path))
    with pytest.raises(ConfigError) as error:
        asyncio.run(controller.connect(wanted))
    assert str(path) in str(error.value)
    assert "service account" in str(error.value)


def test_a_missing_kubeconfig_is_refused(tmp_path):
    """So is one that cannot be read."""
    wanted = settings.KubernetesSettings(sources=(REF,), kubeconfig=str(tmp_path / "none"))
    with pytest.raises(ConfigError, match=r"no such file \(.*none\)"):
        asyncio.run(controller.connect(wanted))


async def test_broken_credentials_are_reported_and_reloaded(tmp_path):
    """A kubeconfig that is being rewritten is no end."""

    def prepare(server):
        server.token = "first"

    async with following(tmp_path, builders.pool(), builders.pod("a"), prepare=prepare) as scene:
        await scene.server.until_watched()
        (tmp_path / "kubeconfig").write_text("{")
        scene.server.token = "second"
        scene.server.drop()
        assert "401 Unauthorized" in (await scene.until_fact("misconfigured")).detail
        scene.server.put(builders.pod("b", ip="10.0.0.2"))
        scene.server.kubeconfig(tmp_path)
        await scene.until_names("a", "b")
