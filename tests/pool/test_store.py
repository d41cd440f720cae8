from __future__ import annotations

import msgspec
import pytest

from extproc.endpoint import (
    DEFAULT_STEP_TIMES,
    NO_LOAD,
    Endpoint,
    EngineCounters,
    Load,
    ServedModels,
)
from extproc.pool.snapshot import EndpointSnapshot
from extproc.pool.store import PoolStore

FIRST, SECOND, THIRD = "10.0.0.1:8000", "10.0.0.2:8000", "10.0.0.3:8000"


class Gone(list[Endpoint]):
    """Collects the endpoints that left."""

    def __call__(self, endpoint: Endpoint) -> None:
        self.append(endpoint)


def fleet_of(*addresses: str, gone: Gone | None = None) -> PoolStore:
    store = PoolStore(on_gone=gone if gone is not None else Gone())
    store.set_endpoints([Endpoint(address) for address in addresses], 0.0)
    return store


def member_of(fleet: PoolStore, address: str = FIRST) -> EndpointSnapshot:
    member = fleet.pool.find(address)
    assert member is not None
    return member


def observed(
    fleet: PoolStore, running: float | None, waiting: float | None, at: float = 1.0
) -> EndpointSnapshot:
    mark = fleet.begin_scrape(member_of(fleet).endpoint)
    fleet.observe(mark, Load(at=at, running=running, waiting=waiting), at)
    return member_of(fleet)


def test_a_store_is_synced_after_the_first_endpoints():
    """Before the first list there is no pool; an empty list counts as one."""
    store = PoolStore(on_gone=Gone())
    assert not store.synced
    store.set_endpoints([], 0.0)
    assert store.synced
    assert store.pool.members == ()


def test_members_keep_the_listed_order_and_the_first_duplicate():
    """Members stand in the order of the list; of one address the first entry counts."""
    store = PoolStore(on_gone=Gone())
    store.set_endpoints([Endpoint(SECOND, "a"), Endpoint(FIRST), Endpoint(SECOND, "b")], 0.0)
    assert [member.endpoint.address for member in store.pool.members] == [SECOND, FIRST]
    assert member_of(store, SECOND).endpoint.name == "a"


def test_snapshots_are_replaced_and_never_edited():
    """A snapshot that a caller holds stays as it was."""
    store = fleet_of(FIRST, SECOND)
    before = store.pool
    members = before.members
    observed(store, 1, 0)
    store.set_endpoints([Endpoint(THIRD)], 1.0)
    assert before.members is members
    assert before.members[0].load is NO_LOAD
    assert before.find(THIRD) is None


def test_a_kept_endpoint_keeps_account_and_load():
    """A new list does not disturb endpoints that are in it; names and labels are updated."""
    store = fleet_of(FIRST, SECOND)
    observed(store, 3, 4)
    before = member_of(store)
    before.account.open("m", 10, cached_tokens=0, now=0.0)
    store.set_endpoints([Endpoint(FIRST, "renamed", {"zone": "b"}), Endpoint(THIRD)], 1.0)
    after = member_of(store)
    assert after.account is before.account
    assert (after.load, after.foreign) == (before.load, 7.0)
    assert (after.endpoint.name, after.endpoint.labels) == ("renamed", {"zone": "b"})
    assert after.endpoint.incarnation == before.endpoint.incarnation


def test_a_removed_endpoint_is_reported_once():
    """Each endpoint that leaves is reported once, with its incarnation, after the change."""
    gone = Gone()
    store = fleet_of(FIRST, SECOND, gone=gone)
    left = member_of(store, SECOND).endpoint
    store.set_endpoints([Endpoint(FIRST)], 1.0)
    store.set_endpoints([Endpoint(FIRST)], 2.0)
    assert gone == [left]


def test_a_returning_endpoint_is_a_new_incarnation():
    """A new life has a new incarnation and a clean account; old tickets close on the old one."""
    store = fleet_of(FIRST)
    first = member_of(store)
    reservation = first.account.open("m", 10, cached_tokens=0, now=0.0)
    store.set_endpoints([], 1.0)
    store.set_endpoints([Endpoint(FIRST)], 2.0)
    second = member_of(store)
    assert second.endpoint.incarnation > first.endpoint.incarnation
    assert (second.account.in_flight, second.load) == (0, NO_LOAD)
    assert first.account.in_flight == 1
    reservation.close(0.0)
    assert (first.account.in_flight, second.account.in_flight) == (0, 0)


def test_a_reused_address_is_a_new_incarnation():
    """Another uid at the same address is a new life, even when nothing was seen in between."""
    gone = Gone()
    store = PoolStore(on_gone=gone)
    lives = []
    for uid in ("a", "a", "b"):
        store.set_endpoints([Endpoint(FIRST, uid=uid)], 0.0)
        lives.append(member_of(store).endpoint)
    assert lives[0] == lives[1]
    assert lives[2].incarnation > lives[1].incarnation
    assert gone == [lives[0]]


