"""Blocks of engines by their events, against sets."""

from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.prefix_cache import kv_events
from extproc.prefix_cache.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlocksLeftOut,
    BlockStored,
)
from extproc.prefix_cache.token_blocks import TokenBlockIndex

SIZE = 4


def tokens(*numbers):
    """Tokens of blocks, each of one number."""
    return array("I", [number for number in numbers for _ in range(SIZE)]).tobytes()


def stored(hashes, numbers, parent=None, **fields):
    return BlockStored(hashes, parent, tokens(*numbers), SIZE, **fields)


def keys(*numbers, adapter=""):
    return kv_events.block_keys(kv_events.root_key(adapter), tokens(*numbers), SIZE)


def depth(index, engine, chain):
    """Leading blocks of a chain on an engine."""
    ends = index.holders(chain, len(chain))
    for guess in range(len(chain) + 2):
        assert index.holders(chain, len(chain), [(guess, 1), (guess + 1, 2)]) == ends
    return next((d for d, bits in ends if bits & engine.bit), 0)


def test_index_follows_stored_and_removed_blocks():
    """Chains that go on from a block are found from the root, on each engine alone."""
    index = TokenBlockIndex(100)
    first, second = index.open(), index.open()
    index.apply(first, stored([11, 12], [1, 2]))
    index.apply(first, stored([13], [3], parent=12))
    index.apply(second, stored([91], [1]))
    chain = keys(1, 2, 3)
    assert index.holders(chain, 3) == [(1, second.bit), (3, first.bit)]
    index.apply(first, BlockRemoved([13]))
    index.apply(first, BlockRemoved([4711]))
    assert index.holders(chain, 3) == [(1, second.bit), (2, first.bit)]
    assert (first.held, second.held, index.num_keys) == (2, 1, 2)


def test_index_keeps_adapters_and_extras_apart():
    """The same tokens with another adapter are another chain."""
    index = TokenBlockIndex(100)
    engine = index.open()
    index.apply(engine, stored([1], [1], adapter="ad"))
    assert depth(index, engine, keys(1)) == 0
    assert depth(index, engine, keys(1, adapter="ad")) == 1


def test_index_leaves_out_what_it_cannot_place():
    """Blocks behind an unknown parent, of another size, or beyond the bound."""
    index = TokenBlockIndex(2)
    engine = index.open()
    index.apply(engine, stored([8], [8]))
    index.apply(engine, stored([1], [1], parent=99))
    index.apply(engine, BlockStored([2], None, array("I", [1, 2]).tobytes(), 2))
    index.apply(engine, BlockStored([3, 3], None, b"", 0, medium="CPU"))
    index.apply(engine, stored([4, 5, 6], [1, 2, 3]))
    index.apply(engine, BlockStored([7], None, b"", 0))
    assert (engine.held, engine.dropped, len(engine.lower_keys)) == (1, 7, 0)


def test_blocks_that_are_left_out_of_an_event_leave_a_gap():
    """Other blocks of the engine stay known, but are not all that it holds."""
    index = TokenBlockIndex(10)
    engine = index.open()
    index.wipe(engine, is_complete=True)
    index.apply(engine, stored([1], [1]))
    version = index.version
    index.apply(engine, BlocksLeftOut(9000))
    assert (depth(index, engine, keys(1)), engine.dropped) == (1, 9000)
    assert (engine.is_complete, engine.has_gap) == (False, True)
    assert index.version > version


def test_the_size_of_blocks_is_taken_anew_once_no_block_of_the_old_size_is_known():
    """An engine that is unlike the others leaves, or all are replaced by others."""
    resized = []
    index = TokenBlockIndex(10, on_resized=lambda: resized.append(index.block_tokens))
    odd, usual = index.open(), index.open()
    event = BlockStored([1], None, array("I", [1] * 8).tobytes(), 8)
    index.apply(odd, event)
    index.apply(usual, stored([1], [1]))
    assert (index.block_tokens, usual.held, resized) == (8, 0, [])
    index.close(odd)
    index.apply(usual, stored([1], [1]))
    assert (index.block_tokens, resized) == (SIZE, [SIZE])
    assert depth(index, usual, keys(1)) == 1


