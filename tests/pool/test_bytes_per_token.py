from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.endpoint import Endpoint, EngineCounters, Load
from extproc.pool.inflight import InflightLoad
from extproc.pool.request_tokens import BytesPerTokenEstimator


def scrape(learned, account, totals):
    """A scrape of the engine's counters, as the store takes it in."""
    if learned.record_scrape(
        Load(counters=totals),
        incarnation=account.endpoint.incarnation,
        texts=account.texts,
        answered=account.answered,
    ):
        account.forget_texts()


class CountingEngine:
    """Counts what finished, by its own tokenizer."""

    def __init__(self, tokenizers, *, incarnation=1, seed=1):
        self.tokenizers = tokenizers
        self.account = InflightLoad(Endpoint("10.0.0.1:8000", incarnation=incarnation))
        self.finished = self.tokens = 0
        self.rng = random.Random(seed)

    def serve(self, requests, bytes_per_token, *, model="m", ours=True, tokenized=False):
        """Requests that differ in length, and by a quarter in bytes per token."""
        for _ in range(requests):
            tokens = self.rng.randint(100, 3000)
            size = round(tokens * bytes_per_token * self.rng.uniform(0.75, 1.25))
            if ours:
                self.account.open(
                    model,
                    size // 4,
                    cached_tokens=0,
                    now=0.0,
                    prompt_bytes=0 if tokenized else size,
                ).close(0.0)
            self.finished += 1
            self.tokens += tokens

    def scrape(self):
        totals = EngineCounters(
            finished=float(self.finished), finished_prompt_tokens=float(self.tokens)
        )
        scrape(self.tokenizers, self.account, totals)


@pytest.mark.parametrize("truth", [1.5, 2.7, 4.4, 6.0])
def test_the_ratio_of_a_model_is_learned_from_counters(truth):
    """Within 5 % after ten scrapes of ten requests."""
    learned = BytesPerTokenEstimator()
    engine = CountingEngine(learned)
    assert learned.bytes_per_token("m") == 4.0
    for _ in range(11):
        engine.scrape()
        engine.serve(10, truth)
    engine.scrape()
    assert learned.bytes_per_token("m") == pytest.approx(truth, rel=0.05)
    assert learned.ratios == {"m": learned.bytes_per_token("m")}


def test_the_ratio_follows_another_kind_of_text():
    """From English to Chinese: within 10 % after 300 requests."""
    learned = BytesPerTokenEstimator()
    engine = CountingEngine(learned)
    for truth in (4.4, 2.2):
        for _ in range(30):
            engine.scrape()
            engine.serve(10, truth)
    engine.scrape()
    assert learned.bytes_per_token("m") == pytest.approx(2.2, rel=0.1)


def test_a_single_endpoint_sets_the_ratio_of_the_pool():
    """A tokenizer belongs to the model; an unknown adapter has that of the others."""
    learned = BytesPerTokenEstimator()
    engine = CountingEngine(learned)
    engine.scrape()
    engine.serve(50, 3.0)
    engine.scrape()
    assert learned.bytes_per_token("m") == pytest.approx(3.0, rel=0.1)
    assert learned.bytes_per_token("another adapter") == learned.bytes_per_token("m")


@pytest.mark.parametrize("others", [5, 40])
def test_windows_with_foreign_requests_are_skipped(others):
    """If more than a tenth is not ours, the tokens cannot be attributed."""
    learned = BytesPerTokenEstimator()
    engine = CountingEngine(learned)
    for _ in range(20):
        engine.scrape()
        engine.serve(20, 3.0)
        engine.serve(others, 1.2, ours=False)
    engine.scrape()
    assert learned.bytes_per_token("m") == 4.0


def test_tokenized_prompts_do_not_change_the_ratio():
    """They are exact already, and windows full of them have no text to compare."""
    learned = BytesPerTokenEstimator()
    engine = CountingEngine(learned)
    for _ in range(10):
        engine.scrape()
        engine.serve(20, 3.0, tokenized=True)
    engine.scrape()
    assert learned.ratios == {}


