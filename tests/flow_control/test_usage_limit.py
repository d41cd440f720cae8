"""Requests that are held in the queue at the ceiling of their priority."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.decision import Deferral, Rejection
from extproc.endpoint import Load
from extproc.flow_control.controller import FlowCallbacks, FlowController, LookBudget
from extproc.flow_control.flow_queue import EndpointBits
from extproc.flow_control.queue import EnqueueRequest, FlowControlSettings
from extproc.request import InferenceRequest
from extproc.routing.usage_limit import MEMORY_S, PriorityCeilings, UsageLimit
from extproc.scheduling.load_bounds import (
    ConcurrencyDetector,
    SaturationRules,
    UtilizationDetector,
)
from tests.flow_control.timer_fixture import TimerFixture
from tests.support.pool_fixture import PoolFixture

A, B = "10.0.0.1:8000", "10.0.0.2:8000"

#: Four open requests of an endpoint are its saturation of 1.
OPEN = SaturationRules(concurrency=ConcurrencyDetector(max_concurrency=4))

HALF = UsageLimit(min_ceiling=0.5)


class UsageLimitFixture:
    """A pool with flow control in virtual time, whose endpoints are never busy by the estimate."""

    def __init__(self, *addresses, limit=HALF, rules=OPEN, budget=None, **settings):
        self.timer = TimerFixture()
        self.pool = PoolFixture(dict.fromkeys(addresses or (A,)))
        self.pool.now = self.timer.time
        self.went, self.rejected, self.looks = {}, {}, 0
        self.priorities, self.queued = {}, {}
        self.subsets, self.known = {}, None
        self.configure(limit, rules)
        callbacks = FlowCallbacks(
            decide=self.decide,
            on_waiting=lambda _item, _address: None,
            dispatch=self.go,
            reject=self.rejected.__setitem__,
            endpoint_bits=self.bits,
        )
        self.controller = FlowController(
            FlowControlSettings(**settings), callbacks, self.timer, budget=budget
        )

    def configure(self, limit, rules=OPEN, banded=()):
        director = self.pool.director
        settings = msgspec.structs.replace(
            director.routing.settings, busy_s=1e6, usage_limit=limit, banded_priorities=banded
        )
        director.reconfigure(
            msgspec.structs.replace(director.routing, settings=settings, saturation=rules)
        )

    def bits(self):
        serving = self.pool.director.serving_bits
        if self.known is None or self.known.version is not serving:
            self.known = EndpointBits(
                for_target=lambda target: serving.bits_for("m", target[0], target[1]),
                for_addresses=serving.bits_of_addresses,
                version=serving,
                adapter_of=lambda target: target[0],
            )
        return self.known

    def decide(self, item, may_defer):
        self.looks += 1
        request = InferenceRequest(
            api="completions",
            model="m",
            prompt_tokens=10,
            priority=self.priorities[item],
            subset=self.subsets.get(item),
        )
        return self.pool.director.scheduler.schedule(
            request, self.timer.time, chain=(), headers={}, may_defer=may_defer
        )

    def go(self, item, decision):
        self.went[item] = self.pool.director.reserve(decision, self.timer.time)

    def ask(self, item, priority=0, *, subset=None, adapter="", **properties):
        """Dispatch a new request, or let it wait; returns whether it waits."""
        self.priorities[item], self.subsets[item] = priority, subset
        outcome = self.decide(item, may_defer=True)
        address = "" if isinstance(outcome, Deferral | Rejection) else outcome.endpoints[0].address
        why = self.controller.check(outcome, priority=priority, preferred_endpoint=address)
        if why is None:
            self.go(item, outcome)
            return False
        target = (adapter, subset)
        place = EnqueueRequest(priority=priority, target=target, **properties)
        queued = self.controller.enqueue(item, place, why, self.timer.time)
        if isinstance(queued, Rejection):
            self.rejected[item] = queued
            return False
        self.queued[item] = queued
        return True

    @property
    def open(self):
        """Requests that were dispatched and did not end."""
        return [item for item, reservation in self.went.items() if reservation.is_open]

    def end(self, item):
        """A response that ends, as the server reports it."""
        self.pool.director.release(self.went[item], self.timer.time)
        self.controller.notify_capacity()

    def scrape(self, waiting, address=A):
        store = self.pool.store
        mark = store.begin_scrape(store.pool.find(address).endpoint)
        load = Load(at=self.timer.time, engine="vllm", waiting=waiting, running=1.0, kv_usage=0.0)
        store.observe(mark, load, self.timer.time)
        self.controller.notify_capacity()

    def fill(self, count, priority=0):
        for at in range(count):
            assert not self.ask(f"first-{at}", priority)


@pytest.mark.parametrize(
    ("domain", "ceilings"), [("rank", [0.9, 0.65, 0.4]), ("value", [0.9, 0.42, 0.4])]
)
def test_ceilings_fall_from_the_highest_priority_to_the_lowest(domain, ceilings):
    """In equal steps, or in proportion to the priorities."""
    limit = UsageLimit(min_ceiling=0.4, max_ceiling=0.9, domain=domain)
    by_priority = limit.find_ceilings([-1, 24, 0])
    assert list(by_priority) == [24, 0, -1]
    assert list(by_priority.values()) == pytest.approx(ceilings)
    assert limit.find_ceilings([7]) == {7: 0.9}


def test_a_ceiling_of_the_lowest_above_the_highest_is_refused():
    """A higher priority is never held before a lower one."""
    with pytest.raises(ValueError, match="min_ceiling of at most max_ceiling"):
        UsageLimit(min_ceiling=0.9, max_ceiling=0.8)


def test_priorities_count_for_ten_minutes_or_by_their_band():
    """A single one has the highest ceiling, so that nothing is kept for requests that never come."""
    ceilings = PriorityCeilings()
    ceilings.reconfigure(HALF, ())
    assert ceilings.find(0, 0.0) == 1.0
    assert ceilings.find(10, 1.0) == 1.0
    assert ceilings.find(0, MEMORY_S) == 0.5
    assert ceilings.find(0, MEMORY_S + 1.0) == 1.0
    ceilings.reconfigure(HALF, (20,))
    assert ceilings.find(0, MEMORY_S + 2.0) == 0.5


def test_a_low_priority_is_held_while_a_high_one_passes():
    """Arriving requests wait as those do that wait already, and go in order once a response ends."""
    fixture = UsageLimitFixture()
    assert not fixture.ask("urgent", 10)
    assert not fixture.ask("a")
    assert fixture.ask("b")
    assert fixture.ask("c")
    assert not fixture.ask("more urgent", 10)
    fixture.timer.advance(5.0)
    assert list(fixture.queued) == ["b", "c"]
    fixture.end("urgent")
    fixture.timer.advance(0.0)
    assert "b" not in fixture.went
    fixture.end("more urgent")
    fixture.timer.advance(0.0)
    assert "b" in fixture.went
    assert "c" not in fixture.went
    fixture.end("a")
    fixture.timer.advance(0.0)
    assert "c" in fixture.went


def test_equal_ceilings_hold_every_priority():
    """The static policy: new requests wait from the ceiling on, whatever their priority."""
    fixture = UsageLimitFixture(limit=UsageLimit(min_ceiling=0.5, max_ceiling=0.5))
    fixture.fill(2)
    assert fixture.ask("low")
    assert fixture.ask("high", 10)
    fixture.end("first-0")
    fixture.timer.advance(0.0)
    assert "high" in fixture.went
    assert "low" not in fixture.went


def test_without_a_limit_no_request_is_held():
    """However saturated the pool is."""
    fixture = UsageLimitFixture(limit=None)
    fixture.fill(9)


@pytest.mark.parametrize(
    "rules", [None, SaturationRules(), SaturationRules(utilization=UtilizationDetector())]
)
def test_a_scrape_ends_the_hold(rules):
    """Without detectors, by the default thresholds; an unknown load holds nothing."""
    fixture = UsageLimitFixture(A, B, rules=rules)
    fixture.ask("urgent", 10)
    assert not fixture.ask("a")
    fixture.scrape(5.0)
    assert fixture.ask("b")
    fixture.scrape(5.0, B)
    fixture.timer.advance(0.0)
    assert "b" not in fixture.went
    fixture.scrape(0.0, B)
    fixture.scrape(4.0)
    fixture.timer.advance(0.0)
    assert "b" in fixture.went


def test_time_ends_the_hold():
    """A higher priority that counts no longer is noticed without an event, within a tenth of a second."""
    fixture = UsageLimitFixture(timeout_s=2000.0)
    fixture.ask("urgent", 10)
    fixture.ask("a")
    fixture.timer.advance(MEMORY_S - 1.0)
    fixture.ask("b")
    fixture.timer.advance(0.9)
    assert "b" not in fixture.went
    fixture.timer.advance(0.2)
    assert "b" in fixture.went


def test_a_change_of_the_limit_ends_the_hold():
    """A reload, without another event."""
    fixture = UsageLimitFixture()
    fixture.fill(2, priority=10)
    assert fixture.ask("low")
    fixture.configure(UsageLimit(min_ceiling=0.75))
    fixture.timer.advance(0.1)
    assert "low" in fixture.went


def test_held_requests_expire_and_leave():
    """429 at their deadline; one whose client is gone is looked at no more."""
    fixture = UsageLimitFixture(timeout_s=5.0)
    fixture.fill(2, priority=10)
    fixture.ask("patient")
    fixture.ask("gone", timeout_s=60.0)
    assert fixture.controller.cancel(fixture.queued["gone"])
    fixture.ask("hasty", timeout_s=0.0)
    fixture.timer.advance(5.1)
    assert {item: (why.status, why.cause) for item, why in fixture.rejected.items()} == {
        "patient": (429, "queue-timeout"),
        "hasty": (429, "held"),
    }
    assert fixture.controller.outcomes == {"cancelled": 1, "expired": 1}
    assert not fixture.controller.queue.count


def test_a_priority_below_zero_is_rejected_at_saturation():
    """Also while it waits: to hold it until its deadline would be in vain."""
    fixture = UsageLimitFixture()
    fixture.fill(2, priority=10)
    assert fixture.ask("low", -1)
    for at in range(2):
        fixture.ask(f"second-{at}", 10)
    fixture.timer.advance(0.1)
    assert fixture.rejected["low"].cause == "shed"


def test_held_requests_hold_up_those_of_other_adapters_only_on_the_same_endpoints():
    """One look per set of endpoints; a less saturated part of them takes requests that must go there."""
    fixture = UsageLimitFixture(A, B)
    for at, address in enumerate([A, A, A, A, B]):
        assert not fixture.ask(f"urgent-{at}", 10, subset=(address,))
    for at in range(50):
        assert fixture.ask(f"held-{at}", adapter=f"lora-{at}")
    fixture.looks = 0
    fixture.controller.notify_capacity()
    fixture.timer.advance(0.0)
    assert fixture.looks == 1
    fixture.ask("for B", subset=(B,))
    fixture.timer.advance(0.01)
    assert list(fixture.went)[5:] == ["for B"]


STEPS = st.one_of(
    st.tuples(st.just("ask"), st.integers(-1, 2)),
    st.tuples(st.just("end"), st.integers(0, 9)),
    st.tuples(st.just("cancel"), st.integers(0, 9)),
    st.tuples(st.just("wait"), st.sampled_from([0.0, 0.05, 3.0])),
    st.tuples(st.just("limit"), st.sampled_from([None, 0.25, 0.5, 1.0])),
)


@given(st.lists(STEPS, max_size=40), st.sampled_from([None, 1]))
def test_no_held_request_is_lost(steps, most):
    """Each goes once, expires, is rejected or cancelled; all that wait go when the pool is idle."""
    budget = None if most is None else LookBudget(looks=most, seconds=1.0)
    fixture = UsageLimitFixture(budget=budget, timeout_s=20.0)
    cancelled = set()
    for at, (step, value) in enumerate(steps):
        if step == "ask":
            fixture.ask(at, value)
        elif step == "end" and fixture.open:
            fixture.end(fixture.open[value % len(fixture.open)])
        elif step == "cancel" and fixture.queued:
            item = list(fixture.queued)[value % len(fixture.queued)]
            if fixture.controller.cancel(fixture.queued[item]):
                cancelled.add(item)
        elif step == "wait":
            fixture.timer.advance(value)
        elif step == "limit":
            fixture.configure(None if value is None else UsageLimit(min_ceiling=value))
        waiting = {i for i, queued in fixture.queued.items() if queued.is_queued}
        counts = Counter([*fixture.went, *fixture.rejected, *cancelled, *waiting])
        assert counts == dict.fromkeys(fixture.priorities, 1)
    for _ in range(len(steps)):
        for item in fixture.open:
            fixture.end(item)
        fixture.timer.advance(0.1)
    assert not fixture.controller.queue.count
