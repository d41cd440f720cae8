"""From counters to demand: rates, peers, restarts, what is learned."""

import msgspec
import pytest

from extproc.autoscaling import demand_estimator
from extproc.autoscaling.demand_estimator import (
    DemandEstimator,
    EstimatorSettings,
    EstimatorState,
    PickerCounters,
    TargetObservation,
)
from extproc.endpoint import StepTimeModel

#: One request at a time, 10 ms for each token of its answer.
SERIAL = StepTimeModel(step_s=0.01, prefill_s=0.0, decode_s=0.0, context_s=0.0)
SERIAL_SETTINGS = EstimatorSettings(concurrency=1.0)
TARGET = TargetObservation(spec=1, available=1, rates=SERIAL)


def read(estimator, now, observation=TARGET, **counters):
    """Replicas that a single picker computes."""
    return estimator.read(now, {"a": PickerCounters(**counters)}, observation)


def test_arriving_work_is_requests_times_their_work():
    """Ten requests in 20 s, 30 s each as long as nothing is known: 15 seconds of work per second."""
    estimator = DemandEstimator(SERIAL_SETTINGS)
    read(estimator, 0.0)
    demand = read(estimator, 20.0, arrived=10.0, in_flight=10)
    assert demand.request_work == pytest.approx(30)
    assert demand.arriving == pytest.approx(15)


def test_answer_lengths_are_learned():
    """Fifty answers of 100 tokens are 1 s each, less what is left of the prior."""
    estimator = DemandEstimator(SERIAL_SETTINGS)
    read(estimator, 0.0)
    demand = read(estimator, 60.0, arrived=50.0, answered=50.0, answer_tokens=5000.0)
    # The prior of 3,000 tokens has 0.98^50 = 0.36 of an answer's weight.
    assert demand.request_work == pytest.approx((3000 * 0.364 + 5000) / 50.364 * 0.01, rel=0.01)


def test_prompts_add_prefill_time():
    """1,000 tokens at 1 ms are a second more."""
    estimator = DemandEstimator(SERIAL_SETTINGS)
    observation = msgspec.structs.replace(
        TARGET, rates=msgspec.structs.replace(SERIAL, prefill_s=1e-3)
    )
    read(estimator, 0.0, observation)
    demand = read(estimator, 10.0, observation, arrived=1.0, prompt_tokens=1000.0)
    assert demand.arriving == pytest.approx((1.0 + 30) / 10, rel=0.01)


def test_pickers_are_summed():
    """Requests wait and run at all of them."""
    both = {"a": PickerCounters(held=2, in_flight=1), "b": PickerCounters(held=3, in_flight=4)}
    demand = DemandEstimator(SERIAL_SETTINGS).read(0.0, both, TARGET)
    assert (demand.held, demand.in_flight, demand.complete) == (5, 5, True)


def test_an_unreadable_peer_keeps_its_last_counters_for_a_minute():
    """Its last counters stand for a minute; the demand is not complete from the first moment on."""
    estimator = DemandEstimator(SERIAL_SETTINGS)
    estimator.read(0.0, {"a": PickerCounters(held=1), "b": PickerCounters(held=3)}, TARGET)
    demand = estimator.read(60.0, {"a": PickerCounters(held=1), "b": None}, TARGET)
    assert (demand.held, demand.complete) == (4, False)
    demand = estimator.read(61.0, {"a": PickerCounters(held=1), "b": None}, TARGET)
    assert (demand.held, demand.complete) == (1, False)
    demand = estimator.read(62.0, {"a": PickerCounters(held=1)}, TARGET)
    assert (demand.held, demand.complete) == (1, True)


def test_a_total_that_goes_back_is_no_new_demand():
    """A picker that starts again has another name; what comes after counts from the lower total."""
    estimator = DemandEstimator(SERIAL_SETTINGS)
    read(estimator, 0.0, arrived=100.0, answered=100.0)
    assert read(estimator, 10.0, arrived=98.0, answered=98.0).arriving == 0.0
    demand = read(estimator, 20.0, arrived=100.0, answered=98.0)
    assert demand.arriving == pytest.approx(2 * 30 / 10)


def test_earlier_totals_of_a_new_peer_are_not_counted():
    """A thousand requests before the first reading did not arrive in the last interval."""
    estimator = DemandEstimator(SERIAL_SETTINGS)
    read(estimator, 0.0)
    demand = estimator.read(
        10.0, {"a": PickerCounters(), "b": PickerCounters(arrived=1000.0)}, TARGET
    )
    assert demand.arriving == 0


