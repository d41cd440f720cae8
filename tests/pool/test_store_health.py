"""Health evidence of scrapes and requests in the pool store, and its snapshots."""

from __future__ import annotations

import operator
import random

import pytest

from extproc.endpoint import Endpoint, EngineCounters, Load
from extproc.pool.endpoint_health import HealthState, OutlierDetectionSettings, RequestOutcome
from extproc.pool.store import PoolStore

FIRST, SECOND, THIRD, FOURTH = (f"10.0.0.{n}:8000" for n in range(1, 5))


def fleet_of(*addresses: str) -> PoolStore:
    store = PoolStore(on_gone=lambda _: None)
    store.set_endpoints([Endpoint(address) for address in addresses], 0.0)
    return store


def state(fleet: PoolStore, address: str = FIRST) -> HealthState:
    member = fleet.pool.find(address)
    assert member is not None
    return member.condition.state


def endpoint(fleet: PoolStore, address: str = FIRST) -> Endpoint:
    member = fleet.pool.find(address)
    assert member is not None
    return member.endpoint


def missed(fleet: PoolStore, address: str, reason: str, times: int = 2) -> None:
    for _ in range(times):
        fleet.scrape_failed(fleet.begin_scrape(endpoint(fleet, address)), reason, 1.0)


@pytest.mark.parametrize(
    ("totals", "running", "out"),
    [
        (EngineCounters(steps=5.0), 1.0, True),
        (EngineCounters(steps=5.0), 0.0, False),
        (EngineCounters(computed_tokens=5.0, decoded_tokens=7.0), 2.0, True),
        # These stand still for as long as one answer takes.
        (EngineCounters(generated_tokens=5.0, finished=1.0), 1.0, False),
        (EngineCounters(), 1.0, False),
    ],
)
def test_stalled_counters_eject_an_endpoint(*, totals: EngineCounters, running: float, out: bool):
    """Work and no iteration for 15 s is a hung engine, where iterations or tokens are counted."""
    store = fleet_of(FIRST, SECOND)
    member = store.pool.find(FIRST)
    assert member is not None
    member.account.open("m", 10, cached_tokens=0, now=0.0)
    for at in range(1, 20):
        mark = store.begin_scrape(endpoint(store))
        store.observe(mark, Load(at=at, running=running, waiting=0.0, counters=totals), float(at))
    assert (state(store) is HealthState.EJECTED) is out


def test_a_stall_that_could_not_eject_is_forgotten_once_the_engine_moves():
    """The only endpoint stands still and serves again; when others come later, it stays."""
    store = fleet_of(FIRST)
    store.pool.members[0].account.open("m", 10, cached_tokens=0, now=0.0)

    def scrape(at: int, steps: float) -> None:
        load = Load(at=at, running=1.0, waiting=0.0, counters=EngineCounters(steps=steps))
        store.observe(store.begin_scrape(endpoint(store)), load, float(at))

    for at in range(1, 20):
        scrape(at, 5.0)
    scrape(20, 6.0)
    store.record_outcome(endpoint(store), RequestOutcome.SERVED, sent_at=1.0, now=20.0)
    store.set_endpoints([Endpoint(FIRST), Endpoint(SECOND)], 21.0)
    assert state(store) is HealthState.HEALTHY


def test_foreign_work_does_not_eject_an_endpoint():
    """Without a request of ours nothing is said of an engine that stands still."""
    store = fleet_of(FIRST, SECOND)
    for at in range(1, 40):
        load = Load(at=at, running=3.0, waiting=0.0, counters=EngineCounters(steps=1.0))
        store.observe(store.begin_scrape(endpoint(store)), load, float(at))
    assert state(store) is HealthState.HEALTHY


def test_requests_that_eject_no_more_leave_no_endpoint_out():
    """After a reload with `failures: 0`, also during a probe; endpoints out of reach stay out."""
    addresses = [f"10.0.0.{n}:8000" for n in range(1, 9)]
    store = fleet_of(*addresses)
    for address in (FIRST, SECOND, THIRD):
        for _ in range(3):
            store.record_outcome(
                endpoint(store, address), RequestOutcome.FAILED, sent_at=1.0, now=1.0
            )
    missed(store, THIRD, "refused")
    store.record_sent(endpoint(store, SECOND), 7.0)
    states = [state(store, address) for address in addresses[:3]]
    assert states == [HealthState.EJECTED, HealthState.PROBING, HealthState.DOWN]
    store.outlier_detector.reconfigure(OutlierDetectionSettings(failures=0), 8.0)
    # What changes for requests is seen with the next outcome or scrape.
    store.record_outcome(endpoint(store, SECOND), RequestOutcome.FAILED, sent_at=7.0, now=8.1)
    for _ in range(9):
        store.record_outcome(endpoint(store, FIRST), RequestOutcome.FAILED, sent_at=8.1, now=8.2)
    states = [state(store, address) for address in addresses[:3]]
    assert states == [HealthState.HEALTHY, HealthState.HEALTHY, HealthState.DOWN]


