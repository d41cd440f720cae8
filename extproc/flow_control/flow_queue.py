"""Flow queues: queued requests by endpoint set and tenant.

Endpoint sets: the endpoints that can serve a queued request, as bits.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, Literal

import msgspec


class EndpointBits(msgspec.Struct, frozen=True):
    """Translates targets and addresses into bits, one bit for each endpoint of the pool.

    Drivers replace it by another object when endpoints, or what they serve, change.

    Attributes:
        for_target: Bits of the endpoints that can serve a target; 0 where none can.
        named: Bits of the endpoints at these addresses.
        version: Source of the bits; the driver compares it to detect changes.
    """

    for_target: Callable[[Any], int]
    named: Callable[[Sequence[str]], int]
    version: object = None


class EndpointSet:
    """Endpoints that can serve some of the queued requests. Compared by identity.

    Attributes:
        bits: Of these endpoints; 0 if unknown, or if none can serve them.
        targets: Targets that are waited for and can be served by them (count).
    """

    __slots__ = ("bits", "targets")

    def __init__(self, bits: int = 0) -> None:
        self.bits = bits
        self.targets = 0


class _TargetEntry:
    """A target with its endpoint set, and the number of requests queued for it."""

    __slots__ = ("count", "endpoints")

    def __init__(self, endpoints: EndpointSet) -> None:
        self.endpoints = endpoints
        self.count = 0


class EndpointSets:
    """The endpoint set of every target that has queued requests.

    Without bits every target has a set of its own.
    """

    def __init__(self) -> None:
        self._bits: EndpointBits | None = None
        self._targets: dict[Hashable, _TargetEntry] = {}
        self._by_bits: dict[int, EndpointSet] = {}

    def enter(self, target: Hashable) -> EndpointSet:
        """Count a request that joins the queue, and find its endpoint set."""
        entry = self._targets.get(target)
        if entry is None:
            entry = self._targets[target] = _TargetEntry(self._find(target))
            entry.endpoints.targets += 1
        entry.count += 1
        return entry.endpoints

    def leave(self, target: Hashable) -> None:
        """Remove a request that left the queue."""
        entry = self._targets[target]
        entry.count -= 1
        if not entry.count:
            del self._targets[target]
            endpoints = entry.endpoints
            endpoints.targets -= 1
            if not endpoints.targets:
                self._by_bits.pop(endpoints.bits, None)

    def current(self, target: Hashable) -> EndpointSet:
        """The endpoint set of a target that has queued requests."""
        return self._targets[target].endpoints

    def adopt(self, bits: EndpointBits | None) -> bool:
        """Replace the bits; returns whether they changed.

        A set whose first target gets other bits goes on with these, so that few requests change
        their set when an endpoint comes or goes.
        """
        if bits is self._bits:
            return False
        self._bits = bits
        self._by_bits = {}
        inherited: set[EndpointSet] = set()
        for target, entry in self._targets.items():
            before = entry.endpoints
            wanted = 0 if bits is None else bits.for_target(target)
            endpoint_set = None if bits is None else self._by_bits.get(wanted)
            if endpoint_set is None:
                endpoint_set = EndpointSet() if before in inherited else before
                inherited.add(endpoint_set)
                endpoint_set.bits, endpoint_set.targets = wanted, 0
                if bits is not None:
                    self._by_bits[wanted] = endpoint_set
            endpoint_set.targets += 1
            entry.endpoints = endpoint_set
        return True

    def named(self, addresses: Sequence[str]) -> int:
        """Bits of the endpoints at these addresses; 0 if the bits are unknown."""
        return self._bits.named(addresses) if self._bits is not None and addresses else 0

    def _find(self, target: Hashable) -> EndpointSet:
        if self._bits is None:
            return EndpointSet()
        bits = self._bits.for_target(target)
        endpoint_set = self._by_bits.get(bits)
        if endpoint_set is None:
            endpoint_set = self._by_bits[bits] = EndpointSet(bits)
        return endpoint_set


#: In which order requests of one tenant go on.
Order = Literal["fcfs", "edf", "slo"]


#: Of a request that does not wait yet.
_NO_ENDPOINTS = EndpointSet()


class QueuedItem:
    """A queued request.

    Args:
        arrived: When it began to wait.
        deadline: When it ends.

    Attributes:
        tenant: Tenant that sent it.
        priority: Of its objective.
        target: What it can be served by: requests of equal targets can be served by the same
            endpoints.
        bytes: Of its body.
        tokens: Its prompt's estimated tokens.
        slo_s: Seconds to the first token it asks for; infinity for none.
        endpoints: The endpoints that can serve its target; the queue's business.
        toward: The endpoint it would rather have; empty for any.
        waits: Whether it still does.
        number: Of those that ever waited, in the order in which they came.
        place: Changes whenever it is put into another lane.
    """

    __slots__ = (
        "arrived",
        "bytes",
        "deadline",
        "endpoints",
        "number",
        "place",
        "priority",
        "slo_s",
        "target",
        "tenant",
        "tokens",
        "toward",
        "waits",
    )

    def __init__(
        self,
        *,
        arrived: float,
        deadline: float,
        tenant: str = "",
        priority: int = 0,
        target: Hashable = "",
        size: int = 0,
        tokens: int = 0,
        slo_s: float = math.inf,
    ) -> None:
        self.arrived = arrived
        self.deadline = deadline
        self.tenant = tenant
        self.priority = priority
        self.target = target
        self.bytes = size
        self.tokens = tokens
        self.slo_s = slo_s
        self.endpoints = _NO_ENDPOINTS
        self.toward = ""
        self.waits = False
        self.number = 0
        self.place = 0

    def rank(self, order: Order) -> float:
        """The rank within the tenant: lower goes first."""
        if order == "edf":
            return self.deadline
        if order == "slo":
            return self.arrived + self.slo_s
        return self.arrived


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
