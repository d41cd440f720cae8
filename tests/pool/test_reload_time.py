"""Time that an engine takes to load tokens from host memory, and how many it has copies of."""

import pytest

from extproc.endpoint import EngineCounters, Load, StepTimeModel
from extproc.pool.reload_time import ReloadTimeEstimator

LEARNED = StepTimeModel(prefill_s=100e-6, evidence=5.0)


def page(tokens, seconds, missed=0.0):
    counters = EngineCounters(reloaded_tokens=tokens, reload_s=seconds)
    return Load(prefix_queries=2.0 * missed, prefix_hits=missed, counters=counters)


def test_the_time_is_learned_from_two_counters():
    """Once enough tokens were loaded; what was loaded before the first page does not count."""
    estimator = ReloadTimeEstimator()
    assert estimator.update(Load(), LEARNED).reload_s is None
    assert estimator.update(page(1e6, 500.0), LEARNED).reload_s is None
    assert estimator.update(page(1e6 + 1_000, 500.02), LEARNED).reload_s is None
    assert estimator.update(page(1e6 + 4_000, 500.08), LEARNED).reload_s == pytest.approx(20e-6)


@pytest.mark.parametrize(
    ("prefill_s", "evidence", "saving"),
    [(100e-6, 5.0, 0.8), (10e-6, 5.0, 0.0), (100e-6, 0.0, None)],
)
def test_the_saving_is_known_once_the_time_to_compute_a_token_is(prefill_s, evidence, saving):
    """Loading that takes longer than computing saves nothing."""
    rates = StepTimeModel(prefill_s=prefill_s, evidence=evidence, reload_s=20e-6)
    assert rates.reload_saving == (saving if saving is None else pytest.approx(saving))


def test_a_restart_goes_on_with_what_was_learned():
    """Its counters begin at 0."""
    estimator = ReloadTimeEstimator()
    for tokens in (0.0, 10_000.0):
        estimator.update(page(tokens, tokens * 20e-6), LEARNED)
    assert estimator.update(page(0.0, 0.0), LEARNED).reload_s == pytest.approx(20e-6)
    assert estimator.update(page(10_000.0, 0.2), LEARNED).reload_s == pytest.approx(20e-6)


def test_the_time_follows_a_change():
    """Earlier pages fade."""
    estimator = ReloadTimeEstimator()
    tokens, seconds = 0.0, 0.0
    for rate in (5e-6, 300e-6):
        for _ in range(40):
            rates = estimator.update(page(tokens, seconds), LEARNED)
            tokens += 100_000.0
            seconds += 100_000.0 * rate
        assert rates.reload_s == pytest.approx(rate, rel=0.02)


@pytest.mark.parametrize(("missed", "ratio"), [(0.0, 1.0), (20_000.0, 1.0), (80_000.0, 0.25)])
def test_an_evicted_token_costs_what_is_loaded_of_those_that_are_missing(missed, ratio):
    """A host that holds little of what is evicted makes evictions little cheaper."""
    estimator = ReloadTimeEstimator()
    estimator.update(page(0.0, 0.0), LEARNED)
    rates = estimator.update(page(10_000.0, 0.2, missed), LEARNED)
    assert rates.copied_ratio == pytest.approx(ratio)
    assert rates.evicted_s == pytest.approx(100e-6 * (1.0 - 0.8 * ratio))
    assert LEARNED.evicted_s == LEARNED.prefill_s
