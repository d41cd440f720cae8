from __future__ import annotations

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
    fleet = PoolStore(on_gone=gone if gone is not None else Gone())
    fleet.set_endpoints([Endpoint(address) for address in addresses], 0.0)
    return fleet


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
    fleet = PoolStore(on_gone=Gone())
    assert not fleet.synced
    fleet.set_endpoints([], 0.0)
    assert fleet.synced
    assert fleet.pool.members == ()


def test_members_keep_the_listed_order_and_the_first_duplicate():
    """Members stand in the order of the list; of one address the first entry counts."""
    fleet = PoolStore(on_gone=Gone())
    fleet.set_endpoints([Endpoint(SECOND, "a"), Endpoint(FIRST), Endpoint(SECOND, "b")], 0.0)
    assert [member.endpoint.address for member in fleet.pool.members] == [SECOND, FIRST]
    assert member_of(fleet, SECOND).endpoint.name == "a"


def test_snapshots_are_replaced_and_never_edited():
    """A pool that somebody holds stays as it was."""
    fleet = fleet_of(FIRST, SECOND)
    before = fleet.pool
    members = before.members
    observed(fleet, 1, 0)
    fleet.set_endpoints([Endpoint(THIRD)], 1.0)
    assert before.members is members
    assert before.members[0].load is NO_LOAD
    assert before.find(THIRD) is None


def test_a_kept_endpoint_keeps_account_and_load():
    """A new list does not disturb endpoints that are in it; names and labels are updated."""
    fleet = fleet_of(FIRST, SECOND)
    observed(fleet, 3, 4)
    before = member_of(fleet)
    before.account.open("m", 10, cached_tokens=0, now=0.0)
    fleet.set_endpoints([Endpoint(FIRST, "renamed", {"zone": "b"}), Endpoint(THIRD)], 1.0)
    after = member_of(fleet)
    assert after.account is before.account
    assert (after.load, after.foreign) == (before.load, 7.0)
    assert (after.endpoint.name, after.endpoint.labels) == ("renamed", {"zone": "b"})
    assert after.endpoint.incarnation == before.endpoint.incarnation


def test_a_removed_endpoint_is_reported_once():
    """Each endpoint that leaves is reported once, with its incarnation, after the change."""
    gone = Gone()
    fleet = fleet_of(FIRST, SECOND, gone=gone)
    left = member_of(fleet, SECOND).endpoint
    fleet.set_endpoints([Endpoint(FIRST)], 1.0)
    fleet.set_endpoints([Endpoint(FIRST)], 2.0)
    assert gone == [left]


def test_a_returning_endpoint_is_a_new_incarnation():
    """A new life has a new incarnation and a clean account; old tickets close on the old one."""
    fleet = fleet_of(FIRST)
    first = member_of(fleet)
    ticket = first.account.open("m", 10, cached_tokens=0, now=0.0)
    fleet.set_endpoints([], 1.0)
    fleet.set_endpoints([Endpoint(FIRST)], 2.0)
    second = member_of(fleet)
    assert second.endpoint.incarnation > first.endpoint.incarnation
    assert (second.account.in_flight, second.load) == (0, NO_LOAD)
    assert first.account.in_flight == 1
    ticket.close(0.0)
    assert (first.account.in_flight, second.account.in_flight) == (0, 0)


def test_a_reused_address_is_a_new_incarnation():
    """Another uid at the same address is a new life, even when nothing was seen in between."""
    gone = Gone()
    fleet = PoolStore(on_gone=gone)
    lives = []
    for uid in ("a", "a", "b"):
        fleet.set_endpoints([Endpoint(FIRST, uid=uid)], 0.0)
        lives.append(member_of(fleet).endpoint)
    assert lives[0] == lives[1]
    assert lives[2].incarnation > lives[1].incarnation
    assert gone == [lives[0]]


def test_discovered_models_count_until_the_engine_lists_its_own():
    """KubeAI's labels; when they change, the engine is to be asked again."""
    fleet = PoolStore(on_gone=Gone())
    listed = ServedModels(frozenset({"base"}), frozenset({"one"}))
    fleet.set_endpoints(
        [Endpoint(FIRST, models=listed), Endpoint(SECOND, models=ServedModels(frozenset({"x"})))],
        0.0,
    )
    assert fleet.pool.serving.names == {"base", "one", "x"}
    assert fleet.pool.serving.parse_kubeai_name("base_one").adapter == "one"
    assert "one" in fleet.pool.adapters
    fleet.observe_models(member_of(fleet).endpoint, ServedModels(frozenset({"base"})))
    assert fleet.pool.serving.names == {"base", "x"}
    more = ServedModels(frozenset({"base"}), frozenset({"one", "two"}))
    fleet.set_endpoints([Endpoint(FIRST, models=more)], 1.0)
    assert member_of(fleet).models is None
    assert fleet.pool.serving.names == {"base", "one", "two"}


