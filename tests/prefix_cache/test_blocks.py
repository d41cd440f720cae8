from itertools import pairwise

import mmh3
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.prefix_cache import blocks

SMALL = blocks.Schedule(block_bytes=4, growth=2, fine_bytes=16, span=4, limit_bytes=128)


def test_default_schedule_grows_at_its_borders():
    """256 bytes up to 8 KiB, 1 KiB up to 64 KiB, 4 KiB up to 4 MiB."""
    cuts = blocks.DEFAULT.cuts
    steps = [after - before for before, after in pairwise(cuts)]
    assert (steps.count(256), steps.count(1024), steps.count(4096)) == (32, 56, 1008)
    assert cuts[32] == 8 * 1024
    assert cuts[-1] == 4 * 1024 * 1024


def test_depth_reads_as_bytes_and_tokens():
    """The first 33 blocks are 9 KiB, four bytes to a token."""
    assert blocks.DEFAULT.cuts[33] == 9 * 1024
    assert blocks.DEFAULT.tokens[33] == 9 * 256
    assert blocks.DEFAULT.cuts[0] == 0


@given(
    st.integers(4, 64),
    st.integers(1, 4),
    st.integers(1, 300),
    st.integers(1, 8),
    st.integers(64, 999),
)
def test_any_schedule_ascends_within_its_limit(block_bytes, growth, fine_bytes, span, limit_bytes):
    """Cuts rise by at least one block and never pass the limit."""
    schedule = blocks.Schedule(
        block_bytes=block_bytes,
        growth=growth,
        fine_bytes=fine_bytes,
        span=span,
        limit_bytes=limit_bytes,
    )
    assert schedule.cuts[-1] <= limit_bytes
    assert all(b - a >= block_bytes for a, b in pairwise(schedule.cuts))
    expected, step = [0], block_bytes
    for border in (fine_bytes, fine_bytes * span, limit_bytes):
        while expected[-1] < border and expected[-1] + step <= limit_bytes:
            expected.append(expected[-1] + step)
        step *= growth
    assert schedule.cuts == tuple(expected)


def test_schedule_refuses_zero():
    """A zero field is a validation error that names the field."""
    with pytest.raises(msgspec.ValidationError, match="block_bytes"):
        msgspec.convert({"block_bytes": 0}, blocks.Schedule)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"block_bytes": 3}, "block_bytes of at least 4"),
        ({"limit_bytes": 255}, "limit_bytes of at least block_bytes, 256"),
        ({"block_bytes": 8 << 20}, "limit_bytes of at least block_bytes, 8388608"),
    ],
)
def test_schedule_refuses_to_be_without_a_block_of_a_token(fields, message):
    """A cache is sized in blocks, by their tokens."""
    with pytest.raises(msgspec.ValidationError, match=message):
        msgspec.convert(fields, blocks.Schedule)


def test_smallest_schedule_has_one_block_of_one_token():
    """It is allowed."""
    assert blocks.Schedule(block_bytes=4, limit_bytes=4).tokens == (0, 1)


def test_schedule_refuses_tables_without_end():
    """Blocks of a token would make a million; those of vLLM up to the longest prompt are allowed."""
    with pytest.raises(msgspec.ValidationError, match=r"65536 blocks.*got 1048576"):
        msgspec.convert({"block_bytes": 4, "growth": 1}, blocks.Schedule)
    with pytest.raises(msgspec.ValidationError, match="raise block_bytes"):
        msgspec.convert({"limit_bytes": 1 << 60}, blocks.Schedule)
    assert len(blocks.Schedule(block_bytes=64, growth=1).cuts) == blocks.MAX_BLOCKS + 1


@given(st.binary(max_size=200), st.binary(max_size=8))
def test_chain_equals_one_hash_over_everything_before_the_cut(prompt, seed):
    """Carrying the state from block to block gives the hash of seed and prefix in one piece."""
    wanted = [
        mmh3.mmh3_x64_128_utupledigest(seed + prompt[:cut])[0] & blocks.HASH_MASK
        for cut in SMALL.cuts[1:]
        if cut <= len(prompt)
    ]
    assert list(blocks.chain(prompt, seed, schedule=SMALL)) == wanted


@given(st.binary(max_size=140), st.binary(max_size=140), st.binary(max_size=140))
def test_equal_beginnings_give_equal_chains(common, left, right):
    """Two chains agree on exactly the full blocks that both prompts share, across block growth."""
    first = blocks.chain(common + left, b"", schedule=SMALL)
    second = blocks.chain(common + right, b"", schedule=SMALL)
    shared = sum(
        1
        for cut in SMALL.cuts[1:]
        if cut <= min(len(common + left), len(common + right))
        and (common + left)[:cut] == (common + right)[:cut]
    )
    agree = next((i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), None)
    assert (min(len(first), len(second)) if agree is None else agree) == shared


@given(
    st.lists(st.text(max_size=4), max_size=3),
    st.lists(st.text(max_size=4), max_size=3),
    st.binary(max_size=8),
)
def test_seeds_are_unambiguous(left, right, tail):
    """Different names never make one seed, nor does a prompt continue a seed into another."""
    first, second = blocks.seed(*left), blocks.seed(*right)
    assert (first == second) == (left == right)
    if left != right:
        assert not (first + tail).startswith(second + tail)


def test_seed_takes_names_that_are_not_unicode():
    """A lone surrogate in a model name is hashed, not refused."""
    assert blocks.seed("\ud800") != blocks.seed("?")


def test_chain_stops_at_the_limit():
    """Nothing behind limit_bytes is hashed."""
    assert len(blocks.chain(bytes(1000), b"", schedule=SMALL)) == len(SMALL.cuts) - 1
