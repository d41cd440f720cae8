import gc
import itertools
import random
import tracemalloc
from array import array
from collections import OrderedDict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.prefix_cache import blocks
from extproc.prefix_cache.index import IndexBudget, PrefixIndex
from tests.support.seeded import examples

A, B, C = ("10.0.0.1:8000", 0), ("10.0.0.2:8000", 0), ("10.0.0.3:8000", 0)
KEYS = (A, B, C)
#: Blocks of a token. The tables of a schedule grow with its limit.
TINY = blocks.Schedule(block_bytes=4, growth=1, limit_bytes=4096)

prompts = st.text("ab", min_size=0, max_size=9).map(str.encode)
colliding = st.lists(st.integers(0, 3), max_size=9)


def scripts(chains):
    """Steps in the life of an index."""
    keys = st.sampled_from(KEYS)
    record = st.tuples(st.just("record"), keys, chains)
    resize = st.tuples(st.just("resize"), keys, st.integers(0, 12))
    forget = st.tuples(st.just("forget"), keys, st.none())
    retract = st.tuples(st.just("retract"), keys, st.tuples(chains, st.integers(0, 9)))
    return st.lists(st.one_of(record, record, record, resize, forget, retract), max_size=40)


def questions(chains):
    """Chains to look up."""
    return st.lists(chains, min_size=1, max_size=5)


def chain(prompt):
    """A block for each byte of a prompt."""
    return blocks.chain(b"".join(b"%4d" % byte for byte in prompt), b"", schedule=TINY)


class Naive:
    """One ordered dict of blocks, each known by its path, for each endpoint; tails go in first."""

    def __init__(self, capacity):
        self.capacity = dict.fromkeys(KEYS, capacity)
        self.default = capacity
        self.held = {key: OrderedDict() for key in KEYS}

    def record(self, key, blocks_):
        queued = self.held[key]
        for depth in range(min(len(blocks_), self.capacity[key]), 0, -1):
            queued[tuple(blocks_[:depth])] = True
            queued.move_to_end(tuple(blocks_[:depth]))
        self.shrink(key)

    def resize(self, key, capacity):
        self.capacity[key] = capacity
        self.shrink(key)

    def forget(self, key, _):
        self.held[key].clear()
        self.capacity[key] = self.default

    def retract(self, key, argument):
        blocks_, keep = argument
        gone = tuple(blocks_[: keep + 1])
        if len(blocks_) > keep:
            for path in [item for item in self.held[key] if item[: len(gone)] == gone]:
                del self.held[key][path]

    def shrink(self, key):
        while len(self.held[key]) > self.capacity[key]:
            self.held[key].popitem(last=False)

    def depth(self, key, blocks_):
        queued = self.held[key]
        paths = (tuple(blocks_[:depth]) for depth in range(1, len(blocks_) + 1))
        return sum(1 for _ in itertools.takewhile(queued.__contains__, paths))


def parts(index, key):
    """Blocks that an endpoint holds, each with all blocks before it."""
    return {
        (*before(run), *unpacked(run)[: depth + 1])
        for run, keep in index._caches[index.slot(key)].parts()
        for depth in range(keep)
    }


def unpacked(run):
    """The blocks of a run."""
    return array("Q", run.hashes)


def before(run):
    """The blocks from the root to a run."""
    return () if run.parent is None else (*before(run.parent), *unpacked(run.parent))


def check_books(index):
    """Runs, masks, counts and beliefs say the same."""
    runs, blocks_ = 0, 0
    below = list(index._root.children.values())
    while below:
        run = below.pop()
        runs, blocks_ = runs + 1, blocks_ + run.size
        assert run.size
        assert unpacked(run)[0] == run.head
        assert run.holders
        assert not run.holders & run.partly
        assert run.parent is index._root or not (run.holders | run.partly) & ~run.parent.holders
        for slot, cache_model in enumerate(index._caches):
            keep = cache_model.held_blocks(run)
            assert bool(run.holders >> slot & 1) == (keep == run.size)
            assert bool(run.partly >> slot & 1) == (0 < keep < run.size)
        children = (run.children or {}).items()
        assert all(child.parent is run and child.head == head for head, child in children)
        below += [child for _, child in children]
    assert (index._runs, index._blocks) == (runs, blocks_)
    for cache in index._caches:
        assert cache.held - cache.unnamed == sum(held for _, held in cache.parts())


