"""The requests of one pool that wait: bounded, in bands of priority, each until its deadline."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator

import msgspec

from extproc.decision import Rejection
from extproc.holding.band import Band, Way
from extproc.holding.estimate import Pace
from extproc.holding.turns import Turns
from extproc.holding.waiter import Settings, Waiter


class Joined(msgspec.Struct, frozen=True):
    """A request waits.

    Attributes:
        displaced: Whoever had to make room for it; the driver tells them.
    """

    displaced: tuple[Waiter, ...] = ()


class Queue:
    """Who waits for the endpoints of a pool.

    Args:
        settings: How requests wait; may be replaced.

    Attributes:
        count: Requests that wait.
        bytes: Of their bodies.
        turns: What tenants attained.
        pace: Requests that go on per second.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.count = 0
        self.bytes = 0
        self.turns = Turns(settings.half_life_s)
        self.pace = Pace()
        self._numbers = 0
        self._bands: dict[int, Band] = {}
        self._deadlines: list[tuple[float, int, Waiter]] = []

    def join(self, waiter: Waiter, now: float) -> Joined | Rejection:
        """Begin to wait.

        Where there is no room, requests of lower priority are displaced, the last of the tenant
        with most waiting first; where there are none, the request itself is refused.

        Args:
            waiter: Who.
            now: Monotonic seconds.

        Returns:
            429 with Retry-After where there is no room.
        """
        displaced: list[Waiter] = []
        while not self._fits(waiter):
            last = self._lowest(below=waiter.priority)
            if last is None:
                for one in displaced:  # they were not in the way
                    self._put(one)
                return self.full(now)
            self.leave(last)
            displaced.append(last)
        self._put(waiter)
        return Joined(tuple(displaced))

    def leave(self, waiter: Waiter) -> None:
        """Stop waiting, for whatever reason; nothing if it does not wait."""
        if not waiter.waits:
            return
        waiter.waits = False
        self.count -= 1
        self.bytes -= waiter.bytes
        band = self._bands[waiter.priority]
        band.left(waiter)
        if not band.count:
            del self._bands[waiter.priority]
        if len(self._deadlines) > 2 * self.count + 64:
            self._deadlines = [entry for entry in self._deadlines if entry[2].waits]
            heapq.heapify(self._deadlines)

    def turn(self, waiter: Waiter, toward: str) -> None:
        """One that waits would rather have another endpoint now; it keeps its rank."""
        if waiter.toward != toward:
            band = self._bands[waiter.priority]
            band.left(waiter)
            waiter.toward = toward
            band.add(waiter)

    def pump(self, go: Callable[[Waiter], Way | None], now: float) -> int:
        """Let requests go on until nobody who waits can.

        What cannot be served now holds up only those that want the same.

        Args:
            go: Sends one on if it can be served now, and says what cannot if not.
            now: Monotonic seconds.

        Returns:
            How many went.
        """
        went = 0
        for _, band in sorted(self._bands.items(), reverse=True):
            blocked: set[Way] = set()
            for waiter in band.heads(blocked):
                way = go(waiter)
                if way is not None:
                    blocked.add(way)
                    continue
                self.leave(waiter)
                self.turns.served(waiter.tenant, waiter.tokens, now)
                went += 1
        if went:
            self.pace.went(went, now)
        return went

    def expired(self, now: float) -> Iterator[Waiter]:
        """Those whose deadline is over; they stop waiting."""
        while self._deadlines and self._deadlines[0][0] <= now:
            waiter = heapq.heappop(self._deadlines)[2]
            if waiter.waits:
                self.leave(waiter)
                yield waiter

    def next_deadline(self) -> float | None:
        """When the next one expires; None when nobody waits."""
        while self._deadlines and not self._deadlines[0][2].waits:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def ahead(self, priority: int) -> int:
        """How many wait whom a request of this priority would not overtake."""
        return sum(band.count for rank, band in self._bands.items() if rank >= priority)

    def full(self, now: float) -> Rejection:
        """There is no room: 429, with the queue's own estimate of when there will be."""
        return Rejection(
            429,
            "too many requests are waiting",
            reason="rejected-saturated",
            retry_after_s=self.wait_s(now),
        )

    def wait_s(self, now: float) -> int:
        """Whole seconds until all who wait went on, at most as long as one may wait."""
        return self.pace.wait_s(self.count, now, most_s=self.settings.timeout_s)

    def __iter__(self) -> Iterator[Waiter]:
        for band in self._bands.values():
            yield from band

    def _put(self, waiter: Waiter) -> None:
        self._numbers += 1
        waiter.number = self._numbers
        waiter.waits = True
        self.count += 1
        self.bytes += waiter.bytes
        band = self._bands.get(waiter.priority)
        if band is None:
            settings = self.settings
            band = Band(settings.order, settings.fairness, self.turns)
            self._bands[waiter.priority] = band
        band.add(waiter)
        heapq.heappush(self._deadlines, (waiter.deadline, waiter.number, waiter))

    def _fits(self, waiter: Waiter) -> bool:
        settings = self.settings
        return (
            self.count < settings.max_requests and self.bytes + waiter.bytes <= settings.max_bytes
        )

    def _lowest(self, *, below: int) -> Waiter | None:
        priority = min(self._bands, default=below)
        return self._bands[priority].last() if priority < below else None
