"""Resources of pools, and the time at which they are built."""

from __future__ import annotations

import pytest

from extproc.endpoint import Endpoint, Load
from extproc.pool.store import PoolStore
from extproc.xds import resources
from extproc.xds.resources import (
    ASSIGNMENT,
    CLUSTER,
    ClusterOptions,
    HealthCheck,
    LbEndpoint,
    LbHealth,
)
from extproc.xds.snapshot_cache import SnapshotCache

FIRST, SECOND = Endpoint("10.0.0.1:8000"), Endpoint("10.0.0.2:8000")


@pytest.fixture
def fleet():
    store = PoolStore(on_gone=lambda _: None)
    store.set_endpoints([FIRST, SECOND], 0.0)
    return store


@pytest.fixture
def board():
    return SnapshotCache(ClusterOptions())


@pytest.fixture
def telling():
    """Envoys do not ask engines themselves."""
    return SnapshotCache(ClusterOptions(health_check=HealthCheck(path="")))


def mark(fleet, endpoint):
    """A scrape of it, in its life now, is sent."""
    return fleet.begin_scrape(fleet.pool.find(endpoint.address).endpoint)


def fail(fleet, endpoint, times=2):
    """Its scrapes cannot connect."""
    for _ in range(times):
        fleet.scrape_failed(mark(fleet, endpoint), "refused", 0.0)


def test_a_pool_is_a_cluster_and_an_assignment(board, fleet):
    """The cluster has the pool's name; one without is called `engines`."""
    assert board.update({"": fleet.pool, "llama": PoolStore(on_gone=lambda _: None).pool})
    for kind in (CLUSTER, ASSIGNMENT):
        assert board.snapshot[kind].keys() == {"engines", "llama"}


def test_scrapes_change_nothing(board, fleet):
    """A pool with other loads needs no look and no other snapshot."""
    board.update({"": fleet.pool})
    before = board.snapshot
    fleet.observe(mark(fleet, FIRST), Load(at=1.0, waiting=3.0, running=1.0), 1.0)
    assert not board.is_stale({"": fleet.pool})
    assert not board.update({"": fleet.pool})
    assert board.snapshot is before


def test_an_added_endpoint_changes_the_version(board, fleet):
    """The assignment changes, the cluster does not, nor does another pool."""
    other = PoolStore(on_gone=lambda _: None).pool
    board.update({"a": fleet.pool, "b": other})
    before = board.snapshot
    fleet.set_endpoints([FIRST, SECOND, Endpoint("10.0.0.3:8000")], 1.0)
    pools = {"a": fleet.pool, "b": other}
    assert board.is_stale(pools)
    assert board.update(pools)
    assert board.snapshot[CLUSTER] == before[CLUSTER]
    assert board.snapshot[ASSIGNMENT]["b"] is before[ASSIGNMENT]["b"]
    assert board.snapshot[ASSIGNMENT]["a"].version != before[ASSIGNMENT]["a"].version


def test_the_order_of_endpoints_does_not_matter(board, fleet):
    """Replicas that learned of pools in another order send the same version."""
    board.update({"": fleet.pool})
    before = board.snapshot
    fleet.set_endpoints([SECOND, FIRST], 1.0)
    assert board.is_stale({"": fleet.pool})
    assert not board.update({"": fleet.pool})
    assert board.snapshot is before
    assert not board.is_stale({"": fleet.pool})


def test_a_removed_pool_has_no_resources(board, fleet):
    """Its cluster and its endpoints are no longer there."""
    board.update({"a": fleet.pool, "b": fleet.pool})
    assert board.is_stale({"a": fleet.pool})
    assert board.update({"a": fleet.pool})
    assert board.snapshot[CLUSTER].keys() == board.snapshot[ASSIGNMENT].keys() == {"a"}


def test_an_endpoint_that_is_down_is_unhealthy(telling, fleet):
    """Two refused scrapes are published to Envoy, and a good one as well."""
    telling.update({"": fleet.pool})
    before = telling.snapshot[ASSIGNMENT]["engines"]
    fail(fleet, SECOND)
    assert telling.is_stale({"": fleet.pool})
    assert telling.update({"": fleet.pool})
    assert [
        endpoint.health for endpoint in resources.lb_endpoints(fleet.pool, with_health=True)
    ] == [
        LbHealth.HEALTHY,
        LbHealth.UNHEALTHY,
    ]
    fleet.observe(mark(fleet, SECOND), Load(at=1.0), 1.0)
    assert telling.update({"": fleet.pool})
    assert telling.snapshot[ASSIGNMENT]["engines"] == before


