"""Data-parallel ranks in the pool: identity, health, subsets, and who answered."""

from __future__ import annotations

import pytest

from extproc.endpoint import DataParallelRank, Endpoint, ServedModels
from extproc.pool.endpoint_health import RequestOutcome
from extproc.pool.store import PoolStore

ENGINE, OTHER = "10.0.0.1:8000", "[fd00::1]:8000"


class Ranked:
    """A pool of an engine with three ranks and another engine."""

    def __init__(self) -> None:
        self.gone: list[str] = []
        self.store = PoolStore(lambda endpoint: self.gone.append(endpoint.address))
        self.endpoints = [Endpoint(ENGINE, "pod", uid="1"), Endpoint(OTHER, uid="2")]
        self.store.set_endpoints(self.endpoints, 0.0)
        self.store.set_ranks(self.store.pool.members[0].endpoint, (0, 1, 2), 1.0)

    @property
    def members(self):
        return self.store.pool.members


def test_a_rank_has_an_address_a_name_and_the_port_of_its_engine():
    """The address tells ranks apart; what goes to the data plane is that of the engine."""
    pool = Ranked()
    assert [member.endpoint.address for member in pool.members] == [
        f"{ENGINE}@0",
        f"{ENGINE}@1",
        f"{ENGINE}@2",
        OTHER,
    ]
    second = pool.members[1].endpoint
    assert (second.host_port, second.ip, second.port) == (ENGINE, "10.0.0.1", 8000)
    assert second.name == "pod-rank-1"
    assert second.rank == DataParallelRank(index=1, count=3, number=1)
    assert pool.members[3].endpoint.port == 8000
    assert pool.gone == [ENGINE]


def test_discovery_that_lists_the_engine_again_keeps_its_ranks():
    """Neither a new list nor new labels change accounts and incarnations of ranks."""
    pool = Ranked()
    before = pool.members
    pool.store.set_endpoints([*reversed(pool.endpoints)], 2.0)
    assert {id(member.account) for member in pool.members} == {
        id(member.account) for member in before
    }
    relabelled = Endpoint(ENGINE, "pod", labels={"zone": "a"}, uid="1")
    pool.store.set_endpoints([relabelled], 3.0)
    assert [member.endpoint.labels["zone"] for member in pool.members] == ["a"] * 3
    assert [member.account for member in pool.members] == [member.account for member in before[:3]]


@pytest.mark.parametrize("is_gone_between", [False, True])
def test_another_engine_at_the_address_begins_without_ranks(*, is_gone_between: bool):
    """Ranks belong to a pod: its successor shows its own first."""
    pool = Ranked()
    if is_gone_between:
        pool.store.set_endpoints(pool.endpoints[1:], 2.0)
        pool.store.set_endpoints(pool.endpoints, 3.0)
    else:
        successor = Endpoint(ENGINE, "pod", uid="3")
        pool.store.set_endpoints([successor, pool.endpoints[1]], 2.0)
    assert [member.endpoint.address for member in pool.members] == [ENGINE, OTHER]
    assert set(pool.gone[1:]) == {f"{ENGINE}@{rank}" for rank in range(3)}


def test_health_is_of_the_engine():
    """Failures on any of its ranks add up, and all of them are ejected and come back together."""
    pool = Ranked()
    for n in range(6):
        endpoint = pool.members[n % 3].endpoint
        pool.store.record_outcome(endpoint, RequestOutcome.FAILED, sent_at=2.0, now=2.0 + n / 10)
    assert [member.is_ejected for member in pool.members] == [True, True, True, False]
    assert len(pool.store.outlier_detector.ejections) == 1
    assert pool.store.outlier_detector.ejections.total() == 1
    pool.store.set_ranks(pool.members[0].endpoint, (0, 1), 3.0)
    assert [member.is_ejected for member in pool.members] == [True, True, False]


def test_ranks_begin_with_the_health_and_models_of_their_engine():
    """A split is no new engine: it is neither warmed up nor asked for its models again."""
    store = PoolStore(lambda _: None)
    store.set_endpoints([Endpoint(ENGINE)], 0.0)
    store.observe_models(store.pool.members[0].endpoint, ServedModels(frozenset({"m"})))
    before = store.pool.members[0].condition
    store.set_ranks(store.pool.members[0].endpoint, (0, 1), 50.0)
    assert [member.condition for member in store.pool.members] == [before] * 2
    assert [member.models for member in store.pool.members] == [ServedModels(frozenset({"m"}))] * 2
    store.observe_models(store.pool.members[1].endpoint, ServedModels(frozenset({"n"})))
    assert {member.models for member in store.pool.members} == {ServedModels(frozenset({"n"}))}


def test_subsets_name_engines():
    """`ip:port` and `ip` of a subset hint mean all ranks; a rank cannot be named."""
    pool = Ranked().store.pool
    ranks = list(pool.members[:3])
    assert pool.allowed([ENGINE]) == ranks
    assert pool.allowed(["10.0.0.1"]) == ranks
    assert pool.allowed([f"{ENGINE}@1"]) == []


def test_the_endpoint_that_answered_is_the_rank_that_was_sent_along():
    """Without one, it is the rank with the fewest requests of ours."""
    pool = Ranked().store.pool
    assert pool.find_served(ENGINE, DataParallelRank(index=1, count=3, number=1)) is pool.members[1]
    pool.members[0].account.open("m", 1, cached_tokens=0, now=0.0)
    assert pool.find_served(ENGINE, None) is pool.members[1]
    assert pool.find_served(OTHER, None) is pool.members[3]
    assert pool.find_served("10.0.0.9:1", None) is None