def test_the_size_of_blocks_is_that_of_most_engines():
    """An engine with blocks of its own size, which comes first, does not keep the others on estimates."""
    resized = []
    index = TokenBlockIndex(10, on_resized=lambda: resized.append(index.block_tokens))
    odd, first, second = index.open(), index.open(), index.open()
    event = BlockStored([1], None, array("I", [1] * 8).tobytes(), 8)
    index.apply(odd, event)
    index.set_complete(odd)
    index.apply(first, stored([1], [1]))
    assert (index.block_tokens, first.has_gap, resized) == (8, True, [])
    index.apply(second, stored([1], [1]))
    assert (index.block_tokens, second.has_gap, resized) == (SIZE, False, [SIZE])
    assert (odd.held, odd.is_complete, odd.has_gap) == (0, False, True)
    index.apply(first, stored([1], [1]))
    assert [depth(index, engine, keys(1)) for engine in (odd, first, second)] == [0, 1, 1]
    for _ in range(3):
        index.apply(odd, event)
        index.apply(odd, AllBlocksCleared())
    assert (index.block_tokens, odd.held, resized) == (SIZE, 0, [SIZE])


def test_index_leaves_out_groups_of_sliding_windows():
    """Their removals do not remove the same hashes of the full group."""
    index = TokenBlockIndex(10)
    engine = index.open()
    index.apply(engine, stored([1], [1]))
    index.apply(engine, stored([1], [1], group=1, is_prefix=False))
    index.apply(engine, BlockRemoved([1], group=1))
    assert depth(index, engine, keys(1)) == 1
    index.apply(engine, BlockRemoved([1]))
    assert depth(index, engine, keys(1)) == 0


def test_groups_that_are_left_out_are_those_since_the_last_wipe():
    """An engine that restarts with another layout of its cache uses their numbers for other layers."""
    index = TokenBlockIndex(10)
    engine = index.open()
    for group in (0, 1):
        index.apply(engine, stored([1], [1], group=group, is_prefix=bool(group)))
    index.wipe(engine, is_complete=True)
    index.apply(engine, stored([1], [1]))
    index.apply(engine, stored([2], [2], parent=1))
    index.apply(engine, stored([2], [2], parent=1))
    assert depth(index, engine, keys(1, 2)) == 2
    for copies in (1, 0):
        index.apply(engine, BlockRemoved([2]))
        assert (depth(index, engine, keys(1, 2)), engine.num_copies) == (1 + copies, 0)


def test_index_counts_copies_of_a_block():
    """A block that an engine stored twice is held until both are removed; a report stores none."""
    index = TokenBlockIndex(10)
    engine = index.open()
    index.apply(engine, stored([1, 2], [1, 2]))
    index.apply(engine, stored([2], [2], parent=1))
    assert (engine.held, engine.num_copies) == (2, 1)
    index.apply(engine, BlockRemoved([2]))
    assert depth(index, engine, keys(1, 2)) == 2
    index.apply(engine, BlockRemoved([2]))
    assert (depth(index, engine, keys(1, 2)), engine.num_copies) == (1, 0)
    index.apply(engine, stored([2], [2], parent=1))
    index.apply(engine, stored([1, 2], [1, 2]))
    index.apply(engine, BlockRemoved([2]))
    assert depth(index, engine, keys(1, 2)) == 1


def test_index_needs_a_block_in_every_group_of_full_attention():
    """Blocks of the groups have the same hash; a removal from any of them ends the prefix."""
    index = TokenBlockIndex(10)
    engine = index.open()
    index.apply(engine, stored([1], [1]))
    for number in (2, 2, 2):
        index.apply(engine, stored([number], [number], parent=1))
        index.apply(engine, stored([number], [number], parent=1, group=3))
    assert engine.num_copies == 2
    index.apply(engine, BlockRemoved([2], group=3))
    assert (depth(index, engine, keys(1, 2)), engine.num_copies) == (1, 0)


