"""Flow controller without a driver: queueing, dispatch and rejection."""

import math

import msgspec
import pytest

from extproc.decision import NO_ENDPOINTS_YET, Decision, Rejection, all_busy
from extproc.endpoint import Endpoint
from extproc.flow_control.controller import FlowCallbacks, FlowController, LookBudget
from extproc.flow_control.flow_queue import EndpointBits, QueuedItem
from extproc.flow_control.queue import EnqueueRequest, FlowControlSettings
from extproc.request import MAX_ID_BYTES, FlowHeaders, InferenceRequest
from tests.flow_control.timer_fixture import TimerFixture

GOES = Decision(request=InferenceRequest(api="completions"), endpoints=(Endpoint("10.0.0.1:8000"),))
BUSY = all_busy(0.5)
EMPTY = NO_ENDPOINTS_YET


class FlowControllerFixture:
    """A flow controller, and a number of requests that endpoints have capacity for.

    Args:
        free: Requests that may be dispatched (count).
        most: Requests that a call of `dispatch` looks at (count); None for the default.
        callbacks: Further callbacks of the controller, by name.
        settings: Settings of the queue.
    """

    def __init__(self, *, free=0, most=None, callbacks=None, **settings):
        self.free = free
        self.look_s = 0.0
        self.looks = 0
        self.wanted = {}
        self.went = []
        self.rejections = {}
        self.toward = {}
        self.waits = {}
        self.broken = set()
        self.refused = set()
        own = {
            "decide": self.decide,
            "on_waiting": self.toward.__setitem__,
            "dispatch": self.go,
            "reject": self.rejections.__setitem__,
        }
        acts = FlowCallbacks(**{**own, **(callbacks or {})})
        self.timer = TimerFixture()
        budget = None if most is None else LookBudget(looks=most, seconds=1.0)
        self.controller = FlowController(
            FlowControlSettings(**settings), acts, self.timer, budget=budget
        )

    def decide(self, item, may_defer):
        self.looks += 1
        self.timer.time += self.look_s
        if item in self.broken:
            raise ZeroDivisionError
        if item in self.refused:
            return Rejection(404, "there is no such model any more")
        wanted = self.wanted.get(item)
        if wanted and may_defer:
            return all_busy(0.5, preferred_endpoint=wanted)
        return GOES if self.free else all_busy(self.waits.get(item, 0.5))

    def go(self, item, _decision):
        self.free -= 1
        self.went.append(item)

    def hold(self, *items, why=BUSY, now=0.0, **want):
        queued = [self.controller.enqueue(item, EnqueueRequest(**want), why, now) for item in items]
        return queued[0] if len(queued) == 1 else queued


def test_new_requests_do_not_overtake_queued_ones():
    """A request that could go waits behind those of its own and higher priorities only."""
    fixture = FlowControllerFixture()
    assert fixture.controller.check(GOES, priority=0) is None
    assert fixture.controller.check(BUSY, priority=0) is BUSY
    fixture.hold("a")
    assert fixture.controller.check(GOES, priority=0).retry_in_s == 0.0
    assert fixture.controller.check(GOES, priority=-1).retry_in_s == 0.0
    assert fixture.controller.check(GOES, priority=1) is None


def test_new_requests_pass_requests_for_other_endpoints():
    """One for an idle endpoint goes at once, past a full queue, and without a timeout."""
    bits = EndpointBits(
        for_target={"a": 0b01, "both": 0b11, "none": 0}.__getitem__,
        for_addresses=lambda addresses: sum({"x": 0b01, "y": 0b10}[name] for name in addresses),
    )
    fixture = FlowControllerFixture(callbacks={"endpoint_bits": lambda: bits}, max_requests=2)
    check = fixture.controller.check
    fixture.hold("1", "2", target="a")
    assert check(GOES, priority=0, preferred_endpoint="y") is None
    assert check(GOES, priority=0, preferred_endpoint="x").preferred_endpoint == "x"
    assert check(GOES, priority=1, preferred_endpoint="x") is None
    assert check(GOES, priority=0).preferred_endpoint == ""
    bits = msgspec.structs.replace(bits, for_target=lambda _: 0b11)
    assert check(GOES, priority=0, preferred_endpoint="y").preferred_endpoint == "y"


