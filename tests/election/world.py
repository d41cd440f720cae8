"""Electors under virtual time around a store that compares and swaps; the network does as it likes."""

from __future__ import annotations

import heapq
import itertools
import random
import types

from extproc import election
from extproc.server import leader_elector


@types.coroutine
def _ask(call):
    """Wait, as a method of a store, until the world answers."""
    return (yield call)


class _Far:
    """The store as one elector reaches it."""

    async def read(self):
        return await _ask(None)

    async def write(self, put):
        return await _ask(put)

    async def close(self):
        """Nothing to close."""


class Store:
    """One record, and a version that every write raises."""

    def __init__(self):
        self.record = None
        self._version = 0

    def do(self, put):
        """Read for None, else write if the version fits."""
        if put is None:
            return self.record
        if put.version != (self.record.version if self.record else ""):
            return leader_elector.LeaseRequestFailed("conflict", conflict=True)
        self._version += 1
        self.record = election.LeaseRecord(
            put.holder, put.duration_s, put.transitions, str(self._version)
        )
        return self.record


class Fate:
    """Delays of a request and of its answer.

    Args:
        there: Seconds until it is executed; None: never.
        back: Seconds from then until its answer arrives; None: never.
    """

    def __init__(self, candidates, back):
        self.there, self.back = candidates, back


class ElectionCandidate:
    """A process with an elector, and a clock that need not agree with another's."""

    def __init__(self, world, name, settings, *, offset=0.0, rate=1.0):
        self.name = name
        self.alive = True
        self.stands = True
        self._steps = None
        self._serial = 0
        self.facts = []
        self.elector = leader_elector.LeaderElector(
            name,
            settings,
            _Far(),
            clock=lambda: world.now * rate + offset,
            rng=random.Random(name),
            can_lead=lambda: self.stands,
            on_event=self.facts.append,
        )
        self._world = world
        self._rate = rate

    def leads(self):
        """Return True if a living process believes that it leads."""
        return self.alive and self.elector.is_leader

    def start(self):
        """Begin a step."""
        if self.alive:
            self._go(self.elector.step())

    def resign(self):
        """End in order. What is still on its way is waited for no longer."""
        self.elector.resign()
        self._serial += 1
        self._go(self.elector.release(), last=True)

    def crash(self):
        """End at once."""
        self.alive = False

    def _go(self, steps, *, last=False):
        self._steps = steps
        self._on(None, last=last)

    def _on(self, answer, *, last):
        """Run to the next request, or to the end of the step."""
        try:
            call = self._steps.send(answer)
        except StopIteration as end:
            if last:
                self.alive = False
            else:
                serial = self._serial
                self._world.after(
                    end.value / self._rate, lambda: serial == self._serial and self.start()
                )
            return
        self._serial += 1
        self._world.send(self, call, self._serial, last=last)

    def hear(self, answer, serial, *, last):
        """An answer, unless it comes after the limit."""
        if self.alive and serial == self._serial:
            self._serial += 1
            self._on(answer, last=last)


class ElectionWorld:
    """Candidates, a store and the time.

    Args:
        fate: Gives the `Fate` of the next request.
        limit_s: After which a candidate waits for an answer no longer.
    """

    def __init__(self, delays, *, limit_s=5.0):
        self.now = 0.0
        self.store = Store()
        self.candidates = []
        self.history = []
        self.fate = delays
        self._limit_s = limit_s
        self._events = []
        self._order = itertools.count()

    def add(self, name, settings, *, at=0.0, **clock):
        """A candidate that starts at some time."""
        candidate = ElectionCandidate(self, name, settings, **clock)
        self.candidates.append(candidate)
        self.at(at, candidate.start)
        return candidate

    def at(self, when, what):
        """Something happens at a time."""
        heapq.heappush(self._events, (when, next(self._order), what))

    def after(self, seconds, what):
        """Something happens later."""
        self.at(self.now + seconds, what)

    def send(self, candidate, call, serial, *, last):
        """A request leaves; it may be executed after the sender has given up."""
        delays = self.fate()
        if delays.there is not None:
            self.after(
                delays.there, lambda: self._execute(candidate, call, serial, delays, last=last)
            )
        gave_up = leader_elector.LeaseRequestFailed("no answer")
        self.after(self._limit_s, lambda: candidate.hear(gave_up, serial, last=last))

    def _execute(self, candidate, call, serial, delays, *, last):
        answer = self.store.do(call)
        if delays.back is not None:
            self.after(delays.back, lambda: candidate.hear(answer, serial, last=last))

    @property
    def leaders(self):
        """Everyone who believes to lead."""
        return [candidate for candidate in self.candidates if candidate.leads()]

    def run(self, until):
        """Let time pass; belief begins at events only, so that is when to look."""
        while self._events and self._events[0][0] <= until:
            self.now, _, what = heapq.heappop(self._events)
            what()
            leaders = [candidate.name for candidate in self.leaders]
            assert len(leaders) <= 1, f"{leaders} at {self.now}"
            if leaders and leaders != self.history[-1:]:
                self.history += leaders
        self.now = until
