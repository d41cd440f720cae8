import random
from collections import Counter

import hypothesis
import pytest
from hypothesis import strategies as st

from extproc.scrape import schedule

STEADY = schedule.ScrapeSchedule(jitter=0.0)


def wait(
    settings=STEADY,
    *,
    busy_endpoints=0,
    idle_endpoints=1,
    failing_endpoints=1,
    rng=None,
    **facts,
):
    counts = schedule.EndpointCounts()
    counts.busy, counts.all = busy_endpoints, busy_endpoints + idle_endpoints
    counts.failing = failing_endpoints
    facts = {"busy": False, "failures": 0, **facts}
    return schedule.wait_s(settings, counts=counts, rng=rng or random.Random(1), **facts)


def test_busy_endpoints_are_scraped_fast_and_idle_ones_slow():
    """A busy endpoint is asked every fast interval, an idle one every slow one."""
    assert wait(busy=True, busy_endpoints=1) == 0.2
    assert wait() == 2.0


def test_endpoints_of_a_process_at_rest_are_scraped_half_as_often():
    """The interval at rest takes the place of the slow one; failures have theirs."""
    assert wait(resting=True) == 4.0
    assert wait(resting=True, idle_endpoints=1000) == pytest.approx(10.0)
    assert wait(resting=True, failures=1) == 0.2


def test_many_endpoints_stretch_every_interval():
    """100 busy endpoints share 100 scrapes per second."""
    assert wait(busy=True, busy_endpoints=100, idle_endpoints=0) == pytest.approx(1.0)
    assert wait(idle_endpoints=1000) == pytest.approx(10.0)


@hypothesis.given(busy_endpoints=st.integers(1, 499), idle_endpoints=st.integers(1, 499))
@hypothesis.example(busy_endpoints=400, idle_endpoints=100)
@hypothesis.example(busy_endpoints=499, idle_endpoints=1)
@hypothesis.example(busy_endpoints=10, idle_endpoints=490)
def test_loads_of_500_endpoints_stay_known_within_the_budget(busy_endpoints, idle_endpoints):
    """With jitter no load turns 6 s old; scrapes keep to the budget, and busy ones come first."""
    hypothesis.assume(busy_endpoints + idle_endpoints <= 500)
    counts = {"busy_endpoints": busy_endpoints, "idle_endpoints": idle_endpoints}
    busy_s, idle_s = wait(busy=True, **counts), wait(**counts)
    assert busy_s <= idle_s + 1e-9
    assert 1.1 * idle_s < 6.0
    assert busy_endpoints / busy_s + idle_endpoints / idle_s <= 100.0 + 1e-6


def test_busy_endpoints_leave_idle_ones_two_thirds_of_their_scrapes_at_most():
    """10 of 500 are scraped every 1.8 s, where 0.6 s was their share, and 10 of 100 as ever."""
    assert wait(busy=True, busy_endpoints=10, idle_endpoints=490) == pytest.approx(1.77)
    assert wait(busy=True, busy_endpoints=10, idle_endpoints=90) == 0.2


def test_failures_back_off_to_a_cap():
    """The wait doubles with each failure in a row and stops at the cap."""
    waits = [wait(failures=count) for count in range(1, 9)]
    assert waits == pytest.approx([0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0, 10.0])
    assert wait(failures=10**9) == 10.0


def test_a_failing_endpoint_waits_as_long_as_a_busy_one_at_least():
    """In a large fleet that is longer than the first waits of a back-off."""
    assert wait(failures=1, busy_endpoints=400, idle_endpoints=0) == pytest.approx(4.0)
    assert wait(failures=5, busy_endpoints=400, idle_endpoints=0) == pytest.approx(4.0)


def test_many_failing_endpoints_share_a_budget():
    """500 that fail at once wait 5 s at first, and as long as any other after some failures."""
    waits = [wait(failures=count, failing_endpoints=500) for count in range(1, 4)]
    assert waits == pytest.approx([5.0, 10.0, 10.0])
    assert wait(failures=1, failing_endpoints=20) == 0.2


