"""Requests with images: their tokens, their cached share, and what answers teach."""

from __future__ import annotations

import msgspec
import pytest

from extproc.endpoint import EngineCounters, Load
from extproc.request import HttpRequest
from tests.support import pictures
from tests.support.pool_fixture import PoolFixture

SPOT = "10.0.0.1:8000"
PICTURE = pictures.png(1024, 768)


def ask(pool_fixture, words, *, data=PICTURE, model="qwen2.5-vl"):
    address = data if isinstance(data, str) else pictures.url(data)
    parts = [{"type": "image_url", "image_url": {"url": address}}, {"type": "text", "text": words}]
    body = {"model": model, "messages": [{"role": "user", "content": parts}]}
    headers = {":method": "POST", ":path": "/v1/chat/completions"}
    return pool_fixture.decide(HttpRequest(headers, msgspec.json.encode(body)))


def answer(pool_fixture, decision, tokens):
    reservation = pool_fixture.director.reserve(decision, pool_fixture.now)
    used = {"prompt": tokens, "completion": 1}
    pool_fixture.director.on_usage(decision, used, served=reservation.endpoint)
    pool_fixture.director.release(reservation, pool_fixture.now)


def test_an_image_enters_the_tokens_of_a_request():
    """They count in the work of an endpoint, and leave with the request."""
    pool_fixture = PoolFixture({SPOT: None})
    decision = ask(pool_fixture, "what is it?")
    assert decision.request.prompt_tokens == 999 + 4
    reservation = pool_fixture.director.reserve(decision, pool_fixture.now)
    account = pool_fixture.store.pool.members[0].account
    assert account.prompt_tokens == 999 + 4
    assert reservation.uncached_tokens == 999 + 4
    pool_fixture.director.release(reservation, pool_fixture.now)
    assert account.prompt_tokens == 0


def test_cached_images_count_as_cached():
    """Another question about an image finds its 999 tokens, but for a block."""
    pool_fixture = PoolFixture({SPOT: None})
    answer(pool_fixture, ask(pool_fixture, "what is it?"), 1010)
    again = ask(pool_fixture, "where was it taken?")
    assert 999 - 64 <= again.matched_tokens <= 999
    assert ask(pool_fixture, "what?", data=pictures.gif(1024, 768)).matched_tokens <= 1


def test_usage_corrects_images_and_leaves_text():
    """A deployment that halves its images: four answers show it, in tokens and in cached tokens."""
    pool_fixture = PoolFixture({SPOT: None})
    words = "w" * 400
    for _ in range(4):
        answer(pool_fixture, ask(pool_fixture, words), 100 + 500)
    decision = ask(pool_fixture, words)
    assert decision.request.prompt_tokens == pytest.approx(600, abs=5)
    assert 460 <= decision.matched_tokens <= 600
    ratios = pool_fixture.store.bytes_per_token
    assert ratios.ratios == {}
    assert ratios.media.factors["qwen2.5-vl", "image"] == pytest.approx(0.5, abs=0.01)


def test_remote_images_take_the_mean_of_a_model():
    """An image that cannot be read counts as one of 1024 x 768 pixels, then as the mean of others."""
    pool_fixture = PoolFixture({SPOT: None})
    remote = "https://a.example/cat.png"
    assert ask(pool_fixture, "what?", data=remote).request.prompt_tokens == 1002
    small = pictures.png(280, 280)
    for _ in range(4):
        answer(pool_fixture, ask(pool_fixture, "what?", data=small), 101 + 2)
    assert ask(pool_fixture, "what?", data=remote).request.prompt_tokens == 101 + 2


def test_counters_do_not_teach_ratios_of_text_with_images():
    """Windows of the engine's counters in which images were answered are left out."""
    pool_fixture = PoolFixture({SPOT: None})
    for finished in (0, 20):
        for _ in range(finished):
            decision = ask(pool_fixture, "x" * 3000)
            reservation = pool_fixture.director.reserve(decision, pool_fixture.now)
            pool_fixture.director.release(reservation, pool_fixture.now)
        totals = EngineCounters(finished=float(finished), finished_prompt_tokens=1000.0 * finished)
        mark = pool_fixture.store.begin_scrape(pool_fixture.store.pool.members[0].endpoint)
        load = Load(at=pool_fixture.now, counters=totals)
        pool_fixture.store.observe(mark, load, pool_fixture.now)
    assert pool_fixture.store.bytes_per_token.ratios == {}


def test_peers_are_sent_the_size_of_requests_with_images():
    """A replica predicts the same cached tokens for a request of another one."""
    pool_fixture = PoolFixture({SPOT: None})
    answer(pool_fixture, ask(pool_fixture, "what is it?"), 1010)
    decision = ask(pool_fixture, "where was it taken?")
    reservation = pool_fixture.director.reserve(decision, pool_fixture.now)
    assert reservation.prompt_size.has_media
    estimated = pool_fixture.director.estimate_cached_tokens(
        pool_fixture.store.pool.members[0],
        decision.block_hashes,
        target="qwen2.5-vl",
        size=reservation.prompt_size,
    )
    assert estimated == pytest.approx(decision.matched_tokens, rel=0.05, abs=64)
    pool_fixture.director.release(reservation, pool_fixture.now)
