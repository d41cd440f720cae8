"""A follower of a fake API server, and what it reports."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time

import pytest

from extproc.discovery.kubernetes import controller, settings
from extproc.supervision import Supervisor
from tests.discovery.kubernetes import fake

REF = settings.InferencePoolRef("default", "pool")


KEY = REF.key


class FollowerScene:
    """A follower of a fake API server, and the pools that it published."""

    def __init__(self, server, folder, *sources, **wanted):
        self.server = server
        self.pools = {}
        self.reports = []
        self.facts = []
        self.moved = asyncio.Condition()
        self.folder = folder
        patience = {"retry_s": 0.01, "max_retry_s": 0.05, "absent_s": 0.05, "coalesce_s": 0.001}
        self.supervisor = Supervisor(clock=time.monotonic)
        self.subject = controller.KubernetesDiscovery(
            settings.KubernetesSettings(
                sources=sources or (REF,),
                kubeconfig=server.kubeconfig(folder),
                **(patience | wanted),
            ),
            clock=time.monotonic,
            rng=random.Random(1),
            on_pools=self.on_pools,
            on_event=self._on_fact,
            supervisor=self.supervisor,
        )

    def on_pools(self, changed, removed):
        self.reports.append((dict(changed), removed))
        self.pools = {key: pool for key, pool in self.pools.items() if key not in removed} | changed
        self._news()

    def _on_fact(self, fact):
        self.facts.append(fact)
        self._news()

    def _news(self):
        task = asyncio.ensure_future(self._notify())
        task.add_done_callback(lambda _: None)

    async def _notify(self):
        async with self.moved:
            self.moved.notify_all()

    async def until(self, true, timeout_s=300.0):
        try:
            async with asyncio.timeout(timeout_s), self.moved:
                await self.moved.wait_for(true)
        except TimeoutError:
            pytest.fail(f"never so: {self.pools} {self.facts} {self.server.requests[-5:]}")

    async def until_names(self, *names, key=KEY):
        await self.until(lambda: self.names(key) == list(names))

    async def until_fact(self, kind):
        await self.until(lambda: kind in self.kinds())
        return next(fact for fact in self.facts if fact.kind == kind)

    def names(self, key=KEY):
        return (
            [endpoint.name for endpoint in self.pools[key].endpoints] if key in self.pools else None
        )

    def kinds(self):
        return [fact.kind for fact in self.facts]


@contextlib.asynccontextmanager
async def following(folder, *objects, sources=(), prepare=lambda server: None, **wanted):
    """A started and running follower of a server with these objects."""
    server = await fake.FakeApiServer().start()
    server.put(*objects)
    prepare(server)
    scene = FollowerScene(server, folder, *sources, **wanted)
    try:
        await scene.subject.start()
        running = asyncio.ensure_future(scene.subject.run())
        try:
            yield scene
        finally:
            running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await running
    finally:
        await scene.subject.close()
        await server.close()
