"""Speeds of engines that have shown no step times: from their answers, and from engines like them."""

from __future__ import annotations

import pytest

from extproc.endpoint import Endpoint, EngineCounters, Load
from extproc.pool.store import PoolStore

FIRST, SECOND, THIRD = "10.0.0.1:8000", "10.0.0.2:8000", "10.0.0.3:8000"

#: Seconds of an iteration of the engines that count, and tokens of every answer.
STEP_S, ANSWER = 0.025, 40


class Fleet:
    """Engines that count their iterations, and an engine that may not."""

    def __init__(self, *slow, kv_blocks=(1000, 1000, 1000), answers=True):
        """`slow` are times of the third engine, beside the others', at which it answers."""
        self.store = PoolStore(on_gone=lambda _: None)
        self.store.set_endpoints([Endpoint(address) for address in (FIRST, SECOND, THIRD)], 0.0)
        self.kv_blocks = kv_blocks
        self.open = {}
        self.answers = answers

    def rates(self, address):
        """Rates of an endpoint."""
        member = self.store.pool.find(address)
        assert member is not None
        return member.rates

    def page(self, address, now, *, steps, running=1.0):
        """Take in a page that counts iterations with a token each."""
        member = self.store.pool.find(address)
        assert member is not None
        counters = EngineCounters(
            steps=steps,
            step_tokens=steps,
            generated_tokens=steps,
            finished=float(int(steps / ANSWER)),
        )
        blocks = self.kv_blocks[(FIRST, SECOND, THIRD).index(address)]
        load = Load(
            at=now,
            engine="vllm",
            running=running,
            waiting=0.0,
            kv_blocks=blocks,
            block_tokens=16,
            counters=counters,
        )
        self.store.observe(self.store.begin_scrape(member.endpoint), load, now)

    def no_page(self, address, now):
        """Take in a scrape without a page."""
        member = self.store.pool.find(address)
        assert member is not None
        self.store.scrape_failed(self.store.begin_scrape(member.endpoint), "status 404", now)

    def send(self, address, now):
        """Open a request."""
        member = self.store.pool.find(address)
        assert member is not None
        return member.account.open("base", 100, cached_tokens=99, now=now)

    def run(self, seconds, *, slowness=1.0, third=lambda fleet, now: fleet.no_page(THIRD, now)):
        """Seconds in which each engine answers a request at a time; the third so much slower."""
        took_s = {
            FIRST: ANSWER * STEP_S,
            SECOND: ANSWER * STEP_S,
            THIRD: ANSWER * STEP_S * slowness,
        }
        for tick in range(int(seconds * 10) + 1):
            now = tick / 10
            for address in (FIRST, SECOND, *((THIRD,) if self.answers else ())):
                request = self.open.get(address)
                if request is not None and now - request.at >= took_s[address] - 1e-9:
                    request.close(now)
                    request = None
                if request is None:
                    self.open[address] = self.send(address, now)
            if tick % 5 == 0:
                self.page(FIRST, now, steps=now / STEP_S)
                self.page(SECOND, now, steps=now / STEP_S)
                third(self, now)
        return self


def test_an_engine_without_counters_shows_its_speed_by_its_answers():
    """Answers that take four times as long are those of an engine that is slower than its pool."""
    fleet = Fleet().run(60.0, slowness=4.0)
    pool, slow = fleet.rates(FIRST), fleet.rates(THIRD)
    assert pool.iteration_s(1) == pytest.approx(STEP_S, rel=0.1)
    assert 3.0 < slow.iteration_s(1) / pool.iteration_s(1) < 4.5


def test_a_faster_engine_without_counters_shows_its_speed():
    """So do answers that take a third of the time."""
    fleet = Fleet().run(60.0, slowness=0.3)
    assert fleet.rates(THIRD).iteration_s(1) < 0.5 * fleet.rates(FIRST).iteration_s(1)


