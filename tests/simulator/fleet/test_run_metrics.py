import math
import random

import pytest

from extproc.simulator.fleet import run_metrics
from tests.simulator.fleet.builders import sim_request


class FakeEngineNode:
    """The fields of an engine that the metrics read."""

    def __init__(self, preemptions=0):
        self.preemptions = preemptions
        self.engine = self if preemptions == 0 else FakeEngineNode()


def test_percentiles_are_the_nearest_rank():
    """Of 1 to 100, the n-th percentile is n."""
    values = [float(n) for n in range(1, 101)]
    random.Random(1).shuffle(values)
    spread = run_metrics.spread(values)
    assert (spread.mean, spread.p50, spread.p90, spread.p95, spread.p99) == (50.5, 50, 90, 95, 99)
    assert run_metrics.quantiles(values) == [1.0, *range(1, 101)]


def test_few_values_have_percentiles_too():
    """Of one value all are that value, of two the median is the smaller."""
    assert run_metrics.spread([7.0]) == run_metrics.DistributionSummary(7.0, 7.0, 7.0, 7.0, 7.0)
    assert run_metrics.spread([1.0, 3.0]).p50 == 1.0
    assert run_metrics.quantiles([4.0]) == [4.0] * 101


def test_nothing_is_not_a_number():
    """Without values there is no mean, and no quantile."""
    spread = run_metrics.spread([])
    assert all(math.isnan(value) for value in (spread.mean, spread.p50, spread.p99))
    assert run_metrics.quantiles([]) == []


def finished(name, *, sent=0.0, first=1.0, took=3.0, node=0, output=5, cached=0):
    request = sim_request(name, now=sent, prompt=64, output=output)
    request.first_s, request.took_s, request.node, request.cached_tokens = first, took, node, cached
    return request


def measure(sim_requests, *, since=0.0, engines=2):
    metrics = run_metrics.RunMetrics(since)
    for request in sim_requests:
        metrics.add(request)
    metrics.close([FakeEngineNode() for _ in range(engines)])
    return metrics


def test_a_run_in_numbers():
    """Throughput is per second from the first sending to the last answer."""
    summary = measure(
        [
            finished("r1", sent=1.0, took=3.0, cached=32),
            finished("r2", sent=2.0, took=4.0, node=1),
            finished("r3", sent=2.0, took=4.0, node=1),
        ]
    ).summary()
    assert summary.duration_s == 5.0
    assert summary.requests == 3
    assert summary.requests_per_s == pytest.approx(3 / 5)
    assert summary.output_tokens_per_s == pytest.approx(15 / 5)
    assert summary.total_tokens_per_s == pytest.approx((15 + 192) / 5)
    assert summary.ttft_s.mean == 1.0
    assert summary.tpot_s.mean == pytest.approx((2 / 4 + 3 / 4 + 3 / 4) / 3)
    assert summary.e2e_s.p50 == 4.0
    assert summary.token_s.mean == pytest.approx((0.6 + 0.8 + 0.8) / 3)
    assert summary.hit_ratio == pytest.approx(32 / 192)
    assert summary.requests_max_over_mean == pytest.approx(2 / 1.5)
    assert [endpoint.requests for endpoint in summary.endpoints] == [1, 2]
    assert [endpoint.hit_ratio for endpoint in summary.endpoints] == [0.5, 0.0]


def test_failures_are_counted_by_reason_and_have_no_times():
    """A failed request is in no latency."""
    bad = finished("r1", first=100.0, took=100.0)
    bad.failure = "engine died"
    refused = sim_request("r2")
    refused.failure = "rejected 503"
    summary = measure([bad, refused, finished("r3")]).summary()
    assert summary.failed == {"engine died": 1, "rejected 503": 1}
    assert summary.requests == 1
    assert summary.e2e_s.p99 == 3.0
    assert sum(endpoint.requests for endpoint in summary.endpoints) == 2


def test_answers_of_one_token_have_no_time_per_token_after_the_first():
    """They are left out of TPOT, and counted everywhere else."""
    summary = measure([finished("r1", output=1), finished("r2")]).summary()
    assert summary.tpot_s.mean == 0.5
    assert summary.requests == 2


def test_gaps_are_weighed_by_their_tokens():
    """The mean is exact, percentiles are within one percent."""
    metrics = measure([finished("r1")])
    metrics.gaps(0.010, 97)
    metrics.gaps(0.500, 3)
    gaps = metrics.summary().itl_s
    assert gaps.mean == pytest.approx((0.97 + 1.5) / 100)
    assert gaps.p50 == pytest.approx(0.010, rel=0.01)
    assert gaps.p99 == pytest.approx(0.500, rel=0.01)


def test_gaps_of_the_warm_up_can_be_forgotten():
    """Gaps from before the measurement do not count."""
    metrics = measure([finished("r1")])
    metrics.gaps(5.0, 100)
    metrics.forget_gaps()
    metrics.gaps(0.010, 1)
    assert metrics.summary().itl_s.mean == pytest.approx(0.010)


def test_requests_before_the_measurement_are_left_out():
    """They were sent too early."""
    metrics = measure([finished("r1", sent=1.0), finished("r2", sent=2.0)], since=2.0)
    assert [request.id for request in metrics.requests] == ["r2"]


def test_an_empty_run_is_no_trouble():
    """Nothing sent gives zeros and NaN."""
    summary = measure([]).summary()
    assert (summary.requests, summary.requests_per_s) == (0, 0.0)
    assert math.isnan(summary.ttft_s.mean)
    assert math.isnan(summary.requests_max_over_mean)