@hypothesis.given(failures=st.integers(1, 10**9), idle=st.integers(1, 200), seed=st.integers())
def test_a_refused_endpoint_is_scraped_again_within_two_seconds(failures, idle, seed):
    """However often the port refused, the next look ends within 2 s, jitter and tick included."""
    settings = schedule.ScrapeSchedule()
    wait_s = wait(
        settings, idle_endpoints=idle, failures=failures, refused=True, rng=random.Random(seed)
    )
    assert 0.0 < schedule.align_to_tick(0.0, wait_s, settings=settings) <= 2.0 + 1e-9


def test_a_refused_endpoint_is_scraped_no_later_than_other_failing_ones():
    """Shorter caps hold for refused endpoints too, and a large fleet stretches their wait."""
    short = schedule.ScrapeSchedule(jitter=0.0, slow_s=1.0, backoff_cap_s=0.5)
    assert wait(short, failures=9, refused=True) == 0.5
    assert wait(schedule.ScrapeSchedule(jitter=0.0, slow_s=1.0), failures=9, refused=True) == 0.975
    assert wait(idle_endpoints=1000, failures=9, refused=True) == pytest.approx(1.975 * 5)
    assert wait(idle_endpoints=9000, failures=9, refused=True) == pytest.approx(10.0)


@hypothesis.given(
    busy=st.booleans(),
    busy_endpoints=st.integers(0, 5000),
    idle_endpoints=st.integers(0, 5000),
    failures=st.integers(0, 10**6),
    refused=st.booleans(),
    seed=st.integers(),
)
def test_jitter_stays_within_its_ratio(
    busy, busy_endpoints, idle_endpoints, failures, refused, seed
):
    """Every wait is within ten per cent of the wait without jitter, and above zero."""
    facts = {
        "busy": busy,
        "busy_endpoints": busy_endpoints,
        "idle_endpoints": idle_endpoints,
        "failures": failures,
        "refused": refused,
    }
    spread = wait(schedule.ScrapeSchedule(), rng=random.Random(seed), **facts)
    # The cap of a refused one makes room for the jitter.
    steady = wait(**facts)
    if refused:
        assert 0 < spread <= 1.1 * steady * (1 + 1e-9)
        return
    assert 0 < 0.9 * steady <= spread * (1 + 1e-9)
    assert spread <= 1.1 * steady * (1 + 1e-9)


@hypothesis.given(now=st.floats(0, 1e7), wait_s=st.floats(0, 100))
def test_waits_end_on_ticks(now, wait_s):
    """A wait is lengthened by less than one tick, to a multiple of it."""
    longer = schedule.align_to_tick(now, wait_s, settings=STEADY)
    assert wait_s <= longer <= wait_s + STEADY.tick_s
    ticks = (now + longer) / STEADY.tick_s
    assert ticks == pytest.approx(round(ticks), abs=1e-3)


@hypothesis.given(st.floats(0.0, 1e6), st.floats(2.0, 100.0))
def test_waits_at_rest_end_on_half_seconds(now, wait_s):
    """A wait changes by a quarter of a second at most, either way, so that the mean stays."""
    changed = schedule.align_to_tick(now, wait_s, settings=STEADY, resting=True)
    assert abs(changed - wait_s) <= 0.25 + 1e-6
    assert 2 * (now + changed) == pytest.approx(round(2 * (now + changed)), abs=1e-6)


def test_a_short_wait_at_rest_keeps_its_ticks():
    """Half seconds would change an interval of a second by a quarter."""
    resting = schedule.align_to_tick(0.013, 1.0, settings=STEADY, resting=True)
    assert resting == schedule.align_to_tick(0.013, 1.0, settings=STEADY)


@pytest.mark.parametrize("num_endpoints", [10, 400, 500])
def test_loads_at_rest_stay_known_and_spread(num_endpoints):
    """No load gets older than the six seconds of `stale_after_s`, and no tick keeps all scrapes."""
    settings, rng = schedule.ScrapeSchedule(), random.Random(1)
    counts = schedule.EndpointCounts()
    counts.change_all(num_endpoints, 0.0)
    began = [0.0] * num_endpoints
    for _ in range(30):
        for at, now in enumerate(began):
            wait_s = schedule.wait_s(
                settings, busy=False, counts=counts, failures=0, resting=True, rng=rng
            )
            began[at] += schedule.align_to_tick(now, wait_s, settings=settings, resting=True)
            assert began[at] - now <= 5.75 + 1e-6
    ticks = Counter(round(2 * time) % 8 for time in began)
    assert max(ticks.values()) <= max(5, 0.3 * num_endpoints)
