from __future__ import annotations

import asyncio
import itertools
import random
import time

from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.election import ElectionSettings, LeaseRecord
from extproc.server import leader_elector
from tests.election.world import ElectionWorld, Fate, Store
from tests.support import virtual_loop
from tests.support.seeded import examples

PATIENCE = ElectionSettings()
NAMES = ("a", "b", "c", "d")

#: Some seconds for all of them, on a busy machine.
few = settings(max_examples=examples(40), deadline=None)

#: Beyond the limit of a call and beyond the duration of a Lease: nothing is too late to arrive.
delays = st.none() | st.floats(0.0, 0.2) | st.floats(0.0, 40.0)
fates = st.builds(Fate, delays, delays)
good = st.builds(Fate, st.floats(0.0, 0.05), st.floats(0.0, 0.05))
ends = st.tuples(
    st.floats(0.0, 100.0), st.sampled_from(NAMES), st.sampled_from(["crash", "resign"])
)


def world(chosen, **more):
    """A world that uses these fates in turn, over and over."""
    endless = itertools.cycle(chosen)
    return ElectionWorld(lambda: next(endless), **more)


def swift():
    return world([Fate(0.01, 0.01)])


@settings(max_examples=examples(150), deadline=None)
@given(
    st.lists(fates, min_size=1, max_size=60),
    st.lists(st.tuples(st.floats(0.0, 30.0), st.floats(-1e6, 1e6)), min_size=2, max_size=4),
    st.lists(ends, max_size=6),
)
def test_two_candidates_never_lead_at_once(chosen, starts, ended):
    """Whatever is lost, late, crashed or resigned, and wherever clocks start: one leader at most."""
    cluster = world(chosen)
    for name, (at, offset) in zip(NAMES, starts, strict=False):
        cluster.add(name, PATIENCE, at=at, offset=offset)
    for at, name, how in ended:
        for candidate in cluster.candidates:
            if candidate.name == name:
                cluster.at(at, getattr(candidate, how))
    cluster.run(150.0)


@few
@given(
    st.lists(fates, min_size=1, max_size=60),
    st.lists(st.floats(0.85, 1.2), min_size=2, max_size=4),
)
def test_clock_drift_is_tolerated(chosen, rates):
    """Rates that differ by less than duration over renewal change nothing."""
    cluster = world(chosen)
    for name, rate in zip(NAMES, rates, strict=False):
        cluster.add(name, PATIENCE, rate=rate)
    cluster.run(150.0)


@few
@given(
    st.lists(st.lists(fates, min_size=1, max_size=20), min_size=2, max_size=4),
    st.lists(st.tuples(st.integers(2, 30), st.floats(0.1, 0.9)), min_size=4, max_size=4),
)
def test_replicas_with_different_times_never_lead_together(chosen, times):
    """A rollout that changes the times: the duration that counts stands in the Lease."""
    cluster = world([fate for part in chosen for fate in part])
    for name, (duration, share) in zip(NAMES, times, strict=True):
        patience = ElectionSettings(
            duration_s=duration, renew_s=duration * share, retry_s=duration / 10
        )
        cluster.add(name, patience)
    cluster.run(120.0)


@few
@given(st.lists(good, min_size=1, max_size=30), st.floats(1.0, 60.0))
def test_a_crashed_leader_is_replaced_in_time(chosen, at):
    """Without losses another leads within the duration, a pause and the way of four messages."""
    cluster = world(chosen)
    for name in NAMES[:3]:
        cluster.add(name, PATIENCE)
    cluster.run(at)
    (first,) = cluster.leaders
    first.crash()
    cluster.run(at + PATIENCE.duration_s + PATIENCE.retry_s + 4 * 0.1)
    (second,) = cluster.leaders
    assert second is not first


@few
@given(st.lists(good, min_size=1, max_size=30), st.floats(1.0, 60.0))
def test_a_leader_that_resigns_is_replaced_at_once(chosen, at):
    """Its Lease is free for the next candidate."""
    cluster = world(chosen)
    for name in NAMES[:3]:
        cluster.add(name, PATIENCE)
    cluster.run(at)
    (first,) = cluster.leaders
    first.resign()
    assert cluster.leaders == []
    cluster.run(at + PATIENCE.retry_s + 8 * 0.1)
    assert [second.name for second in cluster.leaders] != [first.name]
    assert len(cluster.leaders) == 1


