"""Learned step times of simulated engines, their number of scrapes, and a change of speed."""

from __future__ import annotations

import itertools
import random
import statistics

import msgspec
import pytest

from extproc.endpoint import Endpoint, EngineCounters, Load, StepTimeModel
from extproc.pool import step_time_estimator
from extproc.pool.inflight import InflightLoad
from extproc.simulator import core, engine_request, profiles


class LearningSite:
    """One engine, our account of it and the learner, under virtual time."""

    def __init__(self, profile, *, seed=1, beat_s=0.5, counts_steps=True):
        self.counts_steps = counts_steps
        self.engine = core.SimulatedEngine(profile)
        self.account = InflightLoad(Endpoint("10.0.0.1:8000"))
        self.learner = step_time_estimator.StepTimeEstimator()
        self.rng = random.Random(seed)
        self.beat_s, self.now, self.next, self.count = beat_s, 0.0, 0.0, 0
        self.steps = self.step_tokens = self.generated = 0
        self.tickets = {}
        self.errors = []
        self.scrape()

    def ask(self, prompt, output, adapters):
        self.count += 1
        name = str(self.count)
        adapter = self.rng.choice(adapters) if adapters else ""
        self.tickets[name] = self.account.open(adapter, prompt, cached_tokens=0, now=self.now)
        refused = self.engine.submit(
            engine_request.EngineRequest(name, prompt, output, adapter=adapter), self.now
        )
        assert refused is None

    def run(self, scrapes, rate, *, prompts=(50, 1500), outputs=(20, 300), adapters=()):
        """Serve random requests for so many scrapes."""
        for _ in range(scrapes):
            until = self.now + self.beat_s
            while self.now < until:
                while self.next <= self.now:
                    self.next += self.rng.expovariate(rate)
                    self.ask(self.rng.randint(*prompts), self.rng.randint(*outputs), adapters)
                done = self.engine.step(self.now, horizon=until)
                if done is None:
                    self.now = min(max(self.now, self.next), until)
                    continue
                self.now += done.duration_s
                self.steps += done.steps
                self.step_tokens += done.prefill_tokens + done.tokens
                self.generated += done.tokens
                for finished in done.finished:
                    self.tickets.pop(finished.job.id).close(self.now)
            self.scrape()
        return self.learner.rates

    def totals(self):
        if not self.counts_steps:
            computed = float(self.step_tokens - self.generated)
            return EngineCounters(computed_tokens=computed, decoded_tokens=float(self.generated))
        return EngineCounters(
            steps=float(self.steps),
            step_tokens=float(self.step_tokens),
            generated_tokens=float(self.generated),
        )

    def scrape(self):
        engine, account = self.engine, self.account
        load = Load(
            at=self.now,
            running=float(engine.running),
            waiting=float(engine.waiting),
            kv_usage=engine.kv_usage,
            adapters=frozenset(engine.slots.active),
            adapter_slots=engine.profile.max_loras,
            kv_blocks=engine.profile.blocks,
            block_tokens=engine.profile.block_tokens,
            counters=self.totals(),
        )
        account.record_scrape(
            sent=account.sent,
            written=account.kv_tokens_sent,
            waiting=load.waiting,
            at=self.now,
            now=self.now,
        )
        ran = account.take_ran() - {""}
        self.learner.update(load, ran=ran, idle=account.idle, is_alone=True)
        if engine.running:
            # What an iteration of the present batch takes, foretold and in truth.
            batch, profile = engine.running, engine.profile
            context = engine.kv_usage * profile.kv_tokens
            truth = (
                profile.base_s
                + profile.decode_s_per_seq * batch
                + profile.context_s_per_token * context
            )
            result = self.learner.rates.iteration_s(batch)
            self.errors.append(abs(result / truth - 1))


