"""Which tenant has most requests waiting, and which of them goes last."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable

from extproc.holding.waiter import Waiter

#: Minus rank and number: the request that goes last comes first.
_Entry = tuple[float, int, Waiter]

#: Entries that may be stale before a heap is dropped (count).
_SLACK = 64


class Crowding:
    """Tenants by how many of their requests wait.

    What goes last matters only where requests are displaced, so a tenant's requests are sorted for
    it when that is first wanted, and kept so from then on.

    Args:
        waiting: All requests of a tenant that wait.
    """

    def __init__(self, waiting: Callable[[str], Iterable[tuple[float, Waiter]]]) -> None:
        self._waiting = waiting
        self._counts: dict[str, int] = {}
        self._by_count: dict[int, dict[str, None]] = {}
        self._most = 0
        self._last: dict[str, list[_Entry]] = {}

    def add(self, rank: float, waiter: Waiter) -> None:
        """A request begins to wait."""
        tenant = waiter.tenant
        self._count(tenant, 1)
        heap = self._last.get(tenant)
        if heap is not None:
            heapq.heappush(heap, (-rank, -waiter.number, waiter))

    def left(self, tenant: str) -> None:
        """A request stopped waiting."""
        self._count(tenant, -1)
        heap = self._last.get(tenant)
        if heap is not None and len(heap) > 2 * self._counts.get(tenant, 0) + _SLACK:
            del self._last[tenant]
        elif not self._counts.get(tenant):
            self._last.pop(tenant, None)

    def last(self) -> Waiter | None:
        """Of the tenant with most waiting, the last of its order; None where none waits."""
        if not self._most:
            return None
        tenant = next(iter(self._by_count[self._most]))
        heap = self._last.get(tenant)
        if heap is None:
            heap = [(-rank, -waiter.number, waiter) for rank, waiter in self._waiting(tenant)]
            heapq.heapify(heap)
            self._last[tenant] = heap
        while not heap[0][2].waits:
            heapq.heappop(heap)
        return heap[0][2]

    def _count(self, tenant: str, change: int) -> None:
        before = self._counts.get(tenant, 0)
        after = before + change
        if before:
            peers = self._by_count[before]
            del peers[tenant]
            if not peers:
                del self._by_count[before]
        if after:
            self._counts[tenant] = after
            self._by_count.setdefault(after, {})[tenant] = None
        else:
            del self._counts[tenant]
        if after > self._most:
            self._most = after
        elif before == self._most and before not in self._by_count:
            self._most = after  # it changes by one, so the next count is where this tenant is now
