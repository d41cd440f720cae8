from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.decision import Rejection
from extproc.flow_control.drain_rate import DrainRateEstimator
from extproc.flow_control.flow_queue import EndpointBits, QueuedItem
from extproc.flow_control.queue import (
    Blocked,
    DepartureCause,
    EnqueueResult,
    FlowControlSettings,
    Queue,
)
from tests.support.reachable import count_reachable


def waiter(name="", *, arrived=0.0, deadline=math.inf, **facts):
    item = QueuedItem(arrived=arrived, deadline=deadline, **facts)
    names[item] = name
    return item


names: dict[QueuedItem, str] = {}


def queue(*waiters, now=0.0, **settings):
    requests = Queue(FlowControlSettings(**settings))
    for item in waiters:
        assert isinstance(requests.join(item, now), EnqueueResult)
    return requests


def order(requests, *, most=10_000, can=lambda _: True, now=1.0):
    """Names in the order in which they go on."""
    went = []

    def go(item):
        if len(went) >= most or not can(item):
            return Blocked()
        went.append(names[item])
        return DepartureCause.DISPATCHED

    requests.pump(go, now)
    return "".join(went)


def test_a_single_tenant_is_served_in_order_of_arrival():
    """First come, first served."""
    requests = queue(*(waiter(name, arrived=at) for at, name in enumerate("abcd")))
    assert order(requests, most=2) == "ab"
    assert order(requests) == "cd"
    assert (requests.count, requests.bytes) == (0, 0)


@pytest.mark.parametrize(("way", "expected"), [("fcfs", "abc"), ("edf", "bca"), ("slo", "cab")])
def test_orders_within_a_tenant(way, expected):
    """By arrival, by deadline, or by arrival plus the time to first token asked for."""
    requests = queue(
        waiter("a", arrived=0, deadline=30, slo_s=5),
        waiter("b", arrived=1, deadline=10),
        waiter("c", arrived=2, deadline=20, slo_s=1),
        order=way,
    )
    assert order(requests) == expected


def test_requested_times_order_requests_within_a_tenant():
    """Deadlines and times to first token of one tenant change no turn of another tenant or band."""
    for way in ("edf", "slo"):
        for fairness in ("least-served", "round-robin"):
            plain = [
                waiter(name, tenant=name, arrived=at, tokens=9) for at, name in enumerate("ab")
            ]
            first = waiter("h", tenant="h", priority=1, arrived=9)
            hasty = [
                waiter(name, tenant="b", arrived=at + 2, tokens=9, deadline=20 - at, slo_s=0.001)
                for at, name in enumerate("xy")
            ]
            went = order(queue(*plain, *hasty, first, order=way, fairness=fairness))
            assert went[0] == "h"
            assert went.index("a") < 3  # one turn of each tenant


def test_requested_times_do_not_change_order_of_arrival():
    """By arrival no request comes earlier for a deadline or a time to first token."""
    waiters = [
        waiter(name, arrived=at, deadline=50 - at, slo_s=9.0 - at) for at, name in enumerate("abcd")
    ]
    assert order(queue(*waiters, order="fcfs")) == "abcd"


def test_higher_priorities_go_first():
    """Bands are strict: a later request of higher priority overtakes."""
    requests = queue(waiter("a"), waiter("b", priority=5, arrived=1), waiter("c", priority=-1))
    assert order(requests) == "bac"


def test_tenants_are_served_round_robin():
    """Round robin: the tenant without a turn for longest is next."""
    many = [waiter("m", tenant="m", arrived=at) for at in range(6)]
    few = [waiter("f", tenant="f", arrived=at + 10) for at in range(2)]
    assert order(queue(*many, *few, fairness="round-robin")) == "mfmfmmmm"


def test_tenants_attain_equal_service():
    """Least attained service: one that sends large prompts has fewer turns."""
    large = [waiter("l", tenant="l", tokens=300, arrived=at) for at in range(3)]
    small = [waiter("s", tenant="s", tokens=100, arrived=at + 10) for at in range(6)]
    assert order(queue(*large, *small)) == "lssslsssl"


def test_without_fairness_the_oldest_request_is_first():
    """One order over all tenants."""
    requests = queue(
        waiter("a", tenant="x"),
        waiter("b", tenant="y", arrived=1),
        waiter("c", tenant="x", arrived=2),
        fairness="none",
    )
    assert order(requests) == "abc"


