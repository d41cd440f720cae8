"""Eviction: which requests in flight are ended for requests of higher priority that wait.

Only requests of priorities below 0 are ended, and only for higher priorities. What an eviction frees
shows on the next page of the engine: until then its endpoint is left alone, and no more evictions are
awaited than requests wait. So nothing is evicted twice for one shortage.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Final, Generic, TypeVar

import msgspec

from extproc.decision import Deferral, Rejection

#: Seconds after which an eviction counts as effective although no page shows it: engines that are not
#: scraped, or a client of gRPC that does not end its stream.
_TIMEOUT_S: Final = 5.0

#: Requests of a priority that are looked at on an endpoint (count). The last ones that were sent are those
#: whose prompts may still wait; of the others all help, or none.
_MAX_LOOKS: Final = 4

#: Answer to a request that is evicted before its response began.
EVICTED: Final = Rejection(
    429,
    "evicted for a request of higher priority",
    reason="evicted",
    retry_after_s=1,
    cause="evicted",
)

#: What is in flight.
ItemT = TypeVar("ItemT")


class EvictableRequest(msgspec.Struct, Generic[ItemT], eq=False):
    """A request in flight that may be evicted.

    Attributes:
        priority: Below 0.
        address: Address of its endpoint.
        number: Order in which requests were sent.
    """

    item: ItemT
    priority: int
    address: str
    number: int


class _Eviction(msgspec.Struct, Generic[ItemT]):
    """An eviction whose effect does not show yet.

    Attributes:
        request: The evicted request.
        at: Monotonic seconds of the eviction.
        ended_at: Monotonic seconds at which the request ended; None while it has not.
    """

    request: EvictableRequest[ItemT]
    at: float
    ended_at: float | None = None


class EvictionCallbacks(msgspec.Struct, Generic[ItemT], frozen=True):
    """Effects and knowledge of the driver.

    Attributes:
        evict: Ends a request; returns False, without any effect, where that is not possible now.
        shortens_wait: Whether the end of a request shortens the wait of one of this priority on its
            endpoint, by the estimate of capacity.
        has_shown: Whether what ended on an endpoint at this time (monotonic seconds) shows.
    """

    evict: Callable[[ItemT], bool]
    shortens_wait: Callable[[ItemT, int], bool]
    has_shown: Callable[[str, float], bool]


class Evictor(Generic[ItemT]):
    """Requests of a pool in flight that may be evicted, and the evictions whose effect is awaited.

    Attributes:
        issued: Evictions by the priority of the request that waited (counts).
        outcomes: Evictions whose request ended (`confirmed`), or did not within 5 s (`timed_out`).
    """

    def __init__(self, callbacks: EvictionCallbacks[ItemT]) -> None:
        self._callbacks = callbacks
        #: In the order in which they were sent, by priority and address.
        self._requests: dict[str, dict[int, dict[EvictableRequest[ItemT], None]]] = {}
        self._pending: dict[str, _Eviction[ItemT]] = {}
        self._numbers = 0
        self.issued: Counter[int] = Counter()
        self.outcomes: Counter[str] = Counter()

    @property
    def counts(self) -> tuple[Mapping[int, int], Mapping[str, int]]:
        """Evictions by `issued`, and by `outcomes`."""
        return self.issued, self.outcomes

    def track(self, item: ItemT, *, priority: int, address: str) -> EvictableRequest[ItemT] | None:
        """Track a request that was sent to an endpoint; None where its priority protects it."""
        if priority >= 0:
            return None
        self._numbers += 1
        request = EvictableRequest(item, priority, address, self._numbers)
        self._put(request)
        return request

    def move(self, request: EvictableRequest[ItemT], address: str) -> None:
        """Note that another endpoint serves a request; without effect once it is evicted or ended."""
        if request.address != address and self._is_tracked(request):
            self._remove(request)
            request.address = address
            self._put(request)
            by_priority = self._requests[address]
            in_order = sorted(by_priority[request.priority], key=lambda other: other.number)
            by_priority[request.priority] = dict.fromkeys(in_order)

    def untrack(self, request: EvictableRequest[ItemT], now: float) -> None:
        """Forget a request that ended; idempotent."""
        self._remove(request)
        eviction = self._pending.get(request.address)
        if eviction is not None and eviction.request is request and eviction.ended_at is None:
            eviction.ended_at = now
            self.outcomes["confirmed"] += 1

    def may_help(self, priority: int) -> bool:
        """True if a request below this priority is in flight."""
        return any(min(by_priority) < priority for by_priority in self._requests.values())

    def make_room(self, priority: int, deferral: Deferral, *, num_waiting: int, now: float) -> bool:
        """Evict a request for one that waits, where that is due; returns whether it did.

        The lowest priority goes first, and of it the request that was sent last: it loses least.
        Where the waiting request prefers an endpoint, those there go before all others.

        Args:
            priority: Priority of the request that waits.
            deferral: Why it waits.
            num_waiting: Requests of this or a higher priority that wait (count).
        """
        self._settle(now)
        if not self._requests:
            return False
        busy = deferral.busy_endpoints
        is_capacity = bool(busy) and not (deferral.waits_for_slot or deferral.is_held)
        if not is_capacity or len(self._pending) >= num_waiting:
            return False
        preferred = deferral.preferred_endpoint
        return self._evict_from([preferred], priority, now) or self._evict_from(busy, priority, now)

    def _evict_from(self, addresses: Sequence[str], priority: int, now: float) -> bool:
        """Evict the first request that may be evicted, and helps, on some endpoints."""
        for request in heapq.merge(*[self._useful(a, priority) for a in addresses], key=_rank):
            if self._callbacks.evict(request.item):
                ended_at = None if self._is_tracked(request) else now
                self._pending[request.address] = _Eviction(request, now, ended_at)
                if ended_at is not None:
                    self.outcomes["confirmed"] += 1
                self._remove(request)
                self.issued[priority] += 1
                return True
        return False

    def _useful(self, address: str, priority: int) -> Iterator[EvictableRequest[ItemT]]:
        """Requests on an endpoint whose end helps one of this priority, in order of eviction."""
        by_priority = self._requests.get(address)
        if by_priority is None or address in self._pending:
            return
        for lower in sorted(by_priority):
            if lower >= priority:
                return
            for request in [*islice(reversed(by_priority[lower]), _MAX_LOOKS)]:
                if self._callbacks.shortens_wait(request.item, priority):
                    yield request

    def _settle(self, now: float) -> None:
        """Forget evictions whose effect shows."""
        for address, eviction in list(self._pending.items()):
            is_over = now - eviction.at >= _TIMEOUT_S
            if eviction.ended_at is not None:
                is_over = is_over or self._callbacks.has_shown(address, eviction.ended_at)
            elif is_over:
                self.outcomes["timed_out"] += 1
            if is_over:
                del self._pending[address]

    def _put(self, request: EvictableRequest[ItemT]) -> None:
        by_priority = self._requests.setdefault(request.address, {})
        by_priority.setdefault(request.priority, {})[request] = None

    def _is_tracked(self, request: EvictableRequest[ItemT]) -> bool:
        return request in self._requests.get(request.address, {}).get(request.priority, {})

    def _remove(self, request: EvictableRequest[ItemT]) -> None:
        if not self._is_tracked(request):
            return
        by_priority = self._requests[request.address]
        del by_priority[request.priority][request]
        if not by_priority[request.priority]:
            del by_priority[request.priority]
        if not by_priority:
            del self._requests[request.address]


def _rank(request: EvictableRequest[ItemT]) -> tuple[int, int]:
    """Order of eviction: the lowest priority, and of it the one that was sent last."""
    return request.priority, -request.number
