from __future__ import annotations

import asyncio
import json
import math
from collections import Counter

import pytest

from extproc.config.holding import Holding
from extproc.decision import Decision, Rejection
from extproc.endpoint import Endpoint, Load
from extproc.holding.allowance import Limit
from extproc.request import RawRequest
from extproc.server.bugs import Bugs
from extproc.server.gate import Gate, Granted, Held, Reservation
from tests.support.house import House
from tests.support.virtual_loop import VirtualLoop

A, B = "10.0.0.1:8000", "10.0.0.2:8000"


class Place:
    """A fleet, its dispatcher and a gate, at a time a test sets."""

    def __init__(self, *addresses, profile="balanced", **holding):
        self.asked = 0
        self.house = House(dict.fromkeys(addresses), profile=profile)
        routing = self.house.dispatcher.routing
        settings = routing.settings.__class__(stale_after_s=60.0, busy_s=0.5)
        self.house.dispatcher.adopt(routing.__class__(routing.profile, {}, settings))
        self.bugs = Counter()
        self.gate = Gate(
            self.house.dispatcher,
            Holding(enabled=True, **holding),
            clock=lambda: self.now,
            bugs=Bugs(self.bugs, lambda: self.now),
        )

    @property
    def now(self):
        return self.house.now

    def ask(self, model="m", *, tokens=10, priority=0, **headers):
        """What becomes of a request: a decision, a refusal, or a wait."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        self.asked += 1
        body = json.dumps({"model": model, "prompt": f"{self.asked} " + "word " * tokens}).encode()
        raw = RawRequest({":method": "POST", ":path": "/v1/completions", **named}, body)
        prepared = self.house.dispatcher.prepare(raw)
        request = prepared.request.__class__(
            **{
                name: getattr(prepared.request, name)
                for name in prepared.request.__struct_fields__
                if name != "priority"
            },
            priority=priority,
        )
        prepared = prepared.__class__(request, prepared.chain, raw, request)
        outcome = self.house.dispatcher.decide(prepared, self.now)
        if isinstance(outcome, Rejection) and outcome.waits_s is not None:
            return self.gate.hold(prepared, outcome, self.now)
        return outcome

    def come(self, *addresses):
        """These endpoints are all there are."""
        self.house.fleet.replace([Endpoint(address) for address in addresses], self.now)
        self.gate.changed()

    def load(self, address, **facts):
        """A scrape of an endpoint."""
        fleet = self.house.fleet
        mark = fleet.begin_scrape(fleet.pool.find(address).endpoint)
        fleet.observe(mark, Load(at=self.now, engine="vllm", **facts), self.now)
        self.gate.changed()


async def answered(*held):
    """Let the loop turn until these are answered."""
    for _ in range(50):
        if all(one.answer.done() for one in held):
            return [one.answer.result() for one in held]
        await asyncio.sleep(0)
    raise AssertionError([one.answer for one in held])


async def test_a_request_waits_for_the_first_endpoint():
    """Held while there is none, sent on when one comes, charged to it."""
    place = Place()
    held = place.ask()
    assert isinstance(held, Held)
    place.come(A)
    (granted,) = await answered(held)
    assert isinstance(granted, Granted)
    assert granted.decision.endpoints[0].address == A
    assert place.house.fleet.pool.members[0].account.in_flight == 1
    assert place.gate.queue.count == 0
    assert place.gate.outcomes == {"went": 1}


async def test_a_gateway_s_own_choice_does_not_wait():
    """A subset hint that nobody fits is 503 at once, as the protocol has it."""
    place = Place()
    body = b'{"model": "m", "prompt": "x"}'
    raw = RawRequest({":method": "POST", ":path": "/v1/completions"}, body, subset=(A,))
    prepared = place.house.dispatcher.prepare(raw)
    assert place.house.dispatcher.decide(prepared, place.now).waits_s is None


async def test_held_requests_are_spread_over_what_comes():
    """A new endpoint is not flooded: it gets what it can begin within the limit."""
    place = Place()
    # 100 us for each of 4000 tokens: two fill the half second of an endpoint.
    held = [place.ask(tokens=3200) for _ in range(6)]
    place.come(A)
    await answered(*held[:2])
    assert [one.answer.done() for one in held] == [True, True, False, False, False, False]
    place.come(A, B)
    await answered(*held[:4])
    accounts = [member.account.in_flight for member in place.house.fleet.pool.members]
    assert accounts == [2, 2]
    place.house.now += 10.0
    place.gate.pump()
    await answered(*held)
    place.gate.close()


async def test_busy_endpoints_are_waited_for():
    """An engine with requests in front is busy until a scrape says otherwise."""
    place = Place(A)
    place.load(A, waiting=20, running=8, kv_usage=0.9)
    held = place.ask()
    assert isinstance(held, Held)
    assert held.why.status == 429
    place.load(A, waiting=0, running=4, kv_usage=0.5)
    (granted,) = await answered(held)
    assert isinstance(granted, Granted)


async def test_without_a_scrape_nobody_is_busy():
    """A late scrape never turns into an outage."""
    place = Place(A)
    place.load(A, waiting=20, running=8)
    place.house.now += 120.0
    assert isinstance(place.ask(), Decision)


async def test_waits_end_at_their_deadline():
    """503 while there is no endpoint, 429 while all are busy; the header may ask for less."""
    place = Place(empty_timeout_s=5, timeout_s=3)
    empty, short = place.ask(), place.ask(x_extproc_hold_ms="1000")
    place.house.now += 1.5
    place.gate.pump()
    (told,) = await answered(short)
    assert (told.status, told.reason) == (503, "rejected-no-endpoints")
    assert not empty.answer.done()
    place.house.now += 4.0
    place.gate.pump()
    assert (await answered(empty))[0].status == 503
    busy = Place(A, timeout_s=3)
    busy.load(A, waiting=20, running=8)
    held = busy.ask()
    busy.house.now += 3.0
    busy.gate.pump()
    (told,) = await answered(held)
    assert (told.status, told.reason) == (429, "rejected-ttl-expired")
    assert told.retry_after_s >= 1
    assert place.gate.outcomes["expired"] == 2


async def test_no_time_is_no_wait():
    """A timeout of nothing answers at once."""
    told = Place(empty_timeout_s=0).ask()
    assert isinstance(told, Rejection)
    assert told.status == 503


async def test_a_client_that_leaves_is_gone_at_once():
    """Waiting or just granted: nothing stays charged or kept."""
    place = Place()
    one, other = place.ask(), place.ask()
    place.gate.left(one, place.now)
    assert place.gate.queue.count == 1
    place.come(A)
    await answered(other)
    place.gate.left(other, place.now)
    assert place.house.fleet.pool.members[0].account.in_flight == 0
    assert place.gate.outcomes == {"left": 1, "went": 1}


async def test_priorities_displace_and_overtake():
    """A full queue makes room for more important requests."""
    place = Place(max_requests=2)
    first, last = place.ask(), place.ask()
    vip = place.ask(priority=3)
    (told,) = await answered(last)
    assert (told.status, told.reason) == (429, "evicted-priority")
    refused = place.ask()
    assert isinstance(refused, Rejection)
    place.come(A)
    order = []
    for name, held in (("first", first), ("vip", vip)):
        held.answer.add_done_callback(lambda _, name=name: order.append(name))
    await answered(first, vip)
    await asyncio.sleep(0)
    assert order == ["vip", "first"]


async def test_the_end_of_the_picker_ends_waits():
    """503 with the reason, for who waits and who comes."""
    place = Place()
    held = place.ask()
    place.gate.close()
    (told,) = await answered(held)
    assert (told.status, told.reason) == (503, "rejected-shutting-down")
    assert place.ask().reason == "rejected-shutting-down"


async def test_tenants_are_limited():
    """Over the limit is 429; what an answer did not use is given back."""
    place = Place(A, limit=Limit(tokens_per_s=10.0, burst_s=10.0))
    body = b'{"model": "m", "prompt": "abcd", "max_tokens": 90}'
    headers = {":method": "POST", ":path": "/v1/completions", "x-llm-d-inference-fairness-id": "t"}
    prepared = place.house.dispatcher.prepare(RawRequest(headers, body))
    assert place.gate.tenant(prepared) == "t"
    reserved = place.gate.reserve(prepared, place.now)
    assert place.gate.reserve(prepared, place.now).status == 429
    place.gate.used(reserved, {"prompt": 1, "completion": 5}, place.now)
    assert isinstance(place.gate.reserve(prepared, place.now), Reservation)
    assert place.gate.queue.turns.attained("t", place.now) == pytest.approx(10.0)


async def test_many_go_in_turns_of_the_loop():
    """Thousands are released without holding up everybody else for long."""
    place = Place()
    held = [place.ask(tokens=1) for _ in range(400)]
    place.come(A)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert 0 < sum(one.answer.done() for one in held) < 400
    await answered(*held)
    assert place.gate.outcomes["went"] == 400


async def test_a_header_that_is_no_number_counts_as_absent():
    """Bad input of a client changes nothing."""
    held = Place(empty_timeout_s=7).ask(x_extproc_hold_ms="-5", x_llm_d_slo_ttft_ms="soon")
    assert held.waiter.deadline == held.waiter.arrived + 7
    assert held.waiter.slo_s == math.inf


async def test_promises_end_with_the_wait():
    """What a request that waits will hold counts while it waits, however that ends."""
    place = Place(A, B, profile="adaptive", timeout_s=5)
    for address in (A, B):
        place.load(address, waiting=20, running=8, kv_usage=0.5)
    accounts = [member.account for member in place.house.fleet.pool.members]
    held = [place.ask(tokens=400) for _ in range(3)]
    assert sum(account.open_tokens for account in accounts) > 1000
    place.gate.left(held[0], place.now)
    place.load(A, waiting=0, running=4, kv_usage=0.5)
    await answered(held[1])
    place.gate.pump()
    place.house.now += 6.0
    place.gate.pump()
    await answered(*held[1:])
    for one in held[1:]:
        if isinstance(one.answer.result(), Granted):
            one.answer.result().ticket.close(place.now)
    assert [account.open_tokens for account in accounts] == [0.0, 0.0]


class BrokenError(Exception):
    """A bug."""


async def test_a_decision_that_fails_is_answered_and_stops_nobody(caplog):
    """The request goes where the rescue says, those behind it as always, and the log says it once."""
    place = Place()
    held = [place.ask() for _ in range(4)]
    decide = place.house.dispatcher.decide

    def broken(prepared, now, *, patient=True):
        if prepared in (held[0].prepared, held[2].prepared):
            raise BrokenError
        return decide(prepared, now, patient=patient)

    place.house.dispatcher.decide = broken
    place.come(A)
    granted = await answered(*held)
    assert all(isinstance(one, Granted) for one in granted)
    assert [bool(one.decision.degraded) for one in granted] == [True, False, True, False]
    assert place.house.in_flight == 4
    assert list(place.bugs.values()) == [2]
    assert len(caplog.records) == 1


async def test_a_grant_that_fails_is_answered_500():
    """Whatever raises between decision and answer; nothing stays charged, and the next one goes."""
    place = Place()
    first, second = place.ask(), place.ask()
    commit, failed = place.house.dispatcher.commit, []

    def broken(decision, now):
        if not failed:
            failed.append(decision)
            raise BrokenError
        return commit(decision, now)

    place.house.dispatcher.commit = broken
    place.come(A)
    refused, granted = await answered(first, second)
    assert (refused.status, refused.message) == (500, "the decision failed (BrokenError)")
    assert isinstance(granted, Granted)
    assert place.house.in_flight == 1
    assert place.gate.outcomes == {"failed": 1, "went": 1}
    assert place.gate.queue.count == 0


async def test_a_pump_that_fails_is_tried_again(caplog):
    """It is counted each time and logged once, and those who wait are looked at again."""
    place = Place()
    held = place.ask()
    queue = place.gate.queue
    expired, broken = queue.expired, True

    def breaking(now, **more):
        if broken:
            raise BrokenError
        return expired(now, **more)

    queue.expired = breaking
    place.gate._timer.cancel()
    place.gate._timer = None
    place.gate.pump()
    place.gate.pump()
    assert list(place.bugs.values()) == [2]
    assert place.gate._timer is not None
    assert len(caplog.records) == 1
    broken = False
    place.come(A)
    await answered(held)
    place.gate.close()


async def test_a_request_that_could_not_begin_to_wait_is_gone():
    """An exception while it joins leaves nothing in the queue."""
    place = Place()

    def broken():
        raise BrokenError

    place.gate.arrivals = broken
    with pytest.raises(BrokenError):
        place.ask()
    assert place.gate.queue.count == 0
    place.gate.close()


async def test_a_turn_of_the_loop_is_short_however_long_decisions_take():
    """A pump stops after some ms and goes on with the next turn, where it stopped."""
    place = Place()
    held = [place.ask(tokens=1) for _ in range(20)]
    decide = place.house.dispatcher.decide

    def slow(prepared, now, *, patient=True):
        place.house.now += 0.002
        return decide(prepared, now, patient=patient)

    place.house.dispatcher.decide = slow
    place.come(A)
    done = []
    while not done or done[-1] < len(held):
        await asyncio.sleep(0)
        done.append(sum(one.answer.done() for one in held))
    assert max(after - before for before, after in zip([0, *done], done, strict=False)) == 3


async def test_many_names_take_one_decision_of_a_pump():
    """All that wait for the same endpoints are held up together, whatever they ask for."""
    place = Place(A, B)
    for address in (A, B):
        place.load(address, waiting=20, running=8, kv_usage=0.9)
    held = [place.ask(f"made-up-{n}", x_llm_d_inference_fairness_id=f"t{n}") for n in range(300)]
    assert all(isinstance(one, Held) for one in held)
    place.gate.pump()
    decide, decided = place.house.dispatcher.decide, []

    def counting(prepared, now, *, patient=True):
        decided.append(prepared)
        return decide(prepared, now, patient=patient)

    place.house.dispatcher.decide = counting
    place.gate.pump()
    assert len(decided) == 1
    place.gate.close()


async def test_thousands_of_deadlines_end_in_turns_of_the_loop():
    """Those that are over at once are refused some at a time, and all of them."""
    place = Place(empty_timeout_s=5)
    held = [place.ask(tokens=1) for _ in range(400)]
    place.house.now += 6.0
    place.gate.pump()
    assert 0 < sum(one.answer.done() for one in held) < 400
    await answered(*held)
    assert place.gate.outcomes == {"expired": 400}


async def test_a_request_that_was_cancelled_is_not_charged():
    """Its stream has not been told yet: nothing goes anywhere, and nothing is a bug."""
    place = Place()
    held = place.ask()
    held.answer.cancel()
    place.come(A)
    place.gate.pump()
    assert place.house.in_flight == 0
    assert not place.bugs
    place.gate.left(held, place.now)
    assert place.house.in_flight == 0


async def test_a_client_that_leaves_is_waited_for_by_nobody():
    """Whatever awaits its answer ends."""
    place = Place()
    held = place.ask()
    place.gate.left(held, place.now)
    assert held.answer.cancelled()
    place.gate.close()


class Computing(Place):
    """A gate on virtual time before a busy endpoint, whose looks at requests take some of it.

    Args:
        loop: What it runs on.
        look_s: Seconds of a look at a request that waits.
        held: Requests that wait (count); each has a priority of its own, so all are looked at.

    Attributes:
        looks: Looks at requests (count).
        held: The requests.
    """

    def __init__(self, loop, *, look_s, held):
        self.loop, self.look_s, self.looks = loop, look_s, 0
        super().__init__(A)
        self.load(A, waiting=20, running=8, kv_usage=0.9)
        self.held = [self.ask(priority=at, x_extproc_hold_ms="900000") for at in range(held, 0, -1)]
        decide = self.house.dispatcher.decide

        def slow(prepared, now, *, patient=True):
            self.looks += 1
            loop.compute(self.look_s)
            return decide(prepared, now, patient=patient)

        self.house.dispatcher.decide = slow

    @property
    def now(self):
        return self.loop.time()

    @property
    def pumped_s(self):
        """Seconds that looks took."""
        return self.looks * self.look_s

    async def compute(self, until, *, turn_s):
        """Use every turn of the loop for so many seconds; returns their sum."""
        computed_s = 0.0
        while not until():
            self.loop.compute(turn_s)
            computed_s += turn_s
            await asyncio.sleep(0)
        return computed_s


def in_virtual_time(test):
    """Run a coroutine function of a loop on virtual time."""
    loop = VirtualLoop(100.0)
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(test(loop))


def test_capacity_that_comes_during_a_sweep_is_for_whoever_comes_first():
    """A sweep over many turns of the loop begins anew after its end, without another event."""

    async def test(loop):
        place = Computing(loop, look_s=0.002, held=9)
        place.gate.pump()
        assert place.looks == 3
        place.load(A, waiting=0, running=4, kv_usage=0.5)
        await asyncio.gather(*(one.answer for one in place.held))
        assert place.gate.outcomes == {"went": 9}
        place.gate.close()

    in_virtual_time(test)


def test_a_sweep_of_many_turns_leaves_half_of_the_time_to_others():
    """Others have as much time as looks take, although each of their turns is short."""

    async def test(loop):
        place = Computing(loop, look_s=0.001, held=200)
        place.gate.changed()
        others_s = await place.compute(lambda: place.looks >= 200, turn_s=0.0001)
        # After the last slice of 5 ms nobody has rested yet.
        assert place.pumped_s - 0.006 <= others_s <= place.pumped_s + 0.001
        place.gate.close()

    in_virtual_time(test)


def test_events_without_end_leave_half_of_the_time_to_others():
    """Each event asks for a sweep, which takes less than a turn may: they wait for the rest."""

    async def test(loop):
        place = Computing(loop, look_s=0.001, held=4)

        def is_over():
            place.gate.changed()
            return loop.time() > 101.0

        others_s = await place.compute(is_over, turn_s=0.0001)
        assert 0.4 < place.pumped_s < 0.51
        assert others_s > 0.49
        place.gate.close()

    in_virtual_time(test)


def test_timers_leave_half_of_the_time_to_others():
    """An endpoint that is believed free each moment is no reason to look without a rest."""

    async def test(loop):
        place = Computing(loop, look_s=0.001, held=20)
        place.gate._turnstile.next_s = lambda soonest_s, now: 0.002
        place.gate.changed()
        await asyncio.sleep(1.0)
        assert 0.3 < place.pumped_s < 0.52
        place.gate.close()

    in_virtual_time(test)


def test_a_short_pump_is_followed_at_once():
    """Requests that are looked at in less than a millisecond wait for no timer."""

    async def test(loop):
        place = Computing(loop, look_s=0.0001, held=2)
        for sweeps in range(1, 5):
            place.gate.changed()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert place.looks == 2 * sweeps
        place.gate.close()

    in_virtual_time(test)


def test_a_clock_that_leaps_does_not_stop_the_pump():
    """Whatever a pump seems to have taken, the next one comes in a moment."""

    async def test(loop):
        place = Computing(loop, look_s=10.0, held=2)
        place.gate.pump()
        assert place.looks == 1
        place.look_s = 0.0
        await asyncio.sleep(0.06)
        assert place.looks == 2
        place.gate.close()

    in_virtual_time(test)


async def test_the_timer_is_for_the_first_deadline():
    """A request that may wait less brings it forward, one that may wait longer does not."""
    place = Place(empty_timeout_s=100)
    place.ask()
    late = place.gate._timer
    place.ask(x_extproc_hold_ms="50000")
    soon = place.gate._timer
    assert late.cancelled()
    assert soon.when() < late.when()
    place.ask(x_extproc_hold_ms="70000")
    assert place.gate._timer is soon
    place.gate.close()
    assert soon.cancelled()


async def test_the_timer_is_set_again_when_it_was_due():
    """As long as somebody waits."""
    place = Place()
    place.ask(x_extproc_hold_ms="1")
    pumped = asyncio.Event()
    turns, pump = [], place.gate.pump

    def pumping():
        turns.append(place.now)
        pump()
        if len(turns) == 3:
            pumped.set()

    place.gate.pump = pumping
    await pumped.wait()
    place.gate.close()


async def test_promises_end_with_a_refusal():
    """A request that waited too long holds nothing of the endpoint it waited for."""
    place = Place(A, B, profile="adaptive", timeout_s=5)
    for address in (A, B):
        place.load(address, waiting=20, running=8, kv_usage=0.5)
    accounts = [member.account for member in place.house.fleet.pool.members]
    held = [place.ask(tokens=400) for _ in range(3)]
    assert sum(account.open_tokens for account in accounts) > 1000
    place.house.now += 6.0
    place.gate.pump()
    assert all(one.status == 429 for one in await answered(*held))
    assert [account.open_tokens for account in accounts] == [0.0, 0.0]


async def test_other_settings_are_gone_by():
    """Limits that stay keep what was taken; headers and half-life are the new ones."""
    limited = {"limit": Limit(requests_per_s=0.1, burst_s=10.0)}
    place = Place(A, **limited)
    headers = {":method": "POST", ":path": "/v1/completions", "x-team": "t"}
    raw = RawRequest(headers, b'{"model": "m", "prompt": "x"}')
    prepared = place.house.dispatcher.prepare(raw)
    assert isinstance(place.gate.reserve(prepared, place.now), Reservation)
    place.gate.adopt(Holding(enabled=True, half_life_s=1.0, **limited))
    assert place.gate.reserve(prepared, place.now).status == 429
    place.gate.queue.turns.charge("t", 64.0, place.now)
    assert place.gate.queue.turns.attained("t", place.now + 2.0) == pytest.approx(16.0)
    place.gate.adopt(Holding(enabled=True, tenant_header="X-Team", **limited))
    assert place.gate.tenant(prepared) == "t"
    place.gate.adopt(Holding(enabled=True))
    assert place.gate.reserve(prepared, place.now).charge is None


async def test_what_an_answer_used_counts_in_place_of_the_estimate():
    """Turns follow the difference, so that the prompt counts once."""
    place = Place(A)
    body = b'{"model": "m", "prompt": "' + b"x" * 4000 + b'"}'
    raw = RawRequest({":method": "POST", ":path": "/v1/completions"}, body)
    reserved = place.gate.reserve(place.house.dispatcher.prepare(raw), place.now)
    assert reserved.prompt_tokens == 1000
    place.gate.used(reserved, {"prompt": 1010, "completion": 5}, place.now)
    assert place.gate.queue.turns.attained("", place.now) == pytest.approx(20.0)
