"""The belief held against simulated engines, under virtual time."""

from __future__ import annotations

import random

import msgspec
import pytest

from extproc.config import factory
from extproc.config.pool_sections import SchedulingSection
from extproc.config.settings import Settings
from extproc.decision import Decision
from extproc.endpoint import Endpoint, EngineCounters, Load
from extproc.prefix_cache import blocks, cache_model
from extproc.prefix_cache.index import PrefixIndex
from extproc.request import InferenceRequest
from extproc.simulator import core, engine_request, profiles

TOKENS = blocks.DEFAULT.tokens
SPOT = Endpoint("10.0.0.1:8000", incarnation=1)


class ConversationsFixture:
    """Conversations that come back to a few engines, one request at a time."""

    def __init__(self, *, engines=2, conversations=60, stated=1.0, correcting=True, seed=1):
        profile = msgspec.structs.replace(profiles.find("l4-8b-fp8"), kv_tokens=32_000)
        self.stated_blocks = int(profile.blocks * stated)
        self.engines = [core.SimulatedEngine(profile) for _ in range(engines)]
        settings = Settings(seed=seed, scheduling=SchedulingSection(strategy="adaptive"))
        self.parts = factory.build(settings)
        self.parts.store.set_endpoints([Endpoint(f"10.0.0.{i}:8000") for i in range(engines)], 0.0)
        self.correcting = correcting
        self.rng = random.Random(seed)
        self.lengths = dict.fromkeys(range(conversations), 0)
        self.newest = conversations
        self.now = 1.0
        self.requests = []
        self.scrape()

    def load(self, engine):
        return Load(
            at=self.now,
            running=float(engine.running),
            waiting=float(engine.waiting),
            kv_usage=engine.kv_usage,
            kv_blocks=self.stated_blocks,
            block_tokens=engine.profile.block_tokens,
            prefix_queries=float(engine.prefix_queries),
            prefix_hits=float(engine.prefix_hits),
        )

    def scrape(self):
        for member, engine in zip(self.parts.store.pool.members, self.engines, strict=True):
            mark = self.parts.store.begin_scrape(member.endpoint)
            self.parts.store.observe(mark, self.load(engine), self.now)
            if not self.correcting:
                known = self.parts.cache_model.state_of(member.endpoint)
                known.calibration.factor = 1.0

    def turn(self):
        """One conversation goes on by a turn."""
        name = self.rng.choice(list(self.lengths))
        tokens = self.lengths.pop(name) + self.rng.randint(100, 300)
        if tokens > 2000:
            self.newest += 1
            name, tokens = self.newest, 200
        self.lengths[name] = tokens
        hashes = range(name << 20, (name << 20) + tokens // 16)
        chain = []
        for cut in TOKENS[1:]:
            if cut > tokens:
                break
            chain.append((name << 20) + cut // 16)
        request = InferenceRequest(api="chat", model="m", prompt_tokens=tokens, session=str(name))
        decision = self.parts.director.scheduler.schedule(
            request, self.now, chain=chain, headers={}
        )
        assert isinstance(decision, Decision)
        reservation = self.parts.director.reserve(decision, self.now)
        at = self.parts.store.pool.positions[decision.endpoints[0].address]
        engine = self.engines[at]
        assert (
            engine.submit(
                engine_request.EngineRequest(str(len(self.requests)), tokens, 8, hashes), self.now
            )
            is None
        )
        while True:
            done = engine.step(self.now)
            self.now += done.duration_s
            if done.finished:
                break
        self.parts.director.release(reservation, self.now)
        cached = done.finished[0].cached_tokens
        self.requests.append((tokens, min(decision.matched_tokens, tokens), cached))
        self.scrape()

    def ratios(self, last):
        """Predicted and observed hit ratio of the last so many requests."""
        requested = self.requests[-last:]
        total = sum(tokens for tokens, _, _ in requested)
        return sum(p for _, p, _ in requested) / total, sum(c for _, _, c in requested) / total


@pytest.mark.parametrize("seed", range(3))
def test_a_silently_halved_cache_is_detected(seed):
    """Bar 6: within 5 points again 200 requests after the engines lost half their cache."""
    traffic = ConversationsFixture(seed=seed)
    for _ in range(500):
        traffic.turn()
    predicted, observed = traffic.ratios(200)
    assert predicted == pytest.approx(observed, abs=0.05)
    for engine in traffic.engines:
        engine.pool.shrink(engine.pool.size // 2)
    for _ in range(200):
        traffic.turn()
    after = []
    for _ in range(100):
        traffic.turn()
        after.append(traffic.ratios(50))
    assert max(abs(p - o) for p, o in after) < 0.12
    predicted, observed = traffic.ratios(100)
    assert predicted == pytest.approx(observed, abs=0.05)
    assert observed < 0.8


def test_without_calibration_the_prediction_stays_wrong():
    """The same town without correction predicts what is not there: the test above can fail."""
    traffic = ConversationsFixture(correcting=False)
    for _ in range(500):
        traffic.turn()
    for engine in traffic.engines:
        engine.pool.shrink(engine.pool.size // 2)
    for _ in range(300):
        traffic.turn()
    predicted, observed = traffic.ratios(100)
    assert predicted - observed > 0.07


def observed(traffic, endpoint, *, restarted=False, **after):
    traffic.observe_load(
        endpoint,
        before=Load(),
        after=Load(at=1.0, **after),
        restarted=restarted,
    )


def test_a_restarted_engine_holds_nothing():
    """Blocks are forgotten at once, and the slot stays good."""
    index = PrefixIndex(100)
    traffic = cache_model.CacheModel(index, TOKENS, most_blocks=100)
    slot = index.slot(cache_model.index_key(SPOT))
    index.record(cache_model.index_key(SPOT), [1, 2, 3])
    observed(traffic, SPOT)
    assert index.match([1, 2, 3])[slot] == 3
    observed(traffic, SPOT, restarted=True)
    assert index.match([1, 2, 3])[slot] == 0
    assert index.slot(cache_model.index_key(SPOT)) == slot
    assert index.capacity(cache_model.index_key(SPOT)) == 100


def test_capacity_follows_the_engines_own():
    """6400 KV tokens are 100 blocks of 64 tokens."""
    index = PrefixIndex(1000)
    traffic = cache_model.CacheModel(index, TOKENS, most_blocks=1000)
    observed(traffic, SPOT, kv_blocks=400, block_tokens=16)
    assert index.capacity(cache_model.index_key(SPOT)) == 100
    assert traffic.state_of(SPOT).capacity_tokens == 6400


def test_ends_of_prompts_and_answers_take_room():
    """Of prompts of 600 tokens, 576 are named blocks; with answers of 200 tokens, seven of them fit."""
    index = PrefixIndex(1000)
    traffic = cache_model.CacheModel(index, TOKENS, most_blocks=1000)
    observed(traffic, SPOT, kv_blocks=400, block_tokens=16)
    chains = [[100 * number + block for block in range(9)] for number in range(1, 12)]
    for chain in chains:
        traffic.record_sent(SPOT, chain, prompt_tokens=600, cached_tokens=0, answer_tokens=200.0)
    slot = index.slot(cache_model.index_key(SPOT))
    held = [index.match(chain)[slot] for chain in chains]
    assert held == [0, 0, 0, 9, 9, 9, 9, 9, 9, 9, 9]


def test_capacity_counts_what_is_loaded_from_the_host():
    """An engine that loads what it evicted holds more than its device, and its page shows it."""
    capacities = []
    for reload_s in (None, 0.1):
        traffic = cache_model.CacheModel(PrefixIndex(10_000), TOKENS, most_blocks=10_000)
        before = Load()
        for turn in range(1, 400):
            for _ in range(8):
                traffic.record_sent(SPOT, [1] * 9, prompt_tokens=600, cached_tokens=0)
            after = Load(
                kv_blocks=400,
                block_tokens=16,
                prefix_queries=4_800.0 * turn,
                prefix_hits=0.0,
                counters=EngineCounters(reloaded_tokens=2_400.0 * turn, reload_s=reload_s),
            )
            traffic.observe_load(SPOT, before=before, after=after, restarted=False)
            before = after
        capacities.append(traffic.state_of(SPOT).calibration.factor)
    assert capacities == [1.0, 16.0]


def test_a_new_model_predicts_the_nominal_capacity():
    """Before the first request, and after one long prompt, capacity is not near nothing."""
    index = PrefixIndex(1000)
    traffic = cache_model.CacheModel(index, TOKENS, most_blocks=1000)
    observed(traffic, SPOT, kv_blocks=400, block_tokens=16)
    assert index.capacity(cache_model.index_key(SPOT)) == 100
    traffic.record_sent(SPOT, [1] * 9, prompt_tokens=600, cached_tokens=0)
    observed(traffic, SPOT, kv_blocks=400, block_tokens=16)
    assert index.capacity(cache_model.index_key(SPOT)) == 100


def test_memory_is_bounded_whatever_engines_hold():
    """The configured number of blocks is the most."""
    index = PrefixIndex(50)
    traffic = cache_model.CacheModel(index, TOKENS, most_blocks=50)
    observed(traffic, SPOT, kv_blocks=10**6, block_tokens=16)
    assert index.capacity(cache_model.index_key(SPOT)) == 50


def test_a_removed_endpoint_is_forgotten():
    """Neither blocks nor calibration stay."""
    index = PrefixIndex(50)
    traffic = cache_model.CacheModel(index, TOKENS, most_blocks=50)
    traffic.record_sent(SPOT, [1], prompt_tokens=64, cached_tokens=0)
    index.record(cache_model.index_key(SPOT), [1])
    first = traffic.state_of(SPOT)
    traffic.forget(SPOT)
    assert index.keys() == ()
    assert traffic.state_of(SPOT) is not first
