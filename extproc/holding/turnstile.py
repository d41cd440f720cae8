"""Who waits, who goes on and who is told no: every decision about waiting, for any driver.

The server awaits and sets timers, the simulator plans events; both ask here what to do and when to
ask again.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

import msgspec

from extproc import decision as outcomes
from extproc.decision import Rejection
from extproc.holding.manners import Want
from extproc.holding.queue import Queue
from extproc.holding.waiter import Settings, Waiter

#: Shortest and longest time until capacity is looked for again without an event (seconds).
_SOONEST_S = 0.002
_LATEST_S = 1.0

#: Share of its longest wait for which a request may wait for one endpoint while another one has a
#: place.
_PATIENCE = 0.5

#: What waits.
Item = TypeVar("Item")
#: What is decided of one that goes on.
Way = TypeVar("Way")


class Acts(msgspec.Struct, Generic[Item, Way], frozen=True):
    """What is done to requests.

    Attributes:
        decide: What would come of one now, without charging anybody; whether it may still wait for
            an endpoint while another one has a place is the second argument.
        waits: One goes on waiting, for the endpoint of this address; empty for any.
        go: One that waited goes where this decision says, and is charged at once.
        refuse: One that waited is told no.
    """

    decide: Callable[[Item, bool], Way | Rejection]
    waits: Callable[[Item, str], None]
    go: Callable[[Item, Way], None]
    refuse: Callable[[Item, Rejection], None]


class Turnstile(Generic[Item, Way]):
    """Holds the requests of one pool until they can be served, or told that they will not.

    Args:
        settings: How requests wait; `queue.settings` replaces them.
        acts: What is done to requests.
        most: Requests that go on in one call (count); None for any number.

    Attributes:
        queue: Who waits.
        outcomes: What came of requests that waited: `went`, `expired`, `displaced`, `left`,
            `refused`, `closed` (counts).
    """

    def __init__(
        self, settings: Settings, acts: Acts[Item, Way], *, most: int | None = None
    ) -> None:
        self._acts = acts
        self._most = math.inf if most is None else most
        self._items: dict[Waiter, tuple[Item, Rejection]] = {}
        self._closed = False
        self.queue = Queue(settings)
        self.outcomes: Counter[str] = Counter()

    def why(self, outcome: Way | Rejection, *, priority: int, toward: str = "") -> Rejection | None:
        """Why a request that has just come cannot go on; None where it can.

        Where waiting helps, `waits_s` is a number.

        Args:
            outcome: What would come of it if nobody else waited.
            priority: Of the request.
            toward: Address of the endpoint it would go to; empty where that is not known.
        """
        if isinstance(outcome, Rejection):
            return outcome
        if self.queue.count and self.queue.ahead(priority):
            # Whoever waits longer goes first; the turn may be this one's all the same.
            return outcomes.busy(0.0, waits_for=toward)
        return None

    def hold(self, item: Item, want: Want, why: Rejection, now: float) -> Waiter | Rejection:
        """Begin to wait.

        Args:
            item: What waits, for `acts`.
            want: What it says of itself.
            why: Why it cannot go on.
            now: Monotonic seconds.

        Returns:
            Its place, or why not, where waiting changes nothing or there is no room or no time.
        """
        if why.waits_s is None:
            return self._estimated(why, now)
        if self._closed:
            return _shutting_down()
        timeout_s = self._timeout_s(want, why)
        if timeout_s <= 0.0:
            return self._estimated(why, now)
        waiter = Waiter(
            arrived=now,
            deadline=now + timeout_s,
            tenant=want.tenant,
            priority=want.priority,
            target=want.target,
            size=want.size,
            tokens=want.tokens,
            slo_s=want.slo_s,
        )
        joined = self.queue.join(waiter, now)
        if isinstance(joined, Rejection):
            return joined
        for other in joined.displaced:
            self._refuse(other, "displaced", _displaced(self.queue.full(now).retry_after_s))
        self._items[waiter] = (item, why)
        self.queue.turn(waiter, why.waits_for)
        self._acts.waits(item, why.waits_for)
        return waiter

    def left(self, waiter: Waiter) -> bool:
        """The client is gone; returns whether the request was still waiting."""
        if self._items.pop(waiter, None) is None:
            return False
        self.queue.leave(waiter)
        self.outcomes["left"] += 1
        return True

    def pump(self, now: float) -> float | None:
        """Let requests go on, and end those that waited too long.

        Args:
            now: Monotonic seconds.

        Returns:
            Seconds after which to ask again even if nothing happens, 0 for at once; None where
            nobody waits.
        """
        for waiter in self.queue.expired(now):
            self._refuse(waiter, "expired", self._expired(self._items[waiter][1], now))
        soonest_s = math.inf
        left = self._most

        def go(waiter: Waiter) -> tuple[Hashable, str | None] | None:
            nonlocal soonest_s, left
            if left <= 0:
                return waiter.target, None
            item, _ = self._items[waiter]
            patient = now - waiter.arrived < _PATIENCE * (waiter.deadline - waiter.arrived)
            outcome = self._acts.decide(item, patient)
            if not isinstance(outcome, Rejection):
                left -= 1
                self._acts.go(self._forget(waiter, "went"), outcome)
                return None
            if outcome.waits_s is None:
                self._refuse(waiter, "refused", outcome)
                return None
            self._items[waiter] = (item, outcome)
            soonest_s = min(soonest_s, outcome.waits_s)
            toward = outcome.waits_for
            self.queue.turn(waiter, toward)
            self._acts.waits(item, toward)
            return waiter.target, toward if toward and not outcome.closed else None

        self.queue.pump(go, now)
        if left <= 0 and self.queue.count:
            return 0.0
        return self.next_s(soonest_s, now)

    def next_s(self, soonest_s: float, now: float) -> float | None:
        """When to look again: the first endpoint is free, or the first deadline is over.

        Args:
            soonest_s: Seconds until an endpoint is believed free; infinity where only an event
                brings it.
            now: Monotonic seconds.

        Returns:
            Seconds; None where nobody waits.
        """
        deadline = self.queue.next_deadline()
        if deadline is None:
            return None
        wait_s = max(_SOONEST_S, min(soonest_s, deadline - now))
        return wait_s if soonest_s == math.inf else min(wait_s, _LATEST_S)

    def close(self) -> None:
        """Nobody waits any longer: 503, and whoever comes is told the same."""
        self._closed = True
        for waiter in list(self.queue):
            self.queue.leave(waiter)
            self._refuse(waiter, "closed", _shutting_down())

    def _estimated(self, why: Rejection, now: float) -> Rejection:
        """A refusal with the queue's own estimate of when trying again helps."""
        if why.retry_after_s is None or not self.queue.count:
            return why
        return msgspec.structs.replace(why, retry_after_s=self.queue.wait_s(now))

    def _refuse(self, waiter: Waiter, how: str, why: Rejection) -> None:
        self._acts.refuse(self._forget(waiter, how), why)

    def _forget(self, waiter: Waiter, how: str) -> Item:
        item, _ = self._items.pop(waiter)
        self.outcomes[how] += 1
        return item

    def _expired(self, why: Rejection, now: float) -> Rejection:
        """503 where there is no endpoint, 429 where all are busy (EPP protocol report 1.8)."""
        if why.status == 503:
            return self._estimated(why, now)
        told = msgspec.structs.replace(
            why, message="no endpoint was free in time", reason="rejected-ttl-expired"
        )
        return self._estimated(told, now)

    def _timeout_s(self, want: Want, why: Rejection) -> float:
        settings = self.queue.settings
        if want.timeout_s is not None:
            return min(want.timeout_s, settings.most_timeout_s)
        usual_s = settings.by_objective.get(want.objective, settings.timeout_s)
        if why.status == 503 and settings.empty_timeout_s is not None:
            usual_s = settings.empty_timeout_s
        return min(usual_s, settings.most_timeout_s)


def _shutting_down() -> Rejection:
    return Rejection(
        503, "the picker is shutting down", reason="rejected-shutting-down", retry_after_s=1
    )


def _displaced(retry_after_s: int | None) -> Rejection:
    return Rejection(
        429,
        "displaced by a request of higher priority",
        reason="evicted-priority",
        retry_after_s=retry_after_s,
    )
