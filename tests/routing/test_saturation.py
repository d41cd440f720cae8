import math

import msgspec
import pytest

from extproc.endpoint import NO_LOAD, AdapterResidency, Candidate, Endpoint, Load, StepTimeModel
from extproc.routing import admission

RATES = StepTimeModel(
    step_s=0.03,
    prefill_s=1e-4,
    decode_s=1e-3,
    context_s=0.0,
    context_tokens=500.0,
    output_tokens=100.0,
)


def candidate(*, queued=0.0, requests=10.0, waiting=0.0, running=10.0, usage=0.5, **facts):
    load = Load(
        at=0.0,
        waiting=waiting,
        running=running,
        kv_usage=usage,
        kv_blocks=1000,
        block_tokens=16,
    )
    facts = {
        "load": load,
        "age_s": 0.0,
        "estimated_requests": requests,
        "queued_tokens": queued,
        "rates": RATES,
    } | facts
    return Candidate(Endpoint("10.0.0.1:8000"), **facts)


def test_an_empty_queue_is_no_wait():
    """However large the batch is."""
    assert admission.wait_s(candidate(requests=200.0)) == 0.0


def test_queued_prompts_wait_for_prefill_and_an_iteration():
    """1000 tokens at 0.1 ms, beside 10 sequences: 0.1 + (0.03 + 10 * 0.001) s."""
    assert admission.wait_s(candidate(queued=1000.0)) == pytest.approx(0.14)


def test_requests_ahead_wait_for_answers_to_end():
    """Two in front, an answer ends every 100 * 0.04 / 10 s."""
    waiting = candidate(waiting=2.0, requests=12.0)
    assert admission.wait_s(waiting) == pytest.approx(0.8)


def test_what_an_old_scrape_showed_counts_less():
    """Half after half of the 4 s of an answer, nothing after all of it; own prompts count in full."""
    waits = [
        admission.wait_s(candidate(waiting=2.0, requests=12.0, queued=1000.0, age_s=age_s))
        for age_s in (0.0, 2.0, 4.0, 15.0)
    ]
    own_s = admission.wait_s(candidate(requests=12.0, queued=1000.0))
    assert waits == [pytest.approx(own_s + seconds) for seconds in (0.8, 0.4, 0.0, 0.0)]


def test_the_mean_of_others_is_as_young_as_they_are():
    """It stands in for the endpoint's own scrape, which is late."""
    late = candidate(waiting=2.0, requests=12.0, age_s=15.0, page=NO_LOAD)
    assert admission.wait_s(late) == pytest.approx(0.8)


def test_kv_limit_is_lower_without_priority():
    """At 0.95 of the KV cache there is room for a priority above 0 only."""
    full = candidate(usage=0.95)
    assert admission.excess_wait_s([full], 0.1, priority=1) == [pytest.approx(-0.5)]
    # 0.05 * 16000 tokens are 1.6 requests of 500.
    assert admission.excess_wait_s([full], 0.1, priority=0) == [pytest.approx(1.6 * 0.4 - 0.1)]


def test_a_higher_priority_has_headroom():
    """Those below stop at the limit; above it stays room for it."""
    busy = candidate(queued=1000.0)
    assert admission.excess_wait_s([busy], 0.1, priority=0) == [pytest.approx(0.04)]
    assert admission.excess_wait_s([busy], 0.1, priority=-1) == [pytest.approx(0.04)]
    assert admission.excess_wait_s([busy], 0.1, priority=1) == [pytest.approx(-0.36)]


def test_a_cached_prompt_may_wait_longer():
    """0.14 s of queue are 0.04 s too much, which 500 cached tokens save, and 300 do not."""
    busy = candidate(queued=1000.0)
    loyal, hardly = (
        candidate(queued=1000.0, matched_tokens=500),
        candidate(queued=1000.0, matched_tokens=300),
    )
    over = admission.excess_wait_s([busy, loyal, hardly], 0.1, priority=0)
    assert [seconds <= 0.0 for seconds in over] == [False, True, False]


def test_an_adapter_that_is_loaded_may_wait_longer():
    """0.14 s of queue are 0.04 s too much, which 0.2 s of loading elsewhere make up for."""
    rates = msgspec.structs.replace(RATES, adapter_load_s=0.2)
    loaded, unknown, missing = (
        candidate(queued=1000.0, rates=rates, residency=residency)
        for residency in (
            AdapterResidency.IDLE,
            AdapterResidency.UNKNOWN,
            AdapterResidency.ROOM,
        )
    )
    over = admission.excess_wait_s([loaded, unknown, missing], 0.1, priority=0)
    assert over == [pytest.approx(-0.16), pytest.approx(-0.06), pytest.approx(0.04)]
    base = candidate(queued=1000.0, rates=rates)
    assert admission.excess_wait_s([base], 0.1, priority=0) == [pytest.approx(0.04)]


def test_kv_limit_is_lower_beside_priority_requests():
    """At 0.87 of the KV cache there is no room for others then."""
    filled = candidate(usage=0.87)
    assert admission.excess_wait_s([filled], 0.1, priority=0) == [pytest.approx(-0.1)]
    assert admission.excess_wait_s([filled], 0.1, priority=0, leaves_headroom=True)[0] > 0.0
    assert admission.excess_wait_s([filled], 0.1, priority=1, leaves_headroom=True)[0] < 0.0


def test_an_unknown_load_is_not_busy():
    """Without a scrape only our own account counts."""
    unknown = Candidate(Endpoint("10.0.0.1:8000"), estimated_requests=100.0)
    assert unknown.age_s == math.inf
    assert admission.wait_s(unknown) == 0.0