def test_refusal_at_the_serving_port_is_unreachable():
    """Closed ports where requests would go: any number may be out for that."""
    store = fleet_of(FIRST, SECOND, THIRD, FOURTH)
    for address in (FIRST, SECOND, THIRD):
        missed(store, address, "refused")
    assert [
        state(store, endpoint_address) for endpoint_address in (FIRST, SECOND, THIRD, FOURTH)
    ] == [
        *[HealthState.DOWN] * 3,
        HealthState.HEALTHY,
    ]


def test_refusal_at_the_metrics_port_is_suspect():
    """A metrics port of its own says less: no more than the share are out for it."""
    store = PoolStore(on_gone=lambda _: None)
    store.set_endpoints([Endpoint(address) for address in (FIRST, SECOND, THIRD, FOURTH)], 0.0)
    for address in (FIRST, SECOND, THIRD):
        for _ in range(2):
            token = store.begin_scrape(endpoint(store, address))
            store.scrape_failed(token, "refused", 1.0, is_own_port=False)
    assert store.pool.down == 2


@pytest.mark.parametrize("reason", ["status 404", "unreadable", "bug: KeyError"])
def test_a_missing_page_is_no_failure(reason: str):
    """An engine without metrics serves as well as any other."""
    store = fleet_of(FIRST, SECOND)
    missed(store, FIRST, reason, times=9)
    assert state(store) is HealthState.HEALTHY


def test_health_is_forgotten_with_the_endpoint():
    """In its next life nothing is held against it, and it counts as new."""
    store = fleet_of(FIRST, SECOND)
    for _ in range(3):
        store.record_outcome(endpoint(store), RequestOutcome.FAILED, sent_at=1.0, now=1.0)
    assert state(store) is HealthState.EJECTED
    store.set_endpoints([Endpoint(SECOND)], 2.0)
    store.set_endpoints([Endpoint(FIRST), Endpoint(SECOND)], 3.0)
    assert state(store) is HealthState.HEALTHY
    assert store.pool.newest == 3.0


def test_initial_endpoints_have_no_slow_start():
    """Those of the first list, and of a list after an empty one, are as old as any."""
    store = fleet_of(FIRST)
    assert store.pool.newest < 0.0
    store.set_endpoints([], 1.0)
    store.set_endpoints([Endpoint(SECOND)], 2.0)
    assert store.pool.newest < 0.0
    store.set_endpoints([Endpoint(SECOND), Endpoint(THIRD)], 3.0)
    assert store.pool.newest == 3.0


def test_the_share_follows_the_pool():
    """When others leave, an endpoint that must stay is taken back."""
    store = fleet_of(FIRST, SECOND)
    for _ in range(3):
        store.record_outcome(endpoint(store), RequestOutcome.FAILED, sent_at=1.0, now=1.0)
    assert store.pool.unhealthy_or_doubtful == 1
    store.set_endpoints([Endpoint(FIRST)], 2.0)
    assert (state(store), store.pool.unhealthy_or_doubtful) == (HealthState.HEALTHY, 0)


def test_a_reservation_moves_with_all_its_counts():
    """Charges of one endpoint move to another, and are released once."""
    store = fleet_of(FIRST, SECOND)
    first, second = (member.account for member in store.pool.members)
    reservation = first.open("m", 100, cached_tokens=40, now=0.0, prompt_bytes=400)
    reservation.move(second, 1.0, cached_tokens=30)
    assert (first.in_flight, first.prompt_tokens, first.adapters, first.queued(1.0)) == (
        0,
        0,
        {},
        0,
    )
    assert (second.in_flight, second.prompt_tokens, second.adapters) == (1, 100, {"m": 1})
    assert (reservation.uncached_tokens, reservation.endpoint) == (70, second.endpoint)
    reservation.close(2.0)
    assert (second.in_flight, second.answered, first.answered) == (0, 1, 0)
    with pytest.raises(RuntimeError):
        reservation.move(first, 3.0, cached_tokens=0)


def test_conditions_that_change_in_turns_leave_the_counts_of_a_pool_right():
    """Hundreds of endpoints fail and come back in any order; the members that stay are the same."""
    rng = random.Random(7)
    fleet = fleet_of(*(f"10.0.1.{n}:8000" for n in range(40)))
    for at in range(1, 600):
        before = fleet.pool
        member = rng.choice(before.members)
        mark = fleet.begin_scrape(member.endpoint)
        if rng.random() < 0.6:
            fleet.scrape_failed(mark, rng.choice(("refused", "timeout", "status")), float(at))
        else:
            fleet.observe(mark, Load(at=float(at), running=1.0, waiting=0.0), float(at))
        if not at % 100:
            fleet.set_endpoints(
                [listed.endpoint for listed in before.members[at // 100 :]], float(at)
            )
            continue
        pool = fleet.pool
        assert pool.down == sum(not listed.is_up for listed in pool.members)
        assert pool.unhealthy_or_doubtful == sum(
            bool(listed.condition.state) for listed in pool.members
        )
        changed = [
            after
            for known, after in zip(before.members, pool.members, strict=True)
            if after.condition is not known.condition or after.endpoint is member.endpoint
        ]
        assert sum(map(operator.is_not, before.members, pool.members)) == len(changed)
        detector = fleet.outlier_detector
        for listed in pool.members:
            assert listed.condition is detector.condition(listed.endpoint.incarnation)
