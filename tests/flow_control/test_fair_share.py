"""Fair share: what tenants that begin to wait start with."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from extproc.flow_control.fair_share import FairShare
from extproc.flow_control.flow_queue import QueuedItem
from extproc.flow_control.queue import DepartureCause, FlowControlSettings, Queue
from tests.support.reachable import count_reachable


def join(queue, tenants, *, at=0.0):
    for tenant in tenants:
        queue.join(QueuedItem(arrived=at, deadline=math.inf, tenant=tenant, tokens=10), at)


def dispatch(queue):
    """Tenants of all requests in the order of dispatch."""
    order = []
    queue.pump(lambda item: order.append(item.tenant) or DepartureCause.DISPATCHED, 0.0)
    return "".join(order)


def test_a_new_tenant_does_not_starve_those_that_wait():
    """However much they attained before it came, they take turns from then on."""
    queue = Queue(FlowControlSettings())
    queue.charge("a", 1000.0, 0.0)
    join(queue, "aaaa")
    join(queue, "bbbb", at=1.0)
    assert dispatch(queue) == "abababab"


def test_a_new_tenant_does_not_starve_those_about_to_wait():
    """One tenant has had all capacity when another fills the queue."""
    queue = Queue(FlowControlSettings())
    queue.charge("a", 1000.0, 0.0)
    join(queue, "bbb")
    join(queue, "aaa", at=1.0)
    assert dispatch(queue) == "bababa"


def test_a_tenant_that_attained_more_waits_for_others():
    """The excess over those that wait counts when it comes back."""
    queue = Queue(FlowControlSettings())
    queue.charge("a", 30.0, 0.0)
    queue.charge("b", 10.0, 0.0)
    join(queue, "bbbb")
    join(queue, "aaa", at=1.0)
    assert dispatch(queue) == "bbbabaa"


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["enter", "leave", "charge"]),
            st.sampled_from("abcd"),
            st.integers(-9, 9),
            st.sampled_from([0.0, 0.5, 300.0]),
        ),
        max_size=60,
    )
)
def test_a_tenant_starts_with_the_lowest_that_wait(steps):
    """Never lower, and no higher unless it attained more, whatever was charged and who left."""
    share, waiting, now = FairShare(1.0), dict.fromkeys("abcd", 0), 0.0
    last = ""
    for step, tenant, tokens, passed in steps:
        now += passed
        if step == "charge":
            share.charge(tenant, tokens, now)
            last = tenant
        elif step == "leave" and waiting[tenant]:
            share.leave(tenant)
            waiting[tenant] -= 1
        elif step == "enter":
            own = share.normalized_service(tenant)
            lowest = min(
                (share.normalized_service(other) for other, count in waiting.items() if count),
                default=share.normalized_service(last),
            )
            share.enter(tenant)
            waiting[tenant] += 1
            assert share.normalized_service(tenant) == max(own, lowest)


def test_tenants_that_left_take_no_memory():
    """However many tenants waited, and however often the service of one is corrected."""
    share = FairShare(60.0)
    share.enter("stays")
    before = count_reachable(share)
    for number in range(1000):
        share.enter(f"t{number}")
        share.leave(f"t{number}")
        share.charge("stays", -1.0, 0.0)
    assert count_reachable(share) < before + 100


def test_tenants_that_were_never_served_are_forgotten():
    """Each began with what the least served one that waited had attained."""
    share = FairShare(60.0)
    share.enter("stays")
    share.charge("stays", 100.0, 0.0)
    for number in range(30_000):
        share.enter(f"t{number}")
        share.leave(f"t{number}")
    known = [number for number in range(30_000) if share.attained(f"t{number}", 0.0)]
    assert len(known) <= 16_384


def test_tenants_that_wait_keep_what_they_attained():
    """However many others are served meanwhile."""
    share = FairShare(60.0)
    share.enter("waits")
    share.charge("waits", 1.0, 0.0)
    for number in range(20_000):
        share.served(f"t{number}", 100.0, 0.0)
    assert share.attained("waits", 0.0) == 1.0
