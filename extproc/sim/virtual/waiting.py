"""Where requests of one picker wait for capacity: the gate of the server, in virtual time."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable

import msgspec

from extproc.config.holding import Holding
from extproc.decision import Decision, Outcome, Rejection
from extproc.holding.queue import Queue
from extproc.holding.waiter import Waiter
from extproc.sim.virtual.timeline import Timeline
from extproc.sim.virtual.trip import Trip

#: Shortest and longest time until capacity is looked for again without an event (seconds), as in
#: the server.
_SOONEST_S = 0.002
_LATEST_S = 1.0


class Acts(msgspec.Struct, frozen=True):
    """What a gate does to its picker.

    Attributes:
        decide: What would come of a trip now, without charging anybody.
        grant: Charge a decision for a trip that waited, and send it.
        refuse: A trip that waited is refused with this status.
    """

    decide: Callable[[Trip], Outcome]
    grant: Callable[[Trip, Decision], None]
    refuse: Callable[[Trip, int], None]


class Gate:
    """Holds trips until they can be served, or refused. Mutable; the picker owns it.

    Args:
        holding: How requests wait; what tenants may take is not simulated.
        timeline: The clock.
        acts: What it does.

    Attributes:
        queue: Who waits.
        outcomes: What came of those that waited, by the words of the server's gate (counts).
    """

    def __init__(self, holding: Holding, *, timeline: Timeline, acts: Acts) -> None:
        self._holding = holding
        self._timeline = timeline
        self._acts = acts
        self._trips: dict[Waiter, tuple[Trip, Rejection]] = {}
        self._waiters: dict[str, Waiter] = {}
        self._soon = False
        self._due_at = math.inf
        self.queue = Queue(holding.queue)
        self.outcomes: Counter[str] = Counter()

    def overtakes(self, trip: Trip) -> bool:
        """Whether a trip that could go on would pass others that wait as long as it may."""
        return bool(self.queue.count and self.queue.ahead(trip.work.priority))

    def hold(self, trip: Trip, why: Rejection) -> int:
        """Begin to wait.

        Args:
            trip: Which.
            why: Why it cannot go on; its `waits_s` is a number.

        Returns:
            0, or the status it is refused with where there is no room or no time.
        """
        now, holding = self._timeline.now, self._holding
        timeout_s = holding.empty_timeout_s if why.status == 503 else holding.timeout_s
        if timeout_s <= 0.0:
            return why.status
        waiter = Waiter(
            arrived=now,
            deadline=now + timeout_s,
            tenant=self._tenant(trip),
            priority=trip.work.priority,
            target=trip.work.adapter,
            tokens=trip.work.prompt_tokens,
        )
        joined = self.queue.join(waiter, now)
        if isinstance(joined, Rejection):
            return joined.status
        for other in joined.displaced:
            self._refuse(other, "displaced", 429)
        self._trips[waiter] = (trip, why)
        self._waiters[trip.id] = waiter
        self._wake(math.inf if why.waits_s is None else why.waits_s)
        return 0

    def left(self, trip: Trip) -> bool:
        """The client of a trip has gone; returns whether the trip was still waiting."""
        waiter = self._waiters.pop(trip.id, None)
        if waiter is None:
            return False
        self.queue.leave(waiter)
        del self._trips[waiter]
        self.outcomes["left"] += 1
        return True

    def changed(self) -> None:
        """Something happened that may be capacity."""
        if self.queue.count and not self._soon:
            self._soon = True
            self._timeline.after(0.0, self.pump)

    def charge(self, trip: Trip) -> None:
        """A trip has ended with an answer, and its tenant's turns follow."""
        tokens = self.queue.settings.output_weight * trip.work.output_tokens
        self.queue.turns.charge(self._tenant(trip), tokens, self._timeline.now)

    def pump(self) -> None:
        """Let trips go on, and end those that waited too long."""
        self._soon = False
        now = self._timeline.now
        for waiter in self.queue.expired(now):
            self._refuse(waiter, "expired", self._trips[waiter][1].status)
        soonest_s = math.inf

        def go(waiter: Waiter) -> bool:
            nonlocal soonest_s
            trip, _ = self._trips[waiter]
            outcome = self._acts.decide(trip)
            if isinstance(outcome, Decision):
                self._forget(waiter, "went")
                self._acts.grant(trip, outcome)
                return True
            if outcome.waits_s is None:
                self._refuse(waiter, "refused", outcome.status)
                return True
            self._trips[waiter] = (trip, outcome)
            soonest_s = min(soonest_s, outcome.waits_s)
            return False

        self.queue.pump(go, now)
        self._wake(soonest_s)

    def _tenant(self, trip: Trip) -> str:
        work = trip.work
        return work.tenant or (work.adapter if self._holding.by_adapter else "")

    def _refuse(self, waiter: Waiter, how: str, status: int) -> None:
        self._acts.refuse(self._forget(waiter, how), status)

    def _forget(self, waiter: Waiter, how: str) -> Trip:
        trip, _ = self._trips.pop(waiter)
        del self._waiters[trip.id]
        self.outcomes[how] += 1
        return trip

    def _wake(self, soonest_s: float) -> None:
        """Look again when the first endpoint is free, or the first deadline is over."""
        deadline = self.queue.next_deadline()
        if deadline is None:
            return
        now = self._timeline.now
        wait_s = max(_SOONEST_S, min(soonest_s, deadline - now))
        if soonest_s < math.inf:
            wait_s = min(wait_s, _LATEST_S)
        when = now + wait_s
        if when < self._due_at:
            self._due_at = when
            self._timeline.at(when, lambda: self._due(when))

    def _due(self, when: float) -> None:
        if when != self._due_at:
            return  # one that is sooner took its place
        self._due_at = math.inf
        self.pump()
