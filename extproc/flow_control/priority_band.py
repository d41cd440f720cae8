"""Priority band: queued requests of the same priority, by endpoint set and tenant.

Sweep: order of dispatch and blocked endpoints. Queue lengths: order of displacement.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Literal

import msgspec

from extproc.flow_control.fair_share import FairShare
from extproc.flow_control.flow_queue import (
    EndpointSet,
    Order,
    QueuedItem,
    QueuePlace,
    TenantQueues,
)

#: Whose turn it is among tenants of one priority.
Fairness = Literal["round-robin", "least-served", "none"]

#: Priority of requests, in the range of InferenceObjectives.
Priority = Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)]

_Bound = Annotated[int, msgspec.Meta(ge=1)]


class BandSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Settings of a priority of flow control.

    Attributes:
        max_requests: Requests of the priority that may wait for a pool (count). Null: only the bound
            of all priorities.
        max_bytes: Bytes of the bodies of these requests. Null: only the bound of all priorities.
        order: Order of the requests of a tenant. Null: that of all priorities.
        fairness: Order of the tenants. Null: that of all priorities.
    """

    max_requests: _Bound | None = None
    max_bytes: _Bound | None = None
    order: Order | None = None
    fairness: Fairness | None = None


class PrioritySettings(BandSettings, frozen=True, kw_only=True):
    """Settings of one priority.

    Attributes:
        priority: The priority, in `bands` only.
    """

    priority: Priority


class Shortage:
    """Room that bounds lack for a new request; false once there is enough."""

    __slots__ = ("bytes", "requests")

    def __init__(self, requests: int, num_bytes: int) -> None:
        self.requests = requests
        self.bytes = num_bytes

    def __bool__(self) -> bool:
        return self.requests > 0 or self.bytes > 0

    def reduce(self, item: QueuedItem) -> None:
        """Add the room of a request that is displaced."""
        self.requests -= 1
        self.bytes -= item.bytes

    def exceeds(self, bands: Sequence[PriorityBand]) -> bool:
        """True if all requests of these bands have less room."""
        return self.requests > sum(band.count for band in bands) or (
            self.bytes > sum(band.bytes for band in bands)
        )


def find_shortage(
    item: QueuedItem, waiting: tuple[int, int], bounds: tuple[int | None, int | None]
) -> Shortage | None:
    """Room that bounds lack for a new request; None where it fits.

    Where bounds were lowered below what waits, it grows no further: no more is displaced for a
    request than it takes itself.

    Args:
        waiting: Requests that wait (count), and bytes of their bodies.
        bounds: Upper bounds of both; None for none.
    """
    requests = num_bytes = 0
    if bounds[0] is not None:
        requests = waiting[0] + 1 - max(bounds[0], waiting[0])
    if bounds[1] is not None:
        num_bytes = waiting[1] + item.bytes - max(bounds[1], waiting[1])
    return Shortage(requests, num_bytes) if requests > 0 or num_bytes > 0 else None


#: The endpoints that can serve a request, and the address of the one it would rather have; empty
#: for any of them.
FlowKey = tuple[EndpointSet, str]


class Sweep:
    """A sweep over all queued requests, possibly in several calls, and what it blocked.

    Attributes:
        priority: Of the band that is looked at; the bands above were.
        has_blocks: Whether anything is blocked in this band.
    """

    def __init__(self) -> None:
        self.priority = math.inf
        self.has_blocks = False
        self._sets: set[EndpointSet] = set()
        self._flow_keys: set[FlowKey] = set()
        self._busy = 0
        #: Bits of the endpoint sets on which this band is held.
        self._held: set[int] = set()
        #: Endpoints whose adapter slots this band waits for, and the bands above (bits).
        self._slots_wanted = self._slots_reserved = 0

    def enter(self, priority: float) -> None:
        """Go on to a band of this priority, for which endpoints may have a place."""
        self.priority = priority
        self._slots_reserved |= self._slots_wanted
        self.has_blocks = bool(self._slots_reserved)
        self._sets.clear()
        self._flow_keys.clear()
        self._held.clear()
        self._busy = self._slots_wanted = 0

    def block(self, flow_key: FlowKey) -> None:
        """Block the requests that prefer the same endpoint."""
        self.has_blocks = True
        self._flow_keys.add(flow_key)

    def block_set(self, endpoints: EndpointSet, busy: int) -> None:
        """Block all that can be served by the same endpoints, or only by busy ones (bits)."""
        self.has_blocks = True
        self._sets.add(endpoints)
        self._busy |= busy

    def hold(self, endpoints: EndpointSet) -> None:
        """Block all that can be served by the same endpoints, whatever adapter they ask for.

        Not those that only some of them can serve, as these may be less saturated.
        """
        self._held.add(endpoints.bits)

    def reserve_slots(self, endpoints: EndpointSet) -> None:
        """Let lower bands send no adapter to these endpoints, so that a slot becomes free."""
        self._slots_wanted |= endpoints.bits

    def is_blocked(self, flow_key: FlowKey) -> bool:
        """True if the requests of this target are blocked."""
        endpoints = flow_key[0]
        bits = endpoints.bits
        unusable = self._busy | self._slots_reserved if endpoints.adapter else self._busy
        return (
            endpoints in self._sets
            or (bits != 0 and (not bits & ~unusable or bits in self._held))
            or flow_key in self._flow_keys
        )