def test_each_copy_is_removed_by_an_event_of_its_own():
    """A block that was stored four times is gone with the fourth removal."""
    index = TokenBlockIndex(100)
    engine = index.open()
    index.apply(engine, stored([1], [1]))
    for _ in range(4):
        index.apply(engine, stored([2], [2], parent=1))
    for _ in range(3):
        index.apply(engine, BlockRemoved([2]))
        assert depth(index, engine, keys(1, 2)) == 2
    index.apply(engine, BlockRemoved([2]))
    assert (depth(index, engine, keys(1, 2)), engine.num_copies) == (1, 0)


def test_blocks_are_forgotten_with_the_last_lower_tier_that_has_them():
    """A removal from one tier leaves what another one has."""
    index = TokenBlockIndex(100)
    engine = index.open()
    for medium in ("CPU", "FS"):
        index.apply(engine, stored([1, 2], [1, 2], medium=medium))
    index.apply(engine, BlockRemoved([1, 2], medium="CPU"))
    assert len(engine.lower_keys) == 2
    index.apply(engine, BlockRemoved([2], medium="FS"))
    assert len(engine.lower_keys) == 1


def test_copies_end_with_the_cache():
    """A cleared engine has none."""
    index = TokenBlockIndex(10)
    engine = index.open()
    index.apply(engine, stored([1, 2], [1, 2]))
    index.apply(engine, stored([2], [2], parent=1))
    index.apply(engine, AllBlocksCleared())
    assert engine.num_copies == 0
    index.apply(engine, stored([1, 2], [1, 2]))
    index.apply(engine, BlockRemoved([2]))
    assert depth(index, engine, keys(1, 2)) == 1


def test_a_cleared_engine_holds_nothing_at_once_and_is_complete():
    """The rest of the old blocks is swept in steps, and its bit is used again."""
    index = TokenBlockIndex(5000)
    engine, other = index.open(), index.open()
    for number in range(3000):
        index.apply(engine, stored([number], [number]))
    index.apply(other, stored([1], [1]))
    index.apply(engine, AllBlocksCleared())
    assert engine.is_complete
    assert (engine.held, depth(index, engine, keys(1)), depth(index, other, keys(1))) == (0, 0, 1)
    steps = 0
    while index.sweep(512):
        steps += 1
    assert steps > 1
    assert index.num_keys == 1
    assert index.open().bit == 1


@pytest.mark.parametrize(
    "event",
    [
        pytest.param(BlockStored([5], None, tokens(1, 1), 2 * SIZE), id="other size"),
        pytest.param(stored(range(11), range(11)), id="more than fit"),
        pytest.param(stored([5], [5], parent=77), id="unknown parent"),
    ],
)
def test_an_engine_of_which_blocks_were_dropped_is_not_complete(event):
    """Its other blocks are estimated until it is empty, independent of other engines."""
    index = TokenBlockIndex(10)
    first, engine = index.open(), index.open()
    index.apply(first, stored([1], [1]))
    index.set_complete(engine)
    index.apply(engine, event)
    assert (engine.is_complete, engine.has_gap) == (False, True)
    index.apply(engine, AllBlocksCleared())
    assert (engine.is_complete, engine.has_gap) == (True, False)


def test_clearing_an_empty_cache_again_and_again_takes_no_bits():
    """Nothing grows, and a turn of the event loop does few."""
    index = TokenBlockIndex(10)
    engine = index.open()
    assert {index.apply(engine, AllBlocksCleared()) for _ in range(100)} == {32}
    assert index.num_slots == 1
    assert not index.sweep(0)


_EVENTS = st.lists(
    st.tuples(
        st.sampled_from(("store", "remove", "clear", "close")),
        st.integers(0, 2),
        st.lists(st.integers(0, 1), min_size=1, max_size=5),
    ),
    max_size=60,
)


