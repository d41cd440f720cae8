"""Unknown values count as the mean of the known ones."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.endpoint import NO_LOAD, Endpoint, EngineCounters, Load
from extproc.pool import candidate_builder
from extproc.pool.store import PoolStore

NOW = 100.0
FULL = Load(
    at=NOW, engine="vllm", waiting=4.0, running=8.0, kv_usage=0.5, kv_blocks=100, block_tokens=16
)

pages = st.builds(
    Load,
    at=st.sampled_from((NOW, NOW - 1.0, NOW - 60.0)),
    waiting=st.none() | st.floats(0, 1e6),
    running=st.none() | st.floats(0, 1e6),
    kv_usage=st.none() | st.floats(0, 1),
    kv_blocks=st.none() | st.integers(1, 10**6),
    block_tokens=st.none() | st.just(16),
)


def fleet_of(*loads, own=0):
    store = PoolStore(on_gone=lambda _: None)
    store.set_endpoints([Endpoint(f"10.0.0.{n}:8000") for n in range(len(loads))], 0.0)
    for member, load in zip(store.pool.members, loads, strict=True):
        for _ in range(own):
            member.account.open("m", 100, cached_tokens=0, now=NOW)
        if load is not None:
            store.observe(store.begin_scrape(member.endpoint), load, load.at)
    return store


def candidates(fleet, imputer=None, now=NOW):
    pool = fleet.pool
    imputer = imputer or candidate_builder.Imputer()
    return candidate_builder.build_candidates(
        pool.members,
        [0] * len(pool.members),
        adapter="",
        adapters=frozenset(),
        now=now,
        imputation=imputer.impute(pool.members, pool=pool, oldest=now - 6.0),
    )


def change(load, **facts):
    return msgspec.structs.replace(load, **facts)


@pytest.mark.parametrize("lost", [None, change(FULL, at=0.0, waiting=400.0, kv_usage=1.0)])
def test_stale_and_missing_loads_are_imputed_with_the_mean(lost):
    """Requests, queue, memory and the size of the cache are as those of the others on average."""
    more = change(FULL, waiting=8.0, running=4.0, kv_usage=0.7)
    store = fleet_of(FULL, more, lost, own=2)
    first, second, third = candidates(store)
    assert (third.estimated_requests, third.in_flight) == (2 + 10, 2)
    queued = [
        c.queued_tokens - m.account.queued(NOW)
        for c, m in zip((first, second, third), store.pool.members, strict=True)
    ]
    assert queued == [4 * 500, 8 * 500, 6 * 500]
    load = third.load
    assert (load.waiting, load.running, load.kv_tokens) == (6.0, 6.0, 1600)
    assert load.kv_usage == pytest.approx(0.6)
    assert third.page is NO_LOAD
    assert first.page is second.page is None


def test_without_any_load_only_own_requests_count():
    """Pages that are lost everywhere leave nothing behind, however long the queues on them were."""
    lost = [change(FULL, at=0.0, waiting=float(waiting)) for waiting in (0, 4, 13, 19)]
    imputed = candidates(fleet_of(*lost, own=1))
    assert [c.load for c in imputed] == [NO_LOAD] * 4
    assert [(c.estimated_requests, c.queued_tokens) for c in imputed] == [(1.0, 100.0)] * 4


def test_a_missing_value_is_imputed_with_the_mean():
    """Of a fresh page only the gap is filled, and its own values stay."""
    partial = change(FULL, waiting=None, running=3.0, kv_usage=None, kv_blocks=None)
    _, second = candidates(fleet_of(FULL, partial))
    assert (second.load.waiting, second.load.running, second.load.kv_usage) == (4.0, 3.0, 0.5)
    assert (second.load.kv_tokens, second.estimated_requests) == (1600, 12.0)
    assert second.page == partial


def test_a_value_missing_on_all_pages_stays_unknown():
    """A value that no endpoint knows is not imputed, and costs no loop."""
    bare = Load(at=NOW, waiting=1.0)
    store = fleet_of(bare, bare)
    assert not store.pool.has_unknown_values
    assert [c.load for c in candidates(store)] == [bare, bare]


def test_a_value_that_every_page_lacks_is_not_imputed():
    """A stale page beside pages that do not name the cache's size leaves those as they are."""
    bare = change(FULL, kv_blocks=None, block_tokens=None)
    first, second, third = candidates(fleet_of(bare, bare, None))
    assert first.page is second.page is None
    assert first.load is second.load
    assert (third.load.waiting, third.load.kv_tokens) == (4.0, None)


