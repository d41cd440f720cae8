"""Matched tokens by what engines publish, beside what was routed."""

from array import array

import pytest

from extproc.decision import Decision
from extproc.endpoint import Load
from extproc.prefix_cache import blocks, cache_model, kv_events
from extproc.prefix_cache.exact_prefixes import ExactPrefixes
from extproc.prefix_cache.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from extproc.request import HttpRequest
from tests.support.pool_fixture import PoolFixture, load

SIZE = 16
A, B = "10.0.0.1:8000", "10.0.0.2:8000"
TOKENS = array("I", range(512))
KEYS = kv_events.block_keys(kv_events.root_key(""), TOKENS.tobytes(), SIZE)


def request(text):
    body = b'{"model": "m", "prompt": "%b"}' % text
    return HttpRequest({":path": "/v1/completions", ":method": "POST"}, body)


class PublishingPool:
    """Two endpoints whose engines publish, and a prompt of 2,048 bytes: 512 tokens, 32 blocks."""

    def __init__(self):
        self.exact = ExactPrefixes(blocks.DEFAULT, max_blocks=10_000)
        self.fixture = PoolFixture({A: load(0, 0.0), B: load(0, 0.0)}, exact=self.exact)
        self.engines = {
            member.endpoint.address: self.exact.open(
                (member.endpoint.address, member.endpoint.incarnation), 0
            )
            for member in self.fixture.store.pool.members
        }
        for engine in self.engines.values():
            self.exact.index.set_live(engine, is_live=True)
            self.exact.index.set_complete(engine)
        self.text = b"".join(b"%08d" % number for number in range(256))
        self.raw = request(self.text)
        self.chain = self.fixture.director.preparer.prepare(self.raw).chain

    def store(self, address, count):
        """Store the first blocks of the prompt on an engine."""
        event = BlockStored(list(range(count)), None, TOKENS[: count * SIZE].tobytes(), SIZE)
        self.exact.index.apply(self.engines[address], event)

    def map_prompt(self):
        self.exact.map_prompt(self.chain, TOKENS, adapter="", prompt_bytes=len(self.text))

    def decide(self):
        outcome = self.fixture.decide(self.raw)
        assert isinstance(outcome, Decision)
        return outcome

    def matched(self):
        return {c.endpoint.address: c.matched_tokens for c in self.decide().candidates}


@pytest.fixture
def pool():
    return PublishingPool()


def test_blocks_in_the_memory_of_the_host_count_by_their_weight(pool):
    """Behind those on the device; the more an engine takes to load them, the less."""
    pool.store(A, 20)
    pool.store(B, 20)
    pool.map_prompt()
    index = pool.exact.index
    index.apply(pool.engines[A], BlockStored(list(range(16)), None, b"", 0, medium="CPU"))
    index.apply(pool.engines[A], BlockRemoved(list(range(10, 20))))
    assert pool.matched() == {A: 160, B: 320}
    index.set_lower_weight(pool.engines[A], 0, 0.5)
    assert pool.matched() == {A: 160 + 48, B: 320}
    assert pool.decide().match_source == "events"
    index.set_lower_weight(pool.engines[A], 0, 1.0)
    assert pool.matched() == {A: 256, B: 320}


def test_events_say_what_is_cached(pool):
    """Once a prompt is mapped, its blocks count where engines hold them, to the block."""
    pool.store(A, 20)
    assert pool.matched() == {A: 0, B: 0}
    assert pool.decide().match_source == "estimate"
    pool.map_prompt()
    assert pool.matched() == {A: 320, B: 0}
    decision = pool.decide()
    assert decision.endpoints[0].address == A
    assert decision.match_source == "events"
    pool.exact.index.apply(pool.engines[A], BlockRemoved(list(range(5, 20))))
    assert pool.matched() == {A: 80, B: 0}
    pool.exact.index.apply(pool.engines[A], AllBlocksCleared())
    assert pool.matched() == {A: 0, B: 0}