@settings(max_examples=100)
@given(_EVENTS)
def test_index_agrees_with_sets_of_chains(events):  # noqa: C901 - an engine and its model
    """Whatever engines do to the ends of chains, depths are those of sets."""
    index = TokenBlockIndex(10_000)
    engines = [index.open() for _ in range(3)]
    held = [set() for _ in engines]
    for action, at, chain in events:
        engine = engines[at]
        if action == "store":
            for end in range(1, len(chain) + 1):
                part = tuple(chain[:end])
                if part not in held[at]:
                    parent = hash(part[:-1]) % 2**64 if end > 1 else None
                    index.apply(engine, stored([hash(part) % 2**64], part[-1:], parent))
                    held[at].add(part)
        elif action == "remove":
            # Engines give up ends only.
            for part in sorted(held[at], key=len, reverse=True):
                if part[: len(chain)] == tuple(chain):
                    index.apply(engine, BlockRemoved([hash(part) % 2**64]))
                    held[at].discard(part)
        elif action == "clear":
            index.apply(engine, AllBlocksCleared())
            held[at].clear()
        else:
            index.close(engine)
            engines[at], held[at] = index.open(), set()
        index.sweep(2)
        for chain_of in (chain, [0, 1, 0, 1, 0], [0, 0, 0]):
            for engine, parts in zip(engines, held, strict=True):
                expected = 0
                while expected < len(chain_of) and tuple(chain_of[: expected + 1]) in parts:
                    expected += 1
                assert depth(index, engine, keys(*chain_of)) == expected


WEIGHTS = (0.5, 0.25)


def lower(hashes, **fields):
    """Blocks in the memory of the host, by their hashes alone, as vLLM names them."""
    return BlockStored(hashes, None, b"", 0, medium="CPU", **fields)


def saved(index, engine, chain):
    """Tokens that an engine saves by its lower tiers behind those on the device."""
    ends = index.holders(chain, len(chain))
    return index.lower_tokens(chain, len(chain), ends).get(engine.slot, 0)


def test_blocks_of_lower_tiers_count_by_weight_behind_the_device():
    """Memory of the host goes on where the device ends, and storage where that ends."""
    index = TokenBlockIndex(100, WEIGHTS)
    engine, other = index.open(), index.open()
    chain = keys(1, 2, 3, 4, 5, 6)
    for slot in (engine, other):
        index.apply(slot, stored([1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6]))
    assert saved(index, engine, chain) == 0
    index.apply(engine, lower([1, 2, 3, 4]))
    index.apply(engine, BlockStored([4, 5], None, b"", 0, medium="FS"))
    assert depth(index, engine, chain) == 6
    assert saved(index, engine, chain) == 0
    index.apply(engine, BlockRemoved([2, 3, 4, 5, 6]))
    assert (depth(index, engine, chain), depth(index, other, chain)) == (1, 6)
    assert saved(index, engine, chain) == SIZE * (3 * 0.5 + 1 * 0.25)
    assert saved(index, other, chain) == 0
    # Block 4 stays in storage only, which still goes on from there.
    index.apply(engine, BlockRemoved([4], medium="CPU"))
    assert saved(index, engine, chain) == SIZE * (2 * 0.5 + 2 * 0.25)
    index.apply(engine, BlockRemoved([1]))
    assert depth(index, engine, chain) == 0
    assert saved(index, engine, chain) == SIZE * (3 * 0.5 + 2 * 0.25)
    index.apply(engine, BlockRemoved([1], medium="CPU"))
    assert saved(index, engine, chain) == 0
    assert len(engine.lower_keys) == 4
    index.set_lower_weight(other, 0, 1.0)
    assert engine.lower_weights == list(WEIGHTS)