def test_a_blocked_target_blocks_no_other_target():
    """A model without capacity does not block another, nor another priority of it."""
    requests = queue(
        waiter("a", target="llama"),
        waiter("b", target="qwen", arrived=1),
        waiter("c", target="llama", arrived=2),
        waiter("d", target="llama", priority=1, arrived=3),
    )
    assert order(requests, can=lambda item: item.target == "qwen" or item.priority) == "db"
    assert order(requests) == "ac"


def test_attained_service_decays_without_saved_credit():
    """After many half-lives tenants start alike, however much one had."""
    requests = Queue(FlowControlSettings(half_life_s=1.0))
    requests.fair_share.served("old", 1e6, 0.0)
    assert requests.fair_share.attained("old", 10.0) == pytest.approx(1e6 / 1024)
    requests.fair_share.served("new", 1.0, 1000.0)
    requests.fair_share.served("new", 1.0, 1_000_000.0)
    assert requests.fair_share.attained("old", 1_000_000.0) < 1e-9
    assert requests.fair_share.attained("new", 1_000_000.0) == pytest.approx(1.0)
    requests.fair_share.charge("new", -5.0, 1_000_000.0)
    assert requests.fair_share.attained("new", 1_000_000.0) == 0.0


def test_a_full_queue_displaces_lower_priorities():
    """The last of the lowest band makes room, of the tenant with most waiting."""
    first = waiter("a", tenant="x", priority=-1)
    last = waiter("b", tenant="y", priority=-1, arrived=1)
    later = waiter("c", tenant="y", priority=-1, arrived=2)
    requests = queue(first, last, later, max_requests=3)
    joined = requests.join(waiter("d"), 3.0)
    assert joined.displaced == (later,)
    assert not later.is_queued
    refused = requests.join(waiter("e", priority=-1), 3.0)
    assert isinstance(refused, Rejection)
    assert (refused.status, refused.reason) == (429, "rejected-saturated")
    assert requests.count == 3


def test_bytes_bound_the_queue():
    """No request is displaced for a body that does not fit anyway."""
    small = waiter("a", size=60, priority=-1)
    requests = queue(small, waiter("b", size=40), max_bytes=100)
    assert isinstance(requests.join(waiter("c", size=70), 0.0), Rejection)
    assert small.is_queued
    assert requests.bytes == 100
    assert requests.join(waiter("d", size=50), 0.0).displaced == (small,)


def test_expired_requests_are_removed_in_order():
    """Each at its own time, first the first; who left is not named."""
    early, late, gone = waiter("a", deadline=1), waiter("b", deadline=2), waiter("c", deadline=1)
    requests = queue(early, late, gone)
    requests.leave(gone)
    assert requests.next_deadline() == 1
    assert list(requests.expired(1.0)) == [early]
    assert requests.next_deadline() == 2
    assert list(requests.expired(1.5)) == []
    assert list(requests.expired(3.0)) == [late]
    assert requests.next_deadline() is None


def test_retry_after_is_the_estimate_of_the_queue():
    """Waiting requests divided by recent departures per second, at most the longest wait."""
    requests = queue(*(waiter(str(at)) for at in range(100)), max_requests=100)
    assert requests.full_rejection(0.0).retry_after_s == 60
    for at in range(60):
        requests.drain_rate.record_departures(1, at / 2)
    assert requests.drain_rate.per_s(30.0) == pytest.approx(2.0, rel=0.2)
    assert requests.full_rejection(30.0).retry_after_s == pytest.approx(50, rel=0.25)
    assert requests.full_rejection(300.0).retry_after_s == 60


def test_dispatched_requests_count_in_the_drain_rate():
    """A pump that lets two go is what the next estimate knows."""
    requests = queue(*(waiter(name) for name in "abc"))
    assert requests.drain_rate.per_s(1.0) == 0.0
    assert order(requests, most=2) == "ab"
    other = DrainRateEstimator()
    other.record_departures(2, 1.0)
    assert requests.drain_rate.per_s(2.0) == other.per_s(2.0) > 0.0


