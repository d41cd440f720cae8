"""The order of looks at waiting requests, and what they cost."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.flow_control.flow_queue import EndpointBits, QueuedItem
from extproc.flow_control.priority_band import PrioritySettings
from extproc.flow_control.queue import (
    Blocked,
    DepartureCause,
    EnqueueResult,
    FlowControlSettings,
    Queue,
)
from tests.flow_control.crowds import crowd, operations
from tests.support.reachable import count_reachable

ENDPOINTS = ("a", "b", "c")


#: Targets by the endpoints that can serve them.
TARGETS = ("", "a", "b", "ab", "bc", "abc", "cba")


def bits_of(names):
    """Bit n for the n-th endpoint."""
    return sum(1 << ENDPOINTS.index(name) for name in set(names))


class SlotFleet:
    """Endpoints with so many free places, which requests take as the dispatcher decides.

    Args:
        free: Places by endpoint.
        wants: The endpoint a request waits for while others have a place, by number.
    """

    def __init__(self, free, wants=None):
        self.free = Counter(free)
        self.wants = wants or {}
        self.looks = []
        self.went = []

    def look(self, queue, waiter):
        """Result of one look of the queue at a request."""
        self.looks.append(waiter.number)
        places = [name for name in waiter.target if self.free[name] > 0]
        if not waiter.target:
            return DepartureCause.REJECTED
        if not places:
            return Blocked(busy=bits_of(waiter.target))
        wanted = self.wants.get(waiter.number, "")
        if wanted in waiter.target and wanted and wanted not in places:
            queue.set_preferred_endpoint(waiter, wanted)
            return Blocked(preferred_endpoint=wanted)
        self.free[places[0]] -= 1
        self.went.append(waiter.number)
        return DepartureCause.DISPATCHED


def expected(waiting, fleet, queue, *, order, fairness, shared):
    """The order of going by the plainest means: the best of all who wait, again and again."""
    free, went = Counter(fleet.free), []
    standing = {item.tenant: queue.fair_share.normalized_service(item.tenant) for item in waiting}
    last = {item.tenant: queue.fair_share.last(item.tenant) for item in waiting}
    turn = max(last.values(), default=0)
    for priority in sorted({item.priority for item in waiting}, reverse=True):
        left = [item for item in waiting if item.priority == priority]
        toward = {item.number: item.preferred_endpoint for item in left}
        busy, ways, targets = set(), set(), set()
        while True:
            free_to_go = [
                item
                for item in left
                if not (item.target and set(item.target) <= busy)
                and frozenset(item.target) not in targets
                and (frozenset(item.target), toward[item.number]) not in ways
            ]
            if not free_to_go:
                break
            turns = {"none": {}, "round-robin": last, "least-served": standing}[fairness]
            item = min(free_to_go, key=lambda w: (turns.get(w.tenant, 0), w.rank(order), w.number))
            places = [name for name in item.target if free[name] > 0]
            wanted = fleet.wants.get(item.number, "")
            if not item.target:
                left.remove(item)
            elif not places:
                busy |= set(item.target)
                targets.add(frozenset(item.target))
            elif wanted and wanted in item.target and wanted not in places:
                toward[item.number] = wanted
                ways.add((frozenset(item.target), wanted))
            else:
                free[places[0]] -= 1
                left.remove(item)
                went.append(item.number)
                turn += 1
                last[item.tenant] = turn
                standing[item.tenant] += item.tokens * shared
    return went


def enough_after(count):
    """A budget of so many looks."""
    calls = iter(range(count))
    return lambda: next(calls, None) is None


REQUESTS = st.lists(
    st.tuples(
        st.integers(0, 3),
        st.integers(0, 2),
        st.sampled_from(TARGETS),
        st.integers(1, 9),
        st.sampled_from(["", "a", "b", "c"]),
        st.integers(0, 3),
    ),
    max_size=25,
)


ROUNDS = st.lists(
    st.tuples(
        st.dictionaries(st.sampled_from(ENDPOINTS), st.integers(0, 4)),
        st.integers(0, 3),
        st.integers(-20, 20),
    ),
    min_size=1,
    max_size=5,
)


@given(
    REQUESTS,
    ROUNDS,
    st.sampled_from(["fcfs", "edf", "slo"]),
    st.sampled_from(["round-robin", "least-served", "none"]),
    st.integers(1, 6),
)
def test_any_budget_dispatches_in_the_same_order(requests, rounds, order, fairness, looks):
    """As one look at everybody after the other would, however little one call may do."""
    queue = Queue(FlowControlSettings(order=order, fairness=fairness, half_life_s=1e9))
    queue.replace_bits(EndpointBits(for_target=bits_of, for_addresses=bits_of))
    waiting, wants = {}, {}
    for at, (tenant, priority, target, tokens, wanted, slo_s) in enumerate(requests):
        item = QueuedItem(
            arrived=at,
            deadline=1e3 - at % 5,
            tenant=str(tenant),
            priority=priority,
            target=target,
            tokens=tokens,
            slo_s=slo_s,
        )
        assert isinstance(queue.join(item, 0.0), EnqueueResult)
        waiting[item.number] = item
        wants[item.number] = wanted
    for free, tenant, charged in rounds:
        queue.charge(str(tenant), charged, 0.0)
        store = SlotFleet(free, wants)
        wished = expected(
            list(waiting.values()), store, queue, order=order, fairness=fairness, shared=1.0
        )
        calls = 1
        while not queue.pump(
            lambda item, pool_store=store: pool_store.look(queue, item),
            0.0,
            enough=enough_after(looks),
        ):
            calls += 1
        assert store.went == wished
        assert len(store.looks) <= calls * looks
        waiting = {item.number: item for item in queue}


@given(st.lists(st.integers(0, 40), min_size=1, max_size=60), st.integers(1, 5))
def test_every_first_request_is_examined_within_bounded_pumps(targets, looks):
    """However often something changes: a sweep goes on where it stopped."""
    queue = Queue(FlowControlSettings())
    for at, target in enumerate(targets):
        queue.join(QueuedItem(arrived=at, deadline=math.inf, target=target), 0.0)
    examined = set()

    def look(item):
        examined.add(item.target)
        return Blocked()

    for _ in range(math.ceil(len(set(targets)) / looks)):
        queue.pump(look, 0.0, enough=enough_after(looks))
    assert examined == set(targets)


def test_busy_endpoints_block_every_model_they_serve():
    """Two thousand names take one look for each endpoint, and not one for each name."""
    queue = Queue(FlowControlSettings())
    store = SlotFleet({})
    names = {f"model-{at}": "abc"[at % 3] if at % 2 else "abc" for at in range(2000)}
    queue.replace_bits(
        EndpointBits(for_target=lambda name: bits_of(names[name]), for_addresses=bits_of)
    )
    for at, name in enumerate(names):
        queue.join(QueuedItem(arrived=at, deadline=math.inf, target=name, tenant=f"t{at}"), 0.0)

    def look(item):
        store.looks.append(item.number)
        return Blocked(busy=bits_of(names[item.target]))

    assert queue.pump(look, 0.0)
    assert len(store.looks) == 1
    assert queue.pump(lambda item: Blocked(), 0.0)
    queue.replace_bits(
        EndpointBits(for_target=lambda name: bits_of(names[name][:1]), for_addresses=bits_of)
    )
    store.looks.clear()

    def look_again(item):
        store.looks.append(item.number)
        return Blocked(busy=bits_of(names[item.target][:1]))

    assert queue.pump(look_again, 0.0)
    assert len(store.looks) == 3


def test_added_endpoints_serve_queued_requests():
    """Requests change their set with what endpoints list, and are not held up by others then."""
    queue = Queue(FlowControlSettings())
    serves = {"x": "a", "y": "a"}
    queue.replace_bits(
        EndpointBits(for_target=lambda name: bits_of(serves[name]), for_addresses=bits_of)
    )
    first = QueuedItem(arrived=0.0, deadline=math.inf, target="x")
    other = QueuedItem(arrived=1.0, deadline=math.inf, target="y")
    for item in (first, other):
        queue.join(item, 0.0)
    went = []

    def look(item):
        if "b" in serves[item.target]:
            went.append(item.target)
            return DepartureCause.DISPATCHED
        return Blocked(busy=bits_of("a"))

    queue.pump(look, 0.0)
    assert went == []
    serves["y"] = "ab"
    queue.replace_bits(
        EndpointBits(for_target=lambda name: bits_of(serves[name]), for_addresses=bits_of)
    )
    queue.pump(look, 0.0)
    assert went == ["y"]
    assert list(queue) == [first]
    assert len(queue.sets._by_bits) == 1


def test_requests_are_sorted_anew_within_the_budget():
    """When what endpoints serve changes, calls that may do little still get to the end."""
    queue = crowd(500, targets=50)
    queue.replace_bits(
        EndpointBits(for_target=lambda target: 1 + target % 3, for_addresses=bits_of)
    )
    gone = list(queue)[::7]
    for item in gone:
        queue.leave(item)
    looks, calls = [], 1
    while not queue.pump(lambda item: looks.append(item) or Blocked(), 0.0, enough=enough_after(2)):
        calls += 1
        assert calls < 20
    assert calls > 5
    assert len(looks) == 3
    assert {item.endpoints.bits for item in queue} == {1, 2, 3}
    assert all(item.endpoints is queue.sets.current(item.target) for item in queue)


@pytest.mark.parametrize("tenants", [1, 2, 3])
def test_requests_of_many_targets_keep_order_of_arrival(tenants):
    """However their targets and tenants alternate, where tenants do not take turns."""
    queue = crowd(24, tenants=tenants, targets=4, settings=FlowControlSettings(fairness="none"))
    went = []
    queue.pump(lambda item: went.append(item.arrived) or DepartureCause.DISPATCHED, 0.0)
    assert went == list(range(24))


@pytest.mark.parametrize("blocked", [Blocked(busy=1), Blocked(preferred_endpoint="a"), Blocked()])
def test_a_blocked_priority_blocks_no_other(blocked):
    """Endpoints may have a place for one and not for the other."""
    queue = Queue(FlowControlSettings())
    queue.replace_bits(EndpointBits(for_target=lambda _: 1, for_addresses=bits_of))
    for priority in (2, 1, 0):
        for _ in range(2):
            item = QueuedItem(arrived=0.0, deadline=math.inf, priority=priority)
            queue.join(item, 0.0)
            queue.set_preferred_endpoint(item, "a")
    looks = []
    queue.pump(lambda item: looks.append(item.priority) or blocked, 0.0)
    assert looks == [2, 1, 0]


def test_a_refused_request_is_not_served():
    """It neither costs its tenant a turn nor counts as one that went on."""
    queue = Queue(FlowControlSettings())
    queue.join(QueuedItem(arrived=0.0, deadline=math.inf, tenant="t", tokens=100), 0.0)
    assert queue.pump(lambda _: DepartureCause.REJECTED, 1.0)
    assert queue.fair_share.attained("t", 1.0) == 0.0
    assert queue.drain_rate.per_s(1.0) == 0.0
    assert queue.count == 0


def test_a_tenant_with_less_usage_is_served_sooner():
    """Turns that go down are noticed at once."""
    queue = Queue(FlowControlSettings())
    for tenant in "xy":
        for at in range(2):
            queue.join(QueuedItem(arrived=at, deadline=math.inf, tenant=tenant, tokens=1), 0.0)
    queue.charge("x", 100.0, 0.0)
    queue.charge("y", 50.0, 0.0)
    order = []
    queue.pump(lambda item: order.append(item.tenant) or Blocked(), 0.0)
    queue.charge("x", -80.0, 0.0)
    queue.pump(lambda item: order.append(item.tenant) or Blocked(), 0.0)
    assert order == ["y", "x"]


def test_a_half_life_can_be_replaced():
    """Attained tokens decay with the new half-life from then on."""
    queue = Queue(FlowControlSettings(half_life_s=1.0))
    queue.fair_share.served("t", 64.0, 0.0)
    queue.reconfigure(FlowControlSettings(half_life_s=10.0), 2.0)
    assert queue.fair_share.attained("t", 2.0) == pytest.approx(16.0)
    assert queue.fair_share.attained("t", 12.0) == pytest.approx(8.0)


SORTINGS = st.tuples(
    st.sampled_from(["fcfs", "edf", "slo"]),
    st.sampled_from(["least-served", "round-robin", "none"]),
)


@given(
    SORTINGS,
    SORTINGS,
    st.lists(
        st.tuples(
            st.sampled_from("xyz"), st.integers(0, 1), st.integers(0, 9), st.sampled_from(TARGETS)
        ),
        max_size=30,
    ),
)
def test_order_and_fairness_can_be_replaced(before, after, requests):
    """Requests that wait go as if they had always waited so, and leave once."""

    def settings(order, fairness):
        band = PrioritySettings(priority=1, order=order, fairness=fairness)
        return FlowControlSettings(bands=(band,), order="edf")

    def waiting(sorting):
        queue = Queue(settings(*sorting))
        queue.fair_share.served("x", 5.0, 0.0)
        for at, (tenant, priority, time_s, target) in enumerate(requests):
            item = QueuedItem(
                arrived=at,
                deadline=1e3 + time_s,
                slo_s=3.0 * time_s,
                tenant=tenant,
                priority=priority,
                target=target,
                size=time_s,
                tokens=1,
            )
            queue.join(item, 0.0)
            if time_s > 5:
                queue.set_preferred_endpoint(item, target)
        return queue

    def dispatched(queue):
        numbers = []
        queue.pump(lambda item: numbers.append(item.number) or DepartureCause.DISPATCHED, 0.0)
        return numbers

    queue, expected = waiting(before), waiting(after)
    queue.reconfigure(settings(*after), 0.0)
    assert (queue.count, queue.bytes) == (expected.count, expected.bytes)
    numbers = dispatched(queue)
    assert numbers == dispatched(expected)
    assert sorted(numbers) == list(range(1, len(requests) + 1))
    assert (queue.count, queue.bytes, list(queue)) == (0, 0, [])


@pytest.mark.parametrize(("tenants", "targets"), [(1, 1), (1000, 1), (1, 1000), (20, 50)])
def test_dispatching_many_is_not_quadratic(tenants, targets):
    """Each takes much the same work, however many wait, of however many tenants and targets."""

    def cost(size):
        queue = crowd(size, tenants=min(tenants, size), targets=min(targets, size))
        return operations(lambda: queue.pump(lambda _: DepartureCause.DISPATCHED, 0.0))

    assert cost(4000) < 6 * cost(1000)


def test_many_targets_of_a_tenant_cost_the_same():
    """Its turn moves all of its requests alike, however many ways they wait."""

    def cost(targets):
        queue = crowd(2000, targets=targets)
        return operations(lambda: queue.pump(lambda _: DepartureCause.DISPATCHED, 0.0))

    assert cost(1000) < 3 * cost(10)


@pytest.mark.parametrize(("tenants", "targets"), [(1, 1), (4000, 1)])
def test_a_pump_without_capacity_is_cheap(tenants, targets):
    """However many wait for the same."""
    queue = crowd(4000, tenants=tenants, targets=targets)
    assert operations(lambda: queue.pump(lambda _: Blocked(), 0.0)) < 100


def test_heaps_are_bounded_by_the_queue():
    """Turns, moves and leaving leave no more entries behind than requests wait."""
    queue = crowd(2000, tenants=3)
    queue.replace_bits(EndpointBits(for_target=lambda _: 1, for_addresses=bits_of))
    for at, item in enumerate(list(queue)[10:]):
        for toward in ("a", f"endpoint {at}", ""):
            queue.set_preferred_endpoint(item, toward)
        queue.leave(item)
    left = list(queue)
    for _ in range(500):
        for item in left:
            queue.set_preferred_endpoint(item, "a")
            queue.set_preferred_endpoint(item, "")
            queue.charge(item.tenant, -1.0, 0.0)
            queue.charge(item.tenant, 1.0, 0.0)
    queue.join(QueuedItem(arrived=0.0, deadline=1e9, priority=1), 0.0)
    queue.pump(lambda _: Blocked(busy=bits_of("a")), 0.0)  # sorts by endpoints what is left
    assert count_reachable(queue) < 800
