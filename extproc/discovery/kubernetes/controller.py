"""Controller that runs all reflectors of a cluster and reports changed pools."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from extproc.discovery.endpoint_list import DiscoveredPool
from extproc.discovery.kubernetes import reflector, settings, store, watch_plan
from extproc.discovery.kubernetes.watch_plan import WatchedCollection
from extproc.discovery.static_discovery import DiscoveryEvent
from extproc.supervision import Supervisor

if TYPE_CHECKING:
    from extproc.discovery.kubernetes import api_client

#: Name of the loop that reports pools, for the supervisor.
_REPORTS = "reports"

#: Receiver of pool changes: pools that are new or different by key, and keys that are gone.
OnPools = Callable[[Mapping[str, DiscoveredPool], frozenset[str]], None]


def _load_client() -> type[api_client.KubernetesApiClient]:
    """Loads the client of the API server, which is heavy and optional."""
    from extproc.discovery.kubernetes import api_client  # noqa: PLC0415 - see above

    return api_client.KubernetesApiClient


async def connect(settings: settings.KubernetesSettings) -> api_client.KubernetesApiClient:
    """Connects to the API server; raises `ConfigError` without its address or credentials."""
    client = _load_client()(settings)
    await client.open()
    return client


class KubernetesDiscovery:
    """Reports pools at the start and at every change.

    `start` comes first, then `run`. While the server is away the last pools stand.

    Args:
        on_pools: Called with the pools that changed and the keys of those that are gone; again with
            the same and what came since if it raises. A pool is first reported when everything it
            depends on was listed.
        on_event: Called when something happened. Kinds: `synced` and `unsynced`
            (at the start), `disconnected` and `connected`, `unauthorized`, `misconfigured`,
            `forbidden`, `not-installed`, `relisted`, `unreadable`, `broken-object` and
            `port-missing`.
        supervisor: Keeps the loops alive; None for one of its own.
    """

    def __init__(
        self,
        settings: settings.KubernetesSettings,
        *,
        clock: Callable[[], float],
        rng: random.Random,
        on_pools: OnPools,
        on_event: Callable[[DiscoveryEvent], None] = lambda _: None,
        supervisor: Supervisor | None = None,
    ) -> None:
        _load_client()  # to the end of the process, unlike the pools that come with `start`
        self._settings = settings
        self._clock = clock
        self._rng = rng
        self._on_pools = on_pools
        self._on_event = on_event
        self._supervisor = supervisor or Supervisor(clock=clock)
        self._object_store = store.ObjectStore(settings)
        self._api_client: api_client.KubernetesApiClient | None = None
        self._reflectors: tuple[reflector.Reflector, ...] = ()
        self._has_changes = asyncio.Event()
        self._watches = watch_plan.WatchStatuses(self._object_store.collections, clock())
        #: What `on_pools` has not taken yet.
        self._changed: dict[str, DiscoveredPool] = {}
        self._removed: set[str] = set()
        #: Per Service, the last reason why its pods are no endpoints.
        self._missing_ports: dict[str, str] = {}
        self._synced_reported = False

    @property
    def synced(self) -> bool:
        """True once every collection was listed, including empty ones, and the pools reported."""
        return self._synced_reported

    @property
    def statuses(self) -> tuple[watch_plan.WatchStatus, ...]:
        """Status of every watch."""
        return self._watches.statuses

    async def start(self) -> None:
        """Lists all collections and reports the pools, up to a time limit; raises as `connect`."""
        self._api_client = server = await connect(self._settings)
        self._reflectors = tuple(
            reflector.Reflector(
                collection,
                server,
                self._object_store,
                listener=self,
                settings=self._settings,
                clock=self._clock,
                rng=self._rng,
                supervisor=self._supervisor,
            )
            for collection in self._object_store.collections
        )
        try:
            async with asyncio.timeout(self._settings.start_s), asyncio.TaskGroup() as tasks:
                for follower in self._reflectors:
                    title = follower.collection.title
                    supervised = self._supervisor.keep("kubernetes", follower.sync, instance=title)
                    tasks.create_task(supervised, name=f"list {title}")
        except TimeoutError:
            missing = [
                collection.title
                for collection in self._object_store.collections
                if not self._object_store.is_synced(collection)
            ]
            self.on_event(
                "unsynced",
                f"{server.name} has not listed {', '.join(missing)} within "
                f"{self._settings.start_s:g} s; their pools are not ready until it does",
            )
        except BaseException:
            await self.close()
            raise
        if not self._supervisor.call("kubernetes", self._report_changes, instance=_REPORTS):
            self._has_changes.set()

    async def run(self) -> None:
        """Watches all collections until cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                for follower in self._reflectors:
                    title = follower.collection.title
                    supervised = self._supervisor.keep("kubernetes", follower.run, instance=title)
                    tasks.create_task(supervised, name=f"watch {title}")
                supervised = self._supervisor.keep(
                    "kubernetes", self._run_reports, instance=_REPORTS
                )
                tasks.create_task(supervised, name="report pools of Kubernetes")
        finally:
            await self.close()

    async def close(self) -> None:
        """Closes all connections; `run` does so at its end."""
        if self._api_client is not None:
            await self._api_client.close()

    def on_changed(self) -> None:
        """Schedules a report after a reflector changed the store."""
        if self._object_store.has_changes or (
            not self._synced_reported and self._object_store.synced
        ):
            self._has_changes.set()

    def on_state(self, collection: WatchedCollection, kind: str, detail: str) -> None:
        """Records the state of a reflector; logs server-wide changes once for all reflectors."""
        facts = self._watches.update(
            collection, kind, detail, server=self._name(), now=self._clock()
        )
        for fact, text in facts:
            self.on_event(fact, text)

    def on_event(self, kind: str, detail: str) -> None:
        """Passes on an event worth a log line."""
        self._on_event(DiscoveryEvent(kind, detail, self._object_store.endpoints))

    def _name(self) -> str:
        return self._api_client.name if self._api_client is not None else ""

    async def _run_reports(self) -> None:
        """Reports the first change after a quiet time at once, later ones in batches."""
        while True:
            await self._has_changes.wait()
            self._report_changes()
            self._supervisor.record_success("kubernetes", _REPORTS)
            await asyncio.sleep(self._settings.coalesce_s)

    def _report_changes(self) -> None:
        changes = self._object_store.collect()
        for key, fault in changes.faults.items():
            self._supervisor.record_error("kubernetes", fault, instance=key)
        for key, reason in changes.missing_ports.items():
            if reason and reason != self._missing_ports.get(key):
                self.on_event("port-missing", f"Service {key}: {reason}")
            self._missing_ports[key] = reason
        for key in changes.removed:
            self._changed.pop(key, None)
        self._removed = (self._removed - changes.discovered.keys()) | changes.removed
        self._changed |= changes.discovered
        if self._changed or self._removed:
            self._on_pools(self._changed, frozenset(self._removed))
            self._changed, self._removed = {}, set()
        # Only now: where something raised, the next try begins at once.
        self._has_changes.clear()
        if self._object_store.synced and not self._synced_reported:
            self._synced_reported = True
            self.on_event("synced", self._name())
