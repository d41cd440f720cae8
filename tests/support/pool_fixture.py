"""The real dispatcher over a fleet that a test describes."""

from __future__ import annotations

import random
from collections.abc import Mapping

from extproc.decision import Outcome
from extproc.endpoint import Endpoint, Load
from extproc.pool.store import PoolStore
from extproc.prefix_cache import blocks
from extproc.prefix_cache.cache_model import CacheModel
from extproc.prefix_cache.exact_prefixes import ExactPrefixes
from extproc.prefix_cache.index import PrefixIndex
from extproc.request import HttpRequest
from extproc.routing.director import Director
from extproc.routing.routing_config import RoutingConfig, RoutingSettings
from extproc.scheduling import registry
from extproc.scheduling.plugin_guard import PluginCounters
from extproc.scheduling.profile import SchedulerProfile


class PoolFixture:
    """A fleet with its dispatcher, at one moment.

    Args:
        loads: Endpoint address to its scraped load; None for never scraped.
        profile: The name of a default profile, or one of your own.
        fallbacks: Further endpoints to name.
        seed: Of all chance.
        exact: What engines publish of their blocks; None for beliefs alone.

    Attributes:
        now: Monotonic seconds of every call.
        counts: Exceptions of plugins.
    """

    def __init__(
        self,
        loads: Mapping[str, Load | None],
        *,
        profile: str | SchedulerProfile = "balanced",
        fallbacks: int = 0,
        seed: int = 1,
        exact: ExactPrefixes | None = None,
    ) -> None:
        self.now = 100.0
        self.counts = PluginCounters()
        self.index = PrefixIndex(1 << 16)
        self.cache_model = CacheModel(self.index, blocks.DEFAULT.tokens, most_blocks=10_000)
        self.store = PoolStore(on_gone=self.cache_model.forget)
        self.store.set_endpoints([Endpoint(address) for address in loads], self.now)
        for member in self.store.pool.members:
            load = loads[member.endpoint.address]
            if load is not None:
                self.store.observe(self.store.begin_scrape(member.endpoint), load, self.now)
        chosen = registry.profiles()[profile] if isinstance(profile, str) else profile
        self.director = Director(
            store=self.store,
            routing=RoutingConfig(
                profile=chosen,
                by_model={},
                settings=RoutingSettings(stale_after_s=60.0, fallbacks=fallbacks),
            ),
            index=self.index,
            cache_model=self.cache_model,
            schedule=blocks.Schedule(),
            rng=random.Random(seed),
            counts=self.counts,
            exact=exact,
        )

    def decide(self, raw: HttpRequest) -> Outcome:
        """Route without charging anybody."""
        return self.director.route(raw, self.now)

    @property
    def in_flight(self) -> int:
        """Open requests on all endpoints."""
        return sum(member.account.in_flight for member in self.store.pool.members)


def load(waiting: float, kv_usage: float, *adapters: str, at: float = 100.0) -> Load:
    """The load the reference picker's tests write as P(queue, kv, models...)."""
    return Load(
        at=at,
        engine="vllm",
        waiting=waiting,
        running=0.0,
        kv_usage=kv_usage,
        adapters=frozenset(adapters),
        waiting_adapters=frozenset(),
        adapter_slots=4,
    )
