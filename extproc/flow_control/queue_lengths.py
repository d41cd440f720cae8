"""Queue lengths by tenant, and the order of displacement."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Generator, Iterable

from extproc.flow_control.queued_item import QueuedItem

#: Minus rank and number: the request that goes last comes first.
_Entry = tuple[float, int, QueuedItem]

#: Entries that may be stale before a heap is dropped (count).
_SLACK = 64


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
        self._last: dict[str, list[_Entry]] = {}

    def add(self, rank: float, waiter: QueuedItem) -> None:
        """A request begins to wait."""
        tenant = waiter.tenant
        self._count(tenant, 1)
        heap = self._last.get(tenant)
        if heap is not None:
            heapq.heappush(heap, (-rank, -waiter.number, waiter))

    def remove(self, tenant: str) -> None:
        """A request stopped waiting."""
        self._count(tenant, -1)
        heap = self._last.get(tenant)
        if heap is not None and len(heap) > 2 * self._counts.get(tenant, 0) + _SLACK:
            del self._last[tenant]
        elif not self._counts.get(tenant):
            self._last.pop(tenant, None)

    def lasts(self) -> Generator[QueuedItem]:
        """Requests in the order in which they are displaced, while nothing changes.

        The next is always of the tenant with most waiting less those before, the last of its order.
        Close the iterator before any request comes or leaves.
        """
        taken: list[tuple[list[_Entry], _Entry]] = []
        reduced: list[str] = []
        by_count = self._grouped()
        try:
            for count in range(self._most, 0, -1):
                crowded = itertools.chain(by_count.get(count, ()), reduced)
                reduced = []
                for tenant in crowded:
                    heap = self._sorted(tenant)
                    while not heap[0][2].waits:
                        heapq.heappop(heap)
                    entry = heapq.heappop(heap)
                    taken.append((heap, entry))
                    reduced.append(tenant)
                    yield entry[2]
        finally:
            for heap, entry in taken:
                heapq.heappush(heap, entry)

    def _sorted(self, tenant: str) -> list[_Entry]:
        heap = self._last.get(tenant)
        if heap is None:
            heap = [(-rank, -waiter.number, waiter) for rank, waiter in self._waiting(tenant)]
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