class _SingleTenantQueues:
    """Flow keys with requests of a single tenant: its turn moves all of them alike.

    Args:
        entries: Rank and number of each head, and the flow key.
    """

    def __init__(self, entries: list[tuple[float, int, FlowKey]]) -> None:
        heapq.heapify(entries)
        self._heap = entries

    def key(
        self, queues_by_key: Mapping[FlowKey, TenantQueues], sweep: Sweep
    ) -> tuple[QueuePlace, FlowKey] | None:
        """The place of the request that goes next, and its flow key."""
        heap = self._heap
        while heap:
            rank, number, flow_key = heap[0]
            queues = queues_by_key.get(flow_key)
            key = None if queues is None or sweep.is_blocked(flow_key) else queues.key()
            if key is None:
                heapq.heappop(heap)
            elif (key[1], key[2]) != (rank, number):
                heapq.heapreplace(heap, (key[1], key[2], flow_key))
            else:
                return key, flow_key
        return None


def next_items(queues_by_key: Mapping[FlowKey, TenantQueues], sweep: Sweep) -> Iterator[QueuedItem]:
    """See `PriorityBand.next_items`.

    Args:
        queues_by_key: Requests leave them meanwhile, and come only to what is blocked.
    """
    top, groups = _first_places(queues_by_key, sweep)
    while top:
        key, single_key = top[0]
        head: tuple[QueuePlace, FlowKey] | None = None
        if single_key is None:
            head = groups[key[3]].key(queues_by_key, sweep)
        else:
            queues = queues_by_key.get(single_key)
            is_blocked = sweep.has_blocks and sweep.is_blocked(single_key)
            place = None if queues is None or is_blocked else queues.key()
            if place is not None:
                head = place, single_key
        if head is None:
            heapq.heappop(top)
            continue
        if head[0] != key:
            entry = (head[0], single_key)
            heapq.heapreplace(top, entry)
            if top[0] is not entry:
                continue
        yield queues_by_key[head[1]].head(head[0])


def _first_places(
    queues_by_key: Mapping[FlowKey, TenantQueues], sweep: Sweep
) -> tuple[list[tuple[QueuePlace, FlowKey | None]], Mapping[str, _SingleTenantQueues]]:
    """A heap of the first places and their flow keys, and the flow keys of single tenants.

    None for a flow key stands for those in which only the tenant of that place waits. Comparisons end
    with the number, which no two requests share.
    """
    single: dict[str, list[tuple[float, int, FlowKey]]] = {}
    top: list[tuple[QueuePlace, FlowKey | None]] = []
    for flow_key, queues in queues_by_key.items():
        key = None if sweep.is_blocked(flow_key) else queues.key()
        if key is None:
            continue
        if len(queues) == 1:
            single.setdefault(key[3], []).append((key[1], key[2], flow_key))
        else:
            top.append((key, flow_key))
    groups = {tenant: _SingleTenantQueues(entries) for tenant, entries in single.items()}
    for group in groups.values():
        head = group.key(queues_by_key, sweep)
        if head is not None:
            top.append((head[0], None))
    heapq.heapify(top)
    return top, groups


#: Minus rank and number: the request that goes last comes first.
_LastEntry = tuple[float, int, QueuedItem]

#: Entries that may be stale before a heap is dropped (count).
_LENGTH_SLACK = 64


