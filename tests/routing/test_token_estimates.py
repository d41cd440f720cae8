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
    ticket = house.director.reserve(decision, house.now)
    used = {"prompt": tokens, "completion": 1}
    house.director.on_usage(decision, used, served=ticket.endpoint)
    house.director.release(ticket, house.now)


def test_prompts_are_counted_in_tokens_of_the_model():
    """4,000 bytes are 1,000 tokens until eight answers say that they are 2,000."""
    house = PoolFixture({SPOT: None})
    first = ask(house, "x" * 4000)
    assert first.request.prompt_tokens == 1000
    for _ in range(8):
        answered(house, ask(house, "x" * 4000), 2000)
    assert ask(house, "y" * 4000).request.prompt_tokens == 2000


def test_cached_tokens_use_the_ratio_of_the_model():
    """Blocks are cut in bytes: the same chain, 15 blocks of 256 bytes, is twice the tokens."""
    house = PoolFixture({SPOT: None})
    before = ask(house, "x" * 4000)
    for _ in range(8):
        answered(house, ask(house, "x" * 4000), 2000)
    after = ask(house, "x" * 4000)
    assert after.block_hashes == before.block_hashes
    assert before.matched_tokens == 0
    assert after.matched_tokens == 15 * 256 / 2


def test_tokenized_prompts_are_exact():
    """Whatever was learned of text, a list of a thousand ids is a thousand tokens."""
    house = PoolFixture({SPOT: None})
    for _ in range(8):
        answered(house, ask(house, "x" * 4000), 2000)
    first = ask(house, ids=list(range(1000)))
    assert first.request.prompt_tokens == 1000
    answered(house, first, 1000)
    again = ask(house, ids=list(range(1000)))
    assert again.request.prompt_tokens == 1000
    assert again.matched_tokens == 15 * 256 / 4


def test_ratio_is_learned_from_counters():
    """Twenty requests of 3,000 bytes, 20,000 tokens finished: three bytes are a token."""
    house = PoolFixture({SPOT: None})
    for finished in (0, 20):
        if finished:
            for _ in range(20):
                decision = ask(house, "x" * 3000)
                ticket = house.director.reserve(decision, house.now)
                house.director.release(ticket, house.now)
        totals = EngineCounters(finished=float(finished), finished_prompt_tokens=1000.0 * finished)
        mark = house.store.begin_scrape(house.store.pool.members[0].endpoint)
        house.store.observe(mark, Load(at=house.now, counters=totals), house.now)
    assert ask(house, "x" * 3000).request.prompt_tokens == pytest.approx(1000, abs=1)