def test_an_open_request_shows_a_slow_engine_before_its_first_answer():
    """Its time so far counts: an engine that does not answer for long is slow."""
    fleet = Fleet().run(20.0, slowness=1000.0)
    assert fleet.rates(THIRD).iteration_s(1) > 3.0 * fleet.rates(FIRST).iteration_s(1)


def test_engines_whose_answers_take_about_as_long_have_the_rates_of_the_pool():
    """A quarter more or less is what answers differ by."""
    for slowness in (0.8, 1.0, 1.25):
        fleet = Fleet().run(30.0, slowness=slowness)
        assert fleet.rates(THIRD).step_s == pytest.approx(fleet.rates(FIRST).step_s, rel=0.05)


def test_answers_tell_engines_apart_of_which_none_counts():
    """Nothing says how long a step takes anywhere: the slow one counts as slower than the default."""
    fleet = Fleet()
    fleet.page = lambda address, now, **_: fleet.no_page(address, now)
    fleet.run(60.0, slowness=4.0)
    assert fleet.rates(FIRST) == fleet.rates(SECOND)
    assert 3.0 < fleet.rates(THIRD).iteration_s(1) / fleet.rates(FIRST).iteration_s(1) < 4.5
    assert not fleet.rates(THIRD).evidence


def test_a_single_engine_that_counts_says_at_once_when_answers_are_due():
    """It is five times faster than others seemed to be; these, which take as long, are as fast."""
    fleet, page = Fleet(), Fleet.page
    fleet.page = lambda address, now, **_: fleet.no_page(address, now)
    fleet.run(30.0)
    for now in (31.0, 32.0, 33.0):
        page(fleet, FIRST, now, steps=200.0 * now)
    first = fleet.rates(FIRST)
    assert first.evidence
    for address in (SECOND, THIRD):
        assert fleet.rates(address).step_s == pytest.approx(first.step_s, rel=0.1)


def test_a_slow_engine_without_requests_is_tried_again():
    """Answers of some minutes ago count for little."""
    fleet = Fleet().run(60.0, slowness=4.0)
    fleet.open[THIRD].close(60.0)
    before = fleet.rates(THIRD).step_s
    for second in range(61, 360):
        fleet.page(FIRST, float(second), steps=second / STEP_S)
        fleet.page(SECOND, float(second), steps=second / STEP_S)
    pool = fleet.rates(FIRST).step_s
    assert before > 3.0 * pool
    assert fleet.rates(THIRD).step_s == pytest.approx(pool, rel=0.2)


def quiet_page(fleet, now):
    """The page of the third engine, which got no request yet."""
    fleet.page(THIRD, now, steps=0.0, running=0.0)


def test_an_engine_without_requests_is_as_fast_as_those_that_look_like_it():
    """An engine with the KV cache of a known kind has its speed, and not that of the fastest.

    Until it has a request it counts as four times as fast.
    """
    slow = Fleet(kv_blocks=(500, 1000, 1005), answers=False)
    other = Fleet(kv_blocks=(1000, 1000, 5000), answers=False)
    for fleet in (slow, other):
        for tick in range(41):
            now = tick / 2
            for address in (FIRST, SECOND):
                if address not in fleet.open:
                    fleet.open[address] = fleet.send(address, now)
            fleet.page(FIRST, now, steps=now / STEP_S)
            fleet.page(SECOND, now, steps=now / STEP_S / 4)
            quiet_page(fleet, now)
    untried, usual = slow.rates(THIRD), slow.rates(SECOND)
    assert untried.step_s == pytest.approx(0.25 * usual.step_s, rel=0.1)
    assert other.rates(THIRD).step_s == pytest.approx(0.25 * other.rates(FIRST).step_s, rel=0.35)
    slow.send(THIRD, 20.0)
    for now in (20.5, 21.5, 22.5):
        quiet_page(slow, now)
    alike = slow.rates(THIRD)
    assert alike.step_s == pytest.approx(usual.step_s, rel=0.1)
    assert alike.step_s > 2.5 * slow.rates(FIRST).step_s
