"""Continuations of prompts."""

import math
import random
import weakref

import pytest

from extproc.endpoint import Endpoint
from extproc.pool.conversations import ConversationTracker
from extproc.pool.inflight import InflightLoad

HERE, THERE = InflightLoad(Endpoint("10.0.0.1:8000")), InflightLoad(Endpoint("10.0.0.2:8000"))


def test_a_prompt_continues_the_conversation_of_its_longest_prefix():
    """A later turn differs from a new conversation by the blocks it repeats."""
    known = ConversationTracker()
    known.record_sent([1, 2, 3], HERE, prompt_tokens=100, now=0.0)
    assert known.last_endpoint([1, 2, 3, 4, 5]) is HERE
    assert known.last_endpoint([1, 2]) is None, "what only begins alike is another conversation"
    assert known.last_endpoint([]) is None


def test_last_endpoint_is_that_of_the_latest_prompt():
    """Of several known beginnings the longest counts."""
    known = ConversationTracker()
    known.record_sent([1, 2], HERE, prompt_tokens=100, now=0.0)
    known.record_sent([1, 2, 3, 4], THERE, prompt_tokens=100, now=0.0)
    assert known.last_endpoint([1, 2, 3, 4, 5]) is THERE
    assert known.last_endpoint([1, 2, 9]) is HERE


def test_the_continuation_ratio_is_learned():
    """It rises with conversations and falls with prompts that share nothing."""
    known = ConversationTracker()
    for n in range(1000):
        known.record_sent([n * 2, n * 2 + 1], HERE, prompt_tokens=100, now=0.0)
    assert known.continuation_ratio < 0.01
    for n in range(1000):
        known.record_sent([*range(n + 2)], HERE, prompt_tokens=100, now=0.0)
    assert known.continuation_ratio > 0.9


def test_a_prompt_without_a_full_block_is_ignored():
    """It could not be known again, so it is neither new nor going on."""
    known = ConversationTracker()
    before = known.continuation_ratio
    known.record_sent([], HERE, prompt_tokens=100, now=0.0)
    assert (known.continuation_ratio, len(known)) == (before, 0)


def test_memory_is_bounded_and_forgets_the_oldest():
    """Long after, a conversation counts as new."""
    known = ConversationTracker(max_prompts=3)
    for n in range(5):
        known.record_sent([n], HERE, prompt_tokens=100, now=0.0)
    assert len(known) == 3
    assert [known.last_endpoint([n]) is HERE for n in range(5)] == [False, False, True, True, True]


def test_a_short_conversation_is_expected_to_grow_to_the_mean():
    """If all prompts continue others, a short one counts with the mean; a long one does not grow."""
    known = ConversationTracker()
    for n in range(1000):
        known.record_sent([*range(n + 2)], HERE, prompt_tokens=800, now=0.0)
    assert known.expected_growth_tokens(300) == pytest.approx(500, rel=0.01)
    assert known.expected_growth_tokens(900) == 0.0


def conversation(known, turns, *, every_s, open_s):
    """Turns of one conversation, one after the other."""
    for n in range(turns):
        last_turn = known.record_sent([*range(n + 1)], HERE, prompt_tokens=100, now=every_s * n)
        last_turn.end(every_s * n + open_s)


def test_idle_conversations_are_counted():
    """With answers of 12 s and 3 s until the next question, one reads for every four who wait."""
    known = ConversationTracker()
    assert known.idle_per_open() == 0.0
    conversation(known, 2000, every_s=15.0, open_s=12.0)
    assert known.idle_per_open() == pytest.approx(0.25, rel=0.01)


def test_idle_per_open_is_bounded():
    """The prefixes of older conversations have been evicted by then."""
    known = ConversationTracker()
    conversation(known, 2000, every_s=100.0, open_s=1.0)
    assert known.idle_per_open() == 0.5


def test_a_conversation_that_continues_at_once_is_not_idle():
    """Nor is anybody where requests of one conversation overlap."""
    known = ConversationTracker()
    conversation(known, 2000, every_s=2.0, open_s=10.0)
    assert known.idle_per_open() == 0.0