class QueueLengths:
    """Tenants ordered by their queued requests (count).

    What goes last matters only where requests are displaced, so tenants are grouped by count, and a
    tenant's requests sorted, when that is first wanted, and kept so from then on.

    Args:
        waiting: All requests of a tenant that wait.
    """

    def __init__(self, waiting: Callable[[str], Iterable[tuple[float, QueuedItem]]]) -> None:
        self._waiting = waiting
        self._counts: dict[str, int] = {}
        self._by_count: dict[int, dict[str, None]] | None = None
        self._most = 0
        self._last: dict[str, list[_LastEntry]] = {}

    def add(self, rank: float, item: QueuedItem) -> None:
        """Add a request that begins to wait."""
        tenant = item.tenant
        self._count(tenant, 1)
        heap = self._last.get(tenant)
        if heap is not None:
            heapq.heappush(heap, (-rank, -item.number, item))

    def remove(self, tenant: str) -> None:
        """Remove a request that stopped waiting."""
        self._count(tenant, -1)
        if not self._last:
            return
        heap = self._last.get(tenant)
        if heap is not None and len(heap) > 2 * self._counts.get(tenant, 0) + _LENGTH_SLACK:
            del self._last[tenant]
        elif not self._counts.get(tenant):
            self._last.pop(tenant, None)

    def has_longer(self, tenant: str) -> bool:
        """True if another tenant has more requests, also with one more of this tenant."""
        self._grouped()
        return self._most > self._counts.get(tenant, 0) + 1

    def lasts_of_longer(self, tenant: str) -> Generator[QueuedItem]:
        """As `lasts`, of tenants for which `has_longer` is true, and while it is."""
        return self.lasts(longer_than=self._counts.get(tenant, 0) + 1)

    def lasts(self, *, longer_than: int = 0) -> Generator[QueuedItem]:
        """Requests in the order in which they are displaced, while nothing changes.

        The next is always of the tenant with most waiting less those before, the last of its order.
        Close the iterator before any request comes or leaves.

        Args:
            longer_than: Requests that every tenant keeps (count).
        """
        taken: list[tuple[list[_LastEntry], _LastEntry]] = []
        reduced: list[str] = []
        by_count = self._grouped()
        try:
            for count in range(self._most, longer_than, -1):
                tenants = itertools.chain(by_count.get(count, ()), reduced)
                reduced = []
                for tenant in tenants:
                    heap = self._sorted(tenant)
                    while not heap[0][2].is_queued:
                        heapq.heappop(heap)
                    entry = heapq.heappop(heap)
                    taken.append((heap, entry))
                    reduced.append(tenant)
                    yield entry[2]
        finally:
            for heap, entry in taken:
                heapq.heappush(heap, entry)

    def _sorted(self, tenant: str) -> list[_LastEntry]:
        heap = self._last.get(tenant)
        if heap is None:
            heap = [(-rank, -item.number, item) for rank, item in self._waiting(tenant)]
            heapq.heapify(heap)
            self._last[tenant] = heap
        return heap

    def _grouped(self) -> dict[int, dict[str, None]]:
        """Tenants by queue length; kept up to date after the first call."""
        by_count = self._by_count
        if by_count is None:
            by_count = self._by_count = {}
            for tenant, count in self._counts.items():
                by_count.setdefault(count, {})[tenant] = None
            self._most = max(by_count, default=0)
        return by_count

    def _count(self, tenant: str, change: int) -> None:
        before = self._counts.get(tenant, 0)
        after = before + change
        if after:
            self._counts[tenant] = after
        else:
            del self._counts[tenant]
        if self._by_count is not None:
            self._regroup(self._by_count, tenant, before, after)

    def _regroup(
        self, by_count: dict[int, dict[str, None]], tenant: str, before: int, after: int
    ) -> None:
        if before:
            peers = by_count[before]
            del peers[tenant]
            if not peers:
                del by_count[before]
        if after:
            by_count.setdefault(after, {})[tenant] = None
        if after > self._most:
            self._most = after
        elif before == self._most and before not in by_count:
            self._most = after  # it changes by one, so the next count is where this tenant is now