def test_throughput_is_learned_from_busy_replicas():
    """An engine that answers half as fast as its rates say is worth half."""
    estimator = DemandEstimator(SERIAL_SETTINGS)
    for n in range(200):
        demand = read(
            estimator,
            60.0 * n,
            held=9,
            in_flight=1,
            arrived=float(n),
            answered=float(n),
            answer_tokens=3000.0 * n,
        )
    assert demand.request_work == pytest.approx(30)
    assert demand.throughput == pytest.approx(0.5, abs=0.08)


def test_idle_replicas_do_not_change_the_throughput():
    """Unrequested work is not counted as throughput."""
    estimator = DemandEstimator(SERIAL_SETTINGS)
    for n in range(100):
        demand = read(estimator, 60.0 * n)
    assert demand.throughput == 1


def test_a_cold_start_is_learned():
    """From the reading that saw the number raised to the one that saw the replica answer."""
    estimator = DemandEstimator(SERIAL_SETTINGS)
    for now, spec, available in ((0, 0, 0), (5, 1, 0), (100, 1, 0), (205, 1, 1)):
        demand = read(estimator, float(now), TargetObservation(spec=spec, available=available))
    # From 0 s on it was asked for; half of the way from 60 to 205.
    assert demand.cold_start_s == pytest.approx((60 + 205) / 2)


def test_a_replica_that_answers_again_is_no_cold_start():
    """While another one is still to start, one that was away for a moment has not started anew."""
    estimator = DemandEstimator(SERIAL_SETTINGS)
    for now, available in ((0, 3), (5, 3), (3600, 2), (3610, 3), (3700, 4)):
        spec = 3 if now == 0 else 4
        demand = read(estimator, float(now), TargetObservation(spec=spec, available=available))
        if now < 3700:
            assert demand.cold_start_s == 60.0
    assert demand.cold_start_s == pytest.approx((60 + 3700) / 2)


def test_replicas_requested_one_after_another_have_cold_starts_of_their_own():
    """One more every 30 s, each of which takes 120 s; the requests are seen 5 s late at most."""
    estimator = DemandEstimator(SERIAL_SETTINGS)
    starts = [float(at) for at in range(60, 630, 30)]
    for now in range(0, 1200, 5):
        spec = 1 + sum(at <= now for at in starts)
        available = 1 + sum(at + 120 <= now for at in starts)
        demand = read(estimator, float(now), TargetObservation(spec=spec, available=available))
    assert demand.cold_start_s == pytest.approx(125, abs=0.1)


def test_replicas_that_are_given_up_have_no_cold_start():
    """Of two that start, the one that was requested last is taken back."""
    estimator = DemandEstimator(SERIAL_SETTINGS)
    for now, spec, available in ((0, 1, 1), (5, 2, 1), (50, 3, 1), (60, 2, 1), (100, 2, 2)):
        demand = read(estimator, float(now), TargetObservation(spec=spec, available=available))
    assert demand.cold_start_s == pytest.approx((60 + 100) / 2)
    assert estimator.state.starting == ()


@pytest.mark.parametrize("requested_at", [0, 3600])
def test_no_cold_start_is_learned_from_a_gap_in_readings(requested_at):
    """Replicas are requested before or in an hour without readings, and answer at its end."""
    estimator = DemandEstimator(SERIAL_SETTINGS, gap_s=15.0)
    raised = 4 if requested_at == 0 else 1
    for now, spec, available in ((0, 1, 1), (5, raised, 1), (3600, 4, 4), (3605, 4, 4)):
        demand = read(estimator, float(now), TargetObservation(spec=spec, available=available))
    assert demand.cold_start_s == 60.0
    assert estimator.state.starting == ()
    for now, available in ((3610, 4), (3620, 4), (3630, 4), (3640, 5)):
        demand = read(estimator, float(now), TargetObservation(spec=5, available=available))
    assert demand.cold_start_s == pytest.approx((60 + 35) / 2)


def test_no_throughput_is_learned_from_a_gap_in_readings():
    """A picker that was away for an hour has few answers, and its engines were not busy for it."""
    estimator = DemandEstimator(SERIAL_SETTINGS, gap_s=15.0)
    read(estimator, 0.0, held=9, answered=100.0)
    assert read(estimator, 3600.0, held=9, answered=1.0).throughput == 1.0


def test_learned_values_survive_a_restart():
    """Another meter reads the same from JSON, on another clock."""
    first, second = DemandEstimator(SERIAL_SETTINGS), DemandEstimator(SERIAL_SETTINGS)
    read(first, 100.0, arrived=5.0, answered=4.0, answer_tokens=400.0)
    read(first, 110.0, arrived=9.0, answered=8.0, answer_tokens=800.0)
    written = msgspec.json.encode(first.state)
    second.restore(msgspec.json.decode(written, type=EstimatorState), shift_s=-100.0)
    a = read(first, 120.0, arrived=11.0, answered=9.0, answer_tokens=900.0)
    b = read(second, 20.0, arrived=11.0, answered=9.0, answer_tokens=900.0)
    assert msgspec.structs.replace(b, now=120.0) == a


