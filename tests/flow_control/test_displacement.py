"""Requests that a full queue displaces: whose, how many, and at what cost."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.decision import Rejection
from extproc.flow_control.flow_queue import QueuedItem
from extproc.flow_control.priority_band import BandSettings, PrioritySettings
from extproc.flow_control.queue import (
    MOST_DISPLACED,
    DepartureCause,
    EnqueueResult,
    FlowControlSettings,
    Queue,
)
from tests.flow_control.crowds import crowd, operations
from tests.support.reachable import count_reachable


def test_the_latest_of_equal_requests_is_displaced():
    """Earlier requests keep their place."""
    queue = Queue(FlowControlSettings(max_requests=3, order="edf"))
    equal = [QueuedItem(arrived=0.0, deadline=5.0) for _ in range(3)]
    for item in equal:
        queue.join(item, 0.0)
    joined = queue.join(QueuedItem(arrived=0.0, deadline=5.0, priority=1), 0.0)
    assert joined.displaced == (equal[2],)


@pytest.mark.parametrize("tenants", [1, 20, 500])
def test_displacing_many_is_not_quadratic(tenants):
    """As many as may make room for one leave; among four times as many, for four times the work."""

    def cost(size):
        queue = crowd(size, tenants=tenants, settings=FlowControlSettings(max_bytes=size))
        large = QueuedItem(arrived=0.0, deadline=1e9, priority=1, size=MOST_DISPLACED)

        def join():
            assert len(queue.join(large, 0.0).displaced) == MOST_DISPLACED

        return operations(join)

    assert cost(4000) < 6 * cost(1000)


@pytest.mark.parametrize("tenants", [1, 20, 500])
def test_a_join_that_would_displace_too_many_is_refused(tenants):
    """No request is displaced for it, the same leave for the next one, and refusing costs little."""
    queue = crowd(500, tenants=tenants, settings=FlowControlSettings(max_bytes=500))
    for at in range(200):
        queue.leave(next(iter(queue)))
        low = QueuedItem(arrived=at, deadline=1e9, tenant=f"t{at % 7}", priority=-1, size=1)
        assert queue.join(low, 0.0) == EnqueueResult()
    places = {item: (item.number, item.place) for item in queue}
    large, fitting = (QueuedItem(arrived=0.0, deadline=1e9, priority=1, size=n) for n in (129, 128))

    def join():
        assert isinstance(queue.join(large, 0.0), Rejection)

    join()
    assert operations(join) < 6000
    assert {item: (item.number, item.place) for item in queue} == places
    assert not large.is_queued
    assert len(queue.join(fitting, 0.0).displaced) == 128


@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.integers(-2, 0), st.integers(0, 5), st.integers(1, 9)),
        min_size=1,
        max_size=40,
    ),
    st.sets(st.integers(0, 39)),
    st.integers(1, 120),
)
def test_a_join_displaces_the_last_of_the_tenant_with_most_waiting(requests, leaving, size):
    """One after the other, lower priorities first: as by counting anew for each."""
    total = sum(request[3] for request in requests)
    queue = Queue(FlowControlSettings(max_bytes=total))
    items = [
        QueuedItem(arrived=arrived, deadline=1e9, tenant=tenant, priority=priority, size=size)
        for tenant, priority, arrived, size in requests
    ]
    for item in items:
        queue.join(item, 0.0)
    for at in leaving & set(range(len(items))):
        queue.leave(items[at])
    waiting = [item for item in items if item.is_queued]
    joined = queue.join(QueuedItem(arrived=0.0, deadline=1e9, priority=1, size=size), 0.0)
    if isinstance(joined, Rejection):
        assert size > total
        return
    bytes_left = sum(item.bytes for item in waiting)
    for gone in joined.displaced:
        assert bytes_left + size > total
        lowest = [item for item in waiting if item.priority == min(w.priority for w in waiting)]
        counts = Counter(item.tenant for item in lowest)
        assert counts[gone.tenant] == max(counts.values())
        own = [item for item in lowest if item.tenant == gone.tenant]
        assert gone is max(own, key=lambda item: (item.arrived, item.number))
        waiting.remove(gone)
        bytes_left -= gone.bytes
    assert bytes_left + size <= total


BOUNDS = st.none() | st.integers(1, 12)

BANDS = st.builds(
    FlowControlSettings,
    max_requests=st.integers(1, 12),
    max_bytes=st.integers(1, 40),
    bands=st.tuples(
        st.builds(
            PrioritySettings,
            priority=st.just(1),
            max_requests=BOUNDS,
            max_bytes=BOUNDS,
            fairness=st.sampled_from([None, "none", "round-robin"]),
            order=st.just("fcfs"),
        )
    ),
    default_band=st.none() | st.builds(BandSettings, max_requests=BOUNDS, max_bytes=BOUNDS),
    default_negative_band=st.none() | st.builds(BandSettings, max_requests=BOUNDS),
)


def find_tails(own, tenant):
    """Requests of a priority that a tenant's new request may displace: beyond what it would have."""
    keep = Counter(item.tenant for item in own)[tenant] + 1
    for name in {item.tenant for item in own}:
        theirs = sorted(
            (item for item in own if item.tenant == name), key=lambda i: (i.arrived, i.number)
        )
        yield from theirs[keep:]