def test_models_on_an_endpoint_have_separate_ratios():
    """Mixed in changing shares, two tokenizers come out within 15 %."""
    learned = BytesPerTokenEstimator()
    engine = CountingEngine(learned)
    engine.scrape()
    for tick in range(60):
        share = 18 if tick % 2 else 2
        engine.serve(share, 2.5, model="a")
        engine.serve(20 - share, 5.0, model="b")
        engine.scrape()
    assert learned.bytes_per_token("a") == pytest.approx(2.5, rel=0.15)
    assert learned.bytes_per_token("b") == pytest.approx(5.0, rel=0.15)


def test_ratio_is_learned_from_usage():
    """Seven answers are not enough, eight are."""
    learned = BytesPerTokenEstimator()
    ratios = []
    for _ in range(8):
        learned.observe_usage("m", prompt_bytes=300, tokens=100)
        ratios.append(learned.bytes_per_token("m"))
    assert ratios == [4.0] * 7 + [3.0]
    learned.observe_usage("m", prompt_bytes=0, tokens=100)
    assert learned.bytes_per_token("m") == 3.0


def test_short_prompts_say_nothing_of_long_ones():
    """Most of their tokens are those of the chat template; beside long prompts they do not matter."""
    learned = BytesPerTokenEstimator()
    for _ in range(50):
        learned.observe_usage("m", prompt_bytes=11, tokens=9)
    assert learned.bytes_per_token("m") == 4.0
    for _ in range(10):
        learned.observe_usage("m", prompt_bytes=3000, tokens=1009)
    assert learned.bytes_per_token("m") == pytest.approx(3.0, rel=0.05)


def test_images_do_not_count_as_text():
    """A thousand tokens for a hundred bytes: outside of what a tokenizer does."""
    learned = BytesPerTokenEstimator()
    for _ in range(20):
        learned.observe_usage("m", prompt_bytes=100, tokens=1000)
    assert learned.ratios == {}


def test_a_restarted_engine_starts_a_window():
    """Counters that went back are compared with nothing."""
    learned = BytesPerTokenEstimator()
    engine = CountingEngine(learned)
    engine.serve(100, 3.0)
    engine.scrape()
    engine.finished = engine.tokens = 0
    engine.serve(50, 3.0)
    engine.scrape()
    assert learned.ratios == {}
    engine.serve(50, 3.0)
    engine.scrape()
    assert learned.bytes_per_token("m") == pytest.approx(3.0, rel=0.1)


def test_models_are_bounded():
    """Of a thousand names the last 64 are remembered."""
    learned = BytesPerTokenEstimator()
    for name in range(1000):
        for _ in range(8):
            learned.observe_usage(str(name), prompt_bytes=300, tokens=100)
    assert len(learned.ratios) == 64


@given(
    st.lists(
        st.tuples(
            st.sampled_from("ab"),
            st.integers(0, 5000),
            st.floats(0, 1e7) | st.none(),
            st.floats(0, 1e9) | st.none(),
            st.integers(0, 40),
        ),
        max_size=40,
    )
)
def test_ratios_stay_plausible(acts):
    """Whatever is sent and counted, a token has one to eight bytes."""
    learned = BytesPerTokenEstimator()
    account = InflightLoad(Endpoint("10.0.0.1:8000"))
    for model, size, finished, tokens, count in acts:
        for _ in range(count):
            account.open(model, size, cached_tokens=0, now=0.0, prompt_bytes=size).close(0.0)
        totals = EngineCounters(finished=finished, finished_prompt_tokens=tokens)
        scrape(learned, account, totals)
        learned.observe_usage(model, prompt_bytes=size, tokens=count)
        assert 1.0 <= learned.bytes_per_token("a") <= 8.0
        assert 1.0 <= learned.bytes_per_token("b") <= 8.0
