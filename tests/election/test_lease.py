from __future__ import annotations

import datetime as dt
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.election import lease
from extproc.election.lease_state import LeaseRecord, LeaseWrite

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
    return lease.write(put, namespace="n", name="l", at=AT, before=before)


def test_a_lease_is_read():
    """Holder, duration, transitions and version; the object comes along for the next write."""
    record, stored = lease.read(json.dumps(HELD).encode())
    assert record == LeaseRecord("other", 20, 2, "7")
    assert stored == HELD


@pytest.mark.parametrize("spec", [None, {}, {"holderIdentity": None}])
def test_a_lease_without_a_holder_is_read(spec):
    """A Lease that was never held, or was released, has no holder."""
    text = json.dumps({"metadata": {"resourceVersion": "1"}, "spec": spec}).encode()
    record, _ = lease.read(text)
    assert record == LeaseRecord("", 15, 0, "1")


@given(st.binary(max_size=200) | st.sampled_from([b"[]", b"{}", b'{"metadata":{}}', b"\xff"]))
def test_unreadable_leases_are_values(text):
    """Nothing that a server could send raises."""
    result = lease.read(text)
    assert isinstance(result, lease.UnreadableLease)


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
    assert lease.is_valid_name(name) is fits


def test_paths():
    """Of one Lease, and of all in a namespace."""
    assert lease.path("n", "l") == "/apis/coordination.k8s.io/v1/namespaces/n/leases/l"
    assert lease.path("n") == "/apis/coordination.k8s.io/v1/namespaces/n/leases"
