"""Blocks of open requests, whatever the order in which they open and close."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.pool import request_tokens

#: 16 tokens a block.
TOKENS = tuple(range(0, 16 * 41, 16))

#: Tokens of blocks of which one is followed.
STRIDE = 64


def chain(conversation: int, length: int) -> list[int]:
    """The first blocks of a conversation; those of others are others."""
    return [conversation * 100 + n for n in range(length)]


def held(*lengths: int) -> tuple[request_tokens.SharedContext, list[request_tokens.ContextShare]]:
    """Prompts of one conversation, opened in order."""
    all_ = request_tokens.SharedContext()
    return all_, [all_.open(chain(1, n), TOKENS, growth=0.0) for n in lengths]


def test_common_prefixes_count_once():
    """Ten blocks and twenty that go on from them are twenty."""
    all_, (shorter, longer) = held(10, 20)
    assert all_.tokens == 20 * 16
    all_.close(longer)
    assert 10 * 16 <= all_.tokens < 10 * 16 + STRIDE
    all_.close(shorter)
    assert all_.tokens == 0


def test_shared_tokens_exclude_unique_tokens():
    """Three prompts of which two are the beginning of the third: what is not counted is shared."""
    all_, (shorter, longer, same) = held(10, 20, 20)
    assert all_.shared == (10 + 20) * 16
    all_.close(same)
    assert all_.shared == 10 * 16
    all_.close(shorter)
    all_.close(longer)
    assert all_.shared == 0


def test_repeated_blocks_leave_nothing():
    """No prompt has a block twice, but a replica may send anything."""
    all_ = request_tokens.SharedContext()
    all_.close(all_.open([1] * 20, TOKENS, growth=0.0))
    assert (all_.tokens, all_.shared) == (0, 0)


@pytest.mark.parametrize("first", [0, 1])
def test_overlapping_turns_leave_nothing(first):
    """Pickers hear of an end late, so both turns of a conversation are open for a moment."""
    all_ = request_tokens.SharedContext()
    other = all_.open(chain(2, 8), TOKENS, growth=0.0)
    for _ in range(100):
        turns = [all_.open(chain(1, n), TOKENS, growth=9.0) for n in (9, 19)]
        all_.close(turns.pop(first))
        all_.close(turns.pop())
        assert all_.tokens == 8 * 16
    all_.close(other)


@pytest.mark.parametrize(
    ("before", "after", "growths"),
    [(10, 20, 2), (20, 10, 1), (10, 11, 2), (11, 10, 1), (10, 10, 1)],
)
def test_a_conversation_grows_once(before, after, growths):
    """Of two prompts of which one goes on from the other, the shorter has grown already."""
    all_ = request_tokens.SharedContext()
    all_.open(chain(1, before), TOKENS, growth=1000.0)
    all_.open(chain(1, after), TOKENS, growth=1000.0)
    assert all_.tokens == max(before, after) * 16 + growths * 1000.0


@given(
    st.lists(
        st.tuples(
            st.integers(1, 3), st.integers(1, 40), st.sampled_from([0.0, 7.5]), st.integers(0, 6)
        ),
        max_size=30,
    )
)
def test_any_order_of_opens_and_closes_counts_open_requests(turns):
    """At least what the open prompts cover, at most a stride more for each conversation and turn."""
    all_ = request_tokens.SharedContext()
    own = all_.open(chain(9, 11), TOKENS, growth=0.0)
    open_: list[tuple[int, int, request_tokens.ContextShare]] = []
    for conversation, length, growth, ends in turns:
        share = all_.open(chain(conversation, length), TOKENS, growth=growth)
        open_.append((conversation, length, share))
        if ends < len(open_):
            all_.close(open_.pop(ends)[2])
        longest: dict[int, int] = {}
        for key, blocks, _ in open_:
            longest[key] = max(longest.get(key, 0), blocks)
        covered = 11 * 16 + sum(longest.values()) * 16
        growing = sum(share.growth for _, _, share in open_)
        assert covered <= all_.tokens - growing < covered + STRIDE * (1 + len(longest))
        total = 11 * 16 + sum(blocks for _, blocks, _ in open_) * 16
        assert all_.shared == total - (all_.tokens - growing)
    for _, _, share in open_:
        all_.close(share)
    assert all_.tokens == 11 * 16
    all_.close(own)
    assert all_.tokens == all_.shared == 0
