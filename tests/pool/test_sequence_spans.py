"""Step times of what engines did where no window shows it: before the first scrape, between old ones."""

from __future__ import annotations

import random

import msgspec
import pytest

from extproc.endpoint import EngineCounters
from extproc.pool import step_time_estimator
from extproc.pool.engine_counters import IdleTime
from extproc.simulator import profiles
from extproc.simulator.fleet import engine_node, event_queue, sim_request


class ServedEngine:
    """A simulated engine that serves random requests, and its pages."""

    def __init__(self, profile, *, seed=1):
        self.clock = event_queue.EventQueue()
        self.rng = random.Random(seed)
        self.node = engine_node.EngineNode(
            self.clock,
            msgspec.structs.replace(profile, max_loras=0),
            finished=lambda _: None,
            gaps=lambda *_: None,
        )
        self.node.start()

    def serve(self, count, *, rate, prompts=(50, 1500), outputs=(20, 300), until=None):
        """Serve requests until the last one ended, or until a time, and return the page then."""
        at = self.clock.now
        for n in range(count):
            at += self.rng.expovariate(rate)
            work = sim_request.RequestSpec(
                self.rng.randint(*prompts), self.rng.randint(*outputs), ()
            )
            request = sim_request.SimRequest(f"r{at}-{n}", work, at)
            self.clock.at(at, lambda request=request: self.node.submit(request))
        while (until is None or self.clock.now < until) and self.clock.step():
            pass
        return self.node.page(self.clock.now)


def iteration_s(rates, *, sequences=4, prompt=0.0):
    """Seconds of an iteration of a usual batch."""
    return rates.iteration_s(sequences) + rates.prefill_s * prompt


def true_s(profile, *, context, sequences=4, prompt=0.0):
    """The same in truth."""
    sequence_s = profile.decode_s_per_seq + profile.context_s_per_token * context
    return profile.base_s + sequences * sequence_s + profile.prefill_s_per_token * prompt


@pytest.mark.parametrize("name", ["a10-7b-fp16", "l4-8b-fp8", "a100-8b-bf16", "h100-8b-bf16"])
@pytest.mark.parametrize("rate", [0.05, 0.5, 1.5])
def test_the_first_page_of_an_engine_that_served_before_shows_its_speed(name, rate):
    """A picker that starts beside it knows iterations within a fifth, idle as it is."""
    profile = profiles.find(name)
    page = ServedEngine(profile).serve(60, rate=rate)
    assert not page.running
    estimator = step_time_estimator.StepTimeEstimator()
    estimator.update(page)
    learned = estimator.rates
    assert learned.evidence
    truth = true_s(profile, context=learned.context_tokens)
    assert iteration_s(learned) == pytest.approx(truth, rel=0.2)


def test_answers_of_a_single_token_show_the_speed_of_prompts():
    """Embeddings: nothing but the time until the first token."""
    profile = profiles.find("l4-8b-fp8")
    page = ServedEngine(profile).serve(40, rate=0.5, prompts=(200, 3000), outputs=(1, 1))
    estimator = step_time_estimator.StepTimeEstimator()
    estimator.update(page)
    truth = true_s(profile, context=0, sequences=0, prompt=1600)
    assert iteration_s(estimator.rates, sequences=0, prompt=1600) == pytest.approx(truth, rel=0.15)


@pytest.mark.parametrize("adapters", [frozenset(), frozenset({"a"})])
def test_adapters_before_the_first_scrape_may_have_been_loaded(adapters):
    """An engine that runs them shows nothing on its first page: iterations may have waited for them."""
    page = ServedEngine(profiles.find("l4-8b-fp8")).serve(20, rate=0.5)
    estimator = step_time_estimator.StepTimeEstimator()
    estimator.update(msgspec.structs.replace(page, adapters=adapters, adapter_slots=4))
    assert bool(estimator.rates.evidence) is not bool(adapters)


@pytest.mark.parametrize("name", ["a10-7b-fp16", "h100-8b-bf16"])
def test_the_first_page_of_two_ranks_as_one_shows_the_iteration_of_one(name):
    """Sums over ranks that served beside each other: an iteration takes as long as that of each."""
    profile = profiles.find(name)
    pages = [ServedEngine(profile, seed=seed).serve(120, rate=0.5) for seed in (1, 2)]
    parts = [msgspec.structs.asdict(page.counters) for page in pages]
    names = [name for name, value in parts[0].items() if isinstance(value, float)]
    totals = {name: sum(part[name] for part in parts) for name in names}
    counters = EngineCounters(**totals, rank_steps=tuple(part["steps"] for part in parts))
    estimator = step_time_estimator.StepTimeEstimator()
    estimator.update(msgspec.structs.replace(pages[0], counters=counters))
    learned = estimator.rates
    truth = true_s(profile, context=learned.context_tokens)
    assert iteration_s(learned) == pytest.approx(truth, rel=0.2)


