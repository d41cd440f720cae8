"""What a request takes of an engine."""

import pytest

from extproc.autoscaling import capacity
from extproc.endpoint import StepTimeModel

RATES = StepTimeModel(
    step_s=0.015, prefill_s=1e-4, decode_s=1e-4, context_s=2e-7, context_tokens=500.0
)


def test_concurrency_follows_from_the_slowdown():
    """An iteration of 15 ms and 0.2 ms for each: 77 take twice as long as one."""
    at_once = capacity.concurrency(RATES, slowdown=2.0)
    assert at_once == pytest.approx(77)
    assert RATES.iteration_s(at_once) == pytest.approx(2 * RATES.iteration_s(1))


def test_concurrency_is_bounded_by_the_engine_limit():
    """One at a time is one; no engine has less."""
    assert capacity.concurrency(RATES, slowdown=2.0, most=1.0) == 1
    assert capacity.concurrency(RATES, slowdown=1.0) == 1


def test_free_sequences_give_the_engine_limit():
    """Where one more makes nobody slower, the engine's own limit counts."""
    free = StepTimeModel(step_s=0.015, decode_s=0.0, context_s=0.0)
    assert capacity.concurrency(free, slowdown=2.0, most=9.0) == 9


def test_decoding_shares_an_iteration_and_prefill_does_not():
    """1,000 prompt tokens are 0.1 s; 100 answer tokens a hundred 77th parts of 30.4 ms."""
    work = capacity.work(1000, 100, RATES, at_once=77.0)
    assert work == pytest.approx(0.1 + 100 * 0.0304 / 77)


def test_work_of_a_single_request_is_its_duration():
    """One at a time: the work is the time."""
    assert capacity.work(0, 2000, RATES, at_once=1.0) == pytest.approx(2000 * 0.0152)
