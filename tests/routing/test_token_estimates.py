"""Bytes become tokens at the model's learned ratio; hashes stay what they are."""

from __future__ import annotations

import msgspec
import pytest

from extproc.endpoint import EngineCounters, Load
from extproc.request import HttpRequest
from tests.support.pool_fixture import PoolFixture

SPOT = "10.0.0.1:8000"


def ask(house, text="", *, ids=None, model="m"):
    prompt = text if ids is None else ids
    body = msgspec.json.encode({"model": model, "prompt": prompt})
    raw = HttpRequest({":method": "POST", ":path": "/v1/completions"}, body)
    return house.decide(raw)


def answered(house, decision, tokens):
    reservation = house.director.reserve(decision, house.now)
    used = {"prompt": tokens, "completion": 1}
    house.director.on_usage(decision, used, served=reservation.endpoint)
    house.director.release(reservation, house.now)


def test_prompts_are_counted_in_tokens_of_the_model():
    """4,000 bytes are 1,000 tokens until eight answers say that they are 2,000."""
    pool_fixture = PoolFixture({SPOT: None})
    first = ask(pool_fixture, "x" * 4000)
    assert first.request.prompt_tokens == 1000
    for _ in range(8):
        answered(pool_fixture, ask(pool_fixture, "x" * 4000), 2000)
    assert ask(pool_fixture, "y" * 4000).request.prompt_tokens == 2000


def test_cached_tokens_use_the_ratio_of_the_model():
    """Blocks are cut in bytes: the same chain, 15 blocks of 256 bytes, is twice the tokens."""
    pool_fixture = PoolFixture({SPOT: None})
    before = ask(pool_fixture, "x" * 4000)
    for _ in range(8):
        answered(pool_fixture, ask(pool_fixture, "x" * 4000), 2000)
    after = ask(pool_fixture, "x" * 4000)
    assert after.block_hashes == before.block_hashes
    assert before.matched_tokens == 0
    assert after.matched_tokens == 15 * 256 / 2


def test_tokenized_prompts_are_exact():
    """Whatever was learned of text, a list of a thousand ids is a thousand tokens."""
    pool_fixture = PoolFixture({SPOT: None})
    for _ in range(8):
        answered(pool_fixture, ask(pool_fixture, "x" * 4000), 2000)
    first = ask(pool_fixture, ids=list(range(1000)))
    assert first.request.prompt_tokens == 1000
    answered(pool_fixture, first, 1000)
    again = ask(pool_fixture, ids=list(range(1000)))
    assert again.request.prompt_tokens == 1000
    assert again.matched_tokens == 15 * 256 / 4


def test_ratio_is_learned_from_counters():
    """Twenty requests of 3,000 bytes, 20,000 tokens finished: three bytes are a token."""
    pool_fixture = PoolFixture({SPOT: None})
    for finished in (0, 20):
        if finished:
            for _ in range(20):
                decision = ask(pool_fixture, "x" * 3000)
                reservation = pool_fixture.director.reserve(decision, pool_fixture.now)
                pool_fixture.director.release(reservation, pool_fixture.now)
        totals = EngineCounters(finished=float(finished), finished_prompt_tokens=1000.0 * finished)
        mark = pool_fixture.store.begin_scrape(pool_fixture.store.pool.members[0].endpoint)
        pool_fixture.store.observe(
            mark, Load(at=pool_fixture.now, counters=totals), pool_fixture.now
        )
    assert ask(pool_fixture, "x" * 3000).request.prompt_tokens == pytest.approx(1000, abs=1)