@few
@given(st.lists(fates, min_size=1, max_size=40))
def test_a_leader_is_elected_once_the_network_recovers(chosen):
    """After any trouble a candidate leads within the longest wait."""
    trouble = iter(chosen)
    cluster = ElectionWorld(lambda: next(trouble, Fate(0.01, 0.01)))
    for name in NAMES[:3]:
        cluster.add(name, PATIENCE)
    cluster.run(5.0 * len(chosen) + 40.0 + 2 * PATIENCE.duration_s)
    assert len(cluster.leaders) == 1


def test_a_renewed_lease_keeps_its_leader():
    """No candidate takes a Lease that is renewed: an hour has one leader, and one transition."""
    cluster = swift()
    for name in NAMES:
        cluster.add(name, PATIENCE)
    cluster.run(3600.0)
    assert len(cluster.history) == 1
    assert cluster.store.record.transitions == 0


def test_a_leader_without_renewals_stops_before_another_leads():
    """It stops at `renew_s` after its last renewal; others wait for `duration_s`."""
    cluster = swift()
    first = cluster.add("a", PATIENCE)
    cluster.add("b", PATIENCE, at=0.5)
    cluster.run(20.0)
    assert cluster.leaders == [first]
    cluster.fate = lambda: Fate(None, None)
    cluster.run(20.0 + PATIENCE.renew_s)
    assert cluster.leaders == []
    cluster.fate = lambda: Fate(0.01, 0.01)
    cluster.run(60.0)
    assert len(cluster.leaders) == 1


def test_a_leader_resumes_where_no_other_took_the_lease():
    """An outage of the store costs the lead for as long as it lasts, not more."""
    cluster = swift()
    first = cluster.add("a", PATIENCE)
    cluster.run(20.0)
    cluster.fate = lambda: Fate(None, None)
    cluster.run(60.0)
    assert not first.leads()
    cluster.fate = lambda: Fate(0.01, 0.01)
    cluster.run(70.0)
    assert first.leads()
    kinds = [fact.kind for fact in first.facts]
    assert kinds == ["elected", "failed", "lost", "recovered", "elected"]


class LeasesFixture:
    """A Lease that answers what a test sets."""

    def __init__(self):
        self.answer = None
        self.written = None

    async def read(self):
        return self.answer

    async def write(self, _):
        return self.written


async def test_elector_reports_a_failure_that_needs_an_operator():
    """Once when it begins, again when it turns out to be a missing right, and not each time."""
    facts, leases = [], LeasesFixture()
    subject = leader_elector.LeaderElector(
        "a",
        PATIENCE,
        leases,
        clock=lambda: 0.0,
        rng=random.Random(1),
        can_lead=lambda: False,
        on_event=facts.append,
    )
    away = leader_elector.LeaseRequestFailed("no answer")
    forbidden = leader_elector.LeaseRequestFailed("403; add to a Role", reason="forbidden")
    for answer in (away, away, forbidden, forbidden, away, forbidden, None):
        leases.answer = answer
        await subject.step()
    assert [(fact.kind, fact.detail) for fact in facts] == [
        ("failed", "no answer"),
        ("failed", "403; add to a Role"),
        ("recovered", "the Lease can be read and written again"),
    ]


async def test_a_lease_that_can_only_be_read_is_not_reported_as_recovered():
    """A candidate without the right to write reports that once, also while its reads succeed."""
    facts, leases = [], LeasesFixture()
    subject = leader_elector.LeaderElector(
        "a", PATIENCE, leases, clock=lambda: 0.0, rng=random.Random(1), on_event=facts.append
    )
    leases.written = leader_elector.LeaseRequestFailed("403; add to a Role", reason="forbidden")
    for _ in range(5):
        await subject.step()
    assert [fact.kind for fact in facts] == ["failed"]
    leases.written = LeaseRecord("a", 15, 0, "1")
    await subject.step()
    assert [fact.kind for fact in facts] == ["failed", "recovered", "elected"]


