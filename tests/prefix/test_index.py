from collections import OrderedDict

from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.prefix import blocks
from extproc.prefix.index import PrefixIndex

A, B, C = ("10.0.0.1:8000", 0), ("10.0.0.2:8000", 0), ("10.0.0.3:8000", 0)
KEYS = (A, B, C)
TINY = blocks.Schedule(block_bytes=1, growth=1)

prompts = st.text("ab", min_size=0, max_size=9).map(str.encode)
operations = st.lists(
    st.one_of(
        st.tuples(st.just("record"), st.sampled_from(KEYS), prompts),
        st.tuples(st.just("resize"), st.sampled_from(KEYS), st.integers(0, 12)),
        st.tuples(st.just("forget"), st.sampled_from(KEYS), st.none()),
    ),
    max_size=40,
)


def chain(prompt):
    return blocks.chain(prompt, b"", schedule=TINY)


class Naive:
    """One ordered dict of blocks for each endpoint: tails are inserted before roots."""

    def __init__(self, capacity):
        self.capacity = dict.fromkeys(KEYS, capacity)
        self.default = capacity
        self.held = {key: OrderedDict() for key in KEYS}

    def record(self, key, prompt):
        held = self.held[key]
        for block in reversed(chain(prompt)[: self.capacity[key]]):
            held[block] = True
            held.move_to_end(block)
        self.shrink(key)

    def resize(self, key, capacity):
        self.capacity[key] = capacity
        self.shrink(key)

    def forget(self, key, _):
        self.held[key].clear()
        self.capacity[key] = self.default

    def shrink(self, key):
        while len(self.held[key]) > self.capacity[key]:
            self.held[key].popitem(last=False)

    def depth(self, key, prompt):
        depth = 0
        for block in chain(prompt):
            if block not in self.held[key]:
                break
            depth += 1
        return depth


def apply(index, operation):
    name, key, argument = operation
    if name == "record":
        index.record(key, chain(argument))
    elif name == "resize":
        index.resize(key, argument)
    else:
        index.forget(key)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 8), operations, st.lists(prompts, min_size=1, max_size=5))
def test_index_is_least_recently_used_with_tails_first(capacity, script, questions):
    """After any script the index holds exactly the blocks a naive model holds, within bounds."""
    index, naive = PrefixIndex(capacity), Naive(capacity)
    for operation in script:
        apply(index, operation)
        getattr(naive, operation[0])(operation[1], operation[2])
        for key in KEYS:
            assert index.held(key) <= naive.capacity[key]
            belief = index._beliefs.get(key)
            assert set(belief.blocks() if belief else ()) == set(naive.held[key])
    assert index.blocks_total == sum(len(held) for held in naive.held.values())
    assert set(index._masks) == set().union(*naive.held.values())
    for question in questions:
        slots = [index.slot(key) for key in KEYS]
        depths = index.match(chain(question))
        assert [depths[slot] for slot in slots] == [naive.depth(key, question) for key in KEYS]


@given(st.integers(1, 6), st.lists(st.tuples(st.sampled_from(KEYS), st.lists(st.integers(0, 5)))))
def test_colliding_hashes_keep_the_books_straight(capacity, script):
    """Even for block lists no hash function gives, masks and counts agree and the bound holds."""
    index = PrefixIndex(capacity)
    for key, blocks_ in script:
        index.record(key, blocks_)
        assert index.held(key) <= capacity
    keys = index.keys()
    for key in keys:
        held = index._beliefs[key].blocks()
        assert len(held) == len(set(held)) == index.held(key)
        bit = 1 << index.slot(key)
        assert set(held) == {block for block, mask in index._masks.items() if mask & bit}
    for key in keys:
        index.forget(key)
    assert index._masks == {}


def test_a_block_behind_a_gap_does_not_count():
    """Holding the tail without the root is no match."""
    index = PrefixIndex(10)
    index.record(A, [1, 2, 3])
    index.record(B, [9, 2, 3])
    depths = index.match([1, 2, 3, 4])
    assert (depths[index.slot(A)], depths[index.slot(B)]) == (3, 0)


def test_one_walk_answers_for_all():
    """Every endpoint gets the depth of its own unbroken run."""
    index = PrefixIndex(10)
    for key, depth in ((A, 2), (B, 4), (C, 0)):
        index.record(key, [1, 2, 3, 4][:depth])
    assert index.match([1, 2, 3, 4, 5]) == [2, 4, 0]
    assert index.match([]) == [0, 0, 0]


def test_forget_removes_everything_and_the_slot_is_used_again():
    """A new life of an address starts from nothing, in the slot of the old one."""
    index = PrefixIndex(10)
    index.record(A, [1, 2])
    index.record(B, [1])
    index.forget(A)
    index.forget(A)
    reborn = (A[0], 1)
    assert index.slot(reborn) == 0
    assert index.match([1, 2]) == [0, 1]
    assert index.held(A) == 0
    assert index.keys() == (B, reborn)


def test_a_long_chain_keeps_its_root():
    """A chain longer than the capacity loses its tail."""
    index = PrefixIndex(3)
    index.record(A, [1, 2, 3, 4, 5])
    assert index.match([1, 2, 3, 4, 5]) == [3]


def test_estimate_grows_with_what_is_held():
    """The memory estimate is positive and follows the blocks."""
    index = PrefixIndex(1000)
    empty = index.bytes_estimate()
    index.record(A, chain(bytes(900)))
    index.record(B, chain(bytes(900)))
    assert index.bytes_estimate() > empty + 900 * 40