def test_slow_engines_have_a_drain_rate():
    """One request in twenty seconds is seen as such, whenever one asks."""
    pace = DrainRateEstimator()
    assert pace.per_s(0.0) == 0.0
    for at in range(12):
        pace.record_departures(1, 20.0 * at)
        for later in (1.0, 19.0):
            estimate_s = pace.wait_s(8, 20.0 * at + later)
            if at >= 4:
                assert estimate_s == pytest.approx(160, rel=0.3)
    assert pace.wait_s(8, 240.0, most_s=90.0) == 90


def test_claims_are_those_of_equal_and_higher_priorities():
    """Without endpoint bits, each of them may want any endpoint."""
    requests = queue(waiter("b", priority=2), waiter("c", priority=-3))
    assert [requests.has_claim_on("x", priority) for priority in (3, 2, 0, -5)] == [
        False,
        True,
        True,
        True,
    ]


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["join", "leave", "turn", "pump", "expire"]),
            st.integers(0, 3),
            st.integers(-1, 1),
            st.integers(0, 2),
        ),
        max_size=60,
    ),
    st.sampled_from(["fcfs", "edf", "slo"]),
    st.sampled_from(["round-robin", "least-served", "none"]),
)
def test_no_request_is_lost_or_served_twice(steps, way, fairness):
    """Counts always agree with who waits, whatever happens."""
    requests = Queue(
        FlowControlSettings(max_requests=8, max_bytes=20, order=way, fairness=fairness)
    )
    rng = random.Random(1)
    waiting: set[QueuedItem] = set()
    for now, (step, tenant, priority, target) in enumerate(steps):
        if step == "join":
            item = waiter(
                arrived=now,
                deadline=now + rng.randint(1, 20),
                tenant=str(tenant),
                priority=priority,
                target=target,
                size=rng.randint(0, 6),
                tokens=rng.randint(1, 9),
            )
            joined = requests.join(item, now)
            if isinstance(joined, EnqueueResult):
                waiting -= set(joined.displaced)
                waiting.add(item)
        elif step == "leave" and waiting:
            item = rng.choice(sorted(waiting, key=lambda item: item.arrived))
            requests.leave(item)
            requests.leave(item)
            waiting.discard(item)
        elif step == "turn" and waiting:
            item = rng.choice(sorted(waiting, key=lambda item: item.arrived))
            requests.set_preferred_endpoint(item, rng.choice(["", "a", "b"]))
        elif step == "pump":
            budget = iter(range(rng.randint(0, 3)))
            gone: list[QueuedItem] = []
            requests.pump(
                lambda item, budget=budget, gone=gone, target=target: (
                    Blocked()
                    if item.target != target or next(budget, None) is None
                    else gone.append(item) or DepartureCause.DISPATCHED
                ),
                now,
            )
            assert set(gone) <= waiting
            assert len(gone) == len(set(gone))
            waiting -= set(gone)
        else:
            waiting -= set(requests.expired(now))
        assert set(requests) == waiting
        assert requests.count == len(waiting) <= 8
        assert requests.bytes == sum(item.bytes for item in waiting) <= 20
        assert all(item.is_queued for item in waiting)


@pytest.mark.parametrize("share_late", [0.0, 0.1, 1.0], ids=["in order", "a few late", "any order"])
def test_hundreds_go_in_order_of_deadlines(share_late):
    """However many come out of order, leave, or change their preferred endpoint meanwhile."""
    rng = random.Random(7)
    deadlines = [
        rng.uniform(1e3, 2e3) if rng.random() < share_late else 1e3 + n for n in range(900)
    ]
    requests = Queue(FlowControlSettings(order="edf"))
    waiting = [waiter(deadline=deadline) for deadline in deadlines]
    for item in waiting:
        requests.join(item, 0.0)
    went: list[QueuedItem] = []
    while waiting:
        for item in rng.sample(waiting, min(20, len(waiting))):
            requests.set_preferred_endpoint(item, "a")
            requests.set_preferred_endpoint(item, "")
            if rng.random() < 0.3:
                requests.leave(item)
                waiting.remove(item)
        begun = len(went)
        requests.pump(
            lambda item, begun=begun: (
                Blocked()
                if len(went) - begun == 50
                else went.append(item) or DepartureCause.DISPATCHED
            ),
            0.0,
        )
        expected = sorted(waiting, key=lambda item: (item.deadline, item.number))
        assert went[begun:] == expected[:50]
        waiting = expected[50:]