class PriorityBand:
    """All requests of one priority.

    Args:
        fair_share: Attained service of tenants; shared by all bands.

    Attributes:
        sorting: Order of the requests of a tenant, and of the tenants.
    """

    def __init__(self, sorting: tuple[Order, Fairness], fair_share: FairShare) -> None:
        self.sorting = sorting
        self._order, fairness = sorting
        self._turn = {
            "least-served": fair_share.normalized_service,
            "round-robin": fair_share.last,
            "none": _no_turn,
        }[fairness]
        self._turns = fair_share
        self._version = fair_share.version
        self._queues_by_key: dict[FlowKey, TenantQueues] = {}
        self._flow_keys: dict[str, dict[FlowKey, None]] = {}
        self._queue_lengths = QueueLengths(self._waiting)
        self.count = 0
        self.bytes = 0

    def add(self, item: QueuedItem) -> None:
        """Add a request that begins to wait."""
        self.count += 1
        self.bytes += item.bytes
        rank = item.rank(self._order)
        self._enter(item, rank)
        self._queue_lengths.add(rank, item)

    def remove(self, item: QueuedItem) -> None:
        """Remove a request that stopped waiting."""
        self.count -= 1
        self.bytes -= item.bytes
        self._exit(item)
        self._queue_lengths.remove(item.tenant)

    def move(self, item: QueuedItem, flow_key: FlowKey) -> None:
        """Move a queued request to another flow key; it keeps its rank."""
        self._exit(item)
        item.endpoints, item.preferred_endpoint = flow_key
        self._enter(item, item.rank(self._order))

    def next_items(self, sweep: Sweep) -> Iterator[QueuedItem]:
        """Requests that go next among those that are not blocked, again and again.

        Tenants come in the order of what they attained or of their last turn, and those that are
        equal in the order of their heads; within a tenant the head of lowest rank goes. The caller
        lets each go on or blocks its flow key before the next.
        """
        self._follow_turns()
        return next_items(self._queues_by_key, sweep)

    def has_claim_on(self, bits: int) -> bool:
        """True if any of these endpoints (bits) can serve a request here."""
        return any(flow_key[0].bits & bits for flow_key in self._queues_by_key)

    def refresh(self, tenant: str) -> None:
        """Sort a tenant anew after its turn went down."""
        for flow_key in self._flow_keys.get(tenant, ()):
            self._queues_by_key[flow_key].refresh(tenant)

    def lasts(self) -> Generator[QueuedItem]:
        """Requests in the order in which they are displaced; see `QueueLengths.lasts`."""
        return self._queue_lengths.lasts()

    def has_longer(self, tenant: str) -> bool:
        """See `QueueLengths.has_longer`; False where tenants take no turns."""
        return self._turn is not _no_turn and self._queue_lengths.has_longer(tenant)

    def lasts_of_longer(self, tenant: str) -> Generator[QueuedItem]:
        """See `QueueLengths.lasts_of_longer`."""
        return self._queue_lengths.lasts_of_longer(tenant)

    def __iter__(self) -> Iterator[QueuedItem]:
        for queues in self._queues_by_key.values():
            yield from queues

    def _enter(self, item: QueuedItem, rank: float) -> None:
        flow_key = (item.endpoints, item.preferred_endpoint)
        queues = self._queues_by_key.get(flow_key)
        if queues is None:
            queues = self._queues_by_key[flow_key] = TenantQueues(self._turn)
        item.place += 1
        if queues.add(rank, item):
            self._flow_keys.setdefault(item.tenant, {})[flow_key] = None

    def _exit(self, item: QueuedItem) -> None:
        flow_key = (item.endpoints, item.preferred_endpoint)
        item.place += 1
        queues = self._queues_by_key[flow_key]
        if queues.remove(item):
            flow_keys = self._flow_keys[item.tenant]
            del flow_keys[flow_key]
            if not flow_keys:
                del self._flow_keys[item.tenant]
            if not len(queues):
                del self._queues_by_key[flow_key]

    def _waiting(self, tenant: str) -> Iterable[tuple[float, QueuedItem]]:
        for flow_key in self._flow_keys[tenant]:
            for item in self._queues_by_key[flow_key].flow_queue(tenant):
                yield item.rank(self._order), item

    def _follow_turns(self) -> None:
        """Sort anew where the turns of many tenants went down."""
        if self._version != self._turns.version:
            self._version = self._turns.version
            for queues in self._queues_by_key.values():
                queues.rebuild()


def _no_turn(_: str) -> float:
    """All tenants are equal."""
    return 0.0