def is_over(waiting, item, bounds, before):
    """True if bounds, or what waited before where that is more, have no room."""
    num_bytes = sum(other.bytes for other in waiting)
    return len(waiting) + 1 > max(bounds.max_requests or 99, len(before)) or (
        num_bytes + item.bytes > max(bounds.max_bytes or 999, sum(i.bytes for i in before))
    )


def check_join(waiting, item, settings, joined):
    """Check what a join displaced, or that all it may displace makes no room."""
    bounds = settings.find_band(item.priority) or BandSettings()

    def of_band(items):
        return [other for other in items if other.priority == item.priority]

    def lacks(left):
        return (
            is_over(of_band(left), item, bounds, of_band(waiting)),
            is_over(left, item, settings, waiting),
        )

    own = of_band(waiting)
    is_fair = (bounds.fairness or settings.fairness) != "none"
    tails = list(find_tails(own, item.tenant)) if is_fair else []
    if isinstance(joined, Rejection):
        lower = [other for other in waiting if other.priority < item.priority]
        assert any(lacks([other for other in waiting if other not in {*lower, *tails}]))
        return
    left = list(waiting)
    for gone in joined.displaced:
        own_lacks, all_lack = lacks(left)
        assert own_lacks or all_lack
        lowest = min(other.priority for other in left)
        if own_lacks or lowest == item.priority:
            assert gone in tails
        else:
            assert gone.priority == lowest < item.priority
        left.remove(gone)
    assert not any(lacks(left))


@given(
    BANDS,
    BANDS,
    st.lists(
        st.tuples(st.sampled_from("abc"), st.integers(-2, 2), st.integers(1, 6), st.booleans()),
        min_size=1,
        max_size=40,
    ),
)
def test_bands_bound_their_priority(settings, lowered, requests):
    """A full one displaces its own only; counts stay exact, also after a reload."""
    queue = Queue(settings)
    for at, (tenant, priority, size, leaves) in enumerate(requests):
        if at == 20:
            queue.reconfigure(lowered, 0.0)
        waiting = list(queue)
        item = QueuedItem(arrived=at, deadline=1e9, tenant=tenant, priority=priority, size=size)
        joined = queue.join(item, 0.0)
        check_join(waiting, item, queue.settings, joined)
        if isinstance(joined, Rejection):
            assert set(queue) == set(waiting)
        else:
            assert set(queue) == {*waiting, item} - set(joined.displaced)
        if leaves and waiting:
            queue.leave(waiting[0])
        assert queue.count == len(list(queue))
        assert queue.bytes == sum(other.bytes for other in queue)
    for item in list(queue):
        queue.leave(item)
    assert (queue.count, queue.bytes) == (0, 0)
    assert not queue.has_claim_on("", -9)


def test_a_full_band_refuses_while_the_queue_has_room():
    """As a full queue does; other priorities are neither displaced for it nor refused."""
    bounds = BandSettings(max_requests=2, fairness="none")
    queue = Queue(FlowControlSettings(default_band=bounds))
    low = QueuedItem(arrived=0.0, deadline=1e9, priority=-1)
    queue.join(low, 0.0)
    for tenant in ("flood", "flood"):
        queue.join(QueuedItem(arrived=0.0, deadline=1e9, tenant=tenant), 0.0)
    refused = queue.join(QueuedItem(arrived=1.0, deadline=1e9, tenant="few"), 0.0)
    assert refused == queue.full_rejection(0.0)
    high = QueuedItem(arrived=1.0, deadline=1e9, priority=3)
    assert queue.join(high, 0.0) == EnqueueResult()
    assert {low, high} < set(queue)


@pytest.mark.parametrize("fairness", ["least-served", "round-robin"])
def test_no_tenant_takes_the_whole_queue(fairness):
    """A full queue makes room for a tenant with fewer requests, until both have as many."""
    queue = Queue(FlowControlSettings(max_requests=6, fairness=fairness))
    flood = [QueuedItem(arrived=at, deadline=1e9, tenant="flood") for at in range(6)]
    for item in flood:
        queue.join(item, 0.0)
    few = [QueuedItem(arrived=9.0, deadline=1e9, tenant="few") for _ in range(4)]
    assert [queue.join(item, 0.0).displaced for item in few[:3]] == [(i,) for i in flood[:2:-1]]
    assert isinstance(queue.join(few[3], 0.0), Rejection)
    again = QueuedItem(arrived=9.0, deadline=1e9, tenant="flood")
    assert isinstance(queue.join(again, 0.0), Rejection)
    assert set(queue) == {*flood[:3], *few[:3]}