def test_what_was_evicted_last_counts_by_its_chance():
    """A prompt that no endpoint holds as a whole any more goes where it was."""
    fixture = PoolFixture({A: load(0, 0.0), B: load(0, 0.0)})
    raw = request(b"".join(b"%08d" % number for number in range(256)))
    first = fixture.decide(raw)
    fixture.director.reserve(first, fixture.now)
    fixture.index.resize(cache_model.index_key(first.endpoints[0]), 4)
    matched = {c.endpoint.address: c.matched_tokens for c in fixture.decide(raw).candidates}
    assert matched == {A: 0, B: 0} | {first.endpoints[0].address: 256 + 128}


def test_the_same_prompt_is_never_cached_as_a_whole(pool):
    """Engines compute the last token again."""
    pool.store(A, 32)
    pool.map_prompt()
    assert pool.matched()[A] == 31 * SIZE


def test_a_prompt_that_was_just_sent_is_believed_until_its_events_come(pool):
    """A request that follows while it waits finds it there; once it is over the events count alone."""
    pool.store(B, 1)
    pool.map_prompt()
    decision = pool.decide()
    reservation = pool.fixture.director.reserve(decision, pool.fixture.now)
    sent = decision.endpoints[0].address
    believed = pool.matched()[sent]
    assert believed > 400
    assert pool.decide().match_source == "estimate"
    pool.fixture.now += 30.0
    assert pool.matched()[sent] == believed
    pool.fixture.director.release(reservation, pool.fixture.now)
    assert pool.matched() == {A: 0, B: 16}


def copy_to_host(pool, weight):
    """Let the memory of a host hold a block of another prompt, and spare so much of computing it."""
    index, engine = pool.exact.index, pool.engines[A]
    index.apply(engine, BlockStored([99], None, TOKENS[-SIZE:].tobytes(), SIZE, medium="CPU"))
    index.set_lower_weight(engine, 0, weight)


