"""Engines show how many requests they run at a time where others wait that long."""

from __future__ import annotations

import pytest

from extproc.endpoint import Endpoint, EngineCounters, Load, StepTimeModel
from extproc.pool.engine_counters import BatchLimitEstimator
from extproc.pool.inflight import InflightLoad
from extproc.pool.step_time_estimator import StepTimeEstimator
from extproc.pool.store import PoolStore

FREE = {"kv_usage": 0.1, "kv_blocks": 1000, "block_tokens": 16}


def page(at, running, waiting=1.0, **fields):
    return Load(at=at, running=running, waiting=waiting, **FREE | fields)


def test_requests_that_run_while_others_are_held_up_have_all_places():
    """A page with more of them says that there are more places."""
    limit = BatchLimitEstimator()
    assert limit.update(page(0.0, 8.0), is_held_up=False) is None
    assert limit.update(page(1.0, 8.0), is_held_up=True) == 8.0
    assert BatchLimitEstimator().update(page(1.0, 7.0), is_held_up=True) is None
    assert limit.update(page(2.0, 5.0), is_held_up=False) == 8.0
    assert limit.update(page(3.0, 9.0), is_held_up=False) is None


def test_a_limit_is_forgotten_that_no_page_shows_again():
    """It may have been an engine in trouble, which then gets too little to show better."""
    limit = BatchLimitEstimator()
    limit.update(page(0.0, 9.0), is_held_up=True)
    limit.update(page(50.0, 9.0), is_held_up=True)
    assert limit.update(page(110.0, 1.0), is_held_up=False) == 9.0
    assert limit.update(page(111.0, 0.0), is_held_up=False) is None


@pytest.mark.parametrize(
    "fields",
    [
        {"running": 0.0},
        {"running": None},
    ],
    ids=["nothing runs", "unknown"],
)
def test_an_engine_that_runs_nothing_shows_no_limit(fields):
    load = page(1.0, **{"running": 8.0} | fields)
    assert BatchLimitEstimator().update(load, is_held_up=True) is None


def is_held_up(waited_s, waiting=4.0, free_tokens=2000.0):
    """Returns what a page says of the last 4 of 8 requests, which came so long before it."""
    account = InflightLoad(Endpoint("10.0.0.1:8000"))
    for _ in range(8):
        account.open("m", 1000, cached_tokens=900, now=10.0)
    return account.record_scrape(
        sent=account.sent,
        written=account.kv_tokens_sent,
        waiting=waiting,
        running=4.0,
        free_tokens=free_tokens,
        at=10.0 + waited_s,
        now=11.0 + waited_s,
    )


def test_requests_wait_for_a_place_where_their_prompts_would_be_computed_by_then():
    """Four prompts of 100 new tokens take some hundredths of a second, and an iteration."""
    assert is_held_up(1.0)
    assert not is_held_up(0.05)
    assert not is_held_up(1.0, waiting=0.0)


def test_requests_may_wait_for_memory_that_has_no_room_for_two_prompts():
    assert not is_held_up(1.0, free_tokens=1999.0)
    assert not is_held_up(1.0, free_tokens=None)


def test_an_engine_shows_a_limit_once_its_speed_is_known_and_while_it_computes():
    """One that is slow in the beginning, or hangs, is not taken for a full one."""
    learner = StepTimeEstimator()

    def shown(at, steps):
        counters = EngineCounters(steps=steps, generated_tokens=steps)
        learner.update(page(at, 8.0, counters=counters), is_held_up=True)
        return learner.pooled_rates.max_num_seqs

    assert shown(1.0, 10.0) is None
    assert shown(2.0, 20.0) is None
    learner.rates = StepTimeModel(evidence=20.0)
    assert shown(3.0, 20.0) is None
    assert shown(4.0, 30.0) == 8.0
    assert shown(5.0, 3.0) is None  # it restarted, maybe with another limit


@pytest.mark.parametrize(("target", "limit"), [("m", 8.0), ("a", None)])
def test_requests_for_adapters_may_wait_for_those(target, limit):
    """A page does not show whether an adapter is being loaded."""
    store = PoolStore(lambda _: None)
    store.set_endpoints([Endpoint("10.0.0.1:8000")], 0.0)
    for tick in range(20):
        now = float(tick)
        (member,) = store.pool.members
        if tick == 10:
            for name in (*["m"] * 9, target):
                member.account.open(name, 100, cached_tokens=90, now=now)
        counters = EngineCounters(
            steps=20.0 * tick, step_tokens=2100.0 * tick, generated_tokens=100.0 * tick
        )
        adapters = frozenset(() if tick else "a")
        waiting = 0.0 if tick <= 10 else 2.0
        load = page(now, 8.0, waiting, counters=counters, adapters=adapters, adapter_slots=1)
        store.observe(store.begin_scrape(member.endpoint), load, now)
    assert store.pool.members[0].rates.evidence
    assert store.pool.members[0].rates.max_num_seqs == limit
