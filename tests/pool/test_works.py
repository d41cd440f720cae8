"""The usual work of a request."""

import hypothesis
import pytest
from hypothesis import strategies as st

from extproc.pool.request_tokens import TypicalWork


def test_typical_work_has_a_default():
    """A pool that never answered takes a request for a prompt of usual length."""
    assert TypicalWork().typical == 500
    assert TypicalWork().price(3.0, None) == 1500


def test_typical_follows_the_latest_answers():
    """Older answers no longer count."""
    works = TypicalWork()
    for _ in range(1000):
        works.add(20)
    assert works.typical == 20
    for _ in range(128):
        works.add(3000)
    assert works.typical == 3000


@hypothesis.given(st.lists(st.integers(1, 10**9), max_size=40))
def test_typical_is_moved_by_the_usual_and_not_by_the_longest(strange):
    """Forty prompts of any length among 128 leave the price within the others' lengths."""
    works = TypicalWork()
    for tokens in [400, 500] * 64:
        works.add(tokens)
    for tokens in strange:
        works.add(tokens)
    assert 400 <= works.typical <= 500


@hypothesis.given(st.lists(st.integers(1, 10**6), min_size=1, max_size=300))
def test_typical_is_near_the_median(tokens):
    """Within a fifth of the median of what is remembered."""
    works = TypicalWork()
    for count in tokens:
        works.add(count)
    recent = sorted(tokens[-128:])
    assert abs(recent[len(recent) // 2] - works.typical) <= 0.2 * works.typical


@pytest.mark.parametrize(("kv_tokens", "price"), [(None, 500), (0, 500), (64, 64), (10**6, 500)])
def test_price_is_bounded_by_the_cache(kv_tokens, price):
    """No request is larger than the cache of the engine that answers it."""
    assert TypicalWork().price(2.0, kv_tokens) == 2 * price