def take_step(index, naive, name, key, argument):
    """Do one operation of a script on both."""
    match name:
        case "forget":
            index.forget(key)
        case "retract":
            index.retract(key, *argument)
        case _:
            getattr(index, name)(key, argument)
    getattr(naive, name)(key, argument)


def check_script(capacity, script, questions):
    """Hold an index against the naive model, step by step."""
    index, naive = PrefixIndex(capacity), Naive(capacity)
    for operation in script:
        take_step(index, naive, *operation)
        for item in KEYS:
            assert index.held(item) <= naive.capacity[item]
            assert parts(index, item) == set(naive.held[item])
        check_books(index)
    assert index.blocks_total == sum(len(queued) for queued in naive.held.values())
    for question in questions:
        slots = [index.slot(key) for key in KEYS]
        depths = index.match(question)
        assert [depths[slot] for slot in slots] == [naive.depth(key, question) for key in KEYS]
    for key in KEYS:
        index.forget(key)
    check_books(index)
    assert not index._root.children


@settings(max_examples=examples(200), deadline=None)
@given(st.integers(0, 8), scripts(prompts.map(chain)), questions(prompts.map(chain)))
def test_index_is_least_recently_used_with_tails_first(capacity, script, queries):
    """After any script the index holds exactly the blocks a naive model holds, within bounds."""
    check_script(capacity, script, queries)


@settings(max_examples=examples(200), deadline=None)
@given(st.integers(0, 8), scripts(colliding), questions(colliding))
def test_colliding_hashes_change_nothing(capacity, script, queries):
    """Even for block lists no hash function gives, a block is known by all that lies before it."""
    check_script(capacity, script, queries)


@settings(max_examples=examples(100), deadline=None)
@given(st.integers(200, 4000), scripts(prompts.map(chain)), questions(prompts.map(chain)))
def test_bytes_stay_within_the_bound_of_all_endpoints(max_bytes, script, queries):
    """After any script memory is within the bound, and no more is believed than was recorded."""
    index, naive = PrefixIndex(8, max_bytes=max_bytes), Naive(8)
    for operation in script:
        take_step(index, naive, *operation)
        assert index.bytes_estimate() <= max_bytes
        check_books(index)
    for question in queries:
        slots = [index.slot(key) for key in KEYS]
        depths = index.match(question)
        for key, slot in zip(KEYS, slots, strict=True):
            assert depths[slot] <= naive.depth(key, question)


def test_an_endpoint_that_is_resized_stays_within_the_bound():
    """Its runs are cut, and each part takes more than its share of the whole."""
    index = PrefixIndex(8, max_bytes=2278)
    for key, prompt in ((A, b"bb"), (A, b"abaa"), (A, b"baaa"), (B, b"aa")):
        index.record(key, chain(prompt))
    index.resize(A, 2)
    assert index.bytes_estimate() <= 2278


@settings(max_examples=examples(200), deadline=None)
@given(
    st.integers(1, 3),
    scripts(prompts.map(chain)),
    st.lists(st.tuples(st.integers(0, 40), st.sampled_from(KEYS)), max_size=6),
    questions(prompts.map(chain)),
)
def test_what_is_cleared_is_given_up_in_steps(most, script, cleared, queries):
    """Nothing that an endpoint held before is believed meanwhile, and all is gone in the end."""
    script = [*script]
    for position, key in cleared:
        script.insert(position, ("clear", key, None))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("extproc.prefix_cache.index._MAX_RELEASED", most)
        index, naive = PrefixIndex(12), Naive(12)
        for name, key, argument in script:
            arguments = {"forget": (), "clear": (), "retract": argument}.get(name, (argument,))
            getattr(index, name)(key, *arguments)
            if name == "clear":
                naive.held[key].clear()
            elif name != "resize":
                getattr(naive, name)(key, argument)
            check_books(index)
            for question in queries:
                slots = [index.slot(other) for other in KEYS]
                depths = index.match(question)
                for other, slot in zip(KEYS, slots, strict=True):
                    assert depths[slot] <= naive.depth(other, question)
        for _ in range(200):
            index.record(C, [1])
        for key in KEYS:
            held = {*naive.held[key]} | ({(1,)} if key == C else set())
            assert parts(index, key) <= held
            assert index.held(key) <= 12
            index.forget(key)
        for _ in range(200):
            index.record(A, [1])
        assert list(index.keys()) == [A]
        assert index.blocks_total == 1