def test_an_understated_load_is_raised_to_the_mean():
    """It stays a lower bound, and is no measure for others."""
    store = fleet_of(None, FULL, None)
    liar, _, _ = store.pool.members
    for _ in range(9):
        liar.account.open("m", 100, cached_tokens=0, now=NOW - 9.0)
    claim = change(FULL, waiting=0.0, running=0.0, kv_usage=0.9)
    store.observe(store.begin_scrape(liar.endpoint), claim, NOW)
    first, _, third = candidates(store)
    assert (first.load.waiting, first.load.running, first.load.kv_usage) == (4.0, 8.0, 0.9)
    assert (first.estimated_requests, first.page) == (9 + 12, claim)
    assert third.load.kv_usage == 0.5


def test_a_frozen_page_is_imputed_with_the_mean():
    """However young it is."""
    still = change(FULL, waiting=0.0, running=0.0, counters=EngineCounters(generated_tokens=7.0))
    store = fleet_of(change(still, at=NOW - 5.0), FULL)
    member = store.pool.members[0]
    for _ in range(3):
        member.account.open("m", 100, cached_tokens=0, now=NOW - 4.0).close(NOW - 3.0)
    store.observe(store.begin_scrape(member.endpoint), still, NOW)
    first, _ = candidates(store)
    assert (first.load.waiting, first.load.running, first.estimated_requests) == (4.0, 8.0, 12.0)
    alone = fleet_of(change(still, at=NOW - 5.0))
    member = alone.pool.members[0]
    for _ in range(3):
        member.account.open("m", 100, cached_tokens=0, now=NOW - 4.0).close(NOW - 3.0)
    alone.observe(alone.begin_scrape(member.endpoint), still, NOW)
    assert [c.load for c in candidates(alone)] == [NO_LOAD]


@given(st.lists(st.none() | pages, min_size=1, max_size=6), st.integers(0, 3))
def test_imputed_loads_lie_within_known_loads(loads, own):
    """Whatever is filled in lies within what pages of others say."""
    imputed = candidates(fleet_of(*loads, own=own))
    for read in (
        lambda load: load.waiting,
        lambda load: load.running,
        lambda load: load.kv_usage,
    ):
        known = [
            value
            for load in loads
            if load is not None and load.at > 94.0 and (value := read(load)) is not None
        ]
        for c in imputed:
            value = read(c.load)
            assert (value is None) == (not known)
            if value is not None:
                assert min(known) * (1 - 1e-9) <= value <= max(known) * (1 + 1e-9)
    assert all(c.estimated_requests >= c.in_flight for c in imputed)
    assert all(c.queued_tokens >= 0.0 for c in imputed)


@given(st.floats(0.001, 1.0), st.integers(1, 7))
def test_the_mean_of_equal_kv_usages_is_that_usage(usage, count):
    """Without a page, an endpoint is not better than equal ones by a rounding error."""
    store = fleet_of(*[change(FULL, kv_usage=usage)] * count, None)
    assert candidates(store)[-1].load.kv_usage == usage


def test_an_imputation_is_valid_until_a_scrape_or_expiry():
    """The same pages give the same object, whatever our own requests do meanwhile."""
    imputer = candidate_builder.Imputer()
    store = fleet_of(FULL, change(FULL, at=NOW - 1.0, waiting=None))

    def impute(now):
        pool = store.pool
        return imputer.impute(pool.members, pool=pool, oldest=now - 6.0)

    first = impute(NOW)
    store.pool.members[0].account.open("m", 100, cached_tokens=0, now=NOW)
    assert impute(NOW + 4.9) is first
    assert list(first.stale) == [False, False]
    assert list(impute(NOW + 5.0).stale) == [False, True]
    assert list(impute(NOW).stale) == [False, False]
    member = store.pool.members[1]
    store.observe(store.begin_scrape(member.endpoint), FULL, NOW)
    assert impute(NOW) is None


