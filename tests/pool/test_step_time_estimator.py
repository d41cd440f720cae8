from __future__ import annotations

import math
import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.endpoint import DEFAULT_STEP_TIMES, EngineCounters, Load, StepTimeModel
from extproc.pool import engine_counters, step_time_estimator, step_time_values
from extproc.pool.least_squares import RecursiveLeastSquares
from extproc.pool.pool_step_times import PoolStepTimeEstimators
from extproc.pool.request_tokens import AnswerTokens
from extproc.simulator import core, engine_request, profiles


class Counted:
    """The counters of a pure engine, read off its steps."""

    def __init__(self, profile):
        self.engine = core.SimulatedEngine(profile)
        self.steps = self.step_tokens = self.generated = self.finished = 0

    def run(self, until, now, submit):
        """Step from one time to another; `submit(engine, now)` is asked before each step."""
        while now < until:
            submit(self.engine, now)
            done = self.engine.step(now, horizon=until)
            if done is None:
                return until
            now += done.duration_s
            self.steps += done.steps
            self.step_tokens += done.prefill_tokens + done.tokens
            self.generated += done.tokens
            self.finished += len(done.finished)
        return now

    def load(self, now):
        totals = EngineCounters(
            steps=float(self.steps),
            step_tokens=float(self.step_tokens),
            generated_tokens=float(self.generated),
            finished=float(self.finished),
        )
        return Load(at=now, running=float(self.engine.running), waiting=0.0, counters=totals)


@pytest.mark.parametrize("name", ["a10-7b-fp16", "l4-8b-fp8", "h100-8b-bf16"])
def test_the_speed_of_an_engine_is_learned(name):
    """After a minute of mixed load step and prefill time are within 20 % of the machine's."""
    profile = profiles.find(name)
    counted, estimator, rng = (
        Counted(profile),
        step_time_estimator.StepTimeEstimator(),
        random.Random(1),
    )
    state = {"next": 0.0, "count": 0, "rate": 1.0}

    def submit(engine, now):
        while state["next"] <= now:
            state["next"] += rng.expovariate(state["rate"])
            state["count"] += 1
            engine.submit(
                engine_request.EngineRequest(
                    f"r{state['count']}", rng.randint(50, 1500), rng.randint(20, 300)
                ),
                now,
            )

    now = 0.0
    for tick in range(300):
        state["rate"] = rng.choice((0.3, 0.8, 1.6)) if tick % 25 == 0 else state["rate"]
        now = counted.run(0.2 * (tick + 1), now, submit)
        estimator.update(counted.load(now))
    learned = estimator.rates
    assert learned.step_s == pytest.approx(profile.base_s, rel=0.2)
    assert learned.prefill_s == pytest.approx(profile.prefill_s_per_token, rel=0.2)
    # This page does not say how much context there is.
    context = profile.context_s_per_token
    decode_s = learned.iteration_s(1) - learned.step_s
    assert profile.decode_s_per_seq < decode_s < profile.decode_s_per_seq + 2500 * context
    assert learned.output_tokens == pytest.approx(160, rel=0.3)


class JoinedRanks:
    """Two ranks that a page shows as one engine; requests go to them in turn, or all to the first."""

    def __init__(self, profile, *, spread):
        self.ranks = [Counted(profile), Counted(profile)]
        self.spread, self.rng = spread, random.Random(1)
        self.times = [0.0, 0.0]
        self.next, self.count = 0.0, 0

    def run(self, until, rate):
        while self.next < until:
            request = engine_request.EngineRequest(
                f"r{self.count}", self.rng.randint(50, 1500), self.rng.randint(20, 300)
            )
            self.count += 1
            rank = self.count % 2 if self.spread else 0
            self.times[rank] = self.ranks[rank].run(self.next, self.times[rank], lambda *_: None)
            self.ranks[rank].engine.submit(request, self.next)
            self.next += self.rng.expovariate(rate)
        for rank, counted in enumerate(self.ranks):
            self.times[rank] = counted.run(until, self.times[rank], lambda *_: None)

    def load(self, now):
        loads = [counted.load(now) for counted in self.ranks]
        names = ("steps", "step_tokens", "generated_tokens", "finished")
        totals = {name: sum(getattr(load.counters, name) for load in loads) for name in names}
        totals["rank_steps"] = tuple(load.counters.steps for load in loads)
        running = sum(load.running for load in loads)
        return Load(at=now, running=running, waiting=0.0, counters=EngineCounters(**totals))