def test_incarnations_are_never_reused():
    """No two lives of any endpoints share an incarnation."""
    fleet = PoolStore(on_gone=Gone())
    endpoints = []
    for addresses in ([FIRST, SECOND], [], [SECOND], [FIRST, SECOND], [THIRD]):
        fleet.set_endpoints([Endpoint(address) for address in addresses], 0.0)
        endpoints += [member.endpoint for member in fleet.pool.members]
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
    fleet = fleet_of(FIRST)
    account = member_of(fleet).account
    tickets = [account.open("m", 0, cached_tokens=0, now=0.0) for _ in range(own_at_mark)]
    mark = fleet.begin_scrape(member_of(fleet).endpoint)
    while account.in_flight < own_at_page:
        account.open("m", 0, cached_tokens=0, now=0.0)
    while account.in_flight > own_at_page:
        tickets.pop().close(0.0)
    fleet.observe(mark, Load(at=1.0, running=running, waiting=waiting), 1.0)
    assert member_of(fleet).foreign == foreign


def test_a_scrape_of_an_earlier_incarnation_is_dropped():
    """A page that was asked of an endpoint that left, and came back since, is not its load."""
    fleet = fleet_of(FIRST)
    mark = fleet.begin_scrape(member_of(fleet).endpoint)
    fleet.set_endpoints([], 1.0)
    fleet.observe(mark, Load(at=1.0), 1.0)
    fleet.scrape_failed(mark, "refused", 1.0)
    assert fleet.pool.members == ()
    fleet.set_endpoints([Endpoint(FIRST)], 2.0)
    fleet.observe(mark, Load(at=1.0), 2.0)
    fleet.scrape_failed(mark, "refused", 2.0)
    member = member_of(fleet)
    assert (member.load, member.failures, member.failure) == (NO_LOAD, 0, "")


def test_a_scrape_token_of_a_removed_endpoint_is_ignored():
    """A scrape may begin in the moment its endpoint leaves."""
    fleet = fleet_of(FIRST)
    endpoint = member_of(fleet).endpoint
    fleet.set_endpoints([], 1.0)
    assert fleet.begin_scrape(endpoint).in_flight == 0


@pytest.mark.parametrize(
    ("reasons", "up"),
    [
        (["refused"], True),
        (["refused", "timeout"], False),
        (["refused", "status", "refused"], True),
        (["status"] * 5, True),
        (["timeout"] * 5, False),
    ],
)
def test_two_failed_connections_mean_unreachable(reasons: list[str], up: bool):  # noqa: FBT001
    """Two scrapes in a row that cannot connect: down. A bad page says nothing."""
    fleet = fleet_of(FIRST, SECOND)
    observed(fleet, 1, 1)
    for reason in reasons:
        fleet.scrape_failed(fleet.begin_scrape(member_of(fleet).endpoint), reason, 2.0)
    member = member_of(fleet)
    assert member.is_up is up
    assert member.failure == reasons[-1]
    assert member.load.running == 1
    assert fleet.pool.down == (not up)


def test_a_successful_scrape_readmits_an_endpoint():
    """One page is enough to be up again."""
    fleet = fleet_of(FIRST)
    for _ in range(3):
        fleet.scrape_failed(fleet.begin_scrape(member_of(fleet).endpoint), "refused", 1.0)
    assert fleet.pool.down == 1
    member = observed(fleet, 0, 0)
    assert (member.is_up, member.failures, member.failure, fleet.pool.down) == (True, 0, "", 0)


def test_positions_are_the_same_object_until_endpoints_change():
    """Readers may cache by the identity of `positions` while only loads change."""
    fleet = fleet_of(FIRST, SECOND)
    positions = fleet.pool.positions
    observed(fleet, 1, 1)
    assert fleet.pool.positions is positions
    fleet.set_endpoints([Endpoint(FIRST)], 1.0)
    assert fleet.pool.positions is not positions


def test_a_new_endpoint_is_as_fast_as_the_pool():
    """Whoever joins begins with the mean of the others, and keeps it until it shows its own."""
    fleet = PoolStore(on_gone=lambda _: None)
    old = [Endpoint(f"10.0.0.{at}:8000") for at in range(2)]
    fleet.set_endpoints(old, 0.0)
    for tick in range(60):
        now = float(tick)
        # 20 steps and 2000 prompt tokens a second: 0.03 s a step, or 200 us a token, or between.
        totals = EngineCounters(
            steps=20.0 * tick + (tick % 2),
            step_tokens=2100.0 * tick,
            generated_tokens=100.0 * tick,
        )
        for member in fleet.pool.members:
            load = Load(at=now, running=5.0, kv_usage=0.5, counters=totals)
            fleet.observe(fleet.begin_scrape(member.endpoint), load, now)
    fleet.set_endpoints([*old, Endpoint("10.0.0.9:8000")], 60.0)
    first, second, new = fleet.pool.members
    assert first.rates.step_s == pytest.approx(second.rates.step_s)
    assert new.rates.evidence == 0.0
    for name in ("step_s", "prefill_s", "decode_s", "context_s", "adapter_load_s"):
        assert getattr(new.rates, name) == pytest.approx(getattr(first.rates, name), rel=0.05)
    assert new.rates.step_s > DEFAULT_STEP_TIMES.step_s