def test_a_replica_that_cannot_lead_does_not_take_the_lease():
    """It leaves a free Lease alone, and keeps one that it has."""
    cluster = swift()
    idle, fit = cluster.add("a", PATIENCE), cluster.add("b", PATIENCE, at=5.0)
    idle.stands = False
    cluster.run(20.0)
    assert cluster.leaders == [fit]
    fit.stands = False
    cluster.run(60.0)
    assert cluster.leaders == [fit]


def test_a_deleted_lease_is_written_again_by_its_holder():
    """A candidate that knew its holder waits as if it were there; the holder writes it anew."""
    cluster = swift()
    first = cluster.add("a", PATIENCE)
    cluster.add("b", PATIENCE, at=0.5)
    cluster.run(20.0)
    cluster.store.record = None
    cluster.run(40.0)
    assert cluster.leaders == [first]
    assert cluster.store.record.holder == "a"


def test_a_lease_taken_by_another_program_ends_leadership():
    """A Lease that another program took, or a person edited, ends the lead at the next look."""
    cluster = swift()
    first = cluster.add("a", PATIENCE)
    cluster.run(20.0)
    cluster.store.record = LeaseRecord("person", 15, 7, "x")
    cluster.run(23.0)
    assert cluster.leaders == []
    cluster.run(60.0)
    assert cluster.leaders == [first]
    assert cluster.store.record.transitions == 8


def test_a_frozen_process_does_not_lead_after_waking():
    """A leader whose process stood still for long does not believe what it last heard."""
    cluster = swift()
    first = cluster.add("a", PATIENCE)
    cluster.run(20.0)
    assert first.leads()
    cluster.now += PATIENCE.renew_s
    assert not first.leads()


def test_a_late_confirmation_counts_from_the_request():
    """A leader whose renewal was confirmed late leads only for what is left of the time."""
    cluster = swift()
    first = cluster.add("a", PATIENCE)
    cluster.run(20.0)
    cluster.fate = lambda: Fate(0.0, 4.9)
    cluster.run(30.0)
    cluster.fate = lambda: Fate(None, None)
    assert first.leads()
    cluster.run(30.0 + PATIENCE.renew_s)
    assert not first.leads()


def test_the_duration_in_the_lease_applies():
    """An impatient replica waits as long as the holder said, not as long as it would say."""
    cluster = swift()
    patient = cluster.add("a", ElectionSettings(duration_s=30, renew_s=25.0))
    cluster.add("b", ElectionSettings(duration_s=3, renew_s=2.0, retry_s=0.5), at=1.0)
    cluster.run(10.0)
    assert cluster.leaders == [patient]
    patient.crash()
    cluster.run(37.0)
    assert cluster.leaders == []
    cluster.run(41.0)
    assert [other.name for other in cluster.leaders] == ["b"]


async def test_run_ends_with_a_release():
    """`run` stands until it is resigned, releases the Lease and closes the way to it."""

    class Near:
        """The store, without a network."""

        closed = False

        def __init__(self):
            self.store = Store()

        async def read(self):
            return self.store.do(None)

        async def write(self, put):
            return self.store.do(put)

        async def close(self):
            self.closed = True

    near, elected, facts = Near(), asyncio.Event(), []

    def note(fact):
        facts.append(fact.kind)
        elected.set()

    cluster = leader_elector.LeaderElector(
        "me", PATIENCE, near, clock=time.monotonic, rng=random.Random(1), on_event=note
    )
    async with asyncio.timeout(300), asyncio.TaskGroup() as tasks:
        tasks.create_task(cluster.run())
        await elected.wait()
        assert cluster.is_leader
        cluster.resign()
        assert not cluster.is_leader
        await cluster.wait_ended(5.0)
    assert near.store.record.holder == ""
    assert near.closed
    assert facts == ["elected", "resigned"]


@virtual_loop.in_virtual_time()
async def test_a_candidate_that_never_ran_is_not_waited_for():
    """A process that has to stop while it starts is not held up."""
    clock = asyncio.get_running_loop().time
    cluster = leader_elector.LeaderElector(
        "me", PATIENCE, Store(), clock=clock, rng=random.Random(1)
    )
    cluster.resign()
    await cluster.wait_ended(5.0)
    assert not clock()