@pytest.mark.parametrize(
    ("queued", "free", "spared", "expected"),
    [
        (0, 0, 0.0, 320),
        (1_000, 1_600, 0.0, 320),
        (16, 0, 0.0, 200),
        (1_000_000, 0, 0.0, 80),
        (1_000_000, 0, 0.5, 200),
        (1_000_000, 0, 1.0, 320),
    ],
)
def test_what_prompts_ahead_will_evict_does_not_count(pool, queued, free, spared, expected):
    """As far as the estimate has given it up, and no copy on the host spares it."""
    pool.store(A, 20)
    if spared:
        copy_to_host(pool, spared)
    pool.map_prompt()
    member = pool.fixture.store.pool.members[0]
    sent = member.account.open("", 1, cached_tokens=0, now=-9.0)
    pool.exact.record_sent(pool.chain, sent, -9.0)
    sent.close(0.0)
    size = 20 + free // SIZE
    page = Load(at=pool.fixture.now, waiting=0, kv_usage=0.0, kv_blocks=size, block_tokens=SIZE)
    pool.fixture.store.observe(
        pool.fixture.store.begin_scrape(member.endpoint), page, pool.fixture.now
    )
    # A quarter of the prompt is left of the estimate.
    key = (A, member.endpoint.incarnation)
    pool.fixture.index.record(key, pool.chain[: len(pool.chain) // 4])
    account = pool.fixture.store.pool.members[0].account
    if queued:
        account.open("", queued, cached_tokens=0, now=pool.fixture.now)
    assert pool.matched()[A] == pytest.approx(expected, abs=8)
    assert pool.decide().match_source == ("events" if expected == 320 else "both")


@pytest.mark.parametrize(
    ("waiting", "context_tokens", "is_shared", "spared", "expected"),
    [
        (0, 100_000, False, 0.0, 320),
        (2, 80, False, 0.0, 320),
        (4, 100_000, False, 0.0, 0),
        (4, 100_000, True, 0.0, 256),
        (4, 100_000, False, 0.75, 240),
    ],
)
def test_idle_blocks_do_not_count_where_requests_wait_for_memory(
    pool, waiting, context_tokens, is_shared, spared, expected
):
    """They are evicted before it begins; what open requests have in common with it stays."""
    pool.store(A, 20)
    if spared:
        copy_to_host(pool, spared)
    pool.map_prompt()
    member = pool.fixture.store.pool.members[0]
    account = member.account
    sent = account.open("", 1, cached_tokens=0, now=-9.0)
    pool.exact.record_sent(pool.chain, sent, -9.0)
    sent.close(0.0)
    # An open request, on an engine whose cache has 320 tokens, half of which are in use.
    blocks = [1, *pool.chain[1:]]
    if is_shared:
        blocks = [*pool.chain[:4], 1, 2, 3, 4]
    tokens = [0, *range(context_tokens - len(blocks) + 1, context_tokens + 1)]
    opened = account.open("", context_tokens, cached_tokens=context_tokens, now=pool.fixture.now)
    account.track_context(opened, blocks, tokens, growth=0.0)
    page = Load(at=pool.fixture.now, waiting=waiting, kv_usage=0.5, kv_blocks=20, block_tokens=SIZE)
    pool.fixture.store.observe(
        pool.fixture.store.begin_scrape(member.endpoint), page, pool.fixture.now
    )
    pool.fixture.index.record((A, member.endpoint.incarnation), pool.chain)
    assert pool.matched()[A] == pytest.approx(expected, abs=2)


def test_the_estimate_is_corrected_by_its_own_predictions(pool):
    """Hits that events predict are no error of the estimate."""
    pool.store(A, 20)
    pool.map_prompt()
    decision = pool.decide()
    assert (decision.matched_tokens, decision.match_source) == (320, "events")
    endpoint = decision.endpoints[0]
    now = pool.fixture.now
    reservation = pool.fixture.director.reserve(decision, now)
    calibration = pool.fixture.cache_model.state_of(endpoint).calibration
    calibration.observe_counters(512.0, 320.0)
    assert (calibration.predicted, calibration.observed) == (0.0, 320.0)
    reserved = pool.fixture.director.reserve(decision, now)
    pool.fixture.director.unreserve(reserved, now)
    calibration.observe_counters(512.0, 0.0)
    assert calibration.predicted == 0.0
    pool.fixture.director.release(reservation, now)


def test_what_is_partly_known_counts_beside_the_belief(pool):
    """The larger of both counts."""
    pool.store(A, 4)
    pool.map_prompt()
    for engine in pool.engines.values():
        pool.exact.index.wipe(engine, is_complete=False)
    pool.store(A, 4)
    assert pool.matched() == {A: 64, B: 0}
    assert pool.decide().match_source == "both"
    key = (A, pool.fixture.store.pool.members[0].endpoint.incarnation)
    pool.fixture.index.record(key, pool.chain)
    assert pool.matched()[A] == 512
    assert pool.decide().match_source == "estimate"


def test_a_lost_subscription_falls_back_to_the_belief(pool):
    """At once, and back."""
    pool.store(A, 4)
    pool.map_prompt()
    key = (A, pool.fixture.store.pool.members[0].endpoint.incarnation)
    pool.fixture.index.record(key, pool.chain)
    assert pool.matched()[A] == 64
    pool.exact.index.set_live(pool.engines[A], is_live=False)
    assert pool.matched()[A] == 512
    pool.exact.index.set_live(pool.engines[A], is_live=True)
    assert pool.matched()[A] == 64


def test_ranks_of_an_endpoint_count_as_their_mean(pool):
    """Any of them may serve the request."""
    key = (A, pool.fixture.store.pool.members[0].endpoint.incarnation)
    second = pool.exact.open(key, 1)
    pool.exact.index.set_live(second, is_live=True)
    pool.exact.index.set_complete(second)
    pool.store(A, 8)
    pool.map_prompt()
    assert pool.matched()[A] == 64


def test_reported_usage_is_counted_by_source(pool):
    """Reported hits are counted beside the predicted ones."""
    pool.store(A, 20)
    pool.map_prompt()
    decision = pool.decide()
    pool.fixture.director.on_usage(
        decision, {"prompt": 512, "cached": 304}, served=decision.endpoints[0]
    )
    assert pool.exact.usage_tokens == {("events", "predicted"): 320, ("events", "observed"): 304}