def test_the_next_pump_is_at_the_earliest_capacity():
    """The estimate, within bounds, or the deadline; nothing in an empty queue."""
    fixture = FlowControllerFixture(timeout_s=60.0)
    assert fixture.controller.dispatch(0.0) is None
    fixture.hold("a")
    assert fixture.controller.dispatch(0.0) == 0.5
    assert fixture.controller.next_pump_s(0.0, 0.0) == 0.002
    assert fixture.controller.next_pump_s(30.0, 0.0) == 1.0
    assert fixture.controller.next_pump_s(math.inf, 10.0) == 50.0


def test_dispatches_per_call_are_bounded():
    """A call that reached its budget asks for another one at once."""
    fixture = FlowControllerFixture(free=5, most=2)
    fixture.hold(*"abc")
    assert fixture.controller.dispatch(0.0) == 0.0
    assert fixture.went == ["a", "b"]
    assert fixture.controller.dispatch(0.0) is None
    assert fixture.controller.outcomes == {"dispatched": 3}


def test_how_long_a_request_waits():
    """The requested wait, else that of the objective, else that of an empty pool, up to the maximum."""
    facts = {"timeout_s": 10.0, "empty_timeout_s": 20.0, "max_timeout_s": 40.0}
    fixture = FlowControllerFixture(by_objective={"batch": 30.0}, **facts)
    assert fixture.hold("a").deadline == 10.0
    assert fixture.hold("b", why=EMPTY).deadline == 20.0
    assert fixture.hold("c", objective="batch").deadline == 30.0
    assert fixture.hold("d", objective="batch", timeout_s=5.0).deadline == 5.0
    assert fixture.hold("e", timeout_s=500.0).deadline == 40.0
    assert fixture.hold("f", timeout_s=0.0).status == 429


def test_a_rejection_is_not_queued():
    """The refusal stands, with the queue's own estimate where it names one."""
    fixture = FlowControllerFixture()
    gone = Rejection(404, "there is no such model")
    assert fixture.hold("a", why=gone) is gone
    full = Rejection(429, "full", retry_after_s=1)
    assert fixture.hold("b", why=full) is full
    fixture.hold(*"cdefgh")
    assert fixture.hold("i", why=full).retry_after_s == 60


@pytest.mark.parametrize(
    ("why", "status", "reason"),
    [(BUSY, 429, "rejected-saturated"), (EMPTY, 503, "rejected-no-endpoints")],
)
def test_a_full_queue_names_its_reason(why, status, reason):
    """503 where there is no endpoint, 429 where all are busy, and the same cause."""
    fixture = FlowControllerFixture(max_requests=1)
    fixture.hold("a", why=why)
    full = fixture.hold("b", why=why)
    assert (full.status, full.reason, full.cause) == (status, reason, "queue-full")
    assert full.retry_after_s >= 1


def test_expired_waits_name_their_reason():
    """503 where there was no endpoint, 429 where all were busy, both with Retry-After."""
    fixture = FlowControllerFixture(timeout_s=1.0, empty_timeout_s=1.0)
    fixture.hold("a")
    fixture.hold("b", why=EMPTY)
    fixture.controller.dispatch(2.0)
    assert [(rejection.status, rejection.reason) for rejection in fixture.rejections.values()] == [
        (429, "rejected-ttl-expired"),
        (503, "rejected-no-endpoints"),
    ]
    assert all(rejection.retry_after_s >= 1 for rejection in fixture.rejections.values())


def test_displaced_requests_learn_why():
    """For a tenant with fewer requests that wait, or for a higher priority."""
    fixture = FlowControllerFixture(max_requests=3)
    fixture.hold("a", "b", "c", tenant="flood")
    fixture.hold("few", tenant="few")
    fixture.hold("high", priority=1)
    reasons = {item: (why.reason, why.cause) for item, why in fixture.rejections.items()}
    assert reasons == {
        "c": ("rejected-saturated", "displaced"),
        "b": ("evicted-priority", "displaced"),
    }