@pytest.mark.parametrize("spread", [True, False])
@pytest.mark.parametrize("name", ["l4-8b-fp8", "h100-8b-bf16"])
def test_ranks_beside_each_other_take_the_time_of_one(name, spread):
    """The iteration of two ranks as one engine lasts as long as that of a rank, within a fifth."""
    profile = profiles.find(name)
    joined, estimator = JoinedRanks(profile, spread=spread), step_time_estimator.StepTimeEstimator()
    for tick in range(300):
        joined.run(0.2 * (tick + 1), (0.6, 1.6, 3.2)[tick // 25 % 3] / (1 if spread else 2))
        estimator.update(joined.load(0.2 * (tick + 1)))
    learned = estimator.rates
    assert learned.step_s == pytest.approx(profile.base_s, rel=0.2)
    # Two ranks compute prompts twice as fast as one.
    ranks = 2 if spread else 1
    assert learned.prefill_s == pytest.approx(profile.prefill_s_per_token / ranks, rel=0.35)


def test_a_window_does_not_span_a_change_of_ranks():
    """The counters of a rank that comes are no work of that time."""
    estimator = step_time_estimator.StepTimeEstimator()
    loads = [row(float(tick), 20.0 * tick, 0.0, 20.0 * tick) for tick in range(8)]
    for load in loads[:4]:
        estimator.update(load)
    before = estimator.rates
    joined = msgspec.structs.replace(
        loads[4],
        counters=msgspec.structs.replace(
            loads[4].counters, steps=9_080.0, rank_steps=(80.0, 9_000.0)
        ),
    )
    estimator.update(joined)
    assert estimator.rates == before


def row(at, steps, computed, generated, *, running=1.0, started_at=None):
    totals = EngineCounters(
        steps=steps, step_tokens=computed + generated, generated_tokens=generated, finished=0.0
    )
    return Load(at=at, running=running, started_at=started_at, counters=totals)


def test_an_idle_engine_does_not_change_the_estimate():
    """Time in which nothing ran is not time that work took."""
    estimator = step_time_estimator.StepTimeEstimator()
    for tick in range(20):
        estimator.update(row(float(tick), 10.0 * tick, 0.0, 10.0 * tick, running=0.0))
    assert estimator.rates == DEFAULT_STEP_TIMES


def test_a_restart_starts_a_new_window():
    """A row never spans a restart, and what was learned stays the first guess."""
    estimator = step_time_estimator.StepTimeEstimator()
    for tick in range(10):
        estimator.update(row(float(tick), 20.0 * tick, 0.0, 20.0 * tick, started_at=5.0))
    before = estimator.rates
    estimator.update(row(10.0, 1.0, 0.0, 1.0, started_at=900.0))
    assert estimator.rates == before
    assert engine_counters.engine_restarted(row(0.0, 9.0, 0.0, 9.0), row(1.0, 1.0, 0.0, 1.0))
    assert not engine_counters.engine_restarted(row(0.0, 9.0, 0.0, 9.0), row(1.0, 9.0, 0.0, 9.0))


@pytest.mark.parametrize(
    ("started_at", "steps", "is_restart"),
    [
        (9e8, 10.0, False),
        (9e8 + 1.0, 10.0, False),
        (9e8 + 40.0, 10.0, True),
        (9e8 - 3600.0, 10.0, True),
        (9e8 - 0.5, 1.0, False),
    ],
)
def test_another_start_time_is_a_restart(started_at, steps, is_restart):
    """The clock of its machine may be set back; counters are not looked at."""
    before = row(0.0, 9.0, 0.0, 9.0, started_at=9e8)
    after = row(1.0, steps, 0.0, steps, started_at=started_at)
    assert engine_counters.engine_restarted(before, after) == is_restart


@pytest.mark.parametrize(
    ("before", "engine", "is_restart"),
    [
        ({"prefix_queries": 90.0}, "sglang", True),
        ({"counters": EngineCounters(generated_tokens=90.0)}, "sglang", True),
        ({"prefix_queries": 90.0}, "", False),
        ({"prefix_queries": 0.0}, "sglang", False),
        ({}, "sglang", False),
    ],
)
def test_counters_that_are_gone_are_a_restart(before, engine, is_restart):
    """SGLang shows no start time, and counters once its first request has ended."""
    last = Load(at=0.0, engine="sglang", running=1.0, **before)
    page = Load(at=1.0, engine=engine, running=1.0)
    assert engine_counters.engine_restarted(last, page) == is_restart


@pytest.mark.parametrize("reset", ["steps", "computed", "generated"])
def test_a_counter_that_goes_back_alone_ends_a_window(reset):
    """Whatever it counts, nothing is learned of the time before, and all of the time after."""
    estimator = step_time_estimator.StepTimeEstimator()
    counts = {"steps": 0.0, "computed": 0.0, "generated": 0.0}
    for tick in range(10):
        estimator.update(row(float(tick), **counts))
        for count in counts:
            counts[count] += 20.0
    before = estimator.rates
    counts[reset] = 0.0
    estimator.update(row(10.0, **counts))
    assert estimator.rates == before
    for tick in range(11, 14):
        for count in counts:
            counts[count] += 20.0
        estimator.update(row(float(tick), **counts))
    assert estimator.rates.evidence > before.evidence + 30.0


def test_the_length_of_answers_is_learned_after_counters_went_back():
    """Requests that finish are counted from the lower number on."""
    estimator = step_time_estimator.StepTimeEstimator()
    for tick, finished in enumerate([1e6, 0.0, 10.0, 20.0, 30.0, 40.0]):
        totals = EngineCounters(finished=finished, generated_tokens=1e9 + 1000.0 * finished)
        estimator.update(Load(at=float(tick), started_at=5.0, counters=totals))
    assert estimator.rates.output_tokens > 2 * DEFAULT_STEP_TIMES.output_tokens


@pytest.mark.parametrize("seed", range(6))
def test_contradicting_counters_of_one_engine_spoil_no_other(seed):
    """Times beyond any engine make no rate negative or endless, and another engine is learned."""
    rng, estimators = random.Random(seed), PoolStepTimeEstimators()
    sums = dict.fromkeys(["steps", "generated_tokens", "finished", "gaps", "gaps_s"], 0.0)
    sums |= dict.fromkeys(["prefill_s", "prefill_tokens"], 0.0)
    for incarnation in (1, 2):
        estimators.on_endpoint_added(incarnation)
    for tick in range(200):
        for name in sums:
            sums[name] = rng.choice([0.0, sums[name] + rng.choice([0.0, 1.0, 5000.0]), 2.0**53])
        pages = [
            Load(at=float(tick), running=1.0, counters=EngineCounters(step_tokens=0.0, **sums)),
            row(float(tick), 50.0 * tick, 0.0, 50.0 * tick),
        ]
        for incarnation, page in enumerate(pages, 1):
            learner = estimators.with_pool_prior(incarnation, float(tick), page)
            learner.update(page)
            unknowns = step_time_values.unknowns_of(learner.pooled_rates)
            assert all(0.0 < value < 1e3 for value in unknowns)
    assert learner.pooled_rates.iteration_s(1) == pytest.approx(0.02, rel=0.1)


def test_counters_of_another_process_are_not_work():
    """Steps that no engine takes in the time of a scrape, as behind an address of two engines."""
    estimator = step_time_estimator.StepTimeEstimator()
    for tick in range(10):
        estimator.update(row(float(tick), 20.0 * tick, 0.0, 20.0 * tick, started_at=5.0))
    before = estimator.rates
    estimator.update(row(10.0, 200_000.0, 0.0, 200_000.0, started_at=5.0))
    assert estimator.rates == before


def test_a_restart_without_host_memory_forgets_the_time_of_reloads():
    """The next engine at the address may have no memory to load from."""
    estimator = step_time_estimator.StepTimeEstimator()
    for tick in range(4):
        counters = EngineCounters(reload_s=0.1 * tick, reloaded_tokens=10_000.0 * tick)
        estimator.update(Load(at=float(tick), started_at=5.0, counters=counters))
    assert estimator.rates.reload_s is not None
    estimator.update(Load(at=4.0, started_at=900.0))
    assert (estimator.rates.reload_s, estimator.rates.copied_ratio) == (None, 0.0)


def test_a_new_endpoint_starts_from_the_pool_estimate():
    """Endpoints that showed nothing do not count."""
    shown = [
        StepTimeModel(step_s=0.01, evidence=5.0),
        StepTimeModel(step_s=0.03, evidence=1.0),
        StepTimeModel(step_s=9.0),
    ]
    assert step_time_values.pool_mean(shown).step_s == pytest.approx(0.02)
    assert step_time_values.pool_mean([StepTimeModel(step_s=9.0)]) == DEFAULT_STEP_TIMES


def test_adapter_loads_are_learned_from_engine_counters():
    """Five loads of 2 s each pull the mean towards 2 s."""
    estimator = step_time_estimator.StepTimeEstimator()
    for tick in range(30):
        totals = EngineCounters(adapter_loads=5.0 * tick, adapter_load_s=10.0 * tick)
        estimator.update(Load(at=float(tick), counters=totals))
    assert estimator.rates.adapter_load_s == pytest.approx(2.0, rel=0.01)


COUNTS = st.floats(0, 1e6) | st.none()


@given(
    st.lists(
        st.tuples(st.floats(0.01, 5), COUNTS, COUNTS, COUNTS, COUNTS, st.floats(0, 3) | st.none()),
        max_size=30,
    )
)
def test_rates_stay_within_bounds(pages):
    """Whatever pages say, no rate is negative, infinite or not a number."""
    estimator, now = step_time_estimator.StepTimeEstimator(), 0.0
    for passed, steps, tokens, generated, finished, running in pages:
        now += passed
        totals = EngineCounters(
            steps=steps, step_tokens=tokens, generated_tokens=generated, finished=finished
        )
        estimator.update(Load(at=now, running=running, counters=totals))
        learned = estimator.rates
        assert 1e-4 <= learned.step_s <= 2.0
        assert 1e-7 <= learned.prefill_s <= 1e-2
        assert 1e-7 <= learned.decode_s <= 5e-2
        assert learned.output_tokens >= 1
        assert math.isfinite(learned.evidence)


def learn(slowness, *, windows, prior):
    """Estimator of an engine that takes so many times as long as the prior, after some windows."""
    estimator = step_time_estimator.StepTimeEstimator()
    estimator.set_prior(prior)
    steps_per_s = 1.0 / (slowness * prior.iteration_s(1))
    for tick in range(windows + 1):
        estimator.update(row(float(tick), steps_per_s * tick, 0.0, steps_per_s * tick))
    return estimator


POOL = StepTimeModel(step_s=0.02, context_tokens=0.0, evidence=3.0)


def test_engines_that_seem_alike_have_the_pool_rates():
    """Random differences of a few windows, and those below 40 %, are ignored; those of many are not."""
    few = learn(1.1, windows=4, prior=POOL).pooled_rates
    small = learn(1.35, windows=50, prior=POOL).pooled_rates
    many = learn(2.0, windows=50, prior=POOL).pooled_rates
    unlike = learn(3.0, windows=4, prior=POOL).pooled_rates
    assert few.step_s == pytest.approx(POOL.step_s, rel=0.01)
    assert small.step_s == pytest.approx(POOL.step_s, rel=0.01)
    assert many.step_s == pytest.approx(2.0 * POOL.step_s, rel=0.1)
    assert unlike.step_s == pytest.approx(3.0 * POOL.step_s, rel=0.1)


@given(st.floats(0.3, 3.0), st.integers(2, 40))
def test_rates_follow_the_speed_of_an_engine_without_a_jump(slowness, windows):
    """An engine that is a little slower seems a little slower, and not suddenly of another kind."""
    first, second = (
        learn(factor, windows=windows, prior=POOL).pooled_rates.step_s
        for factor in (slowness, 1.001 * slowness)
    )
    assert abs(second - first) <= 0.02 * first


def test_engines_without_evidence_have_the_pool_rates():
    """Without evidence nothing is an engine's own, nor is a load time without loads."""
    estimator = step_time_estimator.StepTimeEstimator()
    pool = StepTimeModel(step_s=0.05, adapter_load_s=0.1, evidence=2.0)
    estimator.set_prior(pool)
    assert estimator.set_pace(1.0, 0.0, is_tried=True)
    assert estimator.pooled_rates.step_s == 0.05
    assert learn(2.0, windows=20, prior=pool).pooled_rates.adapter_load_s == 0.1


def test_the_pool_mean_is_of_its_median_speed():
    """A slow engine among others makes the prior no slower, however often it is taken."""
    estimators = PoolStepTimeEstimators()
    for incarnation in range(5):
        estimators.on_endpoint_added(incarnation)
    for tick in range(300):
        for incarnation in range(4):
            steps = (10.0 if incarnation == 3 else 40.0) * tick
            learner = estimators.with_pool_prior(incarnation, float(tick))
            learner.update(row(float(tick), steps, 0.0, 4 * steps, running=4.0))
    rates = [
        estimators.with_pool_prior(incarnation, 301.0).pooled_rates for incarnation in range(5)
    ]
    for learned, seconds in zip(rates, (1 / 40, 1 / 40, 1 / 40, 1 / 10), strict=False):
        assert learned.step_s + 4 * learned.decode_s == pytest.approx(seconds, rel=0.08)
    assert 4.0 * rates[4].step_s == pytest.approx(rates[0].step_s, rel=0.05)


def test_an_engine_that_has_shown_nothing_counts_as_faster_than_the_fastest():
    """Otherwise prefixes that others have would keep requests from it, and it would show no speed."""
    estimators = PoolStepTimeEstimators()
    for incarnation in range(4):
        estimators.on_endpoint_added(incarnation)
    for tick in range(50):
        for incarnation, steps_per_s in enumerate((10.0, 10.0, 40.0)):
            learner = estimators.with_pool_prior(incarnation, float(tick))
            learner.update(row(float(tick), steps_per_s * tick, 0.0, steps_per_s * tick))
        learner = estimators.with_pool_prior(3, float(tick))
        learner.update(row(float(tick), 0.0, 0.0, 0.0, running=0.0))
    rates = [estimators.with_pool_prior(n, 60.0).pooled_rates for n in range(4)]
    assert rates[3].step_s == pytest.approx(0.25 * rates[2].step_s, rel=0.1)
    assert rates[0].step_s > 3.0 * rates[3].step_s


def test_answers_are_those_of_the_pool():
    """Answers of one engine give the expected length of answers on all others."""
    answers = AnswerTokens()
    engines = [step_time_estimator.StepTimeEstimator(answers=answers) for _ in range(2)]
    for tick in range(100):
        totals = EngineCounters(generated_tokens=120.0 * tick, finished=4.0 * tick)
        engines[0].update(Load(at=float(tick), counters=totals))
    for engine in engines:
        assert engine.pooled_rates.output_tokens == pytest.approx(30.0, rel=0.05)


def test_undetermined_rates_return_to_the_pool_mean():
    """One sequence at a time tells steps from sequences by nothing: the split is as usual."""
    learners = [
        step_time_estimator.StepTimeEstimator(StepTimeModel(step_s=0.002, decode_s=0.013))
        for _ in range(3)
    ]
    for tick in range(400):
        shown = step_time_values.pool_mean([estimator.rates for estimator in learners])
        for learner in learners:
            learner.set_prior(shown)
            learner.update(row(float(tick), 66.0 * tick, 0.0, 66.0 * tick))
    for learner in learners:
        assert learner.rates.iteration_s(1) == pytest.approx(1 / 66, rel=0.05)
        assert learner.rates.step_s > 5 * learner.rates.decode_s


def test_exact_rows_give_the_solution():
    """Rows of 2 x + 3 y, the prior being far: both come out."""
    squares, rng = RecursiveLeastSquares([(0.0, 10.0)] * 2), random.Random(1)
    for _ in range(200):
        x, y = rng.random(), rng.random()
        squares.add((x, y), 2 * x + 3 * y, keep=1.0, weight=1.0)
    assert squares.solve((1.0, 1.0), 1e-6) == pytest.approx([2.0, 3.0], rel=1e-3)


def test_undetermined_unknowns_follow_the_prior():
    """Always x + y = 6, prior 1 and 2: as 1 + 0.6 and 2 (1 + 1.2); what no row has is the prior."""
    squares = RecursiveLeastSquares([(0.0, 10.0)] * 3)
    for _ in range(100):
        squares.add((1.0, 1.0, 0.0), 6.0, keep=1.0, weight=1.0)
    assert squares.solve((1.0, 2.0, 7.0), 1e-6) == pytest.approx([1.6, 4.4, 7.0], rel=1e-3)


def test_an_unknown_is_clamped_to_its_bounds():
    """The first would be negative; at its bound of 0.5 the rest is the other's."""
    squares = RecursiveLeastSquares([(0.5, 10.0), (0.0, 10.0)])
    for x, y in ((1.0, 1.0), (2.0, 1.0), (1.0, 2.0)) * 50:
        squares.add((x, y), 3 * y - 0.5 * x, keep=1.0, weight=1.0)
    x, y = squares.solve((1.0, 1.0), 1e-6)
    assert x == 0.5
    assert 0.5 < y < 3.0


ROWS = st.lists(
    st.tuples(*[st.floats(0, 1e6)] * 3, st.floats(1e-3, 100), st.floats(0, 1)), max_size=30
)


@given(ROWS, st.floats(1e-3, 5))
def test_any_rows_keep_the_bounds(rows, weight):
    """Degenerate rows give numbers within bounds, never an error."""
    bounds = [(1e-4, 2.0), (1e-7, 1e-2), (1e-9, 1e-4)]
    squares = RecursiveLeastSquares(bounds)
    for *row, total, share in rows:
        squares.add(row, total, keep=0.98, weight=share)
    solution = squares.solve((0.015, 1e-4, 1e-6), weight)
    assert all(low <= value <= high for value, (low, high) in zip(solution, bounds, strict=True))