@pytest.mark.parametrize(
    ("name", "rate"), [("a100-7b-fp16", 2.0), ("l4-8b-fp8", 2.0), ("h100-8b-bf16", 12.0)]
)
def test_every_term_of_an_iteration_is_learned(name, rate):
    """After 150 scrapes of load that comes and goes each of the four is within 30 %."""
    profile = profiles.find(name)
    runtime = LearningSite(profile)
    for at in range(30):
        short, long = ((50, 300), (20, 200)), ((800, 2500), (100, 400))
        prompts, outputs = (short, long)[at % 2]
        runtime.run(5, (0.4, 1.0, 1.6)[at % 3] * rate, prompts=prompts, outputs=outputs)
    learned = runtime.learner.rates
    assert learned.step_s == pytest.approx(profile.base_s, rel=0.3)
    assert learned.prefill_s == pytest.approx(profile.prefill_s_per_token, rel=0.3)
    assert learned.context_s == pytest.approx(profile.context_s_per_token, rel=0.3)
    assert statistics.mean(runtime.errors[75:]) < 0.05


@pytest.mark.parametrize("beat_s", [0.5, 2.0])
def test_engines_that_do_not_count_iterations_are_learned_too(beat_s):
    """Tokens and requests running stand in for iterations: step and prefill within 20 %."""
    profile = profiles.find("a100-7b-fp16")
    runtime = LearningSite(profile, beat_s=beat_s, counts_steps=False)
    for at in range(30):
        runtime.run(5, (0.8, 2.0, 3.2)[at % 3], prompts=((50, 300), (800, 2500))[at % 2])
    learned = runtime.learner.rates
    assert learned.step_s == pytest.approx(profile.base_s, rel=0.2)
    assert learned.prefill_s == pytest.approx(profile.prefill_s_per_token, rel=0.2)
    assert statistics.mean(runtime.errors[75:]) < 0.1


def test_longer_contexts_show_at_once():
    """From chat to documents the time of an iteration is right within 10 % all the way."""
    runtime = LearningSite(profiles.find("a100-7b-fp16"))
    for at in range(8):
        if at % 2:
            runtime.run(30, 1.0, prompts=(2000, 3500), outputs=(200, 400))
        else:
            runtime.run(30, 5.0, prompts=(100, 300), outputs=(100, 200))
    late = sorted(runtime.errors[120:])
    assert late[int(0.9 * len(late))] < 0.1


def test_a_throttled_engine_is_noticed():
    """Half the speed: the time of an iteration is within 10 % again after 80 scrapes."""
    profile = profiles.find("l4-8b-fp8")
    runtime = LearningSite(profile)
    runtime.run(100, 2.0)
    runtime.engine.profile = profile.faster(0.5)
    runtime.run(10, 1.0)
    assert statistics.mean(runtime.errors[-5:]) > 0.2
    runtime.run(70, 1.0)
    assert statistics.mean(runtime.errors[-20:]) < 0.1
    assert runtime.learner.rates.prefill_s == pytest.approx(
        2 * profile.prefill_s_per_token, rel=0.2
    )


def test_what_an_idle_engine_has_shown_is_forgotten_and_learned_again():
    """Without a jump, its step times become those of the pool; the first work after that counts."""
    usual = profiles.find("l4-8b-fp8")
    runtime = LearningSite(usual.faster(0.25))
    pool = StepTimeModel(
        step_s=usual.base_s,
        prefill_s=usual.prefill_s_per_token,
        decode_s=usual.decode_s_per_seq,
        context_s=usual.context_s_per_token,
        evidence=4.0,
    )
    runtime.learner.set_prior(pool)
    runtime.run(100, 0.2)
    times = []
    for _ in range(400):
        runtime.next = runtime.now + 9.0  # nothing comes
        runtime.run(1, 1.0)
        times.append(runtime.learner.pooled_rates.step_s)
    idle = times[60:]  # what was open has ended
    assert idle[0] > 2.0 * pool.step_s
    assert idle == sorted(idle, reverse=True)
    assert max(earlier - later for earlier, later in itertools.pairwise(idle)) < 0.1 * pool.step_s
    assert idle[-1] == pytest.approx(pool.step_s, rel=0.1)
    runtime.engine.profile = usual
    runtime.next = runtime.now
    runtime.run(20, 0.5)
    assert runtime.learner.pooled_rates.step_s == pytest.approx(pool.step_s, rel=0.15)


