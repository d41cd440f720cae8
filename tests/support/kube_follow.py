"""A follower of a real API server in this process, and waiting for what it tells."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from extproc.discovery.endpoint_list import DiscoveredPool
from extproc.discovery.kubernetes import controller, settings
from extproc.discovery.static_discovery import DiscoveryEvent

#: Seconds a change may take to arrive.
_SEEN_S = 300.0

#: Shorter pauses than in service, so that tests wait for the API server and not for us.
_PATIENCE = {"retry_s": 0.02, "max_retry_s": 0.2, "absent_s": 0.2, "coalesce_s": 0.001}


class Following:
    """Changes that were published.

    Attributes:
        pools: By key, as published last.
        facts: All of them.
    """

    def __init__(self) -> None:
        self.pools: dict[str, DiscoveredPool] = {}
        self.facts: list[DiscoveryEvent] = []
        self._news = asyncio.Event()

    def on_pools(self, result: Any, removed: frozenset[str]) -> None:
        """Pools changed."""
        for key in removed:
            self.pools.pop(key, None)
        self.pools.update(result)
        for item in result.values():
            addresses = [endpoint.address for endpoint in item.endpoints]
            assert len(set(addresses)) == len(addresses), "an address was published twice"
        self._news.set()

    def noted(self, fact: DiscoveryEvent) -> None:
        """Something happened."""
        self.facts.append(fact)
        self._news.set()

    @property
    def kinds(self) -> list[str]:
        """Kinds of all facts."""
        return [fact.kind for fact in self.facts]

    async def until(self, holds: Callable[[], bool]) -> None:
        """Wait until it holds, looking after each piece of news."""
        try:
            async with asyncio.timeout(_SEEN_S):
                while not holds():
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            raise AssertionError(f"pools {self.pools}; facts {self.facts}") from None

    def addresses(self, key: str) -> list[str]:
        """Addresses of a pool, sorted; empty if it was never published."""
        result = self.pools.get(key)
        return sorted(endpoint.address for endpoint in result.endpoints) if result else []

    async def has(self, key: str, *addresses: str) -> None:
        """Wait until a pool is exactly this."""
        await self.until(lambda: key in self.pools and self.addresses(key) == sorted(addresses))


@contextlib.asynccontextmanager
async def following(kubeconfig: Path, *sources: settings.KubernetesSource, **wanted: Any):
    """Follow sources for as long as the block runs; it begins when `start` has returned."""
    result = Following()
    follower = controller.KubernetesDiscovery(
        settings.KubernetesSettings(
            sources=sources, kubeconfig=str(kubeconfig), **{**_PATIENCE, **wanted}
        ),
        clock=time.monotonic,
        rng=random.Random(5),
        on_pools=result.on_pools,
        on_event=result.noted,
    )
    await follower.start()
    try:
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(follower.run())
            try:
                yield result
            finally:
                running.cancel()
    finally:
        # A task that was cancelled before it ran has closed nothing.
        await follower.close()


def pool(fixture: tuple[str, Path], **wanted: Any):
    """Follow the pool `vllm` of a namespace.

    Args:
        place: The namespace, and who looks.
        wanted: Other patience.
    """
    namespace, kubeconfig = fixture
    return following(kubeconfig, settings.InferencePoolRef(namespace, "vllm"), **wanted)
