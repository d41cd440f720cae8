"""Slowness: learned speeds of endpoints, compared with those of endpoints like them."""

from __future__ import annotations

import pytest

from extproc.endpoint import Endpoint, Load, StepTimeModel
from extproc.pool.inflight import InflightLoad
from extproc.pool.pool_step_times import find_slowness
from extproc.pool.snapshot import EndpointSnapshot
from extproc.pool.step_time_values import scaled


def member(times, *, evidence=100.0, blocks=1000, engine="vllm"):
    """An endpoint that is so many times slower than usual."""
    endpoint = Endpoint("10.0.0.1:8000")
    rates = scaled(StepTimeModel(evidence=evidence), times)
    load = Load(at=0.0, engine=engine, kv_blocks=blocks, block_tokens=16)
    return EndpointSnapshot(endpoint, InflightLoad(endpoint), load=load, rates=rates)


@pytest.mark.parametrize("count", [2, 3, 4, 8, 9])
def test_one_slow_endpoint_shows_its_factor(count):
    """However small the pool is, a slow endpoint does not count among the quicker quarter."""
    *others, slow = find_slowness([*(member(1.0) for _ in range(count - 1)), member(5.0)])
    assert others == pytest.approx([1.0] * (count - 1))
    assert slow == pytest.approx(5.0)


def test_a_single_quick_endpoint_makes_no_large_pool_slow():
    """The quicker quarter of it is what others are compared with."""
    quick, *others = find_slowness([member(0.2), *(member(1.0) for _ in range(7))])
    assert quick == pytest.approx(0.2)
    assert others == pytest.approx([1.0] * 7)


def test_endpoints_are_compared_with_those_like_them():
    """A machine with less memory, or another engine, may be slower."""
    members = [
        member(1.0),
        member(1.1),
        member(5.0, blocks=300),
        member(15.0, blocks=300),
        member(8.0, engine="sglang"),
    ]
    assert find_slowness(members) == pytest.approx([1.0, 1.1, 1.0, 3.0, 1.0])


def test_endpoints_without_step_times_are_not_compared():
    """They are taken to be as others are, which says nothing about them."""
    assert find_slowness([member(9.0, evidence=0.0), member(1.0)]) == [None, pytest.approx(1.0)]
    assert find_slowness([]) == []