def test_an_endpoint_with_many_runs_is_cleared_in_bounded_steps(monkeypatch):
    """Each chain of it is a run of its own; other endpoints are matched as before."""
    monkeypatch.setattr("extproc.prefix_cache.index._MAX_RELEASED", 10)
    index = PrefixIndex(1000)
    for number in range(100):
        index.record(A, [number])
    index.record(B, [0])
    slots = index.slot(A), index.slot(B)
    index.clear(A)
    assert index.match([0]) == [0, 1]
    assert index.held(A) == 90
    index.record(A, [0, 1])
    assert index.match([0, 1]) == [0, 1]
    for _ in range(10):
        index.record(B, [0])
    assert index.match([0, 1]) == [2, 1]
    assert index.held(A) == 2
    assert slots == (index.slot(A), index.slot(B))


def test_least_recently_used_blocks_go_first():
    """A busy endpoint keeps what it uses while others lose what they do not."""
    index = PrefixIndex(10_000, max_bytes=400_000)
    for number in range(800):
        index.record(A, [1, number])
    for number in range(4000):
        index.record(B, [2, 10_000 + number])
        index.record(C, [3, 4])
    assert index.held(A) == 0
    assert 0 < index.held(B) < 4000
    depths = index.match([2, 13_999])
    assert depths[index.slot(B)] == 2
    assert index.match([2, 10_000])[index.slot(B)] == 1
    assert index.match([3, 4])[index.slot(C)] == 2


def test_memory_bound_holds_for_many_endpoints_with_short_prompts():
    """Prompts one block long are the dearest; all endpoints together stay within a fifth of it."""
    rng = random.Random(1)
    keys = [(f"10.0.{number}.1:8000", 0) for number in range(200)]
    gc.collect()
    tracemalloc.start()
    index = PrefixIndex(32_768, max_bytes=4_000_000)
    most = 0
    for _ in range(16_000):
        index.record(rng.choice(keys), [rng.getrandbits(60)])
        most = max(most, index.bytes_estimate())
    gc.collect()
    before_, _ = tracemalloc.get_traced_memory()
    queued = index.blocks_total
    del index
    gc.collect()
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most <= 4_000_000
    assert before_ - after < 1.2 * 4_000_000
    assert queued * 400 > 4_000_000


def test_indexes_of_several_pools_share_a_bound():
    """The largest gives up first, a small one keeps its blocks, and what one leaves others take."""
    budget, slack = IndexBudget(400_000), 64 * 400
    small, first, second = (PrefixIndex(10_000, budget=budget) for _ in range(3))
    for number in range(64):
        small.record(A, [1, number])
    for number in range(4000):
        first.record(A, [1, number])
    alone = first.held(A)
    assert small.bytes_estimate() + first.bytes_estimate() <= 400_000 + slack
    for number in range(4000):
        second.record(A, [1, number])
    sizes = [index.bytes_estimate() for index in (first, second)]
    assert small.bytes_estimate() + sum(sizes) <= 400_000 + slack
    assert abs(sizes[0] - sizes[1]) < 2 * slack
    assert small.held(A) == 65
    del first
    gc.collect()
    for number in range(4000):
        second.record(A, [1, number])
    assert second.held(A) == pytest.approx(alone, rel=0.1)
    for index in (small, second):
        check_books(index)


def test_a_block_after_a_gap_does_not_match():
    """Holding the tail without the root is no match."""
    index = PrefixIndex(10)
    index.record(A, [1, 2, 3])
    index.record(B, [9, 2, 3])
    depths = index.match([1, 2, 3, 4])
    assert (depths[index.slot(A)], depths[index.slot(B)]) == (3, 0)


def test_a_single_walk_matches_all_endpoints():
    """Every endpoint gets the depth of its own unbroken run."""
    index = PrefixIndex(10)
    for key, depth in ((A, 2), (B, 4), (C, 0)):
        index.record(key, [1, 2, 3, 4][:depth])
    assert index.match([1, 2, 3, 4, 5]) == [2, 4, 0]
    assert index.match([]) == [0, 0, 0]


