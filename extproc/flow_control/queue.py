"""Queue of a pool: bounded, in priority bands, with a deadline for every request.

`Retry-After` is estimated from the rate at which requests leave the queue.
"""

from __future__ import annotations

import contextlib
import heapq
import math
from collections.abc import Callable, Generator, Hashable, Iterator, Mapping, Sequence
from enum import Enum

import msgspec

from extproc.decision import Rejection
from extproc.flow_control.drain_rate import DrainRateEstimator
from extproc.flow_control.fair_share import FairShare
from extproc.flow_control.flow_queue import (
    EndpointBits,
    EndpointSets,
    Order,
    QueuedItem,
    first_time,
    without_gone,
)
from extproc.flow_control.priority_band import (
    BandSettings,
    Fairness,
    PriorityBand,
    PrioritySettings,
    Shortage,
    Sweep,
    find_shortage,
)


class EnqueueRequest(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """Properties of a request that is about to be queued.

    Attributes:
        tenant: Tenant that sent it; empty if unknown.
        target: Key of the endpoints that can serve it; see `QueuedItem`.
        timeout_s: Longest wait it asks for; None for none.
        slo_s: Seconds to the first token it asks for; infinity for none.
    """

    tenant: str = ""
    priority: int = 0
    objective: str = ""
    target: Hashable = ""
    size: int = 0
    tokens: int = 0
    timeout_s: float | None = None
    slo_s: float = math.inf


class FlowControlSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of flow control for a pool.

    Attributes:
        empty_timeout_s: Longest wait while there is no endpoint; None for `timeout_s`.
        order: Within one tenant: `fcfs` by arrival, `edf` by deadline, `slo` by arrival plus the
            time to first token they ask for.
        fairness: Among tenants: `least-served` by tokens attained, `round-robin`, or `none`.
        half_life_s: Time after which what a tenant attained counts half.
        output_weight: A generated token in prompt tokens.
        bands: Settings of single priorities, each priority once.
        default_band: Settings of each priority that `bands` does not have; None for none.
        default_negative_band: In place of `default_band`, of those below 0; None for `default_band`.
        evict_after_s: Seconds of waiting, those to come included, from which on requests of lower
            priorities are evicted; None for never.
    """

    timeout_s: float = 60.0
    empty_timeout_s: float | None = None
    max_timeout_s: float = 3600.0
    by_objective: Mapping[str, float] = {}
    max_requests: int = 10_000
    max_bytes: int = 256 * 1024 * 1024
    order: Order = "fcfs"
    fairness: Fairness = "least-served"
    half_life_s: float = 60.0
    output_weight: float = 2.0
    bands: tuple[PrioritySettings, ...] = ()
    default_band: BandSettings | None = None
    default_negative_band: BandSettings | None = None
    evict_after_s: float | None = None

    def find_band(self, priority: int) -> BandSettings | None:
        """The settings of a priority; None if it has none of its own."""
        for band in self.bands:
            if band.priority == priority:
                return band
        negative = self.default_negative_band
        return self.default_band if priority >= 0 or negative is None else negative

    def find_bounds(self, priority: int) -> tuple[int | None, int | None]:
        """Bounds of a priority of its own: requests (count), and bytes; None for none."""
        band = self.find_band(priority)
        return (None, None) if band is None else (band.max_requests, band.max_bytes)

    def find_sorting(self, priority: int) -> tuple[Order, Fairness]:
        """Order and fairness of a priority."""
        band = self.find_band(priority) or BandSettings()
        return band.order or self.order, band.fairness or self.fairness


#: Requests that are sorted anew between two looks at the budget (count): some 0.2 ms.
_BATCH = 32

#: Requests that make room for another one at most (count). No stream is served meanwhile: 4 ms while
#: 2,000 wait, 11 ms while 10,000 do, the most of it for sorting them (`python -m bench.pump`).
MOST_DISPLACED = 128


class EnqueueResult(msgspec.Struct, frozen=True):
    """A request joined the queue.

    Attributes:
        displaced: Requests that were removed to make room; the driver rejects them.
    """

    displaced: tuple[QueuedItem, ...] = ()


#: No request was displaced.
_ALONE = EnqueueResult()


class Blocked(msgspec.Struct, frozen=True):
    """A request cannot be dispatched now, and blocks others for the same endpoints.

    Attributes:
        preferred_endpoint: Address of the preferred endpoint, which blocks requests that prefer it as well;
            empty blocks all requests of its endpoint set.
        busy: Bits of the endpoints without capacity for its priority; 0 for unknown.
        waits_for_slot: Whether it waits for a slot of its adapter.
        is_held: Whether its priority is held on all endpoints of its set together.
    """

    preferred_endpoint: str = ""
    busy: int = 0
    waits_for_slot: bool = False
    is_held: bool = False


class DepartureCause(Enum):
    """Reason for which a request left the queue."""

    DISPATCHED = "went"
    REJECTED = "refused"


#: What became of a request that was looked at.
DispatchResult = DepartureCause | Blocked


def _never() -> bool:
    """There is no limit."""
    return False


class Queue:
    """Requests that wait for the endpoints of a pool.

    Args:
        settings: How requests wait; `reconfigure` replaces them.

    Attributes:
        drain_rate: Requests that go on per second.
    """

    def __init__(self, settings: FlowControlSettings) -> None:
        self.settings = settings
        self.count = 0
        self.bytes = 0
        self.tokens = 0
        self.fair_share = FairShare(settings.half_life_s)
        self.drain_rate = DrainRateEstimator()
        self.sets = EndpointSets()
        self._numbers = 0
        self._bands: dict[int, PriorityBand] = {}
        self._deadlines: list[tuple[float, int, QueuedItem]] = []
        #: Requests that have preferred an endpoint, by the time at which they stop waiting for one.
        self._preferences: list[tuple[float, int, QueuedItem]] = []
        self._sweep: Sweep | None = None
        #: Requests whose endpoint set may be another one since bits were adopted.
        self._unsorted: list[QueuedItem] = []

    @property
    def is_sweeping(self) -> bool:
        """True if a sweep over all queued requests was interrupted."""
        return self._sweep is not None

    def reconfigure(self, settings: FlowControlSettings, now: float) -> None:
        """Replace the settings; queued requests keep their deadlines."""
        self.settings = settings
        self.fair_share.set_half_life(settings.half_life_s, now)
        for priority, band in self._bands.items():
            sorting = settings.find_sorting(priority)
            if sorting != band.sorting:
                resorted = self._bands[priority] = PriorityBand(sorting, self.fair_share)
                for item in band:
                    resorted.add(item)

    def replace_bits(self, bits: EndpointBits | None) -> None:
        """Replace the endpoint bits and regroup the queued requests."""
        if self.sets.replace_bits(bits):
            self._sweep = None
            self._unsorted = list(self)

    def join(self, item: QueuedItem, now: float) -> EnqueueResult | Rejection:
        """Add a request to the queue.

        Where there is no room, requests of lower priority are displaced, the last of the tenant
        with most waiting first, and then those of the same priority, of tenants with more waiting
        than its own, so that no tenant takes the whole queue. Where its priority has no room, only
        the latter make some. `MOST_DISPLACED` are displaced at most; where they would not make
        enough, the request itself is refused, and nothing changes.

        Returns:
            429 with Retry-After where there is no room.
        """
        settings = self.settings
        lacking = own_lacking = None
        # Repeats `find_shortage`: most requests find room, and a call takes a fifth of a join.
        if self.count >= settings.max_requests or self.bytes + item.bytes > settings.max_bytes:
            bounds = settings.max_requests, settings.max_bytes
            lacking = find_shortage(item, (self.count, self.bytes), bounds)
        if settings.find_band(item.priority) is not None:
            band = self._bands.get(item.priority)
            waiting = (0, 0) if band is None else (band.count, band.bytes)
            own_lacking = find_shortage(item, waiting, settings.find_bounds(item.priority))
        if lacking is None and own_lacking is None:
            self._put(item)
            return _ALONE
        displaced = self._displaced(item, lacking, own_lacking)
        if displaced is None:
            return self.full_rejection(now)
        for other in displaced:
            self.leave(other)
        self._put(item)
        return EnqueueResult(displaced)

    def leave(self, item: QueuedItem) -> None:
        """Remove a request from the queue; does nothing if it is not queued."""
        if not item.is_queued:
            return
        item.is_queued = False
        self.count -= 1
        self.bytes -= item.bytes
        self.tokens -= item.tokens
        self.sets.leave(item.target)
        self.fair_share.leave(item.tenant)
        band = self._bands[item.priority]
        band.remove(item)
        if not band.count:
            del self._bands[item.priority]
        self._deadlines = without_gone(self._deadlines, self.count)
        self._preferences = without_gone(self._preferences, self.count)

    def set_preferred_endpoint(self, item: QueuedItem, preferred_endpoint: str) -> None:
        """Change the preferred endpoint of a queued request; it keeps its rank."""
        if item.preferred_endpoint != preferred_endpoint:
            if not item.has_preferred:
                item.has_preferred = True
                heapq.heappush(self._preferences, (item.preference_ends, item.number, item))
            self._bands[item.priority].move(item, (item.endpoints, preferred_endpoint))

    def charge(self, tenant: str, tokens: float, now: float) -> None:
        """Correct the tokens that a tenant attained; the correction may be negative."""
        self.fair_share.charge(tenant, tokens, now)
        if tokens < 0.0:
            for band in self._bands.values():
                band.refresh(tenant)

    def pump(
        self,
        dispatch: Callable[[QueuedItem], DispatchResult],
        now: float,
        *,
        enough: Callable[[], bool] = _never,
    ) -> bool:
        """Dispatch requests until no queued request can go on.

        A request that cannot be dispatched blocks only requests for the same endpoints. If a call
        ends early, the next call continues there and keeps what is blocked, so that every request
        is examined however small the budget of a call is.

        Args:
            dispatch: Dispatches a request if it can be served now, and returns what it blocks if not.
            enough: Called before each request; True ends the call.

        Returns:
            Whether every request was examined.
        """
        if not (self._sort(enough) and self._end_preferences(now, enough)):
            return False
        sweep, self._sweep = self._sweep or Sweep(), None
        num_dispatched = 0
        try:
            for priority, band in sorted(self._bands.items(), reverse=True):
                if priority > sweep.priority:
                    continue
                if priority < sweep.priority:
                    sweep.enter(priority)
                for item in band.next_items(sweep):
                    if enough():
                        self._sweep = sweep
                        return False
                    num_dispatched += self._try_dispatch(dispatch, item, sweep, now)
        finally:
            if num_dispatched:
                self.drain_rate.record_departures(num_dispatched, now)
        return True

    def _sort(self, enough: Callable[[], bool]) -> bool:
        """Move requests to their current endpoint set; returns whether all were moved."""
        unsorted = self._unsorted
        while unsorted:
            if enough():
                return False
            for item in unsorted[-_BATCH:]:
                endpoints = self.sets.current(item.target) if item.is_queued else item.endpoints
                if endpoints is not item.endpoints:
                    self._bands[item.priority].move(item, (endpoints, item.preferred_endpoint))
            del unsorted[-_BATCH:]
        return True

    def _end_preferences(self, now: float, enough: Callable[[], bool]) -> bool:
        """Let requests that waited long enough pass those that wait for a preferred endpoint.

        Returns:
            Whether all of them may.
        """
        preferences = self._preferences
        while preferences and preferences[0][0] <= now:
            if enough():
                return False
            item = heapq.heappop(preferences)[2]
            if item.is_queued:
                self.set_preferred_endpoint(item, "")
        return True

    def _try_dispatch(
        self,
        dispatch: Callable[[QueuedItem], DispatchResult],
        item: QueuedItem,
        sweep: Sweep,
        now: float,
    ) -> bool:
        """Try to dispatch a request; returns whether it left."""
        result = dispatch(item)
        if isinstance(result, Blocked):
            if result.preferred_endpoint:
                sweep.block((item.endpoints, result.preferred_endpoint))
            else:
                sweep.block_set(item.endpoints, result.busy)
            if result.is_held:
                sweep.hold(item.endpoints)
            if result.waits_for_slot:
                sweep.reserve_slots(item.endpoints)
            return False
        self.leave(item)
        if result is DepartureCause.REJECTED:
            return False
        self.fair_share.served(item.tenant, item.tokens, now)
        return True

    def expired(self, now: float, *, enough: Callable[[], bool] = _never) -> Iterator[QueuedItem]:
        """Remove and yield requests past their deadline, until `enough`."""
        while self._deadlines and self._deadlines[0][0] <= now and not enough():
            item = heapq.heappop(self._deadlines)[2]
            if item.is_queued:
                self.leave(item)
                yield item

    def next_deadline(self) -> float | None:
        """The earliest deadline (monotonic seconds); None for an empty queue."""
        return first_time(self._deadlines)

    def next_preference_end(self) -> float:
        """The earliest end of a wait for a preferred endpoint (monotonic seconds); infinity for none."""
        first = first_time(self._preferences)
        return math.inf if first is None else first

    def has_claim_on(self, address: str, priority: int) -> bool:
        """True if a queued request of this or a higher priority may be sent to this endpoint.

        Args:
            address: Address of the endpoint; any where it or the endpoint bits are unknown.
        """
        bits = 0 if self._unsorted else self.sets.for_addresses([address] if address else [])
        return any(
            not bits or band.has_claim_on(bits)
            for rank, band in self._bands.items()
            if rank >= priority
        )

    def count_from(self, priority: int) -> int:
        """Queued requests of this or a higher priority (count)."""
        return sum(band.count for rank, band in self._bands.items() if rank >= priority)

    def full_rejection(self, now: float) -> Rejection:
        """The rejection for a full queue: 429 with a retry estimate."""
        return Rejection(
            429,
            "too many requests are waiting",
            reason="rejected-saturated",
            retry_after_s=self.wait_s(now),
            cause="queue-full",
        )

    def wait_s(self, now: float) -> int:
        """Estimated seconds until the queue drains, at most the longest allowed wait."""
        return self.drain_rate.wait_s(self.count, now, most_s=self.settings.timeout_s)

    def __iter__(self) -> Iterator[QueuedItem]:
        for band in self._bands.values():
            yield from band

    def _put(self, item: QueuedItem) -> None:
        item.number = self._numbers = self._numbers + 1
        item.is_queued = True
        self.count += 1
        self.bytes += item.bytes
        self.tokens += item.tokens
        item.endpoints = self.sets.enter(item.target)
        self.fair_share.enter(item.tenant)
        band = self._bands.get(item.priority)
        if band is None:
            sorting = self.settings.find_sorting(item.priority)
            band = self._bands[item.priority] = PriorityBand(sorting, self.fair_share)
        band.add(item)
        heapq.heappush(self._deadlines, (item.deadline, item.number, item))

    def _displaced(
        self, item: QueuedItem, lacking: Shortage | None, own_lacking: Shortage | None
    ) -> tuple[QueuedItem, ...] | None:
        """Requests to displace for a new request; None if too many or all would not make room.

        Args:
            lacking: Room that the queue lacks; None for none.
            own_lacking: Room that the priority of the request lacks; None for none.
        """
        lower = [
            self._bands[priority] for priority in sorted(self._bands) if priority < item.priority
        ]
        band = self._bands.get(item.priority)
        own = [band] if band is not None and band.has_longer(item.tenant) else []
        if (lacking and lacking.exceeds([*lower, *own])) or (
            own_lacking and own_lacking.exceeds(own)
        ):
            return None
        chosen: list[QueuedItem] = []
        with contextlib.closing(_displaceable(item, lower, own, own_lacking)) as lasts:
            for last in lasts:
                chosen.append(last)
                if lacking:
                    lacking.reduce(last)
                if own_lacking:  # only requests of its own priority come until it is made
                    own_lacking.reduce(last)
                if not lacking and not own_lacking:
                    return tuple(chosen)
                if len(chosen) == MOST_DISPLACED:
                    return None
        return None


def _displaceable(
    item: QueuedItem,
    lower: Sequence[PriorityBand],
    own: Sequence[PriorityBand],
    own_lacking: Shortage | None,
) -> Generator[QueuedItem]:
    """Requests in the order in which they are displaced for a new request.

    Args:
        lower: Bands of lower priorities, the lowest first.
        own: The band of its priority; empty where it displaces nothing.
        own_lacking: Room that its priority lacks, which the caller reduces.
    """
    with contextlib.ExitStack() as stack:
        own_lasts: Iterator[QueuedItem] = iter(())
        for band in own:
            own_lasts = stack.enter_context(contextlib.closing(band.lasts_of_longer(item.tenant)))
        while own_lacking:
            last = next(own_lasts, None)
            if last is None:
                return
            yield last
        for band in lower:
            with contextlib.closing(band.lasts()) as lasts:
                yield from lasts
        yield from own_lasts