def test_a_tenant_that_sends_large_bodies_makes_room():
    """Lower priorities first; where that and the turns of tenants are not enough, none leaves."""
    queue = Queue(FlowControlSettings(max_bytes=50))
    flood = [QueuedItem(arrived=at, deadline=1e9, tenant="flood", size=10) for at in range(4)]
    low = QueuedItem(arrived=0.0, deadline=1e9, priority=-1, size=10)
    for item in (*flood, low):
        queue.join(item, 0.0)
    most, fits = (QueuedItem(arrived=9.0, deadline=1e9, tenant="few", size=n) for n in (45, 40))
    assert isinstance(queue.join(most, 0.0), Rejection)
    assert queue.join(fits, 0.0).displaced == (low, *flood[:0:-1])


@pytest.mark.parametrize("bound", ["max_requests", "max_bytes"])
def test_a_lowered_bound_refuses_no_higher_priority(bound):
    """A queue beyond its bound makes room as a full one does, and grows no further."""
    queue = crowd(500)
    queue.reconfigure(FlowControlSettings(**{bound: 100}), 0.0)
    high = QueuedItem(arrived=0.0, deadline=1e9, priority=1, size=2)
    assert len(queue.join(high, 0.0).displaced) == (1 if bound == "max_requests" else 2)
    equal = QueuedItem(arrived=0.0, deadline=1e9, tenant="t0", size=1)
    assert isinstance(queue.join(equal, 0.0), Rejection)


def test_without_fairness_a_tenant_may_take_the_whole_queue():
    """No request is displaced for another tenant of the same priority."""
    queue = crowd(6, settings=FlowControlSettings(max_requests=6, fairness="none"))
    assert isinstance(
        queue.join(QueuedItem(arrived=9.0, deadline=1e9, tenant="few"), 0.0), Rejection
    )


def test_no_tenant_takes_a_whole_band():
    """A full band makes room for a tenant with fewer requests, as a full queue does."""
    bounds = BandSettings(max_requests=4, max_bytes=30, fairness="round-robin")
    queue = Queue(FlowControlSettings(fairness="none", default_band=bounds))
    flood = [QueuedItem(arrived=at, deadline=1e9, tenant="flood", size=9) for at in range(3)]
    low = QueuedItem(arrived=0.0, deadline=1e9, priority=-1, size=30)
    for item in (*flood, low):
        queue.join(item, 0.0)
    few = QueuedItem(arrived=9.0, deadline=1e9, tenant="few", size=20)
    assert queue.join(few, 0.0).displaced == (flood[2], flood[1])
    assert set(queue) == {flood[0], low, few}


def test_bands_have_their_own_order_and_fairness():
    """Each that names them; the others have those of all."""
    queue = Queue(
        FlowControlSettings(
            order="edf",
            fairness="none",
            bands=(PrioritySettings(priority=1, order="fcfs"),),
            default_negative_band=BandSettings(fairness="round-robin"),
        )
    )

    def order(priority, tenants):
        items = [
            QueuedItem(arrived=at, deadline=9.0 - at, priority=priority, tenant=tenant)
            for at, tenant in enumerate(tenants)
        ]
        for item in items:
            queue.join(item, 0.0)
        left = []

        def go(item):
            left.append(items.index(item))
            return DepartureCause.DISPATCHED

        queue.pump(go, 0.0)
        return left

    assert order(0, "aab") == [2, 1, 0]
    assert order(1, "aab") == [0, 1, 2]
    assert order(-1, "aab") == [1, 2, 0]


def test_the_latest_of_the_busiest_tenant_is_displaced():
    """Again and again, also for requests that came after others had to leave."""
    queue = crowd(9, tenants=2, settings=FlowControlSettings(max_requests=9, order="edf"))

    def displaced():
        (gone,) = queue.join(QueuedItem(arrived=0.0, deadline=1e9, priority=1), 0.0).displaced
        return gone.tenant, 1e9 - gone.deadline

    # Deadlines come down, so the last of a tenant is the one that came first.
    assert [displaced(), displaced()] == [("t0", 0), ("t1", 1)]
    for tenant, at in (("t1", -5), ("t1", 20)):
        queue.leave(next(item for item in queue if item.priority))
        late = QueuedItem(arrived=0.0, deadline=1e9 - at, tenant=tenant)
        assert isinstance(queue.join(late, 0.0), EnqueueResult)
    assert [displaced(), displaced(), displaced()] == [("t1", -5), ("t0", 2), ("t1", 3)]


def test_a_rejected_join_changes_nothing():
    """No waiting request is moved, nothing is left behind, and it costs little."""
    queue = crowd(500, settings=FlowControlSettings(max_bytes=1000))
    for at in range(500):
        queue.join(QueuedItem(arrived=at, deadline=1e9, priority=1, size=1), 0.0)
    places = {item: (item.number, item.place) for item in queue}
    large = QueuedItem(arrived=0.0, deadline=1e9, priority=1, size=600)
    queue.join(large, 0.0)  # counts the tenants, once
    objects = count_reachable(queue)

    def join():
        for _ in range(10):
            assert isinstance(queue.join(large, 0.0), Rejection)

    assert operations(join) < 1000
    assert {item: (item.number, item.place) for item in queue} == places
    assert count_reachable(queue) == objects
    assert not large.is_queued
