"""Time for which a flow controller holds the event loop, in virtual time."""

from __future__ import annotations

import asyncio

from extproc.flow_control.controller import FlowController
from extproc.server.flow_control_shell import QueuedRequest
from tests.server.flow_control_fixture import A, B, FlowControlFixture, answered
from tests.support.virtual_loop import in_virtual_time


async def test_many_requests_are_dispatched_over_several_loop_iterations():
    """Thousands are released without holding up everybody else for long."""
    fixture = FlowControlFixture()
    queued = [fixture.ask(tokens=1) for _ in range(400)]
    fixture.come(A)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert 0 < sum(request.admission.done() for request in queued) < 400
    await answered(*queued)
    assert fixture.flow_controller.outcomes["dispatched"] == 400


async def test_a_pump_is_short_with_slow_decisions():
    """A pump stops after some ms and goes on with the next turn, where it stopped."""
    fixture = FlowControlFixture()
    queued = [fixture.ask(tokens=1) for _ in range(20)]
    decide = fixture.pool_fixture.director.decide

    def slow(prepared, now, *, may_defer=True):
        fixture.pool_fixture.now += 0.002
        return decide(prepared, now, may_defer=may_defer)

    fixture.pool_fixture.director.decide = slow
    fixture.come(A)
    done = []
    while not done or done[-1] < len(queued):
        await asyncio.sleep(0)
        done.append(sum(request.admission.done() for request in queued))
    assert max(after - before for before, after in zip([0, *done], done, strict=False)) == 3


async def test_many_models_take_a_single_decision_of_a_pump():
    """All that wait for the same endpoints are held up together, whatever they ask for."""
    fixture = FlowControlFixture(A, B)
    for address in (A, B):
        fixture.load(address, waiting=20, running=8, kv_usage=0.9)
    queued = [
        fixture.ask(f"made-up-{n}", x_llm_d_inference_fairness_id=f"t{n}") for n in range(300)
    ]
    assert all(isinstance(request, QueuedRequest) for request in queued)
    fixture.flow_controller.pump()
    decide, decided = fixture.pool_fixture.director.decide, []

    def counters(prepared, now, *, may_defer=True):
        decided.append(prepared)
        return decide(prepared, now, may_defer=may_defer)

    fixture.pool_fixture.director.decide = counters
    fixture.flow_controller.pump()
    assert len(decided) == 1
    fixture.flow_controller.close()


async def test_thousands_of_deadlines_expire_over_several_loop_iterations():
    """Those that are over at once are refused some at a time, and all of them."""
    fixture = FlowControlFixture(empty_timeout_s=5)
    queued = [fixture.ask(tokens=1) for _ in range(400)]
    fixture.pool_fixture.now += 6.0
    fixture.flow_controller.pump()
    assert 0 < sum(request.admission.done() for request in queued) < 400
    await answered(*queued)
    assert fixture.flow_controller.outcomes == {"expired": 400}


class Computing(FlowControlFixture):
    """A flow controller in virtual time before a busy endpoint, whose decisions take time.

    Args:
        look_s: Seconds of a look at a request that waits.
        held: Requests that wait (count); each has a priority of its own, so all are looked at.

    Attributes:
        looks: Looks at requests (count).
        held: The requests.
    """

    def __init__(self, *, look_s, held):
        self.loop, self.look_s, self.looks = asyncio.get_running_loop(), look_s, 0
        super().__init__(A)
        self.load(A, waiting=20, running=8, kv_usage=0.9)
        self.held = [
            self.ask(priority=at, x_extproc_queue_timeout_ms="900000") for at in range(held, 0, -1)
        ]
        decide = self.pool_fixture.director.decide

        def slow(prepared, now, *, may_defer=True):
            self.looks += 1
            self.loop.compute(self.look_s)
            return decide(prepared, now, may_defer=may_defer)

        self.pool_fixture.director.decide = slow

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


@in_virtual_time(100.0)
async def test_capacity_during_a_sweep_goes_to_the_first_in_order():
    """A sweep over many turns of the loop begins anew after its end, without another event."""
    fixture = Computing(look_s=0.002, held=9)
    fixture.flow_controller.pump()
    assert fixture.looks == 3
    fixture.load(A, waiting=0, running=4, kv_usage=0.5)
    await asyncio.gather(*(request.admission for request in fixture.held))
    assert fixture.flow_controller.outcomes == {"dispatched": 9}
    fixture.flow_controller.close()


@in_virtual_time(100.0)
async def test_a_long_sweep_takes_at_most_half_of_the_time():
    """Others have as much time as looks take, although each of their turns is short."""
    fixture = Computing(look_s=0.001, held=200)
    fixture.flow_controller.notify_capacity()
    others_s = await fixture.compute(lambda: fixture.looks >= 200, turn_s=0.0001)
    # After the last slice of 5 ms the loop has not rested yet.
    assert fixture.pumped_s - 0.006 <= others_s <= fixture.pumped_s + 0.001
    fixture.flow_controller.close()


@in_virtual_time(100.0)
async def test_endless_events_take_at_most_half_of_the_time():
    """Each event asks for a sweep, which takes less than a turn may: they wait for the rest."""
    fixture = Computing(look_s=0.001, held=4)

    def is_over():
        fixture.flow_controller.notify_capacity()
        return fixture.now > 101.0

    others_s = await fixture.compute(is_over, turn_s=0.0001)
    assert 0.4 < fixture.pumped_s < 0.51
    assert others_s > 0.49
    fixture.flow_controller.close()


@in_virtual_time(100.0)
async def test_timers_take_at_most_half_of_the_time(monkeypatch):
    """An endpoint that seems free at every moment does not cause sweeps without a pause."""
    monkeypatch.setattr(FlowController, "next_pump_s", lambda *_: 0.002)
    fixture = Computing(look_s=0.001, held=20)
    fixture.flow_controller.notify_capacity()
    await asyncio.sleep(1.0)
    assert 0.3 < fixture.pumped_s < 0.52
    fixture.flow_controller.close()


@in_virtual_time(100.0)
async def test_a_short_pump_is_followed_at_once():
    """Requests that are looked at in less than a millisecond wait for no timer."""
    fixture = Computing(look_s=0.0001, held=2)
    for sweeps in range(1, 5):
        fixture.flow_controller.notify_capacity()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert fixture.looks == 2 * sweeps
    fixture.flow_controller.close()


@in_virtual_time(100.0)
async def test_a_clock_jump_does_not_stop_the_pump():
    """Whatever a pump seems to have taken, the next one comes in a moment."""
    fixture = Computing(look_s=10.0, held=2)
    fixture.flow_controller.pump()
    assert fixture.looks == 1
    fixture.look_s = 0.0
    await asyncio.sleep(0.06)
    assert fixture.looks == 2
    fixture.flow_controller.close()


@in_virtual_time(100.0)
async def test_a_deadline_ends_a_wait_without_an_event():
    """The timer of the event loop wakes the controller."""
    fixture = Computing(look_s=0.0, held=0)
    fixture.ask(x_extproc_queue_timeout_ms="30000")
    await asyncio.sleep(29.0)
    assert fixture.flow_controller.outcomes == {}
    await asyncio.sleep(2.0)
    assert fixture.flow_controller.outcomes == {"expired": 1}
