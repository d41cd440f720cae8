"""A gate whose decisions, grants and pumps raise, and whose clients leave."""

from __future__ import annotations

import pytest

from extproc.server.flow_control_shell import Admission
from tests.server.flow_control_fixture import A, FlowControlFixture, answered


class BrokenError(Exception):
    """A bug."""


async def test_a_decision_that_raises_is_answered_and_blocks_no_other(caplog):
    """The request goes where the rescue says, those behind it as always, and the log says it once."""
    place = FlowControlFixture()
    held = [place.ask() for _ in range(4)]
    decide = place.pool_fixture.director.decide

    def broken(prepared, now, *, may_defer=True):
        if prepared in (held[0].prepared, held[2].prepared):
            raise BrokenError
        return decide(prepared, now, may_defer=may_defer)

    place.pool_fixture.director.decide = broken
    place.come(A)
    granted = await answered(*held)
    assert all(isinstance(admission, Admission) for admission in granted)
    assert [bool(admission.decision.degraded) for admission in granted] == [
        True,
        False,
        True,
        False,
    ]
    assert place.pool_fixture.in_flight == 4
    assert list(place.bugs.values()) == [2]
    assert len(caplog.records) == 1


async def test_a_dispatch_that_raises_is_answered_500():
    """Whatever raises between decision and answer; nothing stays charged, and the next one goes."""
    place = FlowControlFixture()
    first, second = place.ask(), place.ask()
    commit, failed = place.pool_fixture.director.reserve, []

    def broken(decision, now):
        if not failed:
            failed.append(decision)
            raise BrokenError
        return commit(decision, now)

    place.pool_fixture.director.reserve = broken
    place.come(A)
    refused, granted = await answered(first, second)
    assert (refused.status, refused.message) == (500, "the decision failed (BrokenError)")
    assert isinstance(granted, Admission)
    assert place.pool_fixture.in_flight == 1
    assert place.flow_controller.outcomes == {"failed": 1, "dispatched": 1}
    assert place.flow_controller.queue.count == 0


async def test_a_pump_that_raises_is_retried(caplog):
    """It is counted each time and logged once, and those who wait are looked at again."""
    place = FlowControlFixture()
    held = place.ask()
    queue = place.flow_controller.queue
    expired, broken = queue.expired, True

    def breaking(now, **more):
        if broken:
            raise BrokenError
        return expired(now, **more)

    queue.expired = breaking
    place.flow_controller.pump()
    place.flow_controller.pump()
    assert list(place.bugs.values()) == [2]
    assert len(caplog.records) == 1
    broken = False
    place.come(A)
    await answered(held)
    place.flow_controller.close()


async def test_a_request_that_raises_while_queued_is_removed():
    """An exception while it joins leaves nothing in the queue."""
    place = FlowControlFixture()

    def broken():
        raise BrokenError

    place.flow_controller.add_arrival_listener(broken)
    with pytest.raises(BrokenError):
        place.ask()
    assert place.flow_controller.queue.count == 0
    place.flow_controller.close()


async def test_a_request_that_was_cancelled_is_not_charged():
    """Its stream has not been told yet: nothing goes anywhere, and nothing is a bug."""
    place = FlowControlFixture()
    held = place.ask()
    held.admission.cancel()
    place.come(A)
    place.flow_controller.pump()
    assert place.pool_fixture.in_flight == 0
    assert not place.bugs
    place.flow_controller.cancel(held, place.now)
    assert place.pool_fixture.in_flight == 0


async def test_a_disconnected_client_is_not_awaited():
    """Whatever awaits its answer ends."""
    place = FlowControlFixture()
    held = place.ask()
    place.flow_controller.cancel(held, place.now)
    assert held.admission.cancelled()
    place.flow_controller.close()