@given(
    st.lists(st.none() | pages, min_size=1, max_size=12),
    st.lists(st.tuples(st.integers(0, 11), pages, st.booleans()), max_size=40),
    st.integers(0, 3),
)
def test_incremental_imputation_equals_a_fresh_one(loads, changes, own):
    """Whatever pages come in between, what is filled in differs by little more than a hundredth."""
    store, imputer, now = fleet_of(*loads, own=own), candidate_builder.Imputer(), NOW
    for at, page, is_looked_at in changes:
        now += 0.25
        member = store.pool.members[at % len(loads)]
        store.observe(store.begin_scrape(member.endpoint), change(page, at=now), now)
        if not is_looked_at:
            continue
        afresh = candidates(store, now=now)
        for ours, wanted in zip(candidates(store, imputer, now), afresh, strict=True):
            assert ours.page is wanted.page
            for read, slack in (
                (lambda c: c.load.waiting, 1e-6),
                (lambda c: c.load.running, 1e-6),
                (lambda c: c.load.kv_usage, 1e-6),
                (lambda c: c.load.kv_tokens, 16.0),
                (lambda c: c.estimated_requests, 1e-6),
                (lambda c: c.queued_tokens, 1e-3),
            ):
                value, expected = read(ours), read(wanted)
                assert (value is None) == (expected is None)
                if value is not None:
                    assert value == pytest.approx(expected, rel=0.03, abs=slack)


def test_loads_are_imputed_again_when_a_mean_moved():
    """A page that moves the mean of many by little leaves the filled pages as they are."""
    store, imputer = fleet_of(None, *[FULL] * 99), candidate_builder.Imputer()

    def waiting_of_first(waiting):
        member = store.pool.members[50]
        page = change(FULL, waiting=waiting)
        store.observe(store.begin_scrape(member.endpoint), page, NOW)
        return candidates(store, imputer)[0].load.waiting

    assert candidates(store, imputer)[0].load.waiting == 4.0
    assert waiting_of_first(7.0) == 4.0
    assert waiting_of_first(103.0) == pytest.approx(5.0)
    assert waiting_of_first(4.0) == pytest.approx(4.0)


def test_extra_metrics_of_a_stale_page_count_as_the_mean():
    """Each is the mean of the pages that have it; a fresh page has only its own."""
    stale = change(FULL, at=0.0, extra={"depth": 100.0, "gone": 1.0})
    both = change(FULL, extra={"depth": 2.0, "heat": -4.0})
    store = fleet_of(both, change(FULL, extra={"depth": 5.0}), FULL, stale, None)
    means = {"depth": 3.5, "heat": -4.0}
    imputed = candidates(store)
    assert [c.load.extra for c in imputed] == [both.extra, {"depth": 5.0}, {}, means, means]
    assert imputed[3].page is NO_LOAD


def test_extra_metrics_are_imputed_where_pages_have_nothing_else():
    """The load of engines that are not recognized is what their extra metrics show."""
    bare = Load(at=NOW, extra={"depth": 2.0})
    first, second = candidates(fleet_of(bare, None))
    assert (first.load, second.load.extra) == (bare, {"depth": 2.0})
    assert (second.load.waiting, second.page) == (None, NO_LOAD)


def test_extra_metrics_are_imputed_anew_when_a_mean_has_moved():
    """Large values that went leave nothing behind in the mean of small ones."""
    store, imputer = fleet_of(None, *[FULL] * 8), candidate_builder.Imputer()

    def imputed(value):
        member = store.pool.members[5]
        store.observe(
            store.begin_scrape(member.endpoint), change(FULL, extra={"depth": value}), NOW
        )
        return candidates(store, imputer)[0].load.extra["depth"]

    assert [imputed(value) for value in (0.5, 2.0**53, 0.5, 0.501, -0.5)] == [
        0.5,
        2.0**53,
        0.5,
        0.5,
        -0.5,
    ]