def test_blocks_of_lower_tiers_may_come_with_their_tokens():
    """As SGLang publishes them; blocks on the device may follow one that is in memory only."""
    index = TokenBlockIndex(100, WEIGHTS)
    engine = index.open()
    index.apply(engine, stored([1, 2], [1, 2], medium="CPU_PINNED"))
    index.apply(engine, stored([3], [3], parent=2, medium="CPU_PINNED"))
    index.apply(engine, stored([9], [3], parent=77, medium="CPU_PINNED"))
    assert (len(engine.lower_keys), engine.dropped) == (3, 1)
    assert saved(index, engine, keys(1, 2, 3, 4)) == SIZE * 3 * 0.5
    index.apply(engine, stored([4], [4], parent=3))
    assert index.block_tokens == SIZE
    assert engine.held == 1
    assert saved(index, engine, keys(1, 2, 3, 4)) == SIZE * 3 * 0.5


def test_bits_of_lower_tiers_are_swept_with_their_engine():
    """They are free again then, for a device too."""
    index = TokenBlockIndex(100, WEIGHTS)
    engine = index.open()
    index.apply(engine, stored([1, 2], [1, 2]))
    index.apply(engine, lower([1, 2]))
    index.wipe(engine, is_complete=True)
    assert saved(index, engine, keys(1, 2)) == 0
    assert len(engine.lower_keys) == 0
    assert index.sweep(0)
    while index.sweep(1):
        pass
    assert index.num_keys == 0
    others = [index.open() for _ in range(2)]
    assert index.num_slots == 3
    for other in others:
        index.apply(other, stored([1], [1]))
        assert depth(index, other, keys(1)) == 1
    index.apply(engine, stored([1], [1]))
    index.apply(engine, lower([1]))
    index.apply(engine, BlockRemoved([1]))
    assert saved(index, engine, keys(1)) == SIZE * 0.5


@given(
    st.lists(
        st.tuples(
            st.integers(0, 2),  # engine
            st.sampled_from(["GPU", "CPU", "FS"]),
            st.booleans(),
            st.integers(1, 5),  # blocks of the chain from its beginning
        ),
        max_size=40,
    )
)
def test_lower_tiers_match_sets(steps):
    """Tiers that evict the end of a chain first are followed like sets of each."""
    index = TokenBlockIndex(100, WEIGHTS)
    engines = [index.open() for _ in range(3)]
    chain = keys(1, 2, 3, 4, 5)
    model = [{"GPU": 0, "CPU": 0, "FS": 0} for _ in engines]
    for number, medium, is_stored, length in steps:
        engine, depths = engines[number], model[number]
        if is_stored:
            index.apply(
                engine,
                stored(list(range(1, length + 1)), list(range(1, length + 1)), medium=medium),
            )
            depths[medium] = max(depths[medium], length)
        else:
            index.apply(engine, BlockRemoved(list(range(length, 6)), medium=medium))
            depths[medium] = min(depths[medium], length - 1)
    for engine, depths in zip(engines, model, strict=True):
        device, host = depths["GPU"], max(depths["GPU"], depths["CPU"])
        disk = max(host, depths["FS"])
        expected = int(SIZE * ((host - device) * 0.5 + (disk - host) * 0.25))
        assert saved(index, engine, chain) == expected
        assert depth(index, engine, chain) == device


def test_masks_of_many_engines_follow_events():
    """Also of blocks that were looked up, and are remembered."""
    index = TokenBlockIndex(100)
    engines = [index.open() for _ in range(20)]
    for engine in engines:
        index.apply(engine, stored([1, 2], [1, 2]))
    chain = keys(1, 2, 3)
    everyone = sum(engine.bit for engine in engines)
    assert index.holders(chain, 3) == [(2, everyone)]
    index.apply(engines[0], BlockRemoved([2]))
    index.apply(engines[1], stored([3], [3], parent=2))
    index.wipe(engines[2], is_complete=True)
    index.sweep(100)
    rest = everyone - sum(engine.bit for engine in engines[:2]) - 4
    assert index.holders(chain, 3) == [(1, engines[0].bit), (2, rest), (3, engines[1].bit)]
    for engine in engines[:2] + engines[3:]:
        index.apply(engine, BlockRemoved([1, 2, 3]))
    assert index.holders(chain, 3) == ()