def test_health_is_not_sent_where_envoy_checks_health(board, fleet):
    """Nothing that a picker believed stays with an Envoy whose pickers are gone."""
    board.update({"": fleet.pool})
    fail(fleet, SECOND)
    assert fleet.pool.down
    assert not board.is_stale({"": fleet.pool})
    assert not board.update({"": fleet.pool})


def test_health_is_sent_of_grpc_engines_which_envoy_does_not_check(board, fleet):
    """Their cluster has no checks, whatever `health_check.path` is."""
    board.update({"": fleet.pool}, {""})
    before = board.snapshot[ASSIGNMENT]["engines"]
    fail(fleet, SECOND)
    assert board.is_stale({"": fleet.pool}, {""})
    assert board.update({"": fleet.pool}, {""})
    assert board.snapshot[ASSIGNMENT]["engines"] != before


def test_a_swap_of_unhealthy_endpoints_is_a_change(telling, fleet):
    """One down for another is a change, although as many are up."""
    fail(fleet, FIRST)
    telling.update({"": fleet.pool})
    fleet.observe(mark(fleet, FIRST), Load(at=1.0), 1.0)
    fail(fleet, SECOND)
    assert telling.is_stale({"": fleet.pool})
    assert telling.update({"": fleet.pool})


def test_another_app_protocol_changes_the_cluster(board, fleet):
    """Its endpoints are the same; the other pool is left alone."""
    pools = {"a": fleet.pool, "b": fleet.pool}
    board.update(pools)
    before = board.snapshot
    assert board.is_stale(pools, {"a"})
    assert board.update(pools, {"a"})
    assert not board.is_stale(pools, {"a"})
    assert board.snapshot[ASSIGNMENT] == before[ASSIGNMENT]
    assert board.snapshot[CLUSTER]["a"].version != before[CLUSTER]["a"].version
    assert board.snapshot[CLUSTER]["b"] == before[CLUSTER]["b"]


def test_when_all_are_down_all_are_healthy(fleet):
    """Then it is rather the scraper that is cut off, and Envoy sees for itself."""
    fail(fleet, FIRST)
    fail(fleet, SECOND)
    assert {
        endpoint.health for endpoint in resources.lb_endpoints(fleet.pool, with_health=True)
    } == {LbHealth.HEALTHY}


def test_labels_give_region_and_zone(fleet):
    """Kubernetes' labels and the short ones give region and zone."""
    labels = {"topology.kubernetes.io/region": "north", "zone": "n1"}
    fleet.set_endpoints([Endpoint("10.0.0.9:8000", labels=labels)], 1.0)
    assert resources.lb_endpoints(fleet.pool, with_health=True) == (
        LbEndpoint("10.0.0.9:8000", LbHealth.HEALTHY, "north", "n1"),
    )


def test_a_pool_that_raises_hides_no_other_pool(board, fleet, monkeypatch):
    """The others are posted, it stays as it was, and is posted once that ends."""
    other = PoolStore(on_gone=lambda _: None)
    other.set_endpoints([FIRST], 0.0)
    board.update({"a": fleet.pool, "b": other.pool})
    real = resources.lb_endpoints

    def raising(pool, **more):
        if pool is fleet.pool:
            raise OverflowError
        return real(pool, **more)

    before = board.snapshot[ASSIGNMENT]["a"]
    fleet.set_endpoints([FIRST], 1.0)
    other.set_endpoints([SECOND], 1.0)
    with monkeypatch.context() as patch:
        patch.setattr(resources, "lb_endpoints", raising)
        assert board.update({"a": fleet.pool, "b": other.pool})
        assert list(board.faults) == ["a"]
        assert board.snapshot[ASSIGNMENT]["a"] is before
    assert board.is_stale({"a": fleet.pool, "b": other.pool})
    assert board.update({"a": fleet.pool, "b": other.pool})
    assert board.faults == {}
    assert board.snapshot[ASSIGNMENT]["a"] != before