def test_discovered_models_count_until_the_engine_lists_its_own():
    """KubeAI's labels; when they change, the engine is to be asked again."""
    store = PoolStore(on_gone=Gone())
    listed = ServedModels(frozenset({"base"}), frozenset({"one"}))
    store.set_endpoints(
        [Endpoint(FIRST, models=listed), Endpoint(SECOND, models=ServedModels(frozenset({"x"})))],
        0.0,
    )
    assert store.pool.serving.names == {"base", "one", "x"}
    assert store.pool.serving.parse_kubeai_name("base_one").adapter == "one"
    assert "one" in store.pool.adapters
    store.observe_models(member_of(store).endpoint, ServedModels(frozenset({"base"})))
    assert store.pool.serving.names == {"base", "x"}
    more = ServedModels(frozenset({"base"}), frozenset({"one", "two"}))
    store.set_endpoints([Endpoint(FIRST, models=more)], 1.0)
    assert member_of(store).models is None
    assert store.pool.serving.names == {"base", "one", "two"}


def test_adapters_that_are_not_in_use_are_forgotten_for_others():
    """Engines list names of users, other ones on each page; all together more than are remembered."""
    fleet = fleet_of(FIRST, SECOND)
    member_of(fleet).account.open("open", 100, cached_tokens=0, now=0.0)
    old, other, young = (
        {f"{kind}{at}" for at in range(3000)} for kind in ("old", "other", "young")
    )
    for at, names in enumerate([{*old, "open"}, other, young, {"new"}]):
        mark = fleet.begin_scrape(member_of(fleet).endpoint)
        fleet.observe(mark, Load(at=at, adapters=frozenset(names)), at)
    assert fleet.pool.adapters == {"new", "open", *young}
    for names in (old, other, {"late"}):
        served = ServedModels(frozenset({"base"}), frozenset(names))
        fleet.observe_models(member_of(fleet, SECOND).endpoint, served)
    assert fleet.pool.adapters == {"late", "new", "open", *other}


def test_incarnations_are_never_reused():
    """No two lives of any endpoints share an incarnation."""
    store = PoolStore(on_gone=Gone())
    endpoints = []
    for addresses in ([FIRST, SECOND], [], [SECOND], [FIRST, SECOND], [THIRD]):
        store.set_endpoints([Endpoint(address) for address in addresses], 0.0)
        endpoints += [member.endpoint for member in store.pool.members]
    by_life = {endpoint.incarnation: endpoint.address for endpoint in endpoints}
    assert len(by_life) == 5


@pytest.mark.parametrize(
    ("own_at_mark", "own_at_page", "running", "waiting", "foreign"),
    [
        (0, 0, 3, 4, 7),
        (2, 2, 3, 4, 5),
        (9, 9, 3, 4, 0),
        (2, 5, 3, 4, 2),
        (5, 2, 3, 4, 2),
        (0, 0, None, 4, 4),
        (0, 0, 3, None, 3),
        (0, 0, None, None, 0),
    ],
)
def test_foreign_work_excludes_our_own(
    own_at_mark: int, own_at_page: int, running: float, waiting: float, foreign: float
):
    """Foreign = max(0, running + waiting - own), own the larger of the counts at both ends."""
    store = fleet_of(FIRST)
    account = member_of(store).account
    reservations = [account.open("m", 0, cached_tokens=0, now=0.0) for _ in range(own_at_mark)]
    mark = store.begin_scrape(member_of(store).endpoint)
    while account.in_flight < own_at_page:
        account.open("m", 0, cached_tokens=0, now=0.0)
    while account.in_flight > own_at_page:
        reservations.pop().close(0.0)
    store.observe(mark, Load(at=1.0, running=running, waiting=waiting), 1.0)
    assert member_of(store).foreign == foreign


def test_a_scrape_of_an_earlier_incarnation_is_dropped():
    """A page that was asked of an endpoint that left, and came back since, is not its load."""
    store = fleet_of(FIRST)
    mark = store.begin_scrape(member_of(store).endpoint)
    store.set_endpoints([], 1.0)
    store.observe(mark, Load(at=1.0), 1.0)
    store.scrape_failed(mark, "refused", 1.0)
    assert store.pool.members == ()
    store.set_endpoints([Endpoint(FIRST)], 2.0)
    store.observe(mark, Load(at=1.0), 2.0)
    store.scrape_failed(mark, "refused", 2.0)
    member = member_of(store)
    assert (member.load, member.failures, member.failure) == (NO_LOAD, 0, "")


def test_a_scrape_token_of_a_removed_endpoint_is_ignored():
    """A scrape may begin in the moment its endpoint leaves."""
    store = fleet_of(FIRST)
    endpoint = member_of(store).endpoint
    store.set_endpoints([], 1.0)
    assert store.begin_scrape(endpoint).in_flight == 0


