"""Eviction of requests in flight for queued ones of higher priority."""

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from extproc.decision import NO_ENDPOINTS_YET, all_busy
from extproc.flow_control.controller import FlowCallbacks, FlowController
from extproc.flow_control.eviction import EvictionCallbacks, Evictor
from extproc.flow_control.queue import EnqueueRequest, FlowControlSettings
from extproc.routing import admission
from tests.flow_control.timer_fixture import TimerFixture

A, B = "10.0.0.1:8000", "10.0.0.2:8000"
BUSY = all_busy(2.0, busy_endpoints=[A, B])


class EvictorFixture:
    """An evictor over requests that are names.

    Attributes:
        now: Monotonic seconds.
        evicted: Requests that were evicted, in order.
        useless: Requests whose end helps no other one.
        stuck: Requests that cannot be ended now.
        ends_late: Whether evicted requests end by `end` alone.
        shown_at: Until when the pages of all endpoints show what ended.
    """

    def __init__(self):
        self.now = 0.0
        self.evicted = []
        self.useless, self.stuck = set(), set()
        self.ends_late = False
        self.shown_at = -1.0
        self.tracked = {}
        self.evictor = Evictor(
            EvictionCallbacks(
                evict=self.evict,
                shortens_wait=lambda item, _: item not in self.useless,
                has_shown=lambda _, ended_at: ended_at <= self.shown_at,
            )
        )

    def send(self, name, priority, address=A):
        self.tracked[name] = self.evictor.track(name, priority=priority, address=address)

    def end(self, name):
        request = self.tracked.pop(name)
        if request is not None:
            self.evictor.untrack(request, self.now)

    def evict(self, name):
        if name in self.stuck:
            return False
        self.evicted.append(name)
        if not self.ends_late:
            self.end(name)
        return True

    def make_room(self, priority=0, why=BUSY, num_waiting=1):
        return self.evictor.make_room(priority, why, num_waiting=num_waiting, now=self.now)

    def show(self):
        self.shown_at = self.now


def test_the_lowest_priority_goes_first_and_of_it_the_last_that_was_sent():
    """Over all endpoints of the request that waits."""
    fixture = EvictorFixture()
    for name, priority, address in [
        ("early", -2, A),
        ("late", -2, B),
        ("higher", -1, A),
        ("elsewhere", -9, "10.0.0.3:8000"),
        ("safe", 0, A),
    ]:
        fixture.send(name, priority, address)
    for _ in range(5):
        fixture.make_room()
        fixture.show()
    assert fixture.evicted == ["late", "early", "higher"]


def test_nothing_is_evicted_twice_for_one_shortage():
    """Until the effect shows, no more evictions are awaited than requests wait, and one for each endpoint."""
    fixture = EvictorFixture()
    for n in range(4):
        fixture.send(f"a{n}", -1)
        fixture.send(f"b{n}", -1, B)
    assert fixture.make_room()
    assert not fixture.make_room()
    assert fixture.make_room(num_waiting=9)
    assert not fixture.make_room(num_waiting=9)
    assert fixture.evicted == ["b3", "a3"]
    fixture.now = 1.0
    fixture.show()
    assert fixture.make_room()


def test_an_eviction_that_never_shows_is_forgotten():
    """After five seconds the next one may go, whether the request ended or not."""
    fixture = EvictorFixture()
    fixture.send("first", -1)
    fixture.send("second", -1)
    fixture.send("third", -1)
    assert fixture.make_room()
    fixture.now = 4.9
    assert not fixture.make_room()
    fixture.ends_late = True
    fixture.now = 5.0
    assert fixture.make_room()
    fixture.now = 10.0
    assert fixture.make_room()
    assert fixture.evictor.outcomes == {"confirmed": 1, "timed_out": 1}
    assert fixture.evictor.issued == {0: 3}


def test_what_is_evicted_and_has_not_ended_holds_its_endpoint():
    """A page shows nothing before the end of the request."""
    fixture = EvictorFixture()
    fixture.send("first", -1)
    fixture.send("second", -1)
    fixture.ends_late = True
    assert fixture.make_room()
    fixture.now = 1.0
    fixture.show()
    assert not fixture.make_room()
    fixture.end("second")
    fixture.show()
    assert fixture.make_room()
    assert fixture.evicted == ["second", "first"]


def test_requests_at_the_preferred_endpoint_go_first():
    """The waiting request would go nowhere else."""
    fixture = EvictorFixture()
    fixture.send("there", -1, B)
    fixture.send("elsewhere", -5, A)
    assert fixture.make_room(why=all_busy(2.0, preferred_endpoint=B, busy_endpoints=[A, B]))
    assert fixture.evicted == ["there"]


def test_a_request_whose_end_does_not_help_stays():
    """As one that cannot be ended now; the next one goes in its place."""
    fixture = EvictorFixture()
    for name in ("goes", "stuck", "useless"):
        fixture.send(name, -1)
    fixture.useless.add("useless")
    fixture.stuck.add("stuck")
    assert fixture.make_room()
    assert fixture.evicted == ["goes"]


def test_waits_for_anything_but_capacity_evict_nothing():
    """Nor those without an endpoint, and those that may go elsewhere."""
    fixture = EvictorFixture()
    fixture.send("safe", -1)
    for why in (
        NO_ENDPOINTS_YET,
        admission.HELD,
        all_busy(2.0, preferred_endpoint=A),
        all_busy(2.0, busy_endpoints=[A], waits_for_slot=True),
    ):
        assert not fixture.make_room(why=why)


