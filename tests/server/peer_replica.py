"""A picker as far as it exchanges requests with others, over any channel."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable

from extproc.config import loader
from extproc.scheduling.plugin_guard import GuardFactory
from extproc.scrape import client, schedule
from extproc.server.peer_channel import PeerChannel
from extproc.server.pool_registry import PoolRegistry
from extproc.server.pool_runtime import RuntimeContext
from extproc.telemetry.counters import ProcessCounters
from tests.server.test_pool_registry import ask

POOLS = """apiVersion: extproc/v1alpha1
kind: ExtProcConfig
pools:
- {name: a, endpoints: ['127.0.0.11:9', '127.0.0.12:9'], match: {hosts: [a]}}
- {name: b, endpoints: ['127.0.0.13:9'], match: {hosts: [b]}}
"""


def sites(is_synced=lambda: True):
    counters = ProcessCounters()
    guards = GuardFactory(lambda: 0.0, counters.plugins)
    http = client.ScrapeClient(timeout_s=1.0, cap_bytes=1)
    shared = RuntimeContext(counters, guards, http, schedule.EndpointCounts(), time.monotonic)
    return PoolRegistry(
        loader.settings(loader.parse(POOLS, where="f")),
        shared,
        configured={},
        is_discovery_synced=is_synced,
    )


class Replica:
    """One picker as far as it talks."""

    def __init__(self, build: Callable[[PoolRegistry], PeerChannel]) -> None:
        self.is_synced = True
        self.registry = sites(lambda: self.is_synced)
        self.line = build(self.registry)

    def director(self, pool: str = "a"):
        return self.registry.by_name[pool].parts.director

    def send(self, host: str = "a"):
        outcome = ask(self.registry, host=host).outcome
        return self.director(host).reserve(outcome, time.monotonic())

    def in_flight(self, pool: str = "a") -> dict[str, int]:
        members = self.director(pool).pool.members
        return {member.endpoint.address: member.account.in_flight for member in members}

    @property
    def heard(self) -> int:
        return self.line.replica.pickers


@contextlib.asynccontextmanager
async def talking(*replicas: Replica):
    for replica in replicas:
        await replica.registry.sync()
    tasks = [asyncio.ensure_future(replica.line.run()) for replica in replicas]
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
