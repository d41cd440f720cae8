"""Load generation: closed-loop users or open-loop arrivals, under a concurrency limit."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from typing import Annotated

import msgspec

from extproc.simulator.fleet import workloads
from extproc.simulator.fleet.event_queue import EventQueue
from extproc.simulator.fleet.sim_request import RequestSpec, SimRequest, SimSession

Positive = Annotated[int, msgspec.Meta(ge=1)]
PositiveSeconds = Annotated[float, msgspec.Meta(gt=0)]


class Client(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Load generator settings of a scenario.

    One of `users` and `rate_per_s` is given, or neither with a trace or groups, which have times of
    their own.

    Attributes:
        users: Closed loop: so many users, each with one session at a time.
        rate_per_s: Open loop: sessions begin at this rate, as a Poisson process.
        concurrency: Requests open at most; the others wait in the client, first come first served,
            and the clock of TTFT starts when they leave it. None: no limit.
        ramp_s: Seconds over which users begin.
        turnaround_s: Seconds from an answer to the next request that waited for it. 2 ms is a
            client, a proxy and a network.
        timeout_s: Seconds after which the client gives a request up. None: never.
        evenly: Whether sessions begin at equal distances instead, the first one at once.
        skips: Whether a session that finds as many requests open as there may be never begins, as
            with load generators that keep to their own clock.
        abandons: Whether a request that was given up goes on in the engine, as behind proxies that
            do not pass it on.
        retry_after_s: Seconds a user waits after a failure before the session goes on with the
            next request. 1 keeps a user of a dead fleet from spinning.
    """

    users: Positive | None = None
    rate_per_s: Annotated[float, msgspec.Meta(gt=0)] | None = None
    concurrency: Positive | None = None
    ramp_s: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    turnaround_s: PositiveSeconds = 0.002
    timeout_s: PositiveSeconds | None = None
    evenly: bool = False
    skips: bool = False
    abandons: bool = False
    retry_after_s: PositiveSeconds = 1.0


class _Run:
    """A session under way."""

    __slots__ = ("done", "next", "session", "user", "works")

    def __init__(self, session: SimSession, user: int, adapters: int) -> None:
        self.session = session
        self.user = user
        self.next = 0
        works = session.specs
        self.works = workloads.adapted(works, user % adapters) if adapters else works


class Sender:
    """Sends the requests of sessions. Mutable; owned by the simulation.

    Args:
        client: How requests are offered.
        sessions: What is asked.
        adapters: LoRA adapters users are spread over; 0 for none.
        rng: Chance, for arrivals.
        send: Sends a request; `finished` is called with its request once it ended.
    """

    def __init__(
        self,
        client: Client,
        sessions: Iterator[SimSession],
        *,
        adapters: int,
        timeline: EventQueue,
        rng: random.Random,
        send: Callable[[RequestSpec], SimRequest],
    ) -> None:
        self._client = client
        self._sessions = sessions
        self._adapters = adapters
        self._timeline = timeline
        self._rng = rng
        self._send = send
        self._started = 0
        self._open = 0
        self._held: deque[tuple[_Run, float]] = deque()
        self._runs: dict[str, _Run] = {}
        self._active = 0
        self._exhausted = False
        self._arrival_s = 0.0

    @property
    def is_done(self) -> bool:
        """True once every request was sent and has ended."""
        return self._exhausted and not self._active

    def start(self) -> None:
        """Begin."""
        users = self._client.users
        if users is None:
            self._arrive()
            return
        for user in range(users):
            when = self._client.ramp_s * user / users
            self._timeline.at(when, lambda user=user: self._begin(user))  # type: ignore[misc]

    def finished(self, sim_request: SimRequest) -> None:
        """Handle the end of a request."""
        run = self._runs.pop(sim_request.id)
        self._open -= 1
        if self._held:
            held, since = self._held.popleft()
            self._go(held, since=since)
        client = self._client
        pause = client.retry_after_s if sim_request.failure else client.turnaround_s
        if run.next < len(run.works):
            if run.session.think_s:
                pause += run.session.think_s[run.next - 1]
            self._timeline.after(pause, lambda: self._turn(run))
            return
        self._active -= 1
        if client.users is not None:
            self._timeline.after(pause, lambda: self._begin(run.user))
            # The user is not over while the next session may come.

    def _arrive(self) -> None:
        """Open loop: plan the next session."""
        session = next(self._sessions, None)
        if session is None:
            self._exhausted = True
            return
        # From planned to planned: on a real clock every arrival is a little late, and the delays
        # must not add up.
        planned = self._arrival_s + self._pause_s(self._client.rate_per_s)
        when = planned if session.at is None else session.at
        self._arrival_s = when
        self._active += 1

        def begin() -> None:
            run = _Run(session, self._started, self._adapters)
            self._started += 1
            self._turn(run)
            self._arrive()

        self._timeline.at(when, begin)

    def _pause_s(self, rate: float | None) -> float:
        """Seconds from one arrival to the next; none where sessions have their own times."""
        if not rate:
            return 0.0
        if self._client.evenly:
            return 1.0 / rate if self._started else 0.0
        return self._rng.expovariate(rate)

    def _begin(self, user: int) -> None:
        """Closed loop: the user's next session."""
        session = next(self._sessions, None)
        if session is None:
            self._exhausted = True
            return
        self._active += 1
        self._turn(_Run(session, user, self._adapters))

    def _turn(self, run: _Run) -> None:
        limit = self._client.concurrency
        if limit is not None and self._open >= limit:
            if self._client.skips and not run.next:
                self._active -= 1
                return
            self._held.append((run, self._timeline.now))
            return
        self._go(run, since=self._timeline.now)

    def _go(self, run: _Run, *, since: float) -> None:
        work = run.works[run.next]
        run.next += 1
        self._open += 1
        sim_request = self._send(work)
        sim_request.held_s = sim_request.sent_at - since
        self._runs[sim_request.id] = run
