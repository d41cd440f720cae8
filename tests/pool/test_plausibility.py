"""Pages that our own account proves wrong."""

import pytest

from extproc.endpoint import Endpoint, EngineCounters, Load
from extproc.pool.plausibility import (
    NO_KV_SIZE,
    NO_KV_USAGE,
    NO_RUNNING,
    NO_WAITING,
    distrust_reason,
)
from extproc.pool.store import PoolStore


class ReportingEngine:
    """A fleet of one endpoint, and what its pages say."""

    def __init__(self):
        self.store = PoolStore(on_gone=lambda _: None)
        self.store.set_endpoints([Endpoint("10.0.0.1:8000")], 0.0)
        self.account = self.member.account

    @property
    def member(self):
        return self.store.pool.members[0]

    def scrape(self, now, *, generated=0.0, waiting=0.0, running=0.0, **facts):
        totals = EngineCounters(generated_tokens=generated)
        load = Load(at=now, waiting=waiting, running=running, counters=totals, **facts)
        self.store.observe(self.store.begin_scrape(self.member.endpoint), load, now)
        return distrust_reason(self.member.flaws)

    def send(self, now, *, tokens=100, mirrored=False):
        return self.account.open("m", tokens, cached_tokens=0, now=now, from_peers=mirrored)

    def serve(self, now, times=3, **facts):
        for _ in range(times):
            self.send(now, **facts).close(now)


def test_a_page_is_frozen_when_answers_do_not_change_it():
    """Three requests sent and answered between two pages have moved any counter there is."""
    engine = ReportingEngine()
    engine.scrape(1.0)
    engine.serve(2.0)
    assert engine.scrape(4.0) == "frozen"
    assert engine.scrape(5.0, generated=1.0) == ""


@pytest.mark.parametrize(
    ("served_at", "facts"),
    [(2.0, {"times": 2}), (2.0, {"tokens": 0}), (2.0, {"mirrored": True}), (0.5, {})],
    ids=["too few", "nothing generated", "another picker's", "before the page"],
)
def test_an_unchanged_page_may_have_other_reasons(served_at, facts):
    """Few answers, those that generate nothing, and those that others tell of prove nothing."""
    engine = ReportingEngine()
    if served_at < 1.0:
        engine.serve(served_at, **facts)
    engine.scrape(1.0)
    if served_at > 1.0:
        engine.serve(served_at, **facts)
    assert engine.scrape(9.0) == ""


def test_a_page_may_lag():
    """Counters that are published late are no fault for two seconds."""
    engine = ReportingEngine()
    engine.scrape(1.0)
    engine.serve(2.0, times=50)
    assert engine.scrape(2.9) == ""
    assert engine.scrape(3.0) == "frozen"


def test_requests_open_at_the_first_page_explain_answers():
    """Requests whose tokens were all counted by then may end without another count."""
    engine = ReportingEngine()
    reservations = [engine.send(0.5) for _ in range(5)]
    engine.scrape(1.0, running=5.0)
    for reservation in reservations:
        reservation.close(2.0)
    assert engine.scrape(9.0) == ""
    engine.serve(9.5)
    assert engine.scrape(10.0) == "frozen"


def test_a_page_without_counters_is_never_frozen():
    """Without a counter that moves, a standing page proves nothing."""
    engine = ReportingEngine()
    for now in (1.0, 9.0):
        load = Load(at=now, waiting=0.0, running=0.0)
        engine.store.observe(engine.store.begin_scrape(engine.member.endpoint), load, now)
        engine.serve(now, times=9)
    assert distrust_reason(engine.member.flaws) == ""


@pytest.mark.parametrize(
    ("count", "facts", "running", "reason"),
    [
        (4, {}, 1.0, "understated"),
        (4, {}, 2.0, ""),
        (3, {}, 0.0, ""),
        (9, {"tokens": 0}, 0.0, ""),
        (9, {"mirrored": True}, 0.0, ""),
    ],
    ids=["proved", "half of them", "too few", "no prompts", "another picker's"],
)
def test_a_page_below_own_requests_is_understated(count, facts, running, reason):
    """Requests that have been open for two seconds run or wait."""
    engine = ReportingEngine()
    for _ in range(count):
        engine.send(1.0, **facts)
    assert engine.scrape(2.9, running=running) == ""
    assert engine.scrape(3.0, running=running) == reason
    assert engine.scrape(7.0, running=float(count)) == ""


def test_a_frozen_page_is_ignored():
    """Neither its requests nor its queue are anybody's, and it corrects no queue of ours."""
    engine = ReportingEngine()
    engine.scrape(1.0, running=10.0, waiting=40.0)
    assert (engine.member.foreign, engine.member.foreign_waiting) == (50.0, 40.0)
    assert engine.store.foreign_traffic.share == 1.0
    engine.serve(2.0)
    engine.send(3.0)
    engine.scrape(4.0, running=10.0, waiting=40.0)
    assert (engine.member.foreign, engine.member.foreign_waiting) == (0.0, 0.0)
    assert engine.member.foreign_tokens == 0.0
    assert engine.store.foreign_traffic.share == 1.0, "nor do ours count for more"
    assert engine.store.pool.has_unknown_values


def test_missing_values_of_a_page_are_flagged():
    """Each value that imputing can fill in has its bit."""
    engine = ReportingEngine()
    engine.scrape(1.0, kv_usage=0.5, kv_blocks=10, block_tokens=16)
    assert engine.member.flaws == 0
    engine.scrape(2.0)
    assert engine.member.flaws == NO_KV_USAGE | NO_KV_SIZE
    engine.scrape(3.0, waiting=None, running=None, kv_usage=0.5)
    assert engine.member.flaws == NO_WAITING | NO_RUNNING | NO_KV_SIZE
