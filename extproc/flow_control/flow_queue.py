"""Flow queues: queued requests by target and tenant."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator

from extproc.flow_control.queued_item import QueuedItem

#: Rank, number, place and the request.
_Entry = tuple[float, int, int, QueuedItem]

#: A tenant's place in a line: its turn, then rank and number of its head, then the tenant.
QueuePlace = tuple[float, float, int, str]

#: Entries that may be stale before a heap is made anew (count).
_SLACK = 16


class FlowQueue:
    """Requests of a tenant for a target, in dispatch order.

    A request that stops waiting stays where it is until it comes to the front; when half of a lane
    are such, the lane is cleaned, so that memory follows what waits.

    Attributes:
        key: Its valid entry in the line.
    """

    __slots__ = ("_gone", "_heap", "key")

    def __init__(self) -> None:
        self._heap: list[_Entry] = []
        self._gone = 0
        self.key: QueuePlace | None = None

    def add(self, rank: float, waiter: QueuedItem) -> bool:
        """Put a request in its place; returns whether it is first."""
        heapq.heappush(self._heap, (rank, waiter.number, waiter.place, waiter))
        return self._heap[0][3] is waiter

    def head(self) -> _Entry | None:
        """The request that goes next; None when none waits."""
        heap = self._heap
        while heap:
            entry = heap[0]
            waiter = entry[3]
            # `_here`, written out: each look at who goes next asks it.
            if waiter.waits and waiter.place == entry[2]:
                return entry
            heapq.heappop(heap)
            self._gone -= 1
        return None

    def discard(self) -> None:
        """Count a request that left the queue."""
        self._gone += 1
        if self._gone * 2 > len(self._heap):
            self._heap = [entry for entry in self._heap if _here(entry)]
            heapq.heapify(self._heap)
            self._gone = 0

    def __len__(self) -> int:
        return len(self._heap) - self._gone

    def __iter__(self) -> Iterator[QueuedItem]:
        return (entry[3] for entry in self._heap if _here(entry))


class TenantQueues:
    """The flow queues of a target, ordered by tenant turn.

    The turn of a tenant mostly goes up, which is noticed when its lane comes to the front; where it
    goes down `refresh` must be called, and `rebuild` where it goes down for many.

    Args:
        turn: The turn of a tenant: the lowest goes first.
    """

    __slots__ = ("_heap", "_lanes", "_turn")

    def __init__(self, turn: Callable[[str], float]) -> None:
        self._turn = turn
        self._lanes: dict[str, FlowQueue] = {}
        self._heap: list[QueuePlace] = []

    def add(self, rank: float, waiter: QueuedItem) -> bool:
        """Put a request in its place; returns whether its tenant is new here."""
        tenant = waiter.tenant
        lane = self._lanes.get(tenant)
        new = lane is None
        if lane is None:
            lane = self._lanes[tenant] = FlowQueue()
        if lane.add(rank, waiter):
            self._place(tenant, lane)
        return new

    def remove(self, tenant: str) -> bool:
        """A request of a tenant stopped waiting; returns whether it was its last one here."""
        lane = self._lanes[tenant]
        lane.discard()
        if len(lane):
            return False
        del self._lanes[tenant]
        self._clean()
        return True

    def key(self) -> QueuePlace | None:
        """The place of the request that goes next; None when none waits."""
        heap, lanes = self._heap, self._lanes
        while heap:
            key = heap[0]
            tenant = key[3]
            lane = lanes.get(tenant)
            if lane is None or lane.key != key:
                heapq.heappop(heap)
                continue
            fresh = self._key_of(tenant, lane)
            if fresh == key:
                return key
            lane.key = fresh
            heapq.heapreplace(heap, fresh)
            if heap[0] is fresh:
                return fresh
        return None

    def head(self, key: QueuePlace) -> QueuedItem:
        """The request at the place that `key` returned."""
        head = self._lanes[key[3]].head()
        if head is None:
            raise LookupError("no request waits at this place; call head directly after key")
        return head[3]

    def refresh(self, tenant: str) -> None:
        """The turn of a tenant went down."""
        self._place(tenant, self._lanes[tenant])

    def rebuild(self) -> None:
        """The turns of many tenants went down."""
        for tenant, lane in self._lanes.items():
            lane.key = self._key_of(tenant, lane)
        self._heap = [lane.key for lane in self._lanes.values() if lane.key is not None]
        heapq.heapify(self._heap)

    def flow_queue(self, tenant: str) -> FlowQueue:
        """The requests of a tenant that has some here."""
        return self._lanes[tenant]

    def __len__(self) -> int:
        return len(self._lanes)

    def __iter__(self) -> Iterator[QueuedItem]:
        for lane in self._lanes.values():
            yield from lane

    def _place(self, tenant: str, lane: FlowQueue) -> None:
        fresh = self._key_of(tenant, lane)
        if lane.key is None or fresh < lane.key:
            lane.key = fresh
            heapq.heappush(self._heap, fresh)
            self._clean()

    def _clean(self) -> None:
        if len(self._heap) > 2 * len(self._lanes) + _SLACK:
            self.rebuild()

    def _key_of(self, tenant: str, lane: FlowQueue) -> QueuePlace:
        head = lane.head()
        if head is None:
            raise LookupError("an empty lane has no place; remove it with its last request")
        return self._turn(tenant), head[0], head[1], tenant


def _here(entry: _Entry) -> bool:
    """True if the waiter is still queued at this place."""
    return entry[3].waits and entry[3].place == entry[2]
