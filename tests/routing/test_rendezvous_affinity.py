"""Endpoints on which independent pickers expect each other's conversations."""

import math
from collections import Counter
from random import Random

import mmh3
import msgspec
import pytest

from extproc.endpoint import Endpoint, Load, StepTimeModel
from extproc.pool import candidate_builder
from extproc.pool.store import PoolStore
from extproc.request import HttpRequest, hash_affinity_key
from extproc.routing import rendezvous_affinity
from extproc.routing.rendezvous_affinity import RendezvousAffinity
from tests.support.pool_fixture import PoolFixture

#: Hash of the key of a conversation.
SEED = hash_affinity_key("a")


def members(count: int, *, slow: int = 0, hits: float | None = 1.0):
    """Some members, the last of them half as fast as the others; all found prompts in their caches."""
    store = PoolStore(on_gone=lambda _: None)
    store.set_endpoints([Endpoint(f"10.0.0.{n}:8000") for n in range(count)], 0.0)
    usual = StepTimeModel()
    half = msgspec.structs.replace(
        usual,
        step_s=2 * usual.step_s,
        decode_s=2 * usual.decode_s,
        context_s=2 * usual.context_s,
    )
    return [
        msgspec.structs.replace(
            member,
            rates=half if at >= count - slow else usual,
            load=Load(at=0.0, prefix_queries=9.0, prefix_hits=hits),
        )
        for at, member in enumerate(store.pool.members)
    ]


def endpoint_of(seed, store):
    """Index of the member that a conversation belongs to."""
    return RendezvousAffinity().find_endpoint(seed, store)


def expected_hits(seed, tokens, store, **arguments):
    """Hits to expect of a picker that sees these members for the first time."""
    return rendezvous_affinity.with_expected_hits(
        seed, tokens, store, affinity=RendezvousAffinity(), **arguments
    )


def test_without_others_or_a_key_no_hits_are_expected():
    """If all requests are ours, or none goes on from another, or a request has no key: the index counts."""
    known, store = [0, 0, 0], members(3)
    for seed, share in ((SEED, 0.0), (None, 0.5)):
        assert expected_hits(seed, 1000, store, matched=known, share=share) == (
            known,
            None,
        )


def test_hits_are_expected_at_the_rendezvous_endpoint():
    """Tokens that others sent of a prompt are believed at its affinity endpoint, and no more elsewhere."""
    store = members(4)
    at = endpoint_of(SEED, store)
    for share, tokens in ((0.1, 190), (0.5, 550), (1.0, 950)):
        expected = expected_hits(SEED, 1000, store, matched=[100] * 4, share=share)
        assert expected == ([tokens if n == at else 100 for n in range(4)], at)


def test_half_of_a_surrogate_pair_is_a_key():
    """A session that no Unicode text can have is hashed: it ends no process."""
    store = members(4)
    assert 0 <= endpoint_of(hash_affinity_key("a\ud83d"), store) < 4


@pytest.mark.parametrize("hits", [None, 0.0])
def test_affinity_needs_evidence_of_hits(hits):
    """An engine without prefix hits, or without their counter, gets no expected hits."""
    store, known = members(4, hits=hits), [0] * 4
    assert expected_hits(SEED, 1000, store, matched=known, share=0.5) == (
        known,
        None,
    )


def test_a_new_prompt_has_no_affinity():
    """Beside others, and before any engine found anything, no prompt is believed cached anywhere."""
    page = Load(
        at=0.0, engine="vllm", running=4.0, waiting=2.0, prefix_queries=9.0, prefix_hits=0.0
    )
    pool_fixture = PoolFixture({f"10.0.0.{n}:8000": page for n in range(4)}, profile="adaptive")
    body = b'{"model": "m", "prompt": "%b", "prompt_cache_key": "a"}' % (b"and then " * 40_000)
    chosen = pool_fixture.director.route(
        HttpRequest({":path": "/v1/completions"}, body), pool_fixture.now
    )
    assert pool_fixture.store.foreign_traffic.share > rendezvous_affinity.MIN_PEER_SHARE
    assert chosen.matched_tokens == 0
    assert len({round(cost, 6) for cost in chosen.cost.costs}) == 1


def test_a_widely_cached_prompt_has_no_affinity():
    """If two endpoints hold a prompt, or its affinity endpoint does, nothing is added."""
    store = members(4)
    spread = [900, 900, 0, 0]
    assert expected_hits(SEED, 1000, store, matched=spread, share=0.5) == (
        spread,
        None,
    )
    at = endpoint_of(SEED, store)
    queued = [960 if n == at else 0 for n in range(4)]
    assert expected_hits(SEED, 1000, store, matched=queued, share=0.5) == (
        queued,
        at,
    )


