"""Reflector that lists one collection and watches it until cancelled.

The three ways to fail have each their own answer: a connection that breaks goes on from the last
version; a version the server has forgotten is listed again; a server that is away is asked less
and less often. The last state stands through all of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from extproc.discovery.kubernetes import api_responses, objects, settings, store
from extproc.discovery.kubernetes.watch_plan import WatchedCollection
from extproc.errors import ConfigError
from extproc.supervision import Supervisor

if TYPE_CHECKING:
    from extproc.discovery.kubernetes import api_client, controller

#: Watches that may fail in a row, the server answering, before the collection is listed again: it
#: may not know our version.
_MAX_FAILURES = 3

#: Seconds a collection has to be missing before it counts as absent: an API server that has just
#: started may not know its CRDs yet. One deleted in earnest ends its objects one by one before.
_MISSING_GRACE_S = 10.0

#: Seconds for which 403 counts as a failure where the collection was listed before: an API server
#: that has just started knows no Roles yet.
_FORBIDDEN_GRACE_S = 10.0

#: Statuses of a server, or of a proxy before it, that may have been away: its store may have been
#: restored meanwhile. 0 is no answer at all.
_AWAY = frozenset({0, 502, 503, 504})

#: A watch that ends sooner than that, and has brought nothing, is a failure.
_MIN_WATCH_S = 1.0

#: Longest line. etcd takes objects of 1.5 MB.
_MAX_LINE_BYTES = 32 * 1024 * 1024


class Reflector:
    """Keeps one collection of the object store in sync with the cluster."""

    def __init__(
        self,
        collection: WatchedCollection,
        server: api_client.KubernetesApiClient,
        object_store: store.ObjectStore,
        *,
        listener: controller.KubernetesDiscovery,
        settings: settings.KubernetesSettings,
        clock: Callable[[], float],
        rng: random.Random,
        supervisor: Supervisor,
    ) -> None:
        self.collection = collection
        self._server = server
        self._object_store = object_store
        self._listener = listener
        self._settings = settings
        self._clock = clock
        self._rng = rng
        self._supervisor = supervisor
        self._reader = api_responses.WatchReader(collection.resource)
        self._version = ""
        self._failures = 0
        self._consecutive_failures = 0
        self._expirations = 0
        self._slow_retries = 0
        self._has_watch_failed = False
        self._missing_since: float | None = None
        self._forbidden_since: float | None = None
        self._failing_since: float | None = None
        self._is_reachable = True
        self._was_away = False
        self._has_list = self._ends_at_once = False
        self._invalid_objects: set[tuple[str, str]] = set()

    async def sync(self) -> None:
        """Retries until the server has answered for the collection."""
        while not self._object_store.is_synced(self.collection):
            pause_s = await self.step()
            await asyncio.sleep(pause_s)

    async def run(self) -> None:
        """Watches the collection until cancelled."""
        while True:
            pause_s = await self.step()
            self._supervisor.record_success("kubernetes", self.collection.title)
            await asyncio.sleep(pause_s)

    async def step(self) -> float:
        """Runs one list or one watch to its end; returns seconds to wait before the next step."""
        if self._version and self._was_away:
            await self._check_version()
        return await (self._watch() if self._version else self._list())

    async def _check_version(self) -> None:
        """Drops our version if that of the server is older; a failed check comes again.

        An API server whose store was restored from a copy grants a watch from a version that it
        never had, and leaves out all changes up to it.
        """
        answer = await self._server.page(self.collection, "", limit=1)
        if isinstance(answer, api_responses.ApiError):
            # Lists may fail where watches are granted; a fault of both is that of the watch.
            return
        page = self._reader.decode_list(answer)
        if isinstance(page, api_responses.UndecodableMessage):
            return
        self._was_away = False
        if _is_older(page.version, self._version):
            detail = f"the server is at version {page.version}, before our {self._version}"
            self._listener.on_event("relisted", f"{self.collection.title}: {detail}")
            self._version = ""

    async def _list(self) -> float:
        values: list[objects.Value] = []
        invalid_objects: list[api_responses.InvalidObject] = []
        more, limit = "", self._settings.page
        while True:
            generation = self._server.generation
            answer = await self._server.page(self.collection, more, limit=limit)
            if isinstance(answer, api_responses.ApiError):
                if answer.status == 410 and more:
                    # Pages may come slower than their tokens expire.
                    values, invalid_objects, more, limit = [], [], "", 0
                    self._listener.on_event("relisted", self.collection.title)
                    continue
                return await self._on_error(answer, generation)
            page = self._reader.decode_list(answer)
            if isinstance(page, api_responses.UndecodableMessage) or not page.version:
                self._give_up_waiting()
                self._listener.on_state(
                    self.collection, "unreadable", f"list of {self.collection.title}"
                )
                return self._retry_pause()
            values += page.values
            invalid_objects += page.invalid_objects
            more = page.continue_token
            if not more:
                break
        self._version, self._has_list, self._was_away = page.version, True, False
        self._consecutive_failures = 0
        self._missing_since = None
        self._invalid_objects &= {(invalid.namespace, invalid.name) for invalid in invalid_objects}
        for invalid in invalid_objects:
            self._report_invalid(invalid)
        faults = self._object_store.replace(self.collection, values)
        for key, fault in faults.items():
            self._supervisor.record_error("kubernetes", fault, instance="/".join(key))
        if not self._has_watch_failed:
            self._listener.on_state(self.collection, "connected", "")
        self._listener.on_changed()
        return 0.0

    async def _watch(self) -> float:
        started, has_events = self._clock(), False
        seconds = round(self._rng.uniform(1.0, 2.0) * self._settings.watch_s)
        generation = self._server.generation
        async with self._server.watch(self.collection, self._version, seconds) as stream:
            if isinstance(stream, api_responses.ApiError):
                # From now on a list alone does not count: it brings no changes.
                self._has_watch_failed = True
                return await self._on_error(stream, generation)
            self._has_watch_failed = False
            self._slow_retries, self._forbidden_since = 0, None
            with self._report_while_open():
                partial_line = b""
                async for chunk in stream:
                    *lines, partial_line = (
                        (partial_line + chunk).split(b"\n") if partial_line else chunk.split(b"\n")
                    )
                    for line in lines:
                        pause = self._apply_line_safely(line) if line else None
                        if pause is not None:
                            self._listener.on_changed()
                            return pause
                    if lines:
                        has_events = True
                        self._failures = self._consecutive_failures = self._expirations = 0
                        self._listener.on_changed()
                        if self._ends_at_once:
                            self._report_connected()
                    if len(partial_line) > _MAX_LINE_BYTES:
                        return self._restart("a line without end")
        # The rest is half a line of a connection that broke: its event comes again.
        if has_events or self._clock() - started >= _MIN_WATCH_S:
            self._failures = 0
            # Spread, because a server that goes down ends all watches of all clients at once.
            return self._rng.uniform(0.0, self._settings.retry_s)
        return self._on_short_watch()

    def _on_short_watch(self) -> float:
        """Handles a watch that ended at once: of some in a row, changes may be missing."""
        self._consecutive_failures += 1
        if self._consecutive_failures >= _MAX_FAILURES:
            self._version, self._ends_at_once, self._has_watch_failed = "", True, True
            self._listener.on_state(self.collection, "disconnected", "watches end at once")
        return self._retry_pause()

    @contextlib.contextmanager
    def _report_while_open(self) -> Iterator[None]:
        """Reports `connected`: at once, or a second later where watches ended at once."""
        if not self._ends_at_once:
            self._report_connected()
            yield
            return
        # Else the state would change with every watch that a proxy cuts.
        timer = asyncio.get_running_loop().call_later(_MIN_WATCH_S, self._report_connected)
        try:
            yield
        finally:
            timer.cancel()

    def _report_connected(self) -> None:
        self._ends_at_once = False
        self._listener.on_state(self.collection, "connected", "")

    def _apply_line_safely(self, line: bytes) -> float | None:
        """Applies one line through `_apply_line`; skips a line that raises."""
        try:
            return self._apply_line(line)
        except Exception as error:  # noqa: BLE001 - it would come again, and hide all that follows
            self._supervisor.record_error("kubernetes", error, instance=self.collection.title)
            return None

    def _apply_line(self, line: bytes) -> float | None:
        """Applies one line; returns seconds to wait if it ends the watch."""
        put = self._object_store.apply
        event = self._reader.decode_event(line)
        match event:
            case api_responses.Applied(value):
                key = (value.namespace, value.name)
                put(self.collection, key, value)
                self._invalid_objects.discard(key)
            case api_responses.Deleted(namespace, name):
                put(self.collection, (namespace, name), None)
                self._invalid_objects.discard((namespace, name))
            case api_responses.InvalidObject(namespace, name):
                put(self.collection, (namespace, name), None)
                self._report_invalid(event)
            case api_responses.WatchError(410, _):
                return self._on_expired_version()
            case api_responses.WatchError(code, message):
                return self._count_failure(f"watch ended with {code} {message}")
            case api_responses.UndecodableMessage(reason):
                return self._restart(reason)
        self._version = event.version or self._version
        return None

    async def _on_error(self, answer: api_responses.ApiError, generation: int) -> float:
        if answer.status and not self._is_reachable:
            # It is back: what it lacks yet it has in a moment.
            self._failures = 0
        self._is_reachable = answer.status != 0
        self._was_away = self._was_away or answer.status in _AWAY
        if answer.status != 403:
            self._forbidden_since = None
        if answer.credentials_expired:
            return await self._renew_credentials(answer, generation)
        match answer.status:
            case 0:
                if self._is_server_answering():
                    self._give_up_waiting()
                self._listener.on_state(self.collection, "disconnected", answer.message)
                return self._retry_pause()
            case 403:
                return self._on_forbidden(answer)
            case 404:
                return self._on_missing()
            case 410:
                return self._on_expired_version()
            case _:
                self._give_up_waiting()
                detail = f"{answer.status} {answer.message}"
                self._listener.on_state(self.collection, "disconnected", detail)
                counts_as_failure = answer.status != 429 and bool(self._version)
                pause_s = self._count_failure(detail) if counts_as_failure else self._retry_pause()
                return max(pause_s, answer.retry_after_s)

    def _is_server_answering(self) -> bool:
        """Returns True if the server has answered for some collection that pools need."""
        return any(
            self._object_store.is_synced(collection)
            for collection in self._object_store.collections
            if not collection.resource.optional
        )

    def _give_up_waiting(self) -> None:
        """Lets pools do without an optional collection that the server fails to list for long.

        A list, 403 or 404 ends the wait as well, so the time of the first failure is never reset.
        """
        is_awaited = not self._object_store.is_synced(self.collection)
        if not (is_awaited and self.collection.resource.optional):
            return
        now = self._clock()
        if self._failing_since is None:
            self._failing_since = now
        if now - self._failing_since >= self._settings.start_s:
            self._object_store.set_status(self.collection, store.CollectionStatus.FAILED)
            self._listener.on_changed()

    async def _renew_credentials(self, answer: api_responses.ApiError, generation: int) -> float:
        """Renews credentials: tokens and certificates rotate while in use."""
        detail = f"{answer.status} {answer.message}" if answer.status else answer.message
        try:
            await self._server.renew(generation)
        except ConfigError as error:
            self._listener.on_state(self.collection, "misconfigured", f"{error}; before: {detail}")
        else:
            self._listener.on_state(self.collection, "unauthorized", detail)
        first = self._failures == 0
        pause_s = self._retry_pause()
        return 0.0 if first else pause_s

    def _on_forbidden(self, answer: api_responses.ApiError) -> float:
        collection, now = self.collection, self._clock()
        if self._forbidden_since is None:
            self._forbidden_since = now
        if self._has_list and now - self._forbidden_since < _FORBIDDEN_GRACE_S:
            self._listener.on_state(collection, "disconnected", f"403 {answer.message}")
            return self._retry_pause()
        self._version = ""
        self._listener.on_state(
            collection, "forbidden", _missing_permission_text(collection, answer.message)
        )
        if not self._has_list:
            self._object_store.set_status(collection, store.CollectionStatus.FORBIDDEN)
        self._listener.on_changed()
        return self._slow_retry_pause()

    def _on_missing(self) -> float:
        """Handles a missing resource, as when its CRD is not installed."""
        self._version = ""
        now = self._clock()
        if self._missing_since is None:
            self._missing_since = now
        if self._has_list and now - self._missing_since < _MISSING_GRACE_S:
            return self._retry_pause()
        self._has_list = False
        self._listener.on_state(self.collection, "not-installed", self.collection.title)
        self._object_store.set_status(self.collection, store.CollectionStatus.ABSENT)
        self._listener.on_changed()
        return self._slow_retry_pause()

    def _on_expired_version(self) -> float:
        """Handles an expired resource version: lists again, at once the first time."""
        self._version = ""
        self._listener.on_event("relisted", self.collection.title)
        self._expirations += 1
        return 0.0 if self._expirations == 1 else self._retry_pause()

    def _count_failure(self, detail: str) -> float:
        self._consecutive_failures += 1
        if self._consecutive_failures >= _MAX_FAILURES:
            self._listener.on_event("relisted", f"{self.collection.title}: {detail}")
            self._version = ""
        return self._retry_pause()

    def _restart(self, detail: str) -> float:
        self._listener.on_event("unreadable", f"{self.collection.title}: {detail}")
        self._version = ""
        return self._retry_pause()

    def _retry_pause(self) -> float:
        """Returns the pause after a failure, doubling from failure to failure."""
        settings = self._settings
        max_s = min(settings.max_retry_s, settings.retry_s * 2.0 ** min(self._failures, 16))
        self._failures += 1
        return max_s * self._rng.uniform(0.5, 1.0)

    def _slow_retry_pause(self) -> float:
        """Returns the pause until the next retry of a problem that a person must fix."""
        settings = self._settings
        max_s = min(settings.absent_s, settings.max_retry_s * 2.0 ** min(self._slow_retries, 16))
        self._slow_retries += 1
        return max_s * self._rng.uniform(0.5, 1.0)

    def _report_invalid(self, invalid: api_responses.InvalidObject) -> None:
        """Reports a broken object once, not at each of its events."""
        key = (invalid.namespace, invalid.name)
        if key not in self._invalid_objects:
            self._invalid_objects.add(key)
            self._listener.on_event(
                "broken-object",
                f"{self.collection.resource.title} {'/'.join(key)}: {invalid.reason}",
            )


def _is_older(version: str, other: str) -> bool:
    """Returns True if a resource version is before another one; False for those of no order."""
    are_ordered = version.isdecimal() and other.isdecimal()
    return are_ordered and (len(version), version) < (len(other), other)


def _missing_permission_text(collection: WatchedCollection, message: str) -> str:
    """Describes the missing rights and the Role rule that grants them."""
    kind = "Role" if collection.namespace else "ClusterRole"
    return (
        f"may not list and watch {collection.title} ({message}); "
        f"add to a {kind} of the service account: "
        f'apiGroups: ["{collection.resource.group}"], '
        f'resources: ["{collection.resource.plural}"], '
        'verbs: ["list", "watch"]'
    )