def test_a_request_is_cancelled_once():
    """Cancelling returns whether the request was queued, once."""
    fixture = FlowControllerFixture()
    waiter = fixture.hold("a")
    assert isinstance(waiter, QueuedItem)
    assert fixture.controller.cancel(waiter)
    assert not fixture.controller.cancel(waiter)
    assert not fixture.controller.queue.count


def test_a_request_may_wait_for_its_preferred_endpoint():
    """A request for another endpoint overtakes it, until half of its time has passed."""
    fixture = FlowControllerFixture(free=9, timeout_s=60.0)
    fixture.wanted = {"a": "x", "c": "x"}
    fixture.hold(*"abcd")
    fixture.controller.dispatch(1.0)
    assert fixture.went == ["b", "d"]
    assert fixture.toward["a"] == "x"
    fixture.controller.dispatch(29.0)
    assert fixture.went == ["b", "d"]
    fixture.controller.dispatch(30.0)
    assert fixture.went == ["b", "d", "a", "c"]


def test_a_preference_ends_behind_a_request_that_waits_longer():
    """Half of the own timeout counts, whatever the timeout of those before is."""
    fixture = FlowControllerFixture(free=9)
    fixture.wanted = {"a": "x", "b": "x", "c": "x"}
    fixture.hold("a", timeout_s=60.0, why=all_busy(math.inf, preferred_endpoint="x"))
    fixture.hold("b", "c", timeout_s=4.0, why=all_busy(math.inf, preferred_endpoint="x"))
    assert fixture.controller.next_pump_s(math.inf, 0.0) == 2.0
    fixture.controller.dispatch(1.9)
    assert not fixture.went
    fixture.controller.dispatch(2.0)
    assert fixture.went == ["b", "c"]
    fixture.controller.dispatch(30.0)
    assert fixture.went == ["b", "c", "a"]


def test_a_request_whose_preference_ended_waits_for_any_endpoint():
    """It is examined once per sweep, and sent as soon as there is capacity."""
    fixture = FlowControllerFixture(timeout_s=60.0)
    fixture.hold("a", why=all_busy(0.5, preferred_endpoint="x"))
    fixture.hold("b", why=all_busy(0.5, preferred_endpoint="x"), timeout_s=100.0)
    fixture.wanted = {"a": "x", "b": "x"}
    fixture.controller.dispatch(30.0)
    assert fixture.looks == 1
    fixture.free = 1
    fixture.controller.dispatch(31.0)
    assert fixture.went == ["a"]


def test_without_capacity_all_requests_wait_for_any_endpoint():
    """One is asked, whomever it waits for, and the others are not."""
    fixture = FlowControllerFixture()
    fixture.hold("a", why=all_busy(0.5, preferred_endpoint="x", busy_endpoints=("x", "y")))
    fixture.hold("b", why=all_busy(0.5, preferred_endpoint="y", busy_endpoints=("x", "y")))
    assert fixture.toward == {"a": "x", "b": "y"}
    fixture.controller.dispatch(0.0)
    assert fixture.toward == {"a": "", "b": "y"}


def test_a_new_request_waits_for_its_chosen_endpoint():
    """Others wait already, and its turn may come as soon as theirs."""
    fixture = FlowControllerFixture()
    fixture.hold("a")
    assert (
        fixture.controller.check(GOES, priority=0, preferred_endpoint="x").preferred_endpoint == "x"
    )


def test_close_rejects_queued_and_new_requests():
    """Waiting and new requests get the same answer."""
    fixture = FlowControllerFixture()
    fixture.hold("a")
    fixture.controller.close()
    assert fixture.rejections["a"].reason == "rejected-shutting-down"
    assert fixture.hold("b").reason == "rejected-shutting-down"