def test_a_preferred_endpoint_blocks_no_other_requests():
    """Only those that wait for the same; each keeps its rank when it waits for another."""
    requests = queue(*(waiter(name, arrived=at) for at, name in enumerate("abcd")))
    by_name = {names[item]: item for item in requests}
    requests.set_preferred_endpoint(by_name["a"], "x")
    requests.set_preferred_endpoint(by_name["c"], "x")
    went = []

    def go(item):
        if item.preferred_endpoint == "x":
            return Blocked(preferred_endpoint="x")
        went.append(names[item])
        return DepartureCause.DISPATCHED

    requests.pump(go, 1.0)
    assert "".join(went) == "bd"
    requests.set_preferred_endpoint(by_name["c"], "y")
    requests.set_preferred_endpoint(by_name["c"], "x")
    assert requests.count == 2
    assert order(requests) == "ac"


ENGINE = EndpointBits(
    for_target=lambda _: 1, for_addresses=lambda _: 1, adapter_of=lambda name: name.strip(".")
)


def of_adapters(text, *, priorities=()):
    """A queue of requests by adapter, `.` for the base model, in order of arrival, for one engine."""
    requests = Queue(FlowControlSettings())
    requests.replace_bits(ENGINE)
    for at, name in enumerate(text):
        priority = priorities[at] if priorities else 0
        requests.join(waiter(name, arrived=at, target=name, priority=priority), 0.0)
    return requests


def went_with_slots(requests, loaded):
    """Names of the requests that go on while these adapters have all slots."""
    went = []

    def go(item):
        if item.target not in f".{loaded}":
            return Blocked(waits_for_slot=True)
        went.append(names[item])
        return DepartureCause.DISPATCHED

    requests.pump(go, 1.0)
    return "".join(went)


def test_a_request_that_waits_for_a_slot_holds_up_its_adapter_only():
    """Those of loaded adapters and of the base model go on in their order, then the oldest."""
    requests = of_adapters("ab.bcab.a")
    assert went_with_slots(requests, "b") == "b.bb."
    assert went_with_slots(requests, "ac") == "acaa"


def test_a_busy_endpoint_holds_up_all_adapters():
    """Endpoints without capacity have none for any request of the band."""
    requests = of_adapters("ab.b")
    looked = []

    def go(item):
        looked.append(names[item])
        return Blocked(busy=1, waits_for_slot=True)

    requests.pump(go, 1.0)
    assert looked == ["a"]


def test_requests_of_a_profile_hold_up_no_other_profile():
    """Another profile may choose among endpoints that the first one leaves out."""
    requests = Queue(FlowControlSettings())
    requests.replace_bits(
        EndpointBits(
            for_target=lambda _: 3, for_addresses=lambda _: 1, profile_of=lambda name: name
        )
    )
    for at, name in enumerate("dpdp"):
        requests.join(waiter(name, arrived=at, target=name), 0.0)
    looked = []

    def go(item):
        looked.append(names[item])
        return Blocked(busy=1) if item.target == "d" else DepartureCause.DISPATCHED

    requests.pump(go, 1.0)
    assert "".join(looked) == "dpp"
    assert order(requests) == "dd"


def test_a_slot_that_a_higher_priority_waits_for_becomes_free():
    """Lower priorities send no adapter there until it has gone on, only requests without one."""
    requests = of_adapters("b.bab", priorities=[0, 0, 0, 1, 0])
    assert went_with_slots(requests, "b") == "."
    assert went_with_slots(requests, "ab") == "abbb"


def test_memory_follows_the_queue():
    """Thousands who gave up leave nothing behind."""
    requests = Queue(FlowControlSettings())
    empty = count_reachable(requests)
    many = [waiter(arrived=at, deadline=1e6, target=at % 3) for at in range(5000)]
    for item in many:
        requests.join(item, 0.0)
    full = count_reachable(requests)
    for item in many[1:]:
        requests.leave(item)
    assert count_reachable(requests) < empty + 0.02 * (full - empty)
    requests.leave(many[0])
    left = count_reachable(requests)
    assert left < empty + 100
