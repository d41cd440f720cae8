"""The requests of one priority, by tenant and target."""

from __future__ import annotations

import heapq
from collections.abc import Container, Hashable, Iterator

from extproc.holding.turns import Turns
from extproc.holding.waiter import Fairness, Order, Waiter

#: Rank, number, place and who.
_Entry = tuple[float, int, int, Waiter]

#: What can be served by the same endpoints, and which of them it would rather have; None for all
#: that can be served by the same.
Way = tuple[Hashable, str | None]

#: A tenant's place among others: its turn, and rank and number of its head, which is the last.
_Key = tuple[float, float, int, Waiter]


class Lane:
    """Requests of one tenant for one target, first the one that goes next.

    A request that stops waiting stays where it is until it comes to the front; when half of a lane
    are such, the lane is cleaned, so that memory follows what waits.
    """

    __slots__ = ("_gone", "_heap")

    def __init__(self) -> None:
        self._heap: list[_Entry] = []
        self._gone = 0

    def add(self, rank: float, waiter: Waiter) -> None:
        """Put one in its place."""
        heapq.heappush(self._heap, (rank, waiter.number, waiter.place, waiter))

    def head(self) -> _Entry | None:
        """Who goes next; None when nobody waits."""
        heap = self._heap
        while heap and not _here(heap[0]):
            heapq.heappop(heap)
            self._gone -= 1
        return heap[0] if heap else None

    def left(self) -> None:
        """One of them stopped waiting."""
        self._gone += 1
        if self._gone * 2 > len(self._heap):
            self._heap = [entry for entry in self._heap if _here(entry)]
            heapq.heapify(self._heap)
            self._gone = 0

    def last(self) -> _Entry | None:
        """Who would go last; None when nobody waits."""
        return max((entry for entry in self._heap if _here(entry)), default=None)

    def __len__(self) -> int:
        return len(self._heap) - self._gone

    def __iter__(self) -> Iterator[Waiter]:
        return (entry[3] for entry in self._heap if _here(entry))


def _here(entry: _Entry) -> bool:
    """Whether its waiter still waits, and in this place."""
    return entry[3].waits and entry[3].place == entry[2]


class Band:
    """All requests of one priority.

    Args:
        order: Within a tenant.
        fairness: Among tenants.
        turns: What tenants attained; shared by all bands.
    """

    def __init__(self, order: Order, fairness: Fairness, turns: Turns) -> None:
        self._order: Order = order
        self._fairness = fairness
        self._turns = turns
        self._tenants: dict[str, dict[Way, Lane]] = {}
        self.count = 0

    def add(self, waiter: Waiter) -> None:
        """One begins to wait."""
        lanes = self._tenants.setdefault(waiter.tenant, {})
        way = (waiter.target, waiter.toward)
        lane = lanes.get(way)
        if lane is None:
            lane = lanes[way] = Lane()
        waiter.place += 1
        lane.add(waiter.rank(self._order), waiter)
        self.count += 1

    def left(self, waiter: Waiter) -> None:
        """One stopped waiting where it is."""
        self.count -= 1
        waiter.place += 1
        lanes = self._tenants[waiter.tenant]
        way = (waiter.target, waiter.toward)
        lane = lanes[way]
        lane.left()
        if lane.head() is None:
            del lanes[way]
            if not lanes:
                del self._tenants[waiter.tenant]

    def heads(self, blocked: Container[Way]) -> Iterator[Waiter]:
        """Who goes next among those whose way is not blocked, again and again.

        Tenants come in the order of what they attained or of their last turn, and those that are
        equal in the order of their heads; within a tenant the head of lowest rank goes. Whoever
        asks lets each go on or blocks its way before asking for the next.
        """
        line = [(key, tenant) for tenant in self._tenants if (key := self._key(tenant, blocked))]
        heapq.heapify(line)
        while line:
            key, tenant = line[0]
            found = self._key(tenant, blocked)
            if found is None:
                heapq.heappop(line)
            elif found != key:
                heapq.heapreplace(line, (found, tenant))
            else:
                yield found[3]

    def _key(self, tenant: str, blocked: Container[Way]) -> _Key | None:
        """Its place among tenants, and the one that goes next; None where nobody can."""
        best: _Entry | None = None
        for way, lane in self._tenants[tenant].items() if tenant in self._tenants else ():
            if blocked and (way in blocked or (way[0], None) in blocked):
                continue
            head = lane.head()
            if head is not None and (best is None or head < best):
                best = head
        return None if best is None else (self._turn(tenant), best[0], best[1], best[3])

    def last(self) -> Waiter | None:
        """Who would go last: of the tenant with most waiting, the last of its order."""
        if not self._tenants:
            return None
        lanes = max(self._tenants.values(), key=lambda lanes: sum(map(len, lanes.values())))
        entries = [entry for lane in lanes.values() if (entry := lane.last()) is not None]
        return max(entries)[3] if entries else None

    def __iter__(self) -> Iterator[Waiter]:
        for lanes in self._tenants.values():
            for lane in lanes.values():
                yield from lane

    def _turn(self, tenant: str) -> float:
        if self._fairness == "least-served":
            return self._turns.standing(tenant)
        return self._turns.last(tenant) if self._fairness == "round-robin" else 0.0