@pytest.mark.parametrize("beside", [False, True])
def test_a_conversation_is_local_at_its_affinity_endpoint(monkeypatch, beside):
    """Beside others not where our own last turn of it went: caches are left to those at home."""
    page = Load(at=100.0, prefix_queries=9.0, prefix_hits=9.0)
    pool_fixture = PoolFixture({f"10.0.0.{n}:8000": page for n in range(4)}, profile="adaptive")
    body = b'{"model": "m", "prompt": "%b", "prompt_cache_key": "a"}' % (b"and then " * 100)
    raw = HttpRequest(headers={":path": "/v1/completions"}, body=body)
    chosen = pool_fixture.director.route(raw, pool_fixture.now)
    assert chosen.request.session == "a"
    store = pool_fixture.store.pool.members
    at = endpoint_of(SEED, store)
    went = (at + 1) % 4
    there = msgspec.structs.replace(chosen, endpoints=(store[went].endpoint,))
    pool_fixture.director.reserve(there, pool_fixture.now)
    if beside:
        pool_fixture.store.foreign_traffic.update(1.0, 3.0)
    built = []

    def keep(*arguments, look=candidate_builder.build_candidates, **more):
        built.append(look(*arguments, **more))
        return built[-1]

    monkeypatch.setattr(candidate_builder, "build_candidates", keep)
    pool_fixture.director.route(raw, pool_fixture.now)
    ((*candidates,),) = built
    assert [n for n, c in enumerate(candidates) if c.conversation_local] == [at if beside else went]


def test_affinity_is_weighted_by_speed_and_stable():
    """Engines half as fast get half as many homes; one that leaves moves only its own."""
    store = members(4, slow=2)
    seeds = [hash_affinity_key(f"conversation {n}") for n in range(4000)]
    before = [endpoint_of(seed, store) for seed in seeds]
    counts = Counter(before)
    fast, slow = counts[0] + counts[1], counts[2] + counts[3]
    assert 1.8 < fast / slow < 2.2
    after = [endpoint_of(seed, store[:3]) for seed in seeds]
    assert all(new == old for old, new in zip(before, after, strict=True) if old != 3)


@pytest.mark.parametrize("count", [1, 5, 16, 17, 200])
def test_the_shortest_distance_over_speed_wins(count):
    """As the formula says, of the 16 endpoints that are nearest by their hash alone."""
    rng = Random(1)
    store = [
        msgspec.structs.replace(
            member, rates=StepTimeModel(step_s=0.004 * 2.0 ** rng.uniform(0, 4))
        )
        for member in members(count)
    ]

    def distance(at, hashed):
        speed = round(2.0 * math.log2(store[at].rates.iteration_s(32.0)))
        return -math.log((hashed + 1) / 4294967297.0) * 2.0 ** (0.5 * speed)

    for seed in range(100):
        hashes = [mmh3.hash(member.endpoint.address, seed, False) for member in store]
        nearest = sorted(range(count), key=hashes.__getitem__, reverse=True)[:16]
        expected = min(nearest, key=lambda at: distance(at, hashes[at]))
        assert endpoint_of(seed, store) == expected


def test_a_picker_that_remembers_endpoints_agrees_with_one_that_does_not():
    """Endpoints come, go and change their speed: what was found before is not used then."""
    rng, affinity = Random(1), RendezvousAffinity()
    store = members(20)
    for _ in range(300):
        change, at = rng.randrange(4), rng.randrange(len(store))
        if change == 0:  # speeds differ by more, or less, than what is rounded away
            rates = StepTimeModel(step_s=0.015 * 2.0 ** rng.uniform(-1, 1))
            replaced = msgspec.structs.replace(store[at], rates=rates)
            store = [*store[:at], replaced, *store[at + 1 :]]
        elif change == 1 and len(store) > 1:
            store = [*store[:at], *store[at + 1 :]]
        elif change == 2:
            new = Endpoint(f"10.0.{rng.randrange(9)}.{rng.randrange(250)}:8000")
            store = [*store[:at], msgspec.structs.replace(store[at], endpoint=new), *store[at:]]
        for _ in range(4):
            seed = rng.randrange(8)
            assert affinity.find_endpoint(seed, store) == endpoint_of(seed, store)


def test_the_conversations_that_are_remembered_are_bounded(monkeypatch):
    """Beyond the bound, endpoints are found anew."""
    monkeypatch.setattr(rendezvous_affinity, "_MAX_CONVERSATIONS", 8)
    affinity, store = RendezvousAffinity(), members(4)
    for seed in range(100):
        assert affinity.find_endpoint(seed, store) == endpoint_of(seed, store)
        assert len(affinity._endpoints) <= 8
