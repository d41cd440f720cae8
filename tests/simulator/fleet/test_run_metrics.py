import math
import random

import pytest

from extproc.simulator.fleet import run_metrics
from tests.simulator.fleet.builders import sim_request


class Machine:
    """What a tally reads of an engine."""

    def __init__(self, preemptions=0):
        self.preemptions = preemptions
        self.engine = self if preemptions == 0 else Machine()


def test_percentiles_are_the_nearest_rank():
    """Of 1 to 100, the n-th percentile is n."""
    values = [float(n) for n in range(1, 101)]
    random.Random(1).shuffle(values)
    found = run_metrics.spread(values)
    assert (found.mean, found.p50, found.p90, found.p95, found.p99) == (50.5, 50, 90, 95, 99)
    assert run_metrics.quantiles(values) == [1.0, *range(1, 101)]


def test_few_values_have_percentiles_too():
    """Of one value all are that value, of two the median is the smaller."""
    assert run_metrics.spread([7.0]) == run_metrics.DistributionSummary(7.0, 7.0, 7.0, 7.0, 7.0)
    assert run_metrics.spread([1.0, 3.0]).p50 == 1.0
    assert run_metrics.quantiles([4.0]) == [4.0] * 101


def test_nothing_is_not_a_number():
    """Without values there is no mean, and no quantile."""
    found = run_metrics.spread([])
    assert all(math.isnan(value) for value in (found.mean, found.p50, found.p99))
    assert run_metrics.quantiles([]) == []


def finished(name, *, sent=0.0, first=1.0, took=3.0, site=0, output=5, cached=0):
    one = sim_request(name, now=sent, prompt=64, output=output)
    one.first_s, one.took_s, one.node, one.cached_tokens = first, took, site, cached
    return one


def tallied(sim_requests, *, since=0.0, engines=2):
    made = run_metrics.RunMetrics(since)
    for one in sim_requests:
        made.add(one)
    made.close([Machine() for _ in range(engines)])
    return made


def test_a_run_in_numbers():
    """Throughput is per second from the first sending to the last answer."""
    made = tallied(
        [
            finished("r1", sent=1.0, took=3.0, cached=32),
            finished("r2", sent=2.0, took=4.0, site=1),
            finished("r3", sent=2.0, took=4.0, site=1),
        ]
    ).summary()
    assert made.duration_s == 5.0
    assert made.requests == 3
    assert made.requests_per_s == pytest.approx(3 / 5)
    assert made.output_tokens_per_s == pytest.approx(15 / 5)
    assert made.total_tokens_per_s == pytest.approx((15 + 192) / 5)
    assert made.ttft_s.mean == 1.0
    assert made.tpot_s.mean == pytest.approx((2 / 4 + 3 / 4 + 3 / 4) / 3)
    assert made.e2e_s.p50 == 4.0
    assert made.token_s.mean == pytest.approx((0.6 + 0.8 + 0.8) / 3)
    assert made.hit_ratio == pytest.approx(32 / 192)
    assert made.requests_max_over_mean == pytest.approx(2 / 1.5)
    assert [one.requests for one in made.endpoints] == [1, 2]
    assert [one.hit_ratio for one in made.endpoints] == [0.5, 0.0]


def test_failures_are_counted_by_reason_and_have_no_times():
    """A failed request is in no latency."""
    bad = finished("r1", first=100.0, took=100.0)
    bad.failure = "engine died"
    refused = sim_request("r2")
    refused.failure = "rejected 503"
    made = tallied([bad, refused, finished("r3")]).summary()
    assert made.failed == {"engine died": 1, "rejected 503": 1}
    assert made.requests == 1
    assert made.e2e_s.p99 == 3.0
    assert sum(one.requests for one in made.endpoints) == 2


def test_answers_of_one_token_have_no_time_per_token_after_the_first():
    """They are left out of TPOT, and counted everywhere else."""
    made = tallied([finished("r1", output=1), finished("r2")]).summary()
    assert made.tpot_s.mean == 0.5
    assert made.requests == 2


def test_gaps_are_weighed_by_their_tokens():
    """The mean is exact, percentiles are within one percent."""
    made = tallied([finished("r1")])
    made.gaps(0.010, 97)
    made.gaps(0.500, 3)
    found = made.summary().itl_s
    assert found.mean == pytest.approx((0.97 + 1.5) / 100)
    assert found.p50 == pytest.approx(0.010, rel=0.01)
    assert found.p99 == pytest.approx(0.500, rel=0.01)


def test_gaps_of_the_warm_up_can_be_forgotten():
    """What came before the measurement is not in it."""
    made = tallied([finished("r1")])
    made.gaps(5.0, 100)
    made.forget_gaps()
    made.gaps(0.010, 1)
    assert made.summary().itl_s.mean == pytest.approx(0.010)


def test_trips_before_the_measurement_are_left_out():
    """They were sent too early."""
    made = tallied([finished("r1", sent=1.0), finished("r2", sent=2.0)], since=2.0)
    assert [one.id for one in made.requests] == ["r2"]


def test_an_empty_run_is_no_trouble():
    """Nothing sent gives zeros and NaN."""
    made = tallied([]).summary()
    assert (made.requests, made.requests_per_s) == (0, 0.0)
    assert math.isnan(made.ttft_s.mean)
    assert math.isnan(made.requests_max_over_mean)
