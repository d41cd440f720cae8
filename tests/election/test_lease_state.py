from __future__ import annotations

import datetime as dt
import json
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc import election
from extproc.election import ElectionSettings, LeaseRecord, LeaseState, LeaseWrite

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
    """A candidate reads before it writes, and does not lead."""
    state = term()
    assert state.claim(100.0) is None
    assert not state.is_leader(100.0)
    assert not state.is_holder


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
    """Without a holder there is no wait."""
    state = term()
    state.observe(held(), 0.0)
    state.observe(held("", "2"), 1.0)
    assert state.claim(1.0) == LeaseWrite("me", 15, 5, acquired=True, version="2")


def test_leadership_counts_from_the_request():
    """For `renew_s` from when the write was asked for, not from its answer."""
    state = term()
    state.observe(None, 0.0)
    state.confirm(state.claim(0.0), "1", sent_at_s=3.0)
    assert state.is_leader(12.9)
    assert not state.is_leader(13.0)


def test_a_renewal_names_the_version_of_the_last_write():
    """And does not read before."""
    state = leading()
    assert state.is_holder
    assert state.claim(2.0) == LeaseWrite("me", 15, 0, acquired=False, version="1")


def test_after_invalidate_a_read_is_required():
    """A write that failed may be executed yet; the lead lasts as long as it was confirmed for."""
    state = leading()
    state.invalidate()
    assert not state.is_holder
    assert state.claim(2.0) is None
    assert state.is_leader(2.0)
    state.observe(LeaseRecord("me", 15, 0, "2"), 3.0)
    assert state.claim(3.0) == LeaseWrite("me", 15, 0, acquired=False, version="2")
    assert not state.is_leader(10.0), "what was read does not say when it was written"


@pytest.mark.parametrize("record", [None, held(version="2"), held("", "2")])
def test_a_lease_of_another_holder_ends_leadership(record):
    """As soon as it is seen."""
    state = leading()
    state.observe(record, 1.0)
    assert not state.is_leader(1.0)


def test_after_resigning_nothing_is_written():
    """Not even by an answer that was on its way; the release names the last version."""
    state = leading()
    renewal = state.claim(2.0)
    state.resign()
    state.confirm(renewal, "2", 2.0)
    assert not state.is_leader(2.0)
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
    pauses = [state.next_pause_s(5.0, rng) for _ in range(100)]
    assert 1.0 <= min(pauses) < 1.1
    assert 1.9 < max(pauses) <= 2.0
    assert state.next_pause_s(14.5, rng) == 0.5
    assert state.next_pause_s(math.nextafter(15.0, 0.0), rng) == 0.001, "time must pass"
    assert state.next_pause_s(15.0, rng) >= 1.0


AT = dt.datetime(2026, 1, 2, 4, 4, 5, 6, tzinfo=dt.timezone(dt.timedelta(hours=1)))
NOW = "2026-01-02T03:04:05.000006Z"
TAKE = LeaseWrite("me", 15, 3, acquired=True, version="7")

HELD = {
    "apiVersion": "coordination.k8s.io/v1",
    "kind": "Lease",
    "metadata": {
        "name": "l",
        "namespace": "n",
        "resourceVersion": "7",
        "uid": "u",
        "labels": {"team": "a"},
        "managedFields": [{"manager": "x"}],
    },
    "spec": {
        "holderIdentity": "other",
        "leaseDurationSeconds": 20,
        "leaseTransitions": 2,
        "acquireTime": "2026-01-01T00:00:00.000000Z",
        "renewTime": "2026-01-01T00:00:00.000000Z",
        "strategy": "OldestEmulationVersion",
    },
}


def written(put, before=None):
    return election.build_lease(put, namespace="n", name="l", at=AT, before=before)


def test_a_lease_is_read():
    """Holder, duration, transitions and version; the object comes along for the next write."""
    record, stored = election.parse_lease(json.dumps(HELD).encode())
    assert record == LeaseRecord("other", 20, 2, "7")
    assert stored == HELD


@pytest.mark.parametrize("spec", [None, {}, {"holderIdentity": None}])
def test_a_lease_without_a_holder_is_read(spec):
    """A Lease that was never held, or was released, has no holder."""
    text = json.dumps({"metadata": {"resourceVersion": "1"}, "spec": spec}).encode()
    record, _ = election.parse_lease(text)
    assert record == LeaseRecord("", 15, 0, "1")


@given(st.binary(max_size=200) | st.sampled_from([b"[]", b"{}", b'{"metadata":{}}', b"\xff"]))
def test_unreadable_leases_are_values(text):
    """Nothing that a server could send raises."""
    result = election.parse_lease(text)
    assert isinstance(result, election.UnreadableLease)


def test_a_first_write_creates():
    """Without a version there is nothing to keep, and the times are now, in UTC."""
    put = LeaseWrite("me", 15, 0, acquired=True, version="")
    assert written(put, HELD) == {
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": {"namespace": "n", "name": "l"},
        "spec": {
            "holderIdentity": "me",
            "leaseDurationSeconds": 15,
            "leaseTransitions": 0,
            "acquireTime": NOW,
            "renewTime": NOW,
        },
    }


def test_taking_over_keeps_foreign_fields():
    """Labels and fields we do not know stay; the version guards the write."""
    stored = written(TAKE, HELD)
    assert stored["metadata"] == {
        "name": "l",
        "namespace": "n",
        "resourceVersion": "7",
        "uid": "u",
        "labels": {"team": "a"},
    }
    assert stored["spec"] == {
        "holderIdentity": "me",
        "leaseDurationSeconds": 15,
        "leaseTransitions": 3,
        "acquireTime": NOW,
        "renewTime": NOW,
        "strategy": "OldestEmulationVersion",
    }


def test_a_renewal_keeps_the_time_of_acquisition():
    """Only the renewal is new."""
    stored = written(LeaseWrite("other", 20, 2, acquired=False, version="7"), HELD)
    assert stored["spec"]["acquireTime"] == HELD["spec"]["acquireTime"]
    assert stored["spec"]["renewTime"] == NOW


def test_a_version_is_written_without_a_stored_object():
    """A write whose object is not known any more is guarded all the same."""
    assert written(TAKE)["metadata"]["resourceVersion"] == "7"


@pytest.mark.parametrize(
    ("name", "fits"),
    [
        ("epp-default-vllm.llm-d.ai", True),
        ("a", True),
        ("a" * 253, True),
        ("a" * 254, False),
        ("", False),
        ("Upper", False),
        ("a_b", False),
        ("a..b", False),
        ("-a", False),
        ("a-", False),
        ("a\n", False),
    ],
)
def test_names(name, fits):
    """Names are checked as Kubernetes checks those of a Lease."""
    assert election.is_lease_name(name) is fits


def test_paths():
    """Of one Lease, and of all in a namespace."""
    assert election.lease_path("n", "l") == "/apis/coordination.k8s.io/v1/namespaces/n/leases/l"
    assert election.lease_path("n") == "/apis/coordination.k8s.io/v1/namespaces/n/leases"
