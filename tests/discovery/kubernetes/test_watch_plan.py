from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from extproc.discovery.kubernetes import watch_plan

PODS = watch_plan.WatchedCollection(watch_plan.PODS, "n")
POOLS = watch_plan.WatchedCollection(watch_plan.POOLS, "n")
OBJECTIVES = watch_plan.WatchedCollection(watch_plan.OBJECTIVES, "n")
ALL = (PODS, POOLS, OBJECTIVES)


class BoardFixture:
    """The watches of a picker, and what was reported of them."""

    def __init__(self):
        self.subject = watch_plan.WatchStatuses(ALL, 0.0)
        self.reported = []

    def update(self, state, *collections, detail="", now=0.0):
        for collection in collections or ALL:
            facts = self.subject.update(collection, state, detail, server="https://api", now=now)
            self.reported += list(facts)

    @property
    def kinds(self):
        return [kind for kind, _ in self.reported]

    def status(self, collection):
        return next(status for status in self.subject.statuses if status.collection == collection)


def test_watches_report_an_outage_once_for_all_collections():
    """A line when it begins, and another when it is over."""
    statuses = BoardFixture()
    statuses.update("connected")
    statuses.update("disconnected", detail="refused")
    statuses.update("disconnected", detail="refused again")
    statuses.update("connected")
    assert statuses.reported == [
        ("disconnected", "https://api: refused"),
        ("connected", "https://api"),
    ]


def test_watches_report_a_change_of_the_reason():
    """A token that expires during an outage has to be in the log."""
    statuses = BoardFixture()
    statuses.update("connected")
    statuses.update("disconnected", detail="refused")
    statuses.update("unauthorized", detail="401 Unauthorized")
    assert statuses.reported[1:] == [("unauthorized", "https://api: 401 Unauthorized")]


def test_watches_report_connected_only_when_nothing_is_forbidden():
    """The last line is true of all collections."""
    statuses = BoardFixture()
    statuses.update("connected")
    statuses.update("disconnected", detail="refused")
    statuses.update("forbidden", PODS, detail="may not list pods")
    statuses.update("connected", POOLS, OBJECTIVES)
    assert statuses.kinds == ["disconnected", "forbidden", "forbidden"]
    assert statuses.reported[-1][1] == "https://api answers again, but not for pods in namespace n"
    statuses.update("connected", PODS)
    assert statuses.kinds[3:] == ["connected"]


def test_watches_report_a_missing_kind_unless_it_is_optional():
    """And it is no fault that ends."""
    statuses = BoardFixture()
    statuses.update("connected", PODS)
    statuses.update("not-installed", POOLS, OBJECTIVES, detail="missing")
    assert statuses.kinds == ["not-installed"]
    statuses.update("connected")
    assert statuses.kinds == ["not-installed"]


def test_watches_keep_the_time_of_the_last_sync():
    """Through every change of the reason; a list ends it."""
    statuses = BoardFixture()
    assert statuses.status(PODS).unsynced_since == 0.0
    statuses.update("connected", now=5.0)
    assert statuses.status(PODS).unsynced_since is None
    statuses.update("disconnected", PODS, detail="refused", now=10.0)
    statuses.update("forbidden", PODS, detail="403", now=20.0)
    assert statuses.status(PODS).unsynced_since == 10.0
    (line,) = watch_plan.describe_statuses(statuses.subject.statuses, 30.0)
    assert line == "pods in namespace n not in step for 20 s: forbidden: 403"
    statuses.update("connected", PODS, now=40.0)
    assert list(watch_plan.describe_statuses(statuses.subject.statuses, 50.0)) == []


def test_watches_of_an_absent_optional_kind_have_no_state():
    """Its objects would be read if it came."""
    statuses = BoardFixture()
    statuses.update("connected", PODS, POOLS)
    statuses.update("not-installed", OBJECTIVES, detail="missing")
    assert list(watch_plan.describe_statuses(statuses.subject.statuses, 9.0)) == []


@given(
    st.lists(
        st.tuples(st.sampled_from(ALL), st.sampled_from(watch_plan.STATES[1:])),
        max_size=30,
    )
)
def test_watches_report_the_final_state(steps):
    """Whatever happens in whatever order, `connected` is only reported when it is so, and then is."""
    statuses = BoardFixture()
    faults = {*watch_plan.DISCONNECTED, "forbidden", "unreadable"}
    for collection, state in steps:
        before = len(statuses.reported)
        statuses.update(state, collection)
        states = {status.state for status in statuses.subject.statuses}
        if "connected" in statuses.kinds[before:]:
            assert not states & faults
        last = [kind for kind in statuses.kinds if kind != "not-installed"][-1:]
        if states & faults:
            assert last
            assert last != ["connected"]
