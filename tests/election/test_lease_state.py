from __future__ import annotations

import math
import random

import pytest

from extproc.election.lease_state import ElectionSettings, LeaseRecord, LeaseState, LeaseWrite

PATIENCE = ElectionSettings(duration_s=15, renew_s=10.0, retry_s=2.0)


def term():
    return LeaseState("me", PATIENCE)


def held(holder="other", version="1", duration_s=15.0):
    return LeaseRecord(holder, duration_s, 4, version)


def leading():
    state = term()
    state.observe(None, 0.0)
    state.confirm(state.claim(0.0), "1", 0.0)
    return state


def test_a_candidate_reads_before_it_writes():
    """A candidate reads before it writes, and leads nobody."""
    state = term()
    assert state.claim(100.0) is None
    assert not state.leads(100.0)
    assert not state.mine


def test_a_missing_lease_is_free():
    """The first to write has it: no version is named, so only one create succeeds."""
    state = term()
    state.observe(None, 0.0)
    assert state.claim(0.0) == LeaseWrite("me", 15, 0, acquired=True, version="")


@pytest.mark.parametrize(("at", "claims"), [(14.9, False), (15.0, True)])
def test_a_candidate_waits_for_another_holder(at, claims):
    """From when its last write was heard of, for the duration that it wrote."""
    state = term()
    state.observe(held(), 0.0)
    state.observe(held(), at)
    put = LeaseWrite("me", 15, 5, acquired=True, version="1")
    assert state.claim(at) == (put if claims else None)


def test_any_write_restarts_the_wait():
    """The version tells, not the fields: two renewals may look the same."""
    state = term()
    state.observe(held(version="1"), 0.0)
    state.observe(held(version="2"), 14.0)
    assert state.claim(28.0) is None
    assert state.claim(29.0) is not None


def test_a_released_lease_is_free_at_once():
    """Without a holder there is nobody to wait for."""
    state = term()
    state.observe(held(), 0.0)
    state.observe(held("", "2"), 1.0)
    assert state.claim(1.0) == LeaseWrite("me", 15, 5, acquired=True, version="2")


def test_leadership_counts_from_the_request():
    """For `renew_s` from when the write was asked for, not from its answer."""
    state = term()
    state.observe(None, 0.0)
    state.confirm(state.claim(0.0), "1", sent_at_s=3.0)
    assert state.leads(12.9)
    assert not state.leads(13.0)


def test_a_renewal_names_the_version_of_the_last_write():
    """And does not read before."""
    state = leading()
    assert state.mine
    assert state.claim(2.0) == LeaseWrite("me", 15, 0, acquired=False, version="1")


def test_after_invalidate_a_read_is_required():
    """A write that failed may be executed yet; the lead lasts as long as it was confirmed for."""
    state = leading()
    state.invalidate()
    assert not state.mine
    assert state.claim(2.0) is None
    assert state.leads(2.0)
    state.observe(LeaseRecord("me", 15, 0, "2"), 3.0)
    assert state.claim(3.0) == LeaseWrite("me", 15, 0, acquired=False, version="2")
    assert not state.leads(10.0), "what was read does not say when it was written"


@pytest.mark.parametrize("record", [None, held(version="2"), held("", "2")])
def test_a_lease_of_another_holder_ends_leadership(record):
    """As soon as it is seen."""
    state = leading()
    state.observe(record, 1.0)
    assert not state.leads(1.0)


def test_after_resigning_nothing_is_written():
    """Not even by an answer that was on its way; the release names the last version."""
    state = leading()
    renewal = state.claim(2.0)
    state.resign()
    state.confirm(renewal, "2", 2.0)
    assert not state.leads(2.0)
    assert state.claim(3.0) is None
    assert state.release() == LeaseWrite("", 1, 0, acquired=True, version="2")


def test_only_an_own_lease_is_released():
    """A Lease of another is left alone, and so is one that is not known."""
    state = term()
    state.observe(held(), 0.0)
    assert state.release() is None
    mine = leading()
    mine.invalidate()
    assert mine.release() is None


def test_pauses_are_bounded():
    """Spread below `retry_s`, and shorter where the Lease becomes free before."""
    rng = random.Random(3)
    state = term()
    state.observe(held(), 0.0)
    pauses = [state.pause(5.0, rng) for _ in range(100)]
    assert 1.0 <= min(pauses) < 1.1
    assert 1.9 < max(pauses) <= 2.0
    assert state.pause(14.5, rng) == 0.5
    assert state.pause(math.nextafter(15.0, 0.0), rng) == 0.001, "time must pass"
    assert state.pause(15.0, rng) >= 1.0