def test_batches_have_room():
    """Half of the speed of one alone: as many as the rates say."""
    demand = DemandEstimator(EstimatorSettings()).read(
        0.0, {}, TargetObservation(spec=1, available=1)
    )
    assert demand.concurrency == pytest.approx(77)


RATES = StepTimeModel(
    step_s=0.015, prefill_s=1e-4, decode_s=1e-4, context_s=2e-7, context_tokens=500.0
)


def test_concurrency_follows_from_the_slowdown():
    """An iteration of 15 ms and 0.2 ms for each: 77 take twice as long as one."""
    at_once = demand_estimator.concurrency(RATES, slowdown=2.0)
    assert at_once == pytest.approx(77)
    assert RATES.iteration_s(at_once) == pytest.approx(2 * RATES.iteration_s(1))


def test_concurrency_is_bounded_by_the_engine_limit():
    """One at a time is one; no engine has less."""
    assert demand_estimator.concurrency(RATES, slowdown=2.0, most=1.0) == 1
    assert demand_estimator.concurrency(RATES, slowdown=1.0) == 1


def test_free_sequences_give_the_engine_limit():
    """If one more sequence slows none down, the engine's own limit counts."""
    free = StepTimeModel(step_s=0.015, decode_s=0.0, context_s=0.0)
    assert demand_estimator.concurrency(free, slowdown=2.0, most=9.0) == 9


def test_decoding_shares_an_iteration_and_prefill_does_not():
    """1,000 prompt tokens are 0.1 s; 100 answer tokens a hundred 77th parts of 30.4 ms."""
    work = demand_estimator.work(1000, 100, RATES, at_once=77.0)
    assert work == pytest.approx(0.1 + 100 * 0.0304 / 77)


def test_work_of_a_single_request_is_its_duration():
    """One at a time: the work is the time."""
    assert demand_estimator.work(0, 2000, RATES, at_once=1.0) == pytest.approx(2000 * 0.0152)


def test_a_replica_of_several_ranks_does_the_work_of_all_of_them():
    """Four ranks have four times the places, and a request takes a quarter of their time."""
    single, four = DemandEstimator(EstimatorSettings()), DemandEstimator(EstimatorSettings())
    for now in (0.0, 20.0):
        counters = {"arrived": now, "prompt_tokens": 9 * now}
        observation = TargetObservation(spec=1, available=1, rates=RATES, engines=1)
        alone = read(single, now, observation, **counters)
        observation = TargetObservation(spec=1, available=1, rates=RATES, engines=4)
        ranks = read(four, now, observation, **counters)
    assert ranks.concurrency == pytest.approx(4 * alone.concurrency)
    assert ranks.request_work == pytest.approx(alone.request_work / 4)
    assert ranks.arriving == pytest.approx(alone.arriving / 4) != 0


def test_the_ranks_of_a_replica_are_remembered_while_there_is_none():
    """A target at zero is woken for replicas like those before, also by another process."""
    estimator, other = DemandEstimator(EstimatorSettings()), DemandEstimator(EstimatorSettings())
    up = read(estimator, 0.0, TargetObservation(spec=1, available=1, rates=RATES, engines=4))
    written = msgspec.json.encode(estimator.state)
    other.restore(msgspec.json.decode(written, type=EstimatorState))
    down = read(other, 10.0, TargetObservation(spec=0, available=0))
    assert down.concurrency == up.concurrency == pytest.approx(4 * 77)


def test_the_limit_of_requests_is_that_of_a_replica():
    """Its ranks share the configured number."""
    observation = TargetObservation(spec=1, available=1, rates=RATES, engines=4)
    demand = read(DemandEstimator(EstimatorSettings(concurrency=20.0)), 0.0, observation)
    assert demand.concurrency == 20


@pytest.mark.parametrize(("waiting", "throughput"), [(3.0, 1.0), (4.0, 0.5)])
def test_throughput_is_learned_where_every_rank_has_a_queue(waiting, throughput):
    """Fewer waiting requests than ranks leave a rank without any."""
    estimator = DemandEstimator(EstimatorSettings(concurrency=4.0))
    for n in range(200):
        observation = TargetObservation(
            spec=1, available=1, rates=SERIAL, engines=4, waiting=waiting
        )
        done = 4.0 * n
        demand = read(estimator, 60.0 * n, observation, answered=done, answer_tokens=3000.0 * done)
    assert demand.throughput == pytest.approx(throughput, abs=0.08)
