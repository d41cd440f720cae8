"""A packed map is a dict of 64-bit keys that takes a fraction of the memory."""

import random
import tracemalloc

from hypothesis import given
from hypothesis import strategies as st

from extproc.prefix_cache import packed_map
from extproc.prefix_cache.packed_map import PackedMap, packed_values

_KEYS = st.integers(0, 2**64 - 1) | st.integers(0, 40)


@given(st.lists(st.tuples(st.sampled_from(("set", "pop")), _KEYS, st.integers(0, 9)), max_size=200))
def test_packed_map_behaves_as_a_dict(steps):
    """Any changes leave the entries that a dict would have."""
    packed, reference = PackedMap(), {}
    for action, key, value in steps:
        if action == "set":
            packed.set(key, value)
            reference[key] = value
        else:
            assert packed.pop(key) == reference.pop(key, None)
        assert packed.get(key) == reference.get(key)
    assert list(packed) == sorted(reference)
    assert len(packed) == len(reference)


def test_packed_map_keeps_entries_over_many_segments():
    """Segments that are cut and emptied lose nothing."""
    rng, packed = random.Random(1), PackedMap(list)
    keys = [rng.getrandbits(64) for _ in range(10_000)]
    for key in keys:
        packed.set(key, key >> 3)
    assert all(packed.get(key) == key >> 3 for key in keys)
    for key in keys[:9_000]:
        assert packed.pop(key) == key >> 3
    assert sorted(keys[9_000:]) == list(packed)
    left = len(packed)
    removed = packed.pop_segment()
    assert len(packed) == left - len(removed)


def test_packed_map_takes_less_than_twenty_bytes_for_an_entry():
    """Keys and values are packed."""
    rng = random.Random(1)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        packed = PackedMap(packed_values)
        for _ in range(20_000):
            packed.set(rng.getrandbits(64), rng.getrandbits(64))
        taken = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert taken / 20_000 < 20


def test_continuations_have_few_blocks_in_all(monkeypatch):
    """An engine chooses how many blocks an event has, and the longest unused chains go first."""
    monkeypatch.setattr(packed_map, "_MAX_CONTINUED_TOTAL", 10)
    known = packed_map.Continuations()
    for parent in range(4):
        known.record(parent, [10 * parent + number for number in range(4)])
    assert [list(known.find(parent)) for parent in range(4)] == [
        [],
        [],
        [20, 21, 22, 23],
        [30, 31, 32, 33],
    ]
    known.record(3, [40])
    known.record(5, [50, 51, 52])
    assert [len(known.find(parent)) for parent in (2, 3, 5)] == [4, 1, 3]
