"""Controller that runs all reflectors of a cluster and reports changed pools."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping

from extproc.discovery.endpoint_list import DiscoveredPool
from extproc.discovery.kubernetes import api_errors, reflector, settings, store, watch_plan
from extproc.discovery.kubernetes.watch_plan import WatchedCollection
from extproc.discovery.static_discovery import DiscoveryEvent
from extproc.supervision import Supervisor

#: Name of the loop that reports pools, for the supervisor.
_REPORTS = "reports"

#: Receiver of pool changes: pools that are new or different by key, and keys that are gone.
OnPools = Callable[[Mapping[str, DiscoveredPool], frozenset[str]], None]


async def connect(wanted: settings.KubernetesSettings) -> api_errors.KubernetesApi:
    """Connects to the API server through the official client.

    Raises:
        ConfigError: If its address or the credentials are missing or broken.
    """
    from extproc.discovery.kubernetes import api_client  # noqa: PLC0415 - heavy and optional

    server = api_client.KubernetesApiClient(wanted)
    await server.open()
    return server


class KubernetesDiscovery:
    """Reports pools at the start and at every change.

    `start` comes first, then `run`. While the server is away the last pools stand.

    Args:
        wanted: What is watched, and how patiently.
        connect: Opens the API server.
        rng: Chance, for spreading what would else fall together.
        on_pools: Called with the pools that changed and the keys of those that are gone; again with
            the same and what came since if it raises. A pool is first reported when everything it
            depends on was listed.
        on_fact: Called when something happened. Kinds: `synced` and `unsynced`
            (at the start), `disconnected` and `connected`, `unauthorized`, `misconfigured`,
            `forbidden`, `not-installed`, `relisted`, `unreadable` and `broken-object`.
        supervisor: Keeps the loops alive; None for one of its own.
    """

    def __init__(
        self,
        wanted: settings.KubernetesSettings,
        *,
        connect: Callable[
            [settings.KubernetesSettings], Awaitable[api_errors.KubernetesApi]
        ] = connect,
        clock: Callable[[], float],
        rng: random.Random,
        on_pools: OnPools,
        on_fact: Callable[[DiscoveryEvent], None] = lambda _: None,
        supervisor: Supervisor | None = None,
    ) -> None:
        self._wanted = wanted
        self._connect = connect
        self._clock = clock
        self._rng = rng
        self._on_pools = on_pools
        self._on_fact = on_fact
        self._supervisor = supervisor or Supervisor(clock=clock)
        self._cluster = store.ObjectStore(wanted)
        self._server: api_errors.KubernetesApi | None = None
        self._feeds: tuple[reflector.Reflector, ...] = ()
        self._wake = asyncio.Event()
        self._watches = watch_plan.WatchStatuses(self._cluster.collections, clock())
        #: What `on_pools` has not taken yet.
        self._changed: dict[str, DiscoveredPool] = {}
        self._removed: set[str] = set()
        self._synced_reported = False

    @property
    def synced(self) -> bool:
        """True once every collection was listed, including empty ones."""
        return self._cluster.synced

    @property
    def statuses(self) -> tuple[watch_plan.WatchStatus, ...]:
        """Status of every watch."""
        return self._watches.statuses

    async def start(self) -> None:
        """Lists all collections and reports the pools, up to a time limit.

        Raises:
            ConfigError: If the API server's address or the credentials are missing or broken.
        """
        self._server = server = await self._connect(self._wanted)
        self._feeds = tuple(
            reflector.Reflector(
                collection,
                server,
                self._cluster,
                listener=self,
                wanted=self._wanted,
                clock=self._clock,
                rng=self._rng,
                supervisor=self._supervisor,
            )
            for collection in self._cluster.collections
        )
        try:
            async with asyncio.timeout(self._wanted.start_s), asyncio.TaskGroup() as tasks:
                for feed in self._feeds:
                    title = feed.collection.title
                    supervised = self._supervisor.keep("kubernetes", feed.sync, instance=title)
                    tasks.create_task(supervised, name=f"list {title}")
        except TimeoutError:
            missing = [
                collection.title
                for collection in self._cluster.collections
                if not self._cluster.is_synced(collection)
            ]
            self.happened(
                "unsynced",
                f"{server.name} has not listed {', '.join(missing)} within "
                f"{self._wanted.start_s:g} s; their pools are not ready until it does",
            )
        except BaseException:
            await self.close()
            raise
        if not self._supervisor.call("kubernetes", self._report, instance=_REPORTS):
            self._wake.set()

    async def run(self) -> None:
        """Watches all collections until cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                for feed in self._feeds:
                    title = feed.collection.title
                    supervised = self._supervisor.keep("kubernetes", feed.run, instance=title)
                    tasks.create_task(supervised, name=f"watch {title}")
                supervised = self._supervisor.keep("kubernetes", self._reports, instance=_REPORTS)
                tasks.create_task(supervised, name="report pools of Kubernetes")
        finally:
            await self.close()

    async def close(self) -> None:
        """Closes all connections; `run` does so at its end."""
        if self._server is not None:
            await self._server.close()

    def changed(self) -> None:
        """Schedules a report after a reflector changed the store."""
        if self._cluster.dirty or (not self._synced_reported and self._cluster.synced):
            self._wake.set()

    def state(self, collection: WatchedCollection, kind: str, detail: str) -> None:
        """Records the state of a reflector; logs server-wide changes once for all reflectors."""
        facts = self._watches.update(
            collection, kind, detail, server=self._name(), now=self._clock()
        )
        for fact, text in facts:
            self.happened(fact, text)

    def happened(self, kind: str, detail: str) -> None:
        """Passes on an event worth a log line."""
        self._on_fact(DiscoveryEvent(kind, detail, self._cluster.endpoints))

    def _name(self) -> str:
        return self._server.name if self._server is not None else ""

    async def _reports(self) -> None:
        """Reports the first change after a quiet time at once, later ones in batches."""
        while True:
            await self._wake.wait()
            self._report()
            self._supervisor.works("kubernetes", _REPORTS)
            await asyncio.sleep(self._wanted.coalesce_s)

    def _report(self) -> None:
        changes = self._cluster.collect()
        for key, fault in changes.faults.items():
            self._supervisor.note("kubernetes", fault, instance=key)
        for key in changes.removed:
            self._changed.pop(key, None)
        self._removed = (self._removed - changes.discovered.keys()) | changes.removed
        self._changed |= changes.discovered
        if self._changed or self._removed:
            self._on_pools(self._changed, frozenset(self._removed))
            self._changed, self._removed = {}, set()
        # Only now: where something raised, the next try begins at once.
        self._wake.clear()
        if self._cluster.synced and not self._synced_reported:
            self._synced_reported = True
            self.happened("synced", self._name())