def test_a_request_that_another_endpoint_serves_is_found_there():
    """In the order in which it was sent."""
    fixture = EvictorFixture()
    fixture.send("moved", -1, A)
    fixture.send("later", -1, B)
    fixture.evictor.move(fixture.tracked["moved"], B)
    only_b = all_busy(2.0, busy_endpoints=[B])
    assert fixture.make_room(why=only_b)
    fixture.show()
    assert fixture.make_room(why=only_b)
    assert fixture.evicted == ["later", "moved"]


def test_a_request_that_moves_while_it_is_evicted_is_not_evicted_again():
    """Its end confirms the eviction on the endpoint where it was evicted."""
    fixture = EvictorFixture()
    fixture.send("moved", -1, A)
    fixture.ends_late = True
    assert fixture.make_room()
    fixture.evictor.move(fixture.tracked["moved"], B)
    assert not fixture.make_room(num_waiting=2)
    fixture.end("moved")
    assert fixture.evicted == ["moved"]
    assert fixture.evictor.outcomes == {"confirmed": 1}


def test_a_request_that_moves_after_its_end_is_not_tracked_again():
    """It would stay for ever."""
    fixture = EvictorFixture()
    fixture.send("ended", -1, A)
    request = fixture.tracked["ended"]
    fixture.end("ended")
    fixture.evictor.move(request, B)
    assert not fixture.evictor.may_help(0)


REQUESTS = st.lists(st.tuples(st.integers(-3, 2), st.sampled_from([A, B])), max_size=12)
STEPS = st.lists(
    st.tuples(st.integers(-3, 3), st.integers(0, 3), st.floats(0.0, 3.0), st.booleans()),
    max_size=12,
)


@given(requests=REQUESTS, steps=STEPS)
def test_only_lower_priorities_below_zero_are_evicted(requests, steps):
    """In order, at most one for each endpoint at a time, never more than requests wait."""
    fixture = EvictorFixture()
    sent = {}
    for n, (priority, address) in enumerate(requests):
        sent[n] = priority
        fixture.send(n, priority, address)
    awaited = []
    for priority, num_waiting, seconds, shows in steps:
        fixture.now += seconds
        if shows:
            fixture.show()
            awaited = []
        awaited = [at for at in awaited if fixture.now - at < 5.0]
        num_before = len(fixture.evicted)
        is_evicted = fixture.make_room(priority, num_waiting=num_waiting)
        fresh = fixture.evicted[num_before:]
        assert len(fresh) == is_evicted
        for name in fresh:
            assert sent[name] < min(0, priority)
            assert len(awaited) < min(num_waiting, 2)
            awaited.append(fixture.now)


class EvictingControllerFixture:
    """A flow controller whose endpoints are busy, and an evictor."""

    def __init__(self, **settings):
        self.evictors = EvictorFixture()
        self.outcome = BUSY
        self.timer = TimerFixture()
        callbacks = FlowCallbacks(
            decide=lambda *_: self.outcome,
            on_waiting=lambda *_: None,
            dispatch=lambda *_: None,
            reject=lambda *_: None,
        )
        self.controller = FlowController(
            FlowControlSettings(**settings), callbacks, self.timer, evictor=self.evictors.evictor
        )

    def enqueue(self, name, priority):
        request = EnqueueRequest(priority=priority)
        return self.controller.enqueue(name, request, self.outcome, self.timer.time)


def test_a_blocked_request_evicts_at_once():
    """If it is expected to wait longer than the settings say."""
    fixture = EvictingControllerFixture(evict_after_s=0.1)
    fixture.evictors.send("batch", -1)
    fixture.enqueue("user", 0)
    fixture.timer.advance(0.0)
    assert fixture.evictors.evicted == ["batch"]


def test_a_short_wait_evicts_nothing_until_it_was_long():
    """The time that it has waited counts with the time that is expected."""
    fixture = EvictingControllerFixture(evict_after_s=0.1)
    fixture.outcome = msgspec.structs.replace(BUSY, retry_in_s=0.02)
    fixture.evictors.send("batch", -1)
    fixture.enqueue("user", 0)
    fixture.timer.advance(0.07)
    assert fixture.evictors.evicted == []
    fixture.timer.advance(0.05)
    assert fixture.evictors.evicted == ["batch"]


def test_eviction_is_off_by_default():
    """However long a request waits."""
    fixture = EvictingControllerFixture()
    fixture.evictors.send("batch", -1)
    fixture.enqueue("user", 10)
    fixture.timer.advance(30.0)
    assert fixture.evictors.evicted == []


def test_a_reload_turns_eviction_on_and_off():
    """From the next look at the queue on."""
    fixture = EvictingControllerFixture()
    fixture.evictors.send("first", -1)
    fixture.evictors.send("second", -1)
    fixture.enqueue("user", 0)
    queue = fixture.controller.queue
    queue.reconfigure(FlowControlSettings(evict_after_s=0.1), fixture.timer.time)
    fixture.timer.advance(2.0)
    assert fixture.evictors.evicted == ["second"]
    queue.reconfigure(FlowControlSettings(), fixture.timer.time)
    fixture.evictors.now = 9.0
    fixture.evictors.show()
    fixture.timer.advance(9.0)
    assert fixture.evictors.evicted == ["second"]


def test_nothing_is_evicted_when_no_request_waits():
    """The one that waited left, before the queue was looked at."""
    fixture = EvictingControllerFixture(evict_after_s=0.1)
    fixture.evictors.send("batch", -1)
    fixture.controller.cancel(fixture.enqueue("user", 0))
    fixture.timer.advance(5.0)
    assert fixture.evictors.evicted == []