def test_turns_seen_by_other_replicas_are_no_pause():
    """If another picker serves every second turn, its time is not counted as a pause."""
    known = ConversationTracker()
    conversation(known, 2000, every_s=20.0, open_s=10.0)
    assert known.idle_per_open(others=0.5) == 0.0
    assert known.idle_per_open() == 0.5


def test_no_conversation_is_idle_while_engines_fill():
    """If every turn takes longer than the one before, there is no pause between them."""
    known, now = ConversationTracker(), 0.0
    for n in range(200):
        last_turn = known.record_sent([*range(n + 1)], HERE, prompt_tokens=100, now=now)
        now += 1.0 + n / 10
        last_turn.end(now)
    assert known.idle_per_open() == pytest.approx(0.0, abs=1e-9)


def test_a_reservation_records_its_end():
    """However its request ended; where it was moved, the conversation goes on at that endpoint."""
    known = ConversationTracker()
    last_turn = known.record_sent([1], HERE, prompt_tokens=100, now=1.0)
    reservation = HERE.open("m", 100, cached_tokens=0, now=1.0)
    reservation.track_turn(last_turn)
    assert last_turn.ended == math.inf
    reservation.move(THERE, 2.0, cached_tokens=0)
    assert last_turn.ended == math.inf
    assert known.last_endpoint([1, 2]) is THERE
    reservation.close(5.0, answered=False)
    assert last_turn.ended == 5.0


def chain_of(stem, length):
    """A chain that shares its first 8 blocks with others of its stem."""
    return [stem * 100 + at for at in range(8)] + [
        stem * 1000 + length * 100 + at for at in range(length)
    ]


def test_shared_prefixes_of_open_requests_count_once():
    """Tokens that several open requests begin with are counted once, and all are gone at the end."""
    rng = random.Random(5)
    account, tokens = InflightLoad(Endpoint("10.0.0.3:8000")), [64 * at for at in range(40)]
    open_ = []
    for stem, length in [(1, 4), (1, 4), (1, 8), (2, 4), (1, 0)]:
        chain = chain_of(stem, length)
        reservation = account.open("m", 64 * len(chain), cached_tokens=0, now=0.0)
        account.track_context(reservation, chain, tokens, growth=0.0)
        open_.append((reservation, chain))
    assert account.active_context_tokens == 64 * (8 + 4 + 8 + 8 + 4)
    rng.shuffle(open_)
    while open_:
        reservation, _ = open_.pop()
        reservation.close(1.0)
        assert account.active_context_tokens == 64 * len(
            {block for _, chain in open_ for block in chain}
        )


def test_expected_growth_counts_until_the_next_turn():
    """The tokens of a longer open prompt of the same conversation are there already."""
    account, tokens = InflightLoad(Endpoint("10.0.0.3:8000")), [64 * at for at in range(40)]
    first = account.open("m", 512, cached_tokens=0, now=0.0)
    account.track_context(first, chain_of(1, 0), tokens, growth=100.0)
    again = account.open("m", 512, cached_tokens=0, now=0.0)
    account.track_context(again, chain_of(1, 0), tokens, growth=100.0)
    assert account.active_context_tokens == 512 + 100
    first.close(1.0)
    again.close(1.0)
    assert account.active_context_tokens == 0


def test_a_removed_endpoint_is_freed_at_once():
    """Its prompts still count as earlier turns, without an endpoint."""
    known, account = ConversationTracker(), InflightLoad(Endpoint("10.0.0.3:8000"))
    left = weakref.ref(account)
    last_turn = known.record_sent([1], account, prompt_tokens=100, now=0.0)
    reservation = account.open("m", 100, cached_tokens=0, now=0.0)
    reservation.track_turn(last_turn)
    reservation.close(1.0)
    del account, reservation
    assert left() is None
    assert known.last_endpoint([1, 2]) is None
    share = known.continuation_ratio
    known.record_sent([1, 2], HERE, prompt_tokens=100, now=2.0)
    assert known.continuation_ratio > share
