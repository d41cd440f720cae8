"""Remembered adapters of an account never outlive a change."""

from hypothesis import given
from hypothesis import strategies as st

from extproc.endpoint import AdapterResidency, Endpoint, Load
from extproc.pool.candidate_builder import adapter_residency
from extproc.pool.inflight import InflightLoad

NAMES = ("a", "b", "c", "d", "base")

names = st.sampled_from(NAMES)
loads = st.builds(
    Load,
    adapters=st.none() | st.frozensets(names, max_size=2),
    adapter_slots=st.none() | st.integers(0, 4),
)
steps = st.one_of(
    names.map(lambda name: ("open", name)),
    st.integers(0, 9).map(lambda at: ("close", at)),
    loads.map(lambda load: ("scrape", load)),
    st.frozensets(names).map(lambda known: ("learn", known)),
)


def test_an_open_request_changes_residency_at_once():
    """The only slot is free, taken while a request is open, and free again."""
    account, load, known = (
        InflightLoad(Endpoint("10.0.0.1:8000")),
        Load(adapter_slots=1),
        frozenset("ab"),
    )
    assert adapter_residency("a", account, load, known) is AdapterResidency.ROOM
    reservation = account.open("b", 1, cached_tokens=0, now=0.0)
    assert adapter_residency("a", account, load, known) is AdapterResidency.FULL
    reservation.close(0.0)
    assert adapter_residency("a", account, load, known) is AdapterResidency.EVICTABLE
    assert adapter_residency("b", account, load, known) is AdapterResidency.IDLE


def test_an_engine_that_does_not_show_its_slots_has_one():
    """Base models take none of them, and what is open is there."""
    account, load, known = InflightLoad(Endpoint("10.0.0.1:8000")), Load(), frozenset("ab")
    account.open("base", 1, cached_tokens=0, now=0.0)
    assert adapter_residency("a", account, load, known) is AdapterResidency.UNKNOWN
    reservation = account.open("b", 1, cached_tokens=0, now=0.0)
    assert adapter_residency("a", account, load, known) is AdapterResidency.FULL
    assert adapter_residency("b", account, load, known) is AdapterResidency.RESIDENT
    reservation.close(0.0)
    assert adapter_residency("a", account, load, known) is AdapterResidency.UNKNOWN


@given(st.lists(steps, max_size=30))
def test_residency_does_not_depend_on_earlier_queries(history):
    """An account that was asked after every change answers like one that is asked for the first time."""
    cached, fresh = InflightLoad(Endpoint("10.0.0.1:8000")), InflightLoad(Endpoint("10.0.0.1:8000"))
    load, known = Load(), frozenset("abcd")
    reservations = []
    for what, value in history:
        if what == "open":
            reservations.append(
                [account.open(value, 1, cached_tokens=0, now=0.0) for account in (cached, fresh)]
            )
        elif what == "close" and reservations:
            for reservation in reservations.pop(value % len(reservations)):
                reservation.close(0.0)
        elif what == "scrape":
            load = value
        elif what == "learn":
            known = value
        for name in NAMES:
            fresh.adapter_slots = None
            assert adapter_residency(name, cached, load, known) is adapter_residency(
                name, fresh, load, known
            )
