"""The shadow in a running process: when it decides, and where its comparison is read."""

from __future__ import annotations

import asyncio

from extproc.demo import stack
from extproc.server import pool_runtime
from tests.e2e import http1
from tests.support.reloading import ReloadingScene, read

CONFIG = "scheduling: {strategy: random, shadow: {strategy: adaptive, sample_ratio: 1.0}}\n"


def route(scene, count):
    """Route requests without letting the loop run."""
    director = scene.runtime.parts.director
    for _ in range(count):
        director.reserve(scene.decision(), scene.now)


def compared(scene):
    counts = scene.runtime.parts.director.routing.shadow.counts
    return sum(counts.results.values())


async def test_the_shadow_decides_after_the_turn(monkeypatch):
    """No decision of it happens while a request is routed; a page and metrics show the result."""
    monkeypatch.setattr(pool_runtime, "_SHADOW_DELAY_S", 0.0)
    port = stack.free_port()
    server = f"server: {{host: 127.0.0.1, metrics_port: {port}}}\n"
    settings = read(CONFIG + server)
    scene = ReloadingScene(settings)
    await scene.picker.start_admin()
    try:
        route(scene, 20)
        assert compared(scene) == 0
        while compared(scene) < 20:
            await asyncio.sleep(0)
        page = (await http1.ask(port, "/debug/shadow")).json()["pools"][""]
        metrics = (await http1.ask(port, "/metrics")).body.decode()
    finally:
        await scene.picker.admin_server.close()
    assert page["profile"] == "adaptive"
    assert page["results"]["agreed"] + page["results"]["differed"] == 20
    assert page["agreement"] == page["results"]["agreed"] / 20
    assert page["expected_saving_s"]["shadow"] >= 0.0
    assert len(page["differences"]) == page["results"]["differed"]
    agreed = page["results"]["agreed"]
    labels = 'pool="",result="agreed",shadow="adaptive"'
    assert f"extproc_shadow_decisions_total{{{labels}}} {agreed}.0" in metrics
    for result in ("rejected", "failed", "dropped"):
        labels = f'pool="",result="{result}",shadow="adaptive"'
        assert f"extproc_shadow_decisions_total{{{labels}}} 0.0" in metrics
    labels = 'choice="preferred",judge="shadow",pool="",shadow="adaptive"'
    assert f"extproc_shadow_expected_seconds_total{{{labels}}}" in metrics
    assert 'extproc_shadow_seconds_total{pool="",shadow="adaptive"}' in metrics


async def test_a_shadow_that_is_turned_off_leaves_nothing():
    """Its waiting requests are dropped with it."""
    scene = ReloadingScene(read(CONFIG))
    route(scene, 3)
    scene.read_again(read("scheduling: {strategy: adaptive}"))
    assert scene.runtime.parts.director.routing.shadow is None
    await asyncio.sleep(0)
    route(scene, 1)
    assert not scene.picker.pool_registry.shadows()
