"""Reflector that lists one collection and watches it until cancelled.

The three ways to fail have each their own answer: a connection that breaks goes on from the last
version; a version the server has forgotten is listed again; a server that is away is asked less
and less often. The last state stands through all of them.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Protocol

from extproc.discovery.kubernetes import api_errors, objects, settings, store, watch_events
from extproc.discovery.kubernetes.watch_plan import WatchedCollection
from extproc.errors import ConfigError
from extproc.supervision import Supervisor

#: Watches that may fail in a row, the server answering, before the collection is listed again: its
#: store may have been restored from a copy and not know our version.
_MOST_STUMBLES = 3

#: Seconds a collection has to be missing before it is believed gone: an API server that has just
#: started may not know its CRDs yet. One deleted in earnest ends its objects one by one before.
_SURELY_ABSENT_S = 10.0

#: Seconds for which 403 counts as a failure where the collection was listed before: an API server
#: that has just started knows no Roles yet.
_SURELY_FORBIDDEN_S = 10.0

#: A watch that ends sooner than that, and has brought nothing, is a failure.
_SHORT_S = 1.0

#: Longest line. etcd takes objects of 1.5 MB.
_MOST_LINE_BYTES = 32 * 1024 * 1024


class ReflectorListener(Protocol):
    """Receiver of the changes and states of reflectors."""

    def changed(self) -> None:
        """Signals that objects of the cluster may have changed."""

    def state(self, collection: WatchedCollection, kind: str, detail: str) -> None:
        """Reports the state of a collection, of `watch_plan.STATES`; repeats are possible."""

    def happened(self, kind: str, detail: str) -> None:
        """Reports an event worth a log line, once."""


class Reflector:
    """Keeps one collection of the object store in sync with the cluster.

    Args:
        known: What is kept true.
        listener: Receiver of changes and states.
        wanted: How patiently.
        rng: Chance, for spreading what would else fall together.
        supervisor: Hears of objects that make us raise, and of steps that went well.
    """

    def __init__(
        self,
        collection: WatchedCollection,
        server: api_errors.KubernetesApi,
        known: store.ObjectStore,
        *,
        listener: ReflectorListener,
        wanted: settings.KubernetesSettings,
        clock: Callable[[], float],
        rng: random.Random,
        supervisor: Supervisor,
    ) -> None:
        self.collection = collection
        self._server = server
        self._cluster = known
        self._listener = listener
        self._wanted = wanted
        self._clock = clock
        self._rng = rng
        self._supervisor = supervisor
        self._reader = watch_events.WatchReader(collection.resource)
        self._version = ""
        self._failures = 0
        self._consecutive_failures = 0
        self._forgot = 0
        self._looks = 0
        self._missing_since: float | None = None
        self._forbidden_since: float | None = None
        self._reached = True
        self._listed = False
        self._broken: set[tuple[str, str]] = set()

    async def sync(self) -> None:
        """Retries until the server has answered for the collection."""
        while not self._cluster.is_synced(self.collection):
            pause_s = await self.step()
            await asyncio.sleep(pause_s)

    async def run(self) -> None:
        """Watches the collection until cancelled."""
        while True:
            pause_s = await self.step()
            self._supervisor.works("kubernetes", self.collection.title)
            await asyncio.sleep(pause_s)

    async def step(self) -> float:
        """Runs one list or one watch to its end.

        Returns:
            Seconds to wait before the next step.
        """
        return await (self._watch() if self._version else self._list())

    async def _list(self) -> float:
        values: list[objects.Value] = []
        broken: list[watch_events.InvalidObject] = []
        more = ""
        while True:
            generation = self._server.generation
            answer = await self._server.page(self.collection, more)
            if isinstance(answer, api_errors.ApiError):
                return await self._refused(answer, generation)
            page = self._reader.page(answer)
            if isinstance(page, watch_events.UndecodableMessage) or not page.version:
                self._listener.state(
                    self.collection, "unreadable", f"list of {self.collection.title}"
                )
                return self._pause()
            values += page.values
            broken += page.broken
            more = page.more
            if not more:
                break
        self._version, self._listed = page.version, True
        self._consecutive_failures = self._looks = 0
        self._missing_since = self._forbidden_since = None
        self._broken &= {(invalid.namespace, invalid.name) for invalid in broken}
        for invalid in broken:
            self._note_broken(invalid)
        faults = self._cluster.replace(self.collection, values)
        for key, fault in faults.items():
            self._supervisor.note("kubernetes", fault, instance="/".join(key))
        self._listener.state(self.collection, "connected", "")
        self._listener.changed()
        return 0.0

    async def _watch(self) -> float:
        began, brought = self._clock(), False
        seconds = round(self._rng.uniform(1.0, 2.0) * self._wanted.watch_s)
        generation = self._server.generation
        async with self._server.watch(self.collection, self._version, seconds) as stream:
            if isinstance(stream, api_errors.ApiError):
                return await self._refused(stream, generation)
            self._forbidden_since = None
            self._listener.state(self.collection, "connected", "")
            rest = b""
            async for chunk in stream:
                *lines, rest = (rest + chunk).split(b"\n") if rest else chunk.split(b"\n")
                for line in lines:
                    pause = self._safely(line) if line else None
                    if pause is not None:
                        self._listener.changed()
                        return pause
                if lines:
                    brought = True
                    self._failures = self._consecutive_failures = self._forgot = 0
                    self._listener.changed()
                if len(rest) > _MOST_LINE_BYTES:
                    return self._again("unreadable", "a line without end")
        # The rest is half a line of a connection that broke: its event comes again.
        if brought or self._clock() - began >= _SHORT_S:
            self._failures = 0
            # Spread, because a server that goes down ends all watches of all clients at once.
            return self._rng.uniform(0.0, self._wanted.retry_s)
        return self._pause()

    def _safely(self, line: bytes) -> float | None:
        """Applies one line through `_take`; skips a line that raises."""
        try:
            return self._take(line)
        except Exception as error:  # noqa: BLE001 - it would come again, and hide all that follows
            self._supervisor.note("kubernetes", error, instance=self.collection.title)
            return None

    def _take(self, line: bytes) -> float | None:
        """Applies one line; returns seconds to wait if it ends the watch."""
        put = self._cluster.put
        match self._reader.line(line):
            case watch_events.Applied(value, version):
                key = (value.namespace, value.name)
                put(self.collection, key, value)
                self._broken.discard(key)
                self._version = version or self._version
            case watch_events.Deleted(namespace, name, version):
                put(self.collection, (namespace, name), None)
                self._broken.discard((namespace, name))
                self._version = version or self._version
            case watch_events.InvalidObject() as broken:
                put(self.collection, (broken.namespace, broken.name), None)
                self._note_broken(broken)
                self._version = broken.version or self._version
            case watch_events.Bookmark(version):
                self._version = version or self._version
            case watch_events.WatchError(410, _):
                return self._forgotten()
            case watch_events.WatchError(code, message):
                return self._count_failure(f"watch ended with {code} {message}")
            case watch_events.UndecodableMessage(reason):
                return self._again("unreadable", reason)
        return None

    async def _refused(self, answer: api_errors.ApiError, generation: int) -> float:
        if answer.status and not self._reached:
            # It is back: what it lacks yet it has in a moment.
            self._failures = 0
        self._reached = answer.status != 0
        if answer.status != 403:
            self._forbidden_since = None
        if answer.credentials_expired:
            return await self._stale(answer, generation)
        match answer.status:
            case 0:
                self._listener.state(self.collection, "disconnected", answer.message)
                return self._pause()
            case 403:
                return self._forbidden(answer)
            case 404:
                return self._absent()
            case 410:
                return self._forgotten()
            case _:
                detail = f"{answer.status} {answer.message}"
                self._listener.state(self.collection, "disconnected", detail)
                stumbles = answer.status != 429 and bool(self._version)
                pause_s = self._count_failure(detail) if stumbles else self._pause()
                return max(pause_s, answer.retry_after_s)

    async def _stale(self, answer: api_errors.ApiError, generation: int) -> float:
        """Renews credentials: tokens and certificates rotate while in use."""
        detail = f"{answer.status} {answer.message}" if answer.status else answer.message
        try:
            await self._server.renew(generation)
        except ConfigError as error:
            self._listener.state(self.collection, "misconfigured", f"{error}; before: {detail}")
        else:
            self._listener.state(self.collection, "unauthorized", detail)
        first = self._failures == 0
        pause_s = self._pause()
        return 0.0 if first else pause_s

    def _forbidden(self, answer: api_errors.ApiError) -> float:
        collection, now = self.collection, self._clock()
        if self._forbidden_since is None:
            self._forbidden_since = now
        if self._listed and now - self._forbidden_since < _SURELY_FORBIDDEN_S:
            self._listener.state(collection, "disconnected", f"403 {answer.message}")
            return self._pause()
        self._version = ""
        self._listener.state(collection, "forbidden", _rights(collection, answer.message))
        if not self._listed:
            self._cluster.settle(collection, store.CollectionStatus.FORBIDDEN)
        self._listener.changed()
        return self._look()

    def _absent(self) -> float:
        """Handles a missing resource, as when its CRD is not installed."""
        self._version = ""
        now = self._clock()
        if self._missing_since is None:
            self._missing_since = now
        if self._listed and now - self._missing_since < _SURELY_ABSENT_S:
            return self._pause()
        self._listed = False
        self._listener.state(self.collection, "not-installed", self.collection.title)
        self._cluster.settle(self.collection, store.CollectionStatus.ABSENT)
        self._listener.changed()
        return self._look()

    def _forgotten(self) -> float:
        """Handles an expired resource version: lists again, at once the first time."""
        self._version = ""
        self._listener.happened("relisted", self.collection.title)
        self._forgot += 1
        return 0.0 if self._forgot == 1 else self._pause()

    def _count_failure(self, detail: str) -> float:
        self._consecutive_failures += 1
        if self._consecutive_failures >= _MOST_STUMBLES:
            self._listener.happened("relisted", f"{self.collection.title}: {detail}")
            self._version = ""
        return self._pause()

    def _again(self, kind: str, detail: str) -> float:
        self._listener.happened(kind, f"{self.collection.title}: {detail}")
        self._version = ""
        return self._pause()

    def _pause(self) -> float:
        """Returns the pause after a failure, doubling from failure to failure."""
        wanted = self._wanted
        most = min(wanted.max_retry_s, wanted.retry_s * 2.0 ** min(self._failures, 16))
        self._failures += 1
        return most * self._rng.uniform(0.5, 1.0)

    def _look(self) -> float:
        """Returns the pause until the next retry of a problem that a person must fix."""
        wanted = self._wanted
        most = min(wanted.absent_s, wanted.max_retry_s * 2.0 ** min(self._looks, 16))
        self._looks += 1
        return most * self._rng.uniform(0.5, 1.0)

    def _note_broken(self, invalid: watch_events.InvalidObject) -> None:
        """Reports a broken object once, not at each of its events."""
        key = (invalid.namespace, invalid.name)
        if key not in self._broken:
            self._broken.add(key)
            self._listener.happened(
                "broken-object",
                f"{self.collection.resource.title} {'/'.join(key)}: {invalid.reason}",
            )


def _rights(collection: WatchedCollection, message: str) -> str:
    """Describes the missing rights and the Role rule that grants them."""
    kind = "Role" if collection.namespace else "ClusterRole"
    return (
        f"may not list and watch {collection.title} ({message}); "
        f"add to a {kind} of the service account: "
        f'apiGroups: ["{collection.resource.group}"], '
        f'resources: ["{collection.resource.plural}"], '
        'verbs: ["list", "watch"]'
    )
