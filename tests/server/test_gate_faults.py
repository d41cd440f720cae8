"""A flow controller whose decisions, grants and pumps raise, and whose clients leave."""

from __future__ import annotations

import pytest

from extproc.server.flow_control_shell import Admission
from tests.server.flow_control_fixture import A, FlowControlFixture, answered


class QueueBugError(Exception):
    """A bug."""


async def test_a_decision_that_raises_is_answered_and_blocks_no_other(caplog):
    """The request goes where the rescue says, those behind it as always, and the log says it once."""
    fixture = FlowControlFixture()
    queued = [fixture.ask() for _ in range(4)]
    decide = fixture.pool_fixture.director.decide

    def broken(prepared, now, *, may_defer=True):
        if prepared in (queued[0].prepared, queued[2].prepared):
            raise QueueBugError
        return decide(prepared, now, may_defer=may_defer)

    fixture.pool_fixture.director.decide = broken
    fixture.come(A)
    granted = await answered(*queued)
    assert all(isinstance(admission, Admission) for admission in granted)
    assert [bool(admission.decision.degraded) for admission in granted] == [
        True,
        False,
        True,
        False,
    ]
    assert fixture.pool_fixture.in_flight == 4
    assert list(fixture.bugs.values()) == [2]
    assert len(caplog.records) == 1


async def test_a_dispatch_that_raises_is_answered_500():
    """Whatever raises between decision and answer; nothing stays charged, and the next one goes."""
    fixture = FlowControlFixture()
    first, second = fixture.ask(), fixture.ask()
    commit, failed = fixture.pool_fixture.director.reserve, []

    def broken(decision, now):
        if not failed:
            failed.append(decision)
            raise QueueBugError
        return commit(decision, now)

    fixture.pool_fixture.director.reserve = broken
    fixture.come(A)
    refused, granted = await answered(first, second)
    assert (refused.status, refused.message) == (500, "the decision failed (QueueBugError)")
    assert isinstance(granted, Admission)
    assert fixture.pool_fixture.in_flight == 1
    assert fixture.flow_controller.outcomes == {"failed": 1, "dispatched": 1}
    assert fixture.flow_controller.queue.count == 0


async def test_a_pump_that_raises_is_retried(caplog):
    """It is counted each time and logged once, and those who wait are looked at again."""
    fixture = FlowControlFixture()
    queued = fixture.ask()
    queue = fixture.flow_controller.queue
    expired, broken = queue.expired, True

    def breaking(now, **more):
        if broken:
            raise QueueBugError
        return expired(now, **more)

    queue.expired = breaking
    fixture.flow_controller.pump()
    fixture.flow_controller.pump()
    assert list(fixture.bugs.values()) == [2]
    assert len(caplog.records) == 1
    broken = False
    fixture.come(A)
    await answered(queued)
    fixture.flow_controller.close()


async def test_a_request_that_raises_while_queued_is_removed():
    """An exception while it joins leaves nothing in the queue."""
    fixture = FlowControlFixture()

    def broken():
        raise QueueBugError

    fixture.flow_controller.add_arrival_listener(broken)
    with pytest.raises(QueueBugError):
        fixture.ask()
    assert fixture.flow_controller.queue.count == 0
    fixture.flow_controller.close()


async def test_a_request_that_was_cancelled_is_not_charged():
    """A client that leaves before its stream is resumed causes no dispatch and no exception."""
    fixture = FlowControlFixture()
    queued = fixture.ask()
    queued.admission.cancel()
    fixture.come(A)
    fixture.flow_controller.pump()
    assert fixture.pool_fixture.in_flight == 0
    assert not fixture.bugs
    fixture.flow_controller.cancel(queued, fixture.now)
    assert fixture.pool_fixture.in_flight == 0


async def test_a_disconnected_client_is_not_awaited():
    """Whatever awaits its answer ends."""
    fixture = FlowControlFixture()
    queued = fixture.ask()
    fixture.flow_controller.cancel(queued, fixture.now)
    assert queued.admission.cancelled()
    fixture.flow_controller.close()