def test_headers_set_tenant_and_timeouts():
    """Names by precedence; milliseconds, and what is no number counts as absent."""
    manners = FlowHeaders()
    assert manners.tenant({"x-gateway-inference-fairness-id": "old"}, "m") == "old"
    assert manners.tenant({}, "m") == ""
    assert FlowHeaders(by_adapter=True).tenant({}, "m") == "m"
    long = "t" * 300
    assert len(manners.tenant({"x-gateway-inference-fairness-id": long}, "m")) <= MAX_ID_BYTES
    assert manners.tenant({"x-gateway-inference-fairness-id": long + "a"}, "m") != manners.tenant(
        {"x-gateway-inference-fairness-id": long + "b"}, "m"
    )
    assert len(FlowHeaders(by_adapter=True).tenant({}, long)) <= MAX_ID_BYTES
    assert manners.timeout_s({"x-extproc-queue-timeout-ms": "1500"}) == 1.5
    for text in ("", "-1", "soon", "1" * 12):
        assert manners.timeout_s({"x-extproc-queue-timeout-ms": text}) is None
    assert manners.slo_s({"x-slo-ttft-ms": "250"}) == 0.25
    assert manners.slo_s({}) == math.inf


def test_changes_during_a_sweep_start_another_sweep():
    """The sweep goes to its end first, so that no request starves, and then begins anew."""
    fixture = FlowControllerFixture(most=1)
    for target in "abc":
        fixture.hold(target, target=target)
    assert fixture.controller.dispatch(0.0) == 0.0
    fixture.free = 9
    fixture.controller.notify_capacity()
    assert fixture.controller.dispatch(0.0) == 0.0
    assert fixture.controller.dispatch(0.0) == 0.0
    assert fixture.went == ["b", "c"]
    assert fixture.controller.dispatch(0.0) is None
    assert fixture.went == ["b", "c", "a"]


def test_the_next_pump_considers_the_complete_sweep():
    """The soonest that any of its calls was named."""
    fixture = FlowControllerFixture(most=1, timeout_s=60.0)
    fixture.waits = {"a": 0.2, "b": 0.4}
    for target in "ab":
        fixture.hold(target, target=target)
    assert fixture.controller.dispatch(0.0) == 0.0
    assert fixture.controller.dispatch(0.0) == 0.2


def test_an_exception_for_a_request_propagates_without_a_callback():
    """`dispatch` raises what the decision of a request raised."""
    fixture = FlowControllerFixture(free=9)
    fixture.broken = {"a"}
    fixture.hold(*"ab")
    with pytest.raises(ZeroDivisionError):
        fixture.controller.dispatch(0.0)


def test_a_request_that_raises_leaves_the_queue():
    """The exception is reported, and the requests behind it are dispatched."""
    failed = []

    def on_item_failed(item, error):
        failed.append((item, type(error)))

    fixture = FlowControllerFixture(free=9, callbacks={"on_item_failed": on_item_failed})
    fixture.broken = {"a"}
    fixture.hold(*"ab")
    fixture.controller.dispatch(0.0)
    assert failed == [("a", ZeroDivisionError)]
    assert fixture.went == ["b"]
    assert fixture.controller.outcomes == {"failed": 1, "dispatched": 1}
    assert not fixture.controller.queue.count


def test_every_departure_is_reported_once_with_its_wait():
    """Also that of a request whose rejection raises, which left before."""
    departures = []

    def raise_error(item, rejection):
        raise ZeroDivisionError(item, rejection)

    fixture = FlowControllerFixture(
        free=1,
        callbacks={
            "on_departed": lambda *departure: departures.append(departure[:3]),
            "on_item_failed": lambda *_: None,
            "reject": raise_error,
        },
    )
    fixture.broken, fixture.refused = {"a"}, {"b"}
    fixture.hold(*"abc")
    fixture.timer.time = 2.0
    fixture.controller.dispatch(2.0)
    assert departures == [("a", "failed", 2.0), ("b", "rejected", 2.0), ("c", "dispatched", 2.0)]
    assert fixture.controller.outcomes == {"failed": 1, "rejected": 1, "dispatched": 1}


