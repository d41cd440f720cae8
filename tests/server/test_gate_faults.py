"""A gate whose decisions, grants and pumps raise, and whose clients leave."""

from __future__ import annotations

import pytest

from extproc.server.flow_control_shell import Admission
from tests.server.gate_scene import A, Place, answered


class BrokenError(Exception):
    """A bug."""


async def test_a_decision_that_raises_is_answered_and_blocks_no_other(caplog):
    """The request goes where the rescue says, those behind it as always, and the log says it once."""
    place = Place()
    held = [place.ask() for _ in range(4)]
    decide = place.house.dispatcher.decide

    def broken(prepared, now, *, may_defer=True):
        if prepared in (held[0].prepared, held[2].prepared):
            raise BrokenError
        return decide(prepared, now, may_defer=may_defer)

    place.house.dispatcher.decide = broken
    place.come(A)
    granted = await answered(*held)
    assert all(isinstance(admission, Admission) for admission in granted)
    assert [bool(admission.decision.degraded) for admission in granted] == [
        True,
        False,
        True,
        False,
    ]
    assert place.house.in_flight == 4
    assert list(place.bugs.values()) == [2]
    assert len(caplog.records) == 1


async def test_a_dispatch_that_raises_is_answered_500():
    """Whatever raises between decision and answer; nothing stays charged, and the next one goes."""
    place = Place()
    first, second = place.ask(), place.ask()
    commit, failed = place.house.dispatcher.reserve, []

    def broken(decision, now):
        if not failed:
            failed.append(decision)
            raise BrokenError
        return commit(decision, now)

    place.house.dispatcher.reserve = broken
    place.come(A)
    refused, granted = await answered(first, second)
    assert (refused.status, refused.message) == (500, "the decision failed (BrokenError)")
    assert isinstance(granted, Admission)
    assert place.house.in_flight == 1
    assert place.gate.outcomes == {"failed": 1, "dispatched": 1}
    assert place.gate.queue.count == 0


async def test_a_pump_that_raises_is_retried(caplog):
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
    place.gate.pump()
    place.gate.pump()
    assert list(place.bugs.values()) == [2]
    assert len(caplog.records) == 1
    broken = False
    place.come(A)
    await answered(held)
    place.gate.close()


async def test_a_request_that_raises_while_queued_is_removed():
    """An exception while it joins leaves nothing in the queue."""
    place = Place()

    def broken():
        raise BrokenError

    place.gate.add_arrival_listener(broken)
    with pytest.raises(BrokenError):
        place.ask()
    assert place.gate.queue.count == 0
    place.gate.close()


async def test_a_request_that_was_cancelled_is_not_charged():
    """Its stream has not been told yet: nothing goes anywhere, and nothing is a bug."""
    place = Place()
    held = place.ask()
    held.admission.cancel()
    place.come(A)
    place.gate.pump()
    assert place.house.in_flight == 0
    assert not place.bugs
    place.gate.cancel(held, place.now)
    assert place.house.in_flight == 0


async def test_a_disconnected_client_is_not_awaited():
    """Whatever awaits its answer ends."""
    place = Place()
    held = place.ask()
    place.gate.cancel(held, place.now)
    assert held.admission.cancelled()
    place.gate.close()
