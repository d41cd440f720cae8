"""Flow queues: queued requests by tenant and by the set of endpoints that can serve them."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import islice
from typing import Any, Literal

import msgspec


class EndpointBits(msgspec.Struct, frozen=True):
    """Translates targets and addresses into bits, one bit for each endpoint of the pool.

    Drivers replace it by another object when endpoints, or what they serve, change.

    Attributes:
        for_target: Bits of the endpoints that can serve a target; 0 where none can.
        version: Source of the bits; the driver compares it to detect changes.
        adapter_of: LoRA adapter of a target; empty for a base model.
        profile_of: Scheduling profile that a target names; empty for none. Another profile may choose
            among other endpoints of the same bits.
    """

    for_target: Callable[[Any], int]
    for_addresses: Callable[[Sequence[str]], int]
    version: object = None
    adapter_of: Callable[[Any], str] = lambda _: ""
    profile_of: Callable[[Any], str] = lambda _: ""


class EndpointSet:
    """Endpoints that can serve queued requests for an adapter or none. Compared by identity.

    Attributes:
        adapter: Adapter that the requests ask for; empty for a base model.
        profile: Scheduling profile that the requests name; empty for none.
        bits: A bit for each of these endpoints; 0 if unknown, or if none can serve them.
        targets: Targets that are waited for and can be served by them (count).
    """

    __slots__ = ("adapter", "bits", "profile", "targets")

    def __init__(self, adapter: str = "", bits: int = 0, profile: str = "") -> None:
        self.adapter = adapter
        self.profile = profile
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
        self._by_bits: dict[tuple[str, int, str], EndpointSet] = {}

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
                self._by_bits.pop((endpoints.adapter, endpoints.bits, endpoints.profile), None)

    def current(self, target: Hashable) -> EndpointSet:
        """The endpoint set of a target that has queued requests."""
        return self._targets[target].endpoints

    def replace_bits(self, bits: EndpointBits | None) -> bool:
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
            group = _group_of(target, bits)
            endpoint_set = None if bits is None else self._by_bits.get(group)
            if endpoint_set is None:
                endpoint_set = EndpointSet() if before in inherited else before
                inherited.add(endpoint_set)
                endpoint_set.adapter, endpoint_set.bits, endpoint_set.profile = group
                endpoint_set.targets = 0
                if bits is not None:
                    self._by_bits[group] = endpoint_set
            endpoint_set.targets += 1
            entry.endpoints = endpoint_set
        return True

    def for_addresses(self, addresses: Sequence[str]) -> int:
        """Bits of the endpoints at these addresses; 0 if the bits are unknown."""
        return self._bits.for_addresses(addresses) if self._bits is not None and addresses else 0

    def _find(self, target: Hashable) -> EndpointSet:
        if self._bits is None:
            return EndpointSet()
        group = _group_of(target, self._bits)
        endpoint_set = self._by_bits.get(group)
        if endpoint_set is None:
            endpoint_set = self._by_bits[group] = EndpointSet(*group)
        return endpoint_set


def _group_of(target: Hashable, bits: EndpointBits | None) -> tuple[str, int, str]:
    """Adapter, endpoint bits and profile of a target."""
    if bits is None:
        return "", 0, ""
    return bits.adapter_of(target), bits.for_target(target), bits.profile_of(target)


#: In which order requests of one tenant go on.
Order = Literal["fcfs", "edf", "slo"]


#: Share of its longest wait for which a request may wait for one endpoint while another one has a
#: place.
_PREFERENCE_SHARE = 0.5

#: Of a request that does not wait yet.
_NO_ENDPOINTS = EndpointSet()


class QueuedItem:
    """A queued request.

    Args:
        arrived: Monotonic seconds at which it began to wait.
        deadline: Monotonic seconds at which its wait ends.

    Attributes:
        target: Key of the endpoints that can serve it, such as its model, adapter and subset.
        slo_s: Seconds to the first token it asks for; infinity for none.
        endpoints: The endpoints that can serve its target; written by the queue.
        preference_ends: Monotonic seconds at which it stops waiting for a preferred endpoint.
        preferred_endpoint: The endpoint it would rather have; empty for any.
        has_preferred: Whether it has preferred an endpoint at any time.
        is_queued: False once it left the queue.
        place: Changes whenever it is put into another flow queue.
    """

    __slots__ = (
        "arrived",
        "bytes",
        "deadline",
        "endpoints",
        "has_preferred",
        "is_queued",
        "number",
        "place",
        "preference_ends",
        "preferred_endpoint",
        "priority",
        "slo_s",
        "target",
        "tenant",
        "tokens",
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
        self.preference_ends = arrived + _PREFERENCE_SHARE * (deadline - arrived)
        self.tenant = tenant
        self.priority = priority
        self.target = target
        self.bytes = size
        self.tokens = tokens
        self.slo_s = slo_s
        self.endpoints = _NO_ENDPOINTS
        self.preferred_endpoint = ""
        self.has_preferred = False
        self.is_queued = False
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

_EMPTY = "an empty flow queue has no place; remove it with its last request"


class FlowQueue:
    """Requests of a tenant for a target, in dispatch order.

    Most requests come in that order, and stand in a line that is read from its front; a heap, which
    reads scattered memory for each request, holds the others. A request that stops waiting stays where
    it is until it comes to the front; when half of the entries are such, they are sorted anew, so that
    memory follows what waits.

    Attributes:
        key: Its valid entry in the line of tenants.
    """

    __slots__ = ("_front", "_gone", "_heap", "_line", "key")

    def __init__(self) -> None:
        self._line: list[_Entry] = []
        #: Entries of the line that left (count).
        self._front = 0
        self._heap: list[_Entry] = []
        #: Entries of requests that left (count).
        self._gone = 0
        self.key: QueuePlace | None = None

    def add(self, rank: float, item: QueuedItem) -> bool:
        """Put a request in its place; returns whether it may be first."""
        entry = rank, item.number, item.place, item
        line = self._line
        if not line or line[-1] < entry:
            line.append(entry)
            return len(line) - self._front == 1
        heapq.heappush(self._heap, entry)
        return self._heap[0] is entry

    def head(self) -> _Entry | None:
        """The request that goes next; None when none waits."""
        line, front = self._line, self._front
        if front < len(line) and not self._heap:
            entry = line[front]
            item = entry[3]
            # `_here`, written out: each look at who goes next asks it.
            if item.is_queued and item.place == entry[2]:
                return entry
        return self._find_head()

    def _find_head(self) -> _Entry | None:
        """As `head`, past entries of requests that left."""
        line, heap, front = self._line, self._heap, self._front
        while front < len(line) and not _here(line[front]):
            front += 1
            self._gone -= 1
        self._front = front
        while heap and not _here(heap[0]):
            heapq.heappop(heap)
            self._gone -= 1
        if front == len(line):
            return heap[0] if heap else None
        return heap[0] if heap and heap[0] < line[front] else line[front]

    def discard(self, item: QueuedItem) -> bool:
        """Remove a request that left its place; returns whether it was the last."""
        line, front = self._line, self._front
        if front < len(line) and line[front][3] is item:
            self._front = front = front + 1
            if front > _SLACK and front * 2 > len(line):
                del line[:front]
                self._front = front = 0
        else:
            self._gone += 1
        entries = len(line) - front + len(self._heap)
        if self._gone * 2 <= entries and entries:
            return False
        self._line = sorted(self._entries())
        self._heap.clear()
        self._front = self._gone = 0
        return not self._line

    def first(self) -> QueuedItem:
        """The request that goes next; there must be one."""
        head = self.head()
        if head is None:
            raise LookupError(_EMPTY)
        return head[3]

    def __iter__(self) -> Iterator[QueuedItem]:
        return iter([entry[3] for entry in self._entries()])

    def _entries(self) -> list[_Entry]:
        """Entries of the requests that wait, in any order."""
        # `_here`, written out: all are listed whenever an endpoint comes or goes.
        return [
            entry
            for entries in (islice(self._line, self._front, None), self._heap)
            for entry in entries
            if entry[3].is_queued and entry[3].place == entry[2]
        ]


class TenantQueues:
    """The flow queues of a target, ordered by tenant turn.

    The turn of a tenant mostly goes up, which is noticed when its flow queue comes to the front;
    where it goes down `refresh` must be called, and `rebuild` where it goes down for many.

    Args:
        turn: The turn of a tenant: the lowest goes first.
    """

    __slots__ = ("_flow_queues", "_heap", "_turn")

    def __init__(self, turn: Callable[[str], float]) -> None:
        self._turn = turn
        self._flow_queues: dict[str, FlowQueue] = {}
        self._heap: list[QueuePlace] = []

    def add(self, rank: float, item: QueuedItem) -> bool:
        """Put a request in its place; returns whether its tenant is new here."""
        tenant = item.tenant
        flow_queue = self._flow_queues.get(tenant)
        new = flow_queue is None
        if flow_queue is None:
            flow_queue = self._flow_queues[tenant] = FlowQueue()
        if flow_queue.add(rank, item):
            self._place(tenant, flow_queue)
        return new

    def remove(self, item: QueuedItem) -> bool:
        """Remove a request; returns whether it was the last one of its tenant here."""
        tenant = item.tenant
        if not self._flow_queues[tenant].discard(item):
            return False
        del self._flow_queues[tenant]
        self._clean()
        return True

    def key(self) -> QueuePlace | None:
        """The place of the request that goes next; None when none waits."""
        heap, flow_queues, turn = self._heap, self._flow_queues, self._turn
        while heap:
            key = heap[0]
            _, rank, number, tenant = key
            flow_queue = flow_queues.get(tenant)
            if flow_queue is None or flow_queue.key is not key:
                heapq.heappop(heap)
                continue
            # `_key_of`, written out: it runs twice for every request that leaves.
            head = flow_queue.head()
            if head is None:
                raise LookupError(_EMPTY)
            first_turn = turn(tenant)
            if head[1] == number and head[0] == rank and first_turn == key[0]:
                return key
            flow_queue.key = fresh = first_turn, head[0], head[1], tenant
            heapq.heapreplace(heap, fresh)
            if heap[0] is fresh:
                return fresh
        return None

    def head(self, key: QueuePlace) -> QueuedItem:
        """The request at the place that `key` has just returned."""
        return self._flow_queues[key[3]].first()

    def refresh(self, tenant: str) -> None:
        """Sort a tenant anew after its turn went down."""
        self._place(tenant, self._flow_queues[tenant])

    def rebuild(self) -> None:
        """Sort all tenants anew after the turns of many went down."""
        for tenant, flow_queue in self._flow_queues.items():
            flow_queue.key = self._key_of(tenant, flow_queue)
        self._heap = [
            flow_queue.key
            for flow_queue in self._flow_queues.values()
            if flow_queue.key is not None
        ]
        heapq.heapify(self._heap)

    def flow_queue(self, tenant: str) -> FlowQueue:
        """The requests of a tenant that has some here."""
        return self._flow_queues[tenant]

    def __len__(self) -> int:
        return len(self._flow_queues)

    def __iter__(self) -> Iterator[QueuedItem]:
        for flow_queue in self._flow_queues.values():
            yield from flow_queue

    def _place(self, tenant: str, flow_queue: FlowQueue) -> None:
        fresh = self._key_of(tenant, flow_queue)
        if flow_queue.key is None or fresh < flow_queue.key:
            flow_queue.key = fresh
            heapq.heappush(self._heap, fresh)
            self._clean()

    def _clean(self) -> None:
        if len(self._heap) > 2 * len(self._flow_queues) + _SLACK:
            self.rebuild()

    def _key_of(self, tenant: str, flow_queue: FlowQueue) -> QueuePlace:
        head = flow_queue.head()
        if head is None:
            raise LookupError(_EMPTY)
        return self._turn(tenant), head[0], head[1], tenant


def _here(entry: _Entry) -> bool:
    """True if the item is still queued at this place."""
    return entry[3].is_queued and entry[3].place == entry[2]


def first_time(heap: list[tuple[float, int, QueuedItem]]) -> float | None:
    """The first time of a heap of queued requests; None for an empty one."""
    while heap and not heap[0][2].is_queued:
        heapq.heappop(heap)
    return heap[0][0] if heap else None


def without_gone(
    heap: list[tuple[float, int, QueuedItem]], count: int
) -> list[tuple[float, int, QueuedItem]]:
    """The heap without requests that left, where most of its entries are of such."""
    if len(heap) <= 2 * count + 64:
        return heap
    heap = [entry for entry in heap if entry[2].is_queued]
    heapq.heapify(heap)
    return heap
