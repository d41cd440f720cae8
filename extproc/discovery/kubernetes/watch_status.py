"""Status of every watched collection, its age, and its changes worth a log line.

Without I/O: a reflector reports its state, `WatchStatuses` returns the changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from extproc.discovery.kubernetes.watch_plan import WatchedCollection

#: States of a watch. `connected`: listed, and its changes arrive. The next three are about the
#: server itself, the others about a single collection.
CONNECTED = "connected"
AWAY = ("disconnected", "unauthorized", "misconfigured")
STATES = ("unknown", CONNECTED, *AWAY, "forbidden", "not-installed", "unreadable")


class WatchStatus(msgspec.Struct, frozen=True):
    """Status of one watch.

    Attributes:
        collection: What is watched.
        state: One of `STATES`; `unknown` before the first answer.
        detail: Why, for people; empty while it is connected.
        unsynced_since: Monotonic seconds of the last moment in step with the server, or of the
            start where there was none; None while it is in step.
    """

    collection: WatchedCollection
    state: str
    detail: str
    unsynced_since: float | None

    @property
    def stands(self) -> bool:
        """True if its pools are stale; a missing optional resource does not count."""
        missing = self.state == "not-installed" and self.collection.resource.optional
        return self.state != CONNECTED and not missing


class WatchStatuses:
    """Status of all watches.

    Args:
        collections: What is watched.
    """

    def __init__(self, collections: Iterable[WatchedCollection], now: float) -> None:
        self._statuses = {
            collection: WatchStatus(collection, "unknown", "", now) for collection in collections
        }
        #: The state of the server itself that was reported last; empty while it answers.
        self._away = ""
        #: Whether a fault was reported and its end was not.
        self._faulty = False

    @property
    def statuses(self) -> tuple[WatchStatus, ...]:
        """Status of all watches."""
        return tuple(self._statuses.values())

    def update(
        self, collection: WatchedCollection, state: str, detail: str, *, server: str, now: float
    ) -> Iterator[tuple[str, str]]:
        """Records the state that a reflector reported.

        Args:
            collection: Of the feed.
            state: One of `STATES`.
            detail: Why, for people.
            server: Address of the API server, for people.

        Yields:
            Kind and detail of what is worth a log line: every change of the reason, once, and not
            once per collection where the server itself is the reason.
        """
        before = self._statuses[collection]
        since = before.unsynced_since if before.unsynced_since is not None else now
        self._statuses[collection] = WatchStatus(
            collection, state, detail, None if state == CONNECTED else since
        )
        if state == before.state:
            return
        if state in AWAY:
            if state != self._away:
                self._away = state
                self._faulty = True
                yield state, f"{server}: {detail}"
        elif state not in {CONNECTED, "not-installed"} or (
            state == "not-installed" and not collection.resource.optional
        ):
            self._faulty = self._faulty or state != "not-installed"
            yield state, detail
        yield from self._ended(state, server)

    def _ended(self, latest: str, server: str) -> Iterator[tuple[str, str]]:
        """Describes the end of an outage: the server answers again, for all or for some."""
        states = [status.state for status in self._statuses.values()]
        if any(state in AWAY for state in states):
            return
        away, self._away = self._away, ""
        forbidden = [
            status.collection.title
            for status in self._statuses.values()
            if status.state == "forbidden"
        ]
        if forbidden:
            if away and latest != "forbidden":
                yield "forbidden", f"{server} answers again, but not for {', '.join(forbidden)}"
        elif self._faulty and "unreadable" not in states:
            self._faulty = False
            yield CONNECTED, server


def lines(statuses: Iterable[WatchStatus], now: float) -> Iterator[str]:
    """Describes every watch whose pools are stale, for how long, and why."""
    for status in statuses:
        if status.stands and status.unsynced_since is not None:
            why = f"{status.state}: {status.detail}" if status.detail else status.state
            seconds = round(now - status.unsynced_since)
            yield f"{status.collection.title} not in step for {seconds} s: {why}"
