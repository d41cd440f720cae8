"""Share of computing a token that an engine saves by loading it from host memory."""

import pytest

from extproc.endpoint import NO_COUNTERS, EngineCounters, StepTimeModel
from extproc.prefix_cache.reload_time import ReloadTimeEstimator

LEARNED = StepTimeModel(prefill_s=100e-6, evidence=5.0)


def page(tokens, seconds):
    return EngineCounters(reloaded_tokens=tokens, reload_s=seconds)


def test_the_weight_is_learned_from_two_counters():
    """Once enough tokens were loaded, and the time to compute one is known; what was before counts not."""
    estimator = ReloadTimeEstimator()
    assert estimator.update(NO_COUNTERS, LEARNED) is None
    assert estimator.update(page(1e6, 500.0), LEARNED) is None
    assert estimator.update(page(1e6 + 1_000, 500.02), LEARNED) is None
    later = page(1e6 + 4_000, 500.08)
    assert estimator.update(later, StepTimeModel()) is None
    assert estimator.update(later, LEARNED) == pytest.approx(0.8, abs=1e-6)


def test_a_restart_goes_on_with_what_was_learned():
    """Its counters begin at 0."""
    estimator = ReloadTimeEstimator()
    for tokens in (0.0, 10_000.0):
        estimator.update(page(tokens, tokens * 20e-6), LEARNED)
    assert estimator.update(page(0.0, 0.0), LEARNED) == pytest.approx(0.8)
    assert estimator.update(page(10_000.0, 0.2), LEARNED) == pytest.approx(0.8)


def test_the_weight_follows_a_change_and_stays_in_range():
    """Earlier pages fade; loading that takes longer than computing saves nothing."""
    estimator = ReloadTimeEstimator()
    tokens, seconds = 0.0, 0.0
    for rate in (5e-6, 300e-6):
        for _ in range(40):
            weight = estimator.update(page(tokens, seconds), LEARNED)
            tokens += 100_000.0
            seconds += 100_000.0 * rate
        assert weight == pytest.approx(0.95 if rate < 1e-4 else 0.0, abs=0.01)