def test_preempted_sequences_show_nothing():
    """Seconds that they waited between two tokens are not those of an iteration."""
    page = ServedEngine(profiles.find("l4-8b-fp8")).serve(20, rate=0.5)
    page = msgspec.structs.replace(
        page, counters=msgspec.structs.replace(page.counters, preemptions=10.0)
    )
    estimator = step_time_estimator.StepTimeEstimator()
    estimator.update(page)
    assert not estimator.rates.evidence


@pytest.mark.parametrize("absent", ["gaps", "gaps_s", "prefill_s", "prefill_tokens", "finished"])
def test_a_page_without_these_sums_shows_nothing_yet(absent):
    """Older engines: a window in which they are busy has to come."""
    page = ServedEngine(profiles.find("l4-8b-fp8")).serve(20, rate=0.5)
    counters = msgspec.structs.replace(page.counters, **{absent: None})
    estimator = step_time_estimator.StepTimeEstimator()
    estimator.update(msgspec.structs.replace(page, counters=counters))
    assert not estimator.rates.evidence


def idle(times):
    """Idle time of an engine whose requests all ended so often."""
    return IdleTime(times=times)


def test_old_pages_show_the_speed_of_an_engine_that_stands_still_now_and_then():
    """Between two pages it was idle for an unknown time: the time of its sequences shows its speed."""
    profile = profiles.find("l4-8b-fp8")
    engine = ServedEngine(profile)
    estimator = step_time_estimator.StepTimeEstimator()
    estimator.update(engine.node.page(0.0), idle=idle(0))
    for number in range(1, 5):
        estimator.update(engine.serve(20, rate=0.5), idle=idle(number))
    learned = estimator.rates
    truth = true_s(profile, context=learned.context_tokens)
    assert learned.evidence
    assert iteration_s(learned) == pytest.approx(truth, rel=0.2)


def test_fewer_than_ten_requests_wait_for_others():
    """Of few requests a part may have run before; ten show the speed of the engine."""
    profile = profiles.find("l4-8b-fp8")
    engine = ServedEngine(profile)
    estimator = step_time_estimator.StepTimeEstimator()
    estimator.update(engine.serve(5, rate=0.5), idle=idle(1))
    assert not estimator.rates.evidence
    estimator.update(engine.serve(5, rate=0.5), idle=idle(2))
    assert estimator.rates.evidence


def test_an_engine_that_restarted_begins_anew():
    """Its counters are those of another process, and its speed is as well."""
    slow, fast = profiles.find("l4-8b-fp8"), profiles.find("h100-8b-bf16")
    estimator = step_time_estimator.StepTimeEstimator()
    estimator.update(ServedEngine(slow).serve(60, rate=0.5), idle=idle(1))
    before = estimator.rates
    later = msgspec.structs.replace(ServedEngine(fast).serve(20, rate=0.5), at=10_000.0)
    estimator.update(msgspec.structs.replace(later, started_at=9_000.0), idle=idle(2))
    assert estimator.rates.evidence
    assert iteration_s(estimator.rates) < 0.5 * iteration_s(before)


@pytest.mark.parametrize("reset", ["gaps", "gaps_s", "prefill_s", "prefill_tokens", "steps"])
def test_sums_that_go_back_alone_show_nothing(reset):
    """Of the time in which one of them went back nothing is learned, and later times as before."""
    estimator = step_time_estimator.StepTimeEstimator()
    engine = ServedEngine(profiles.find("l4-8b-fp8"))
    estimator.update(engine.serve(60, rate=0.5), idle=idle(1))
    before = estimator.rates
    page = engine.serve(60, rate=0.5)
    lost = getattr(page.counters, reset)
    lower = msgspec.structs.replace(page.counters, **{reset: 0.0})
    estimator.update(msgspec.structs.replace(page, counters=lower), idle=idle(2))
    assert estimator.rates.evidence == before.evidence
    page = engine.serve(60, rate=0.5)
    lower = msgspec.structs.replace(page.counters, **{reset: getattr(page.counters, reset) - lost})
    estimator.update(msgspec.structs.replace(page, counters=lower), idle=idle(3))
    assert estimator.rates.evidence > before.evidence
    assert iteration_s(estimator.rates) == pytest.approx(iteration_s(before), rel=0.2)
