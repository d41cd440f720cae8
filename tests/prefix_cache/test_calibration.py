from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.prefix_cache.cache_model import Calibration


def send(calibration, requests, prompt=1000, cached=500):
    for _ in range(requests):
        calibration.record_sent(prompt, cached)


def test_correct_predictions_change_nothing():
    """Half of 8000 tokens predicted, half found: the capacity is right."""
    estimate = Calibration()
    send(estimate, 8)
    assert not estimate.observe_counters(8000, 4000)
    assert (estimate.factor, estimate.error) == (1.0, 0.0)
    assert (estimate.predicted, estimate.observed) == (4000, 4000)


def test_exported_tokens_are_those_of_the_counters():
    """Reports of answers are left out, and hits count by the share of the tokens that are ours."""
    estimate = Calibration()
    assert not any(estimate.observe_usage(1000, 500, 400) for _ in range(4))
    assert (estimate.predicted, estimate.observed) == (0, 0)
    send(estimate, 4)
    estimate.observe_counters(5000, 1000)
    assert (estimate.predicted, estimate.observed) == (2000, 800)


def test_overprediction_shrinks_the_factor():
    """Half predicted, a tenth found: exp(-1.5 * 0.4) is below the largest step of 0.7."""
    estimate = Calibration()
    send(estimate, 8)
    assert estimate.observe_counters(8000, 800)
    assert estimate.factor == 0.7


def test_underprediction_grows_the_factor_slowly():
    """Half predicted, all found: 15 percent more."""
    estimate = Calibration()
    send(estimate, 8)
    assert estimate.observe_counters(8000, 8000)
    assert estimate.factor == 1.15


def test_more_hits_than_tokens_grow_the_factor_as_slowly():
    """Whatever an engine reports, a correction has a bound."""
    estimate = Calibration()
    assert any(estimate.observe_usage(1, 0, 10**6) for _ in range(8))
    assert estimate.factor == 1.15


def test_a_few_requests_are_not_enough():
    """Seven requests change nothing, the eighth does."""
    estimate = Calibration()
    send(estimate, 8)
    assert not estimate.observe_counters(7000, 0)
    assert estimate.observe_counters(1000, 0)


def test_a_single_miss_is_chance():
    """A missed prompt says nothing of the capacity, a second one does."""
    estimate = Calibration()
    usual = [(1000, 500, 500)] * 6
    assert not any(estimate.observe_usage(*row) for row in [*usual, (1000, 500, 0), usual[0]])
    assert estimate.factor == 1.0
    assert estimate.error == 0.0625
    assert estimate.observe_usage(1000, 500, 0)
    assert estimate.factor == pytest.approx(math.exp(-1.5 * 1000 / 9000))


def test_chance_moves_the_factor_nowhere():
    """Misses and unexpected hits, as often and as large, in any order."""
    estimate, rng = Calibration(), random.Random(3)
    for _ in range(2000):
        estimate.observe_usage(1000, 500, rng.choice((400, 500, 500, 500, 600)))
    assert estimate.factor == pytest.approx(1.0, abs=0.2)


def test_a_miss_counts_once():
    """Counters say again what answers have reported already."""
    estimate = Calibration()
    for _ in range(8):
        estimate.record_sent(1000, 500)
        estimate.observe_usage(1000, 500, 300)
    after_usage = estimate.factor
    assert not estimate.observe_counters(8000, 2400)
    assert estimate.factor == after_usage < 1.0
    assert (estimate.predicted, estimate.observed) == (4000, 2400)
    send(estimate, 8)
    assert estimate.observe_counters(8000, 2400)


def test_requests_are_compared_when_the_engine_looks_them_up():
    """Predictions of requests that still queue wait for their look-up."""
    estimate = Calibration()
    send(estimate, 8, cached=0)
    send(estimate, 8, cached=1000)
    estimate.observe_counters(8000, 0)
    assert estimate.error == 0.0
    estimate.observe_counters(8000, 8000)
    assert estimate.error == 0.0
    assert estimate.factor == 1.0


def test_windows_of_foreign_requests_are_skipped():
    """When most tokens are of other pickers, so are their hits."""
    estimate = Calibration()
    send(estimate, 8)
    assert not estimate.observe_counters(80_000, 0)
    assert estimate.factor == 1.0


def test_usage_is_more_exact_than_counters():
    """Eight answers that report no cached tokens shrink the belief at once."""
    estimate = Calibration()
    assert [estimate.observe_usage(1000, 900, 0) for _ in range(8)] == [False] * 7 + [True]
    assert estimate.factor == 0.7


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("sent"), st.integers(0, 9000), st.integers(0, 9000)),
            st.tuples(st.just("counted"), st.integers(0, 99_000), st.integers(0, 99_000)),
        ),
        max_size=80,
    )
)
def test_the_factor_stays_in_bounds(acts):
    """Whatever is sent and counted, the factor is between 0.02 and 2, and the error a ratio."""
    estimate = Calibration()
    for act, item, other in acts:
        if act == "sent":
            estimate.record_sent(item, min(item, other))
        else:
            estimate.observe_counters(float(item), float(min(item, other)))
        assert 0.02 <= estimate.factor <= 2.0
        assert -1.0 <= estimate.error <= 1.0
