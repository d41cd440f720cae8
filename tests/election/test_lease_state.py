from __future__ import annotations

import math
import random

import pytest

from extproc.election.lease_state import LeaseRecord, LeaseState, LeaseWrite
from extproc.election.settings import ElectionSettings

PATIENCE = ElectionSettings(duration_s=15, renew_s=10.0, retry_s=2.0)


def term():
    return LeaseState("me", PATIENCE)


def held(holder="other", version="1", duration_s=15.0):
    return LeaseRecord(holder, duration_s, 4, version)


def leading():
    one = term()
    one.observe(None, 0.0)
    one.confirm(one.claim(0.0), "1", 0.0)
    return one


def test_nothing_is_claimed_unseen():
    """A candidate reads before it writes, and leads nobody."""
    one = term()
    assert one.claim(100.0) is None
    assert not one.leads(100.0)
    assert not one.mine


def test_nothing_stored_is_free():
    """The first to write has it: no version is named, so only one create succeeds."""
    one = term()
    one.observe(None, 0.0)
    assert one.claim(0.0) == LeaseWrite("me", 15, 0, acquired=True, version="")


@pytest.mark.parametrize(("at", "claims"), [(14.9, False), (15.0, True)])
def test_another_holder_is_waited_for(at, claims):
    """From when its last write was heard of, for the duration that it wrote."""
    one = term()
    one.observe(held(), 0.0)
    one.observe(held(), at)
    put = LeaseWrite("me", 15, 5, acquired=True, version="1")
    assert one.claim(at) == (put if claims else None)


def test_any_write_starts_the_wait_again():
    """The version tells, not the fields: two renewals may look the same."""
    one = term()
    one.observe(held(version="1"), 0.0)
    one.observe(held(version="2"), 14.0)
    assert one.claim(28.0) is None
    assert one.claim(29.0) is not None


def test_a_released_lease_is_free_at_once():
    """Without a holder there is nobody to wait for."""
    one = term()
    one.observe(held(), 0.0)
    one.observe(held("", "2"), 1.0)
    assert one.claim(1.0) == LeaseWrite("me", 15, 5, acquired=True, version="2")


def test_leading_counts_from_the_question():
    """For `renew_s` from when the write was asked for, not from its answer."""
    one = term()
    one.observe(None, 0.0)
    one.confirm(one.claim(0.0), "1", sent_at_s=3.0)
    assert one.leads(12.9)
    assert not one.leads(13.0)


def test_a_renewal_names_the_version_of_the_last_write():
    """And does not read before."""
    one = leading()
    assert one.mine
    assert one.claim(2.0) == LeaseWrite("me", 15, 0, acquired=False, version="1")


def test_after_doubt_it_reads():
    """A write that failed may be executed yet; the lead lasts as long as it was confirmed for."""
    one = leading()
    one.invalidate()
    assert not one.mine
    assert one.claim(2.0) is None
    assert one.leads(2.0)
    one.observe(LeaseRecord("me", 15, 0, "2"), 3.0)
    assert one.claim(3.0) == LeaseWrite("me", 15, 0, acquired=False, version="2")
    assert not one.leads(10.0), "what was read does not say when it was written"


@pytest.mark.parametrize("found", [None, held(version="2"), held("", "2")])
def test_a_lease_of_others_ends_the_lead(found):
    """As soon as it is seen."""
    one = leading()
    one.observe(found, 1.0)
    assert not one.leads(1.0)


def test_after_resigning_nothing_is_claimed():
    """Not even by an answer that was on its way; the release names the last version."""
    one = leading()
    renewal = one.claim(2.0)
    one.resign()
    one.confirm(renewal, "2", 2.0)
    assert not one.leads(2.0)
    assert one.claim(3.0) is None
    assert one.release() == LeaseWrite("", 1, 0, acquired=True, version="2")


def test_only_what_is_ours_is_released():
    """A Lease of another is left alone, and so is one that is not known."""
    one = term()
    one.observe(held(), 0.0)
    assert one.release() is None
    mine = leading()
    mine.invalidate()
    assert mine.release() is None


def test_pauses():
    """Spread below `retry_s`, and shorter where the Lease becomes free before."""
    rng = random.Random(3)
    one = term()
    one.observe(held(), 0.0)
    pauses = [one.pause(5.0, rng) for _ in range(100)]
    assert 1.0 <= min(pauses) < 1.1
    assert 1.9 < max(pauses) <= 2.0
    assert one.pause(14.5, rng) == 0.5
    assert one.pause(math.nextafter(15.0, 0.0), rng) == 0.001, "time must pass"
    assert one.pause(15.0, rng) >= 1.0
