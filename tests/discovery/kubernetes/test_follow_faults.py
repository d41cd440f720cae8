"""A follower among objects that cannot be read, bugs of ours and servers that fail at random."""

from __future__ import annotations

import asyncio
import random

import pytest

from extproc import supervision
from extproc.discovery.kubernetes import pool_views, reflector, settings, store
from tests.discovery.kubernetes import builders, fake
from tests.discovery.kubernetes.follower_scene import KEY, FollowerScene, following
from tests.support.canary import CANARY


async def test_an_invalid_object_is_reported_once_and_skipped(tmp_path):
    """It is no endpoint until it is corrected."""
    async with following(tmp_path, builders.pool(), builders.pod("a"), builders.pod("b")) as scene:
        await scene.server.until_watched()
        for _ in range(3):
            broken = builders.pod("b", ip="10.0.0.2")
            broken["status"]["podIP"] = 5
            scene.server.put(broken)
        scene.server.put(builders.pod("c", ip="10.0.0.3"))
        await scene.until_names("a", "c")
        assert scene.kinds().count("broken-object") == 1
        scene.server.put(builders.pod("b", ip="10.0.0.2"))
        await scene.until_names("a", "b", "c")


@pytest.mark.parametrize("seed", range(4))
async def test_any_sequence_of_faults_ends_in_the_correct_pools(tmp_path, seed):
    """Broken watches, forgotten versions, garbage and errors at any moment, and a restart."""
    chance = random.Random(seed)
    objects = (builders.pool(), builders.pod("p0"))
    async with following(tmp_path, *objects, request_s=2.0) as scene:
        server = scene.server
        await server.until_watched()

        async def broken(_):
            return fake.refuse(chance.choice([429, 500, 503, 504, 410]), "broken")

        faults = [
            server.drop,
            lambda: server.drop(last=b'{"type":"ADDED","object":{"kind'),
            server.compact,
            lambda: server.send(b"garbage\n"),
            lambda: server.send(builders.line("ERROR", {"code": 500, "metadata": {}}) + b"\n"),
            lambda: server.answers.append(broken),
        ]
        alive = {0}
        for step in range(150):
            number = chance.randrange(12)
            value = builders.pod(f"p{number}", ip=f"10.0.0.{number + 1}", uid=f"u{step}")
            if number in alive and chance.random() < 0.5:
                alive.discard(number)
                server.delete(value)
            else:
                alive.add(number)
                server.put(value)
            if chance.random() < 0.2:
                chance.choice(faults)()
            if step == 75:
                await server.stop()
                await server.start()
            # Gives the follower its turn, mostly in the middle of something.
            await asyncio.sleep(0)
        server.put(builders.pod("last", ip="10.0.1.1"))
        names = sorted(f"p{number}" for number in alive)
        await scene.until_names("last", *names)
        uids = {
            value["metadata"]["name"]: value["metadata"]["uid"]
            for value in server.objects["", "pods"].values()
        }
        assert {e.name: e.uid for e in scene.pools[KEY].endpoints} == uids


def poison(monkeypatch, fixture, name, hits):
    """Let a method raise where its arguments hit, as a bug of ours that an object sets off."""
    real = getattr(fixture, name)

    def raising(*args, **more):
        if hits(*args):
            raise OverflowError(CANARY)
        return real(*args, **more)

    monkeypatch.setattr(fixture, name, raising)


@pytest.mark.parametrize("before", [True, False])
def test_an_object_that_raises_hides_no_other_object(tmp_path, monkeypatch, caplog, before):
    """Listed at the start or added by an event, it is counted, and later changes are published."""
    poison(
        monkeypatch,
        store.ObjectStore,
        "apply",
        lambda _, __, key, ___: key[1] == "bad",
    )

    async def scene():
        bad = builders.pod("bad", ip="10.0.0.66")
        listed = (bad,) if before else ()
        async with following(tmp_path, builders.pool(), builders.pod("a"), *listed) as scene:
            assert scene.names() == ["a"]
            scene.server.put(*(() if before else (bad,)), builders.pod("b", ip="10.0.0.2"))
            await scene.until_names("a", "b")
            assert scene.supervisor.failures["kubernetes"] >= 1

    asyncio.run(scene())
    assert CANARY not in caplog.text
    assert "OverflowError" in caplog.text


async def test_a_pool_that_raises_hides_no_other_pool(tmp_path, monkeypatch):
    """The others are published, and so is it once that ends."""
    wrong = [True]
    poison(
        monkeypatch,
        pool_views.PodView,
        "to_discovered_pool",
        lambda view: wrong[0] and view.pool.selector == {"app": "bad"},
    )
    sources = tuple(settings.InferencePoolRef("default", name) for name in ("pool", "other"))
    objects = (builders.pool(app="bad"), builders.pool("other"), builders.pod("a"))
    async with following(tmp_path, *objects, sources=sources) as scene:
        assert scene.names(sources[1].key) == ["a"]
        assert scene.names(sources[0].key) is None
        wrong.clear()
        wrong.append(False)
        scene.server.put(builders.pod("b", app="bad", ip="10.0.0.2"))
        await scene.until_names("b", key=sources[0].key)


async def test_pools_are_reported_again_after_the_callback_raised(tmp_path, monkeypatch):
    """A listener may raise, at the start and later: no change is lost."""
    monkeypatch.setattr(supervision, "FIRST_PAUSE_S", 0.01)
    wrong = [2]
    real = FollowerScene.on_pools

    def raising(self, changed, removed):
        if wrong[0]:
            wrong[0] -= 1
            raise OverflowError(CANARY)
        real(self, changed, removed)

    monkeypatch.setattr(FollowerScene, "on_pools", raising)
    async with following(tmp_path, builders.pool(), builders.pod("a")) as scene:
        await scene.until_names("a")
        assert scene.supervisor.failures["kubernetes"] == 2
        wrong[0] = 1
        scene.server.put(builders.pod("b", ip="10.0.0.2"))
        await scene.until_names("a", "b")
        await scene.until(lambda: not scene.supervisor.degraded)


async def test_a_reflector_that_raises_stops_no_other(tmp_path, monkeypatch):
    """Its collection is followed again after a pause, from what was known."""
    monkeypatch.setattr(supervision, "FIRST_PAUSE_S", 0.01)
    wrong = [3]
    real = reflector.Reflector.step

    async def raising(self):
        if self.collection.resource.plural == "pods" and wrong[0]:
            wrong[0] -= 1
            raise OverflowError(CANARY)
        return await real(self)

    monkeypatch.setattr(reflector.Reflector, "step", raising)
    async with following(tmp_path, builders.pool(), builders.pod("a")) as scene:
        await scene.until_names("a")
        assert scene.supervisor.failures["kubernetes"] == 3