@pytest.mark.parametrize(
    ("reasons", "up"),
    [
        (["refused"], True),
        (["refused", "timeout"], False),
        (["refused", "status", "refused"], True),
        (["status"] * 5, True),
        (["too many open files"] * 5, True),
        (["refused", "too many open files", "refused", "too many open files"], False),
        (["timeout"] * 5, False),
    ],
)
def test_two_failed_connections_mean_unreachable(reasons: list[str], up: bool):  # noqa: FBT001
    """Two scrapes in a row that cannot connect: down. A bad page says nothing."""
    store = fleet_of(FIRST, SECOND)
    observed(store, 1, 1)
    for reason in reasons:
        store.scrape_failed(store.begin_scrape(member_of(store).endpoint), reason, 2.0)
    member = member_of(store)
    assert member.is_up is up
    assert member.failure == reasons[-1]
    assert member.load.running == 1
    assert store.pool.down == (not up)


def test_a_successful_scrape_readmits_an_endpoint():
    """One page is enough to be up again."""
    store = fleet_of(FIRST)
    for _ in range(3):
        store.scrape_failed(store.begin_scrape(member_of(store).endpoint), "refused", 1.0)
    assert store.pool.down == 1
    member = observed(store, 0, 0)
    assert (member.is_up, member.failures, member.failure, store.pool.down) == (True, 0, "", 0)


def test_positions_are_the_same_object_until_endpoints_change():
    """Readers may cache by the identity of `positions` while only loads change."""
    store = fleet_of(FIRST, SECOND)
    positions = store.pool.positions
    observed(store, 1, 1)
    assert store.pool.positions is positions
    store.set_endpoints([Endpoint(FIRST)], 1.0)
    assert store.pool.positions is not positions


def test_a_new_endpoint_is_as_fast_as_the_pool():
    """A new endpoint begins with the mean of the others, and keeps it until it shows its own."""
    store = PoolStore(on_gone=lambda _: None)
    old = [Endpoint(f"10.0.0.{at}:8000") for at in range(2)]
    store.set_endpoints(old, 0.0)
    for tick in range(60):
        now = float(tick)
        # 20 steps and 2000 prompt tokens a second: 0.03 s a step, or 200 us a token, or between.
        totals = EngineCounters(
            steps=20.0 * tick + (tick % 2),
            step_tokens=2100.0 * tick,
            generated_tokens=100.0 * tick,
        )
        for member in store.pool.members:
            load = Load(at=now, running=5.0, kv_usage=0.5, counters=totals)
            store.observe(store.begin_scrape(member.endpoint), load, now)
    store.set_endpoints([*old, Endpoint("10.0.0.9:8000")], 60.0)
    first, second, new = store.pool.members
    assert first.rates.step_s == pytest.approx(second.rates.step_s)
    assert new.rates.evidence == 0.0
    for name in ("step_s", "prefill_s", "decode_s", "context_s", "adapter_load_s"):
        assert getattr(new.rates, name) == pytest.approx(getattr(first.rates, name), rel=0.05)
    assert new.rates.step_s > DEFAULT_STEP_TIMES.step_s


def test_the_first_step_times_of_a_pool_count_for_engines_without_a_page():
    """At once: beside a guess, the engine that was scraped first would look faster, or slower.

    From the next second on, they are to be tried, so they look faster than the fastest.
    """
    store = PoolStore(on_gone=lambda _: None)
    store.set_endpoints([Endpoint(f"10.0.0.{at}:8000") for at in range(3)], 0.0)
    first, _, failing = [member.endpoint for member in store.pool.members]
    store.scrape_failed(store.begin_scrape(failing), "timeout", 0.1)
    # It served 100 requests, in iterations of some 2 ms.
    totals = EngineCounters(
        steps=2000.0,
        step_tokens=103_000.0,
        prompt_tokens=100_000.0,
        generated_tokens=3100.0,
        finished=100.0,
        gaps=3000.0,
        gaps_s=6.0,
        prefill_s=2.0,
        prefill_tokens=100_000.0,
    )
    load = Load(at=0.1, running=0.0, kv_usage=0.0, counters=totals)
    store.observe(store.begin_scrape(first), load, 0.1)
    shown, *others = [member.rates for member in store.pool.members]
    assert shown.evidence
    assert shown.step_s < 0.5 * DEFAULT_STEP_TIMES.step_s
    for rates in others:
        for name in ("step_s", "prefill_s", "decode_s", "context_s"):
            assert getattr(rates, name) == pytest.approx(getattr(shown, name), rel=0.1)
    store.observe(store.begin_scrape(first), msgspec.structs.replace(load, at=1.2), 1.2)
    shown, *others = [member.rates for member in store.pool.members]
    assert max(rates.step_s for rates in others) < 0.5 * shown.step_s