@pytest.mark.parametrize("load_s", [0.1, 0.4, 1.0])
def test_adapter_loads_show_in_the_time_of_steps(load_s):
    """Eight adapters over four slots: the load time is within 25 % after 100 scrapes."""
    profile = msgspec.structs.replace(profiles.find("l4-8b-fp8"), lora_load_s=load_s)
    runtime = LearningSite(profile)
    names = [f"lora-{at}" for at in range(8)]
    learned = runtime.run(100, 0.5, adapters=names)
    assert learned.adapter_load_s == pytest.approx(load_s, rel=0.25)
    assert learned.step_s == pytest.approx(profile.base_s, rel=0.25)
    assert learned.prefill_s == pytest.approx(profile.prefill_s_per_token, rel=0.25)


def test_slower_adapter_loads_are_noticed():
    """A tenth of a second, then a whole one: within 25 % after 120 scrapes."""
    profile = msgspec.structs.replace(profiles.find("l4-8b-fp8"), lora_load_s=0.1)
    runtime = LearningSite(profile)
    names = [f"lora-{at}" for at in range(8)]
    runtime.run(100, 0.5, adapters=names)
    runtime.engine.profile = msgspec.structs.replace(profile, lora_load_s=1.0)
    learned = runtime.run(120, 0.3, adapters=names)
    assert learned.adapter_load_s == pytest.approx(1.0, rel=0.25)


def test_without_loads_their_time_is_the_prior():
    """An engine whose adapters all stay resident says nothing of loading."""
    runtime = LearningSite(profiles.find("l4-8b-fp8"))
    assert runtime.run(50, 1.0).adapter_load_s == 0.5


def test_idle_time_is_not_counted_as_slow_steps():
    """Short requests with nothing in between: time in which nothing ran is not counted."""
    profile = profiles.find("l4-8b-fp8")
    runtime = LearningSite(profile, beat_s=2.0)
    learned = runtime.run(200, 0.8, prompts=(50, 200), outputs=(10, 60))
    assert learned.step_s == pytest.approx(profile.base_s, rel=0.25)


@pytest.mark.parametrize("result", [False, True])
def test_a_common_prefix_is_read_by_every_sequence(result):
    """4,000 tokens in common are in the cache once: only who knows that finds what a sequence costs."""
    profile = profiles.find("l4-8b-fp8")
    estimator, rng = step_time_estimator.StepTimeEstimator(), random.Random(1)
    at, steps, computed, generated = 0.0, 0, 0.0, 0.0
    per_sequence = profile.decode_s_per_seq + profile.context_s_per_token * 4200
    for _ in range(100):
        batch = rng.randint(5, 60)
        for _ in range(2):  # a window begins and ends with the same batch
            took, prompts = 10 * (profile.base_s + per_sequence * batch), rng.randint(0, 3000)
            at += took + prompts * profile.prefill_s_per_token
            steps, computed, generated = steps + 10, computed + prompts, generated + 10.0 * batch
            load = Load(
                at=at,
                running=float(batch),
                kv_usage=(4000 + 200 * batch) / profile.kv_tokens,
                kv_blocks=profile.kv_tokens // 16,
                block_tokens=16,
                counters=EngineCounters(
                    steps=float(steps),
                    step_tokens=computed + generated,
                    generated_tokens=generated,
                ),
            )
            estimator.update(load, shared=4000.0 * (batch - 1) * result)
    learned = estimator.rates
    values = learned.iteration_s(1) - learned.step_s
    if result:
        assert values == pytest.approx(per_sequence, rel=0.15)
        assert learned.step_s == pytest.approx(profile.base_s, rel=0.15)
    else:
        assert values < 0.7 * per_sequence


@pytest.mark.parametrize("speed", [0.2, 0.4, 3.0])
def test_an_engine_of_another_speed_than_its_pool_is_learned(speed):
    """Its iterations are right within 15 % on average after 20 scrapes under light load."""
    usual = profiles.find("a100-7b-fp16")
    runtime = LearningSite(usual.faster(speed))
    runtime.learner.set_prior(
        StepTimeModel(
            step_s=usual.base_s,
            prefill_s=usual.prefill_s_per_token,
            decode_s=usual.decode_s_per_seq,
            context_s=usual.context_s_per_token,
            evidence=4.0,
        )
    )
    runtime.run(40, 0.5 * speed)
    assert statistics.mean(runtime.errors[20:]) < 0.15