def test_partial_holders_keep_a_node_when_its_last_full_holder_leaves():
    """The run is cut to what they hold, for each of them."""
    index = PrefixIndex(100)
    numbers = list(range(1, 11))
    for key in KEYS:
        index.record(key, numbers)
    for key in (B, C):
        index.retract(key, numbers, 6)
    index.forget(A)
    depths = index.match(numbers)
    assert [depths[index.slot(key)] for key in (B, C)] == [6, 6]


@pytest.mark.parametrize("branch", [4, 6, 8])
def test_splitting_a_node_keeps_the_blocks_of_its_holders(branch):
    """Wherever another chain branches off: before, at, or behind the end of what one holds."""
    index = PrefixIndex(100)
    numbers = list(range(1, 11))
    index.record(A, numbers)
    index.record(B, numbers)
    index.retract(B, numbers, 6)
    branched = [*numbers[:branch], 99]
    index.record(C, branched)
    assert [index.match(numbers)[index.slot(key)] for key in KEYS] == [10, 6, branch]
    expected = [branch, min(6, branch), branch + 1]
    assert [index.match(branched)[index.slot(key)] for key in KEYS] == expected
    assert [index.held(key) for key in KEYS] == [10, 6, branch + 1]


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


def test_unnamed_blocks_take_room_and_are_evicted_first():
    """The end of a prompt and its answer go before the blocks that others can find."""
    index = PrefixIndex(10)
    slot = index.slot(A)
    index.record(A, [1, 2, 3], 3)
    index.record(A, [4, 5, 6], 1)
    index.record(A, [7])
    assert index.match([1, 2, 3])[slot] == 3
    index.record(A, [8, 9, 10])
    assert index.match([1, 2, 3])[slot] == 2
    assert index.held(A) == index.blocks_total == 9
    check_books(index)


def test_a_prompt_that_goes_on_takes_the_place_of_an_unnamed_end():
    """An answer becomes a part of the next prompt of its conversation."""
    index = PrefixIndex(8)
    slot = index.slot(A)
    index.record(A, [9, 8])
    index.record(A, [1, 2], 4)
    index.record(A, [1, 2, 3, 4], 2)
    assert index.match([9, 8])[slot] == 2
    index.record(A, [1, 2, 5], 0)
    assert index.match([9, 8])[slot] == 1
    index.retract(A, [1, 2, 3, 4], 2)
    index.record(A, [6, 7], 1)
    assert [index.match(chain)[slot] for chain in ([1, 2, 5], [9, 8], [6, 7])] == [3, 1, 2]
    check_books(index)


def test_bytes_estimate_grows_with_held_blocks():
    """The memory estimate is positive and follows the blocks."""
    index = PrefixIndex(1000)
    empty = index.bytes_estimate()
    index.record(A, chain(bytes(900)))
    index.record(B, chain(bytes(900)))
    assert index.bytes_estimate() > empty + 900 * 8


def test_memory_stays_small_while_blocks_are_replaced():
    """Full and churning, with 8 new blocks a chain, a block takes less than 100 bytes, as documented."""
    rng = random.Random(1)
    system = [rng.getrandbits(60) for _ in range(32)]
    gc.collect()
    tracemalloc.start()
    index = PrefixIndex(2000)
    for _ in range(4000):
        index.record(rng.choice(KEYS), system + [rng.getrandbits(60) for _ in range(8)])
    queued = index.blocks_total
    estimate = index.bytes_estimate()
    gc.collect()
    before_, _ = tracemalloc.get_traced_memory()
    del index
    gc.collect()
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert queued == 3 * 2000
    assert (before_ - after) / queued < 100
    assert abs(estimate / (before_ - after) - 1) < 0.2


def test_slots_of_endpoints_that_left_are_reused_without_a_search():
    """The lowest first; thousands may come back at once, to the first request behind them."""

    class CountedSlots(list):
        """Free slots, and how often all of them were looked at."""

        passes = 0

        def __iter__(self):
            self.passes += 1
            return super().__iter__()

    index = PrefixIndex(10)
    index._free = free = CountedSlots()
    keys = [(f"10.0.0.{number}:80", 1) for number in range(100)]
    for key in keys:
        index.slot(key)
    for key in reversed(keys):
        index.forget(key)
    assert [index.slot(key) for key in keys] == [*range(100)]
    assert not free.passes
