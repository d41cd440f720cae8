from __future__ import annotations

import math

import pytest

from extproc.endpoint import NO_LOAD, Candidate, Endpoint, Load
from extproc.pool import candidate_builder, endpoint_health
from extproc.pool.store import PoolStore

ADDRESSES = ("10.0.0.1:8000", "10.0.0.1:8001", "10.0.0.2:8000", "[fd00::1]:8000", "[fd00::2]:8000")


def fleet_of(*addresses: str) -> PoolStore:
    store = PoolStore(on_gone=lambda _: None)
    store.set_endpoints([Endpoint(address) for address in addresses], 0.0)
    return store


def take_down(fleet: PoolStore, *addresses: str) -> None:
    for address in addresses:
        for _ in range(endpoint_health.UNREACHABLE_AFTER):
            member = fleet.pool.find(address)
            assert member is not None
            fleet.scrape_failed(fleet.begin_scrape(member.endpoint), "refused", 0.0)


def eligible(fleet: PoolStore, subset: tuple[str, ...] | None = None) -> list[str]:
    return [member.endpoint.address for member in fleet.pool.eligible(subset)]


def test_without_a_hint_every_endpoint_is_eligible():
    """Without a hint every member is eligible, in pool order, and nothing is copied."""
    store = fleet_of(*ADDRESSES)
    assert store.pool.eligible(None) is store.pool.members


@pytest.mark.parametrize(
    ("subset", "expected"),
    [
        ((), []),
        (("10.0.0.1:8001",), [1]),
        (("10.0.0.1",), [0, 1]),
        (("10.0.0.1:9",), []),
        (("10.0.0.9",), []),
        (("10.0.0.2", "10.0.0.1:8000"), [0, 2]),
        (("fd00::1",), [3]),
        (("[fd00::1]",), [3]),
        (("[fd00::2]:8000",), [4]),
        (("[fd00::2]:9",), []),
        (("fd00::1:8000",), []),
        (("FD00::1", "[fd00:0::0:2]"), [3, 4]),
        (("[FD00:0:0:0:0:0:0:1]:8000",), [3]),
        (("[fd00::zz]:8000", "fd00::1]:8000:"), []),
        (("", ":", "]", "[", "[]"), []),
        (("8000",), []),
    ],
)
def test_a_hint_names_endpoints_by_address_or_ip(subset: tuple[str, ...], expected: list[int]):
    """ip:port names one endpoint, a bare IP all its ports, anything else none."""
    assert eligible(fleet_of(*ADDRESSES), subset) == [ADDRESSES[at] for at in expected]


def test_endpoints_that_are_down_are_avoided():
    """An endpoint whose scrapes cannot connect is left out while another one is up."""
    store = fleet_of(*ADDRESSES)
    take_down(store, ADDRESSES[0], ADDRESSES[3])
    assert eligible(store) == [ADDRESSES[1], ADDRESSES[2], ADDRESSES[4]]
    assert eligible(store, ("10.0.0.1",)) == [ADDRESSES[1]]


def test_when_all_are_down_all_are_eligible():
    """If no endpoint is up, also inside a hint, it is the scraper that is cut off."""
    store = fleet_of(*ADDRESSES[:3])
    take_down(store, ADDRESSES[0], ADDRESSES[1])
    assert eligible(store, ("10.0.0.1",)) == [ADDRESSES[0], ADDRESSES[1]]
    take_down(store, ADDRESSES[2])
    assert eligible(store) == list(ADDRESSES[:3])


def test_an_empty_pool_has_no_eligible_endpoint():
    """No endpoints: none is eligible, with or without a hint."""
    assert eligible(fleet_of()) == []
    assert eligible(fleet_of(), ("10.0.0.1",)) == []


def turn(fleet: PoolStore, *, now: float) -> Candidate:
    members = fleet.pool.members
    imputation = candidate_builder.Imputer().impute(members, pool=fleet.pool, oldest=now - 3.0)
    (candidate,) = candidate_builder.build_candidates(
        members, [5], adapter="", adapters=frozenset(), now=now, imputation=imputation
    )
    return candidate


def test_requests_are_dead_reckoned():
    """Requests = own now + max(0, scraped - own at scrape), and own moves without a scrape."""
    store = fleet_of(ADDRESSES[0])
    (member,) = store.pool.members
    account = member.account
    reservations = [account.open("m", 100, cached_tokens=0, now=0.0) for _ in range(2)]
    load = Load(at=10.0, running=4, waiting=1)
    store.observe(store.begin_scrape(member.endpoint), load, 10.0)
    assert turn(store, now=11.0).estimated_requests == 2 + 3
    account.open("m", 7, cached_tokens=0, now=0.0)
    candidate = turn(store, now=12.0)
    assert (candidate.estimated_requests, candidate.in_flight, candidate.prompt_tokens) == (
        6,
        3,
        207,
    )
    assert (candidate.load, candidate.age_s, candidate.matched_tokens) == (load, 2.0, 5)
    for reservation in reservations:
        reservation.close(0.0)
    assert turn(store, now=12.0).estimated_requests == 1 + 3


@pytest.mark.parametrize(("now", "known"), [(12.9, True), (13.0, False), (100.0, False)])
def test_a_stale_load_is_unknown(now: float, known: bool):  # noqa: FBT001
    """From the given age on, only our own requests are known of an endpoint."""
    store = fleet_of(ADDRESSES[0])
    (member,) = store.pool.members
    member.account.open("m", 1, cached_tokens=0, now=0.0)
    load = Load(at=10.0, running=4, waiting=1)
    store.observe(store.begin_scrape(member.endpoint), load, 10.0)
    candidate = turn(store, now=now)
    assert candidate.load is (load if known else NO_LOAD)
    assert candidate.estimated_requests == (5 if known else 1)
    assert candidate.age_s == pytest.approx(now - 10.0)


def test_load_that_was_never_scraped_is_infinitely_old():
    """Without any scrape the age is infinite and the load unknown."""
    candidate = turn(fleet_of(ADDRESSES[0]), now=1.0)
    assert (candidate.load, candidate.age_s, candidate.estimated_requests) == (NO_LOAD, math.inf, 0)


def test_only_unreachable_endpoints_are_down():
    """An endpoint whose requests fail is left out, and is there all the same."""
    store = fleet_of(*ADDRESSES[:4])
    failing, gone = (store.pool.members[at].endpoint for at in (0, 1))
    for _ in range(3):
        store.record_outcome(failing, endpoint_health.RequestOutcome.FAILED, sent_at=0.0, now=0.0)
    take_down(store, gone.address)
    first, second, third = store.pool.members[:3]
    assert (first.is_up, first.is_ejected) == (True, True)
    assert (second.is_up, second.is_ejected) == (False, True)
    assert (third.is_up, third.is_ejected) == (True, False)
    assert (store.pool.down, store.pool.unhealthy_or_doubtful) == (1, 2)
    assert eligible(store) == list(ADDRESSES[2:4])