def test_rejections_of_a_sweep_are_delivered():
    """A request that can no longer be served is rejected, and those behind it are dispatched."""
    fixture = FlowControllerFixture(free=1)
    fixture.refused = {"a"}
    fixture.hold(*"ab")
    assert fixture.controller.dispatch(0.0) is None
    assert fixture.rejections["a"].status == 404
    assert fixture.went == ["b"]
    assert fixture.controller.outcomes == {"rejected": 1, "dispatched": 1}


def test_controller_sets_its_timer_for_the_earliest_deadline():
    """A shorter wait moves the timer forward, a longer one leaves it."""
    fixture = FlowControllerFixture(empty_timeout_s=100.0)
    fixture.hold("a", why=EMPTY)
    assert fixture.timer.pending == [100.0]
    fixture.hold("b", why=EMPTY, timeout_s=50.0)
    assert fixture.timer.pending == [50.0]
    fixture.hold("c", why=EMPTY, timeout_s=70.0)
    assert fixture.timer.pending == [50.0]
    fixture.controller.close()
    assert fixture.timer.pending == []


def test_controller_sets_its_timer_again_while_requests_are_queued():
    """Each call of `pump` schedules the next one, and the last request leaves none."""
    fixture = FlowControllerFixture(timeout_s=1.0)
    fixture.hold("a")
    fixture.timer.advance(0.4)
    assert fixture.timer.pending == [0.5]
    fixture.timer.advance(0.4)
    assert fixture.timer.pending == [1.0]
    fixture.timer.advance(0.4)
    assert fixture.rejections["a"].status == 429
    assert fixture.timer.pending == []


def test_controller_dispatches_soon_after_capacity_is_notified():
    """Any number of notifications cause a single call of `pump`."""
    fixture = FlowControllerFixture(timeout_s=60.0)
    fixture.controller.notify_capacity()
    assert fixture.timer.pending == []
    fixture.hold("a", why=EMPTY)
    fixture.free = 1
    fixture.controller.notify_capacity()
    fixture.controller.notify_capacity()
    assert fixture.timer.pending == [0.0, 60.0]
    fixture.timer.advance(0.0)
    assert fixture.went == ["a"]


def test_an_exception_of_a_pump_propagates_without_a_callback():
    """`pump` raises what a step of it raised."""
    fixture = FlowControllerFixture(timeout_s=60.0)
    fixture.hold("a", why=EMPTY)
    fixture.controller.queue.expired = None
    with pytest.raises(TypeError):
        fixture.controller.pump()


def test_controller_pumps_again_after_an_exception():
    """The exception is reported, and the timer is set for a second later."""
    failed = []
    fixture = FlowControllerFixture(timeout_s=60.0, callbacks={"on_pump_failed": failed.append})
    fixture.hold("a", why=EMPTY)
    queue = fixture.controller.queue
    expired, queue.expired = queue.expired, None
    fixture.controller.pump()
    assert [type(error) for error in failed] == [TypeError]
    assert fixture.timer.pending == [1.0]
    queue.expired, fixture.free = expired, 1
    fixture.timer.advance(1.0)
    assert fixture.went == ["a"]


@pytest.mark.parametrize("free", [0, 1, 2])
def test_controller_rests_for_requests_that_stay(free):
    """Calls of `pump` are apart by the time for requests that were looked at and not dispatched."""
    fixture = FlowControllerFixture(free=free, most=2, timeout_s=60.0)
    fixture.hold(*"abcd")
    fixture.look_s = 0.01
    fixture.controller.notify_capacity()
    fixture.timer.advance(0.0)
    ended_s, rest_s = 0.01 * fixture.looks, 0.01 * (fixture.looks - len(fixture.went))
    assert len(fixture.went) == free
    fixture.timer.time = ended_s
    fixture.controller.notify_capacity()
    assert fixture.timer.pending[0] == pytest.approx(ended_s + rest_s)
