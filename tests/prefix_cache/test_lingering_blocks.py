from extproc.prefix_cache.index import PrefixIndex
from tests.prefix_cache.test_index import A, B, chain


def test_what_was_evicted_last_lingers():
    """Half of the chance at first, less with every block that is evicted since, none after a cache full."""
    index = PrefixIndex(8)
    shared = chain(b"abcdef")
    index.record(A, shared)
    index.record(B, chain(b"12"))
    assert index.lingering(shared, index.match(shared)) is None
    index.record(A, chain(b"ghijkl"))  # four of its blocks go
    assert index.match(shared) == [2, 0]
    assert index.lingering(shared, [2, 0]) == (0, [(6, 0.5)])
    other = chain(b"abcdXY")
    assert index.lingering(other, index.match(other)) == (0, [(4, 0.5)])
    index.record(A, chain(b"mn"))
    assert index.match(shared) == [0, 0]
    assert index.lingering(shared, [0, 0]) == (0, [(2, 0.5), (6, 0.375)])
    index.record(A, chain(b"opqrst"))
    assert index.lingering(shared, [0, 0]) == (0, [(2, 0.125)])
    index.record(A, chain(b"uv"))
    assert index.lingering(shared, [0, 0]) is None


def test_what_an_endpoint_evicted_lingers_only_there_and_in_this_life():
    """Not behind what another one holds, nor once its engine began anew."""
    index = PrefixIndex(4)
    shared = chain(b"abcd")
    index.record(A, shared)
    index.record(A, chain(b"efgh"))
    assert index.lingering(shared, index.match(shared)) == (0, [(4, 0.5)])
    index.record(B, chain(b"ab"))
    assert index.match(shared) == [0, 2]
    assert index.lingering(shared, [0, 2]) is None
    index.retract(B, shared, 0)
    index.clear(A)
    assert index.lingering(shared, index.match(shared)) is None


def test_nothing_lingers_of_a_cache_that_is_being_cleared():
    """Parts that are not given up yet go first where new ones need their room."""
    index = PrefixIndex(10_000)
    for number in range(10_000):
        index.record(A, [number + 1])
    index.clear(A)
    assert index.held(A)
    index.record(A, range(1_000_000, 1_005_000))
    prompts = [[number + 1] for number in range(10_000)]
    assert not any(index.lingering(prompt, index.match(prompt)) for prompt in prompts)


def test_what_lingers_takes_no_memory_beyond_the_bound():
    """It goes before what is held, and once as much again was evicted."""
    index, free = PrefixIndex(400, max_bytes=40_000), PrefixIndex(40)
    for number in range(300):
        index.record(A, chain(b"%03d." % number))
        free.record(A, chain(b"%03d." % number))
        assert index.bytes_estimate() <= 40_000
    assert free.bytes_estimate() < 3 * (free.held(A) * 400)
