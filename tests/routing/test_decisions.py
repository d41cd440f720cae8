"""Picks where pages show the work of others, come late, stand still, lie or fail."""

import math

import hypothesis
import pytest
from hypothesis import strategies as st

from extproc.endpoint import DEFAULT_STEP_TIMES
from extproc.scheduling import registry
from tests.support.xds_fixture import STEP_S, EqualEnginesScene

#: Strategies that count what they send. Those that go by pages alone, as upstream's do, herd between
#: two of them, whatever the pages say.
COUNTING = (
    "adaptive",
    "balanced",
    "lmetric",
    "least-load",
    "least-request",
    "prefix-hash",
    "round-robin",
)

#: Of these, the ones that look at pages too.
READING = ("adaptive", "balanced", "lmetric")

#: The other ones: by pages alone, or by chance.
PAGES_ALONE = (
    "weighted",
    "least-queue",
    "least-kv-cache",
    "queue-kv",
    "lora-queue",
    "lora-kv",
    "filter-chain",
    "random",
)


def most(total, size):
    """Requests that an engine among others that look alike has at most."""
    return 1.25 * total / size + 2


@pytest.mark.parametrize("strategy", READING)
def test_foreign_work_costs_the_same_whatever_was_sent_before(strategy):
    """Earlier requests to an engine do not change the estimate of those that wait there now."""
    scene = EqualEnginesScene(strategy, 4, running=8, waiting=4)
    for at, (count, work) in enumerate([(1000, 20), (50, 400), (10, 9000), (0, 0)]):
        account = scene.parts.store.pool.members[at].account
        took_s = 0.5 + work * DEFAULT_STEP_TIMES.prefill_s  # as of engines that are equally fast
        for _ in range(count):
            account.open("m", work, cached_tokens=0, now=1.0).close(1.0 + took_s)
    account.open("m", 100_000, cached_tokens=0, now=1.0).close(1.5, answered=False)
    scene.step()
    assert max(scene.hold(200, 200, steps=0)) <= most(200, 4)


@pytest.mark.parametrize("strategy", READING)
def test_a_refused_prompt_adds_no_cost(strategy):
    """One that was refused costs nothing afterwards, however long it was."""
    scene = EqualEnginesScene(strategy, 4, running=8, waiting=3)
    scene.step()
    reservation = scene.parts.store.pool.members[0].account.open(
        "m", 100_000, cached_tokens=0, now=scene.now
    )
    reservation.close(scene.now, answered=False)
    for _ in range(8):
        scene.step()
    assert max(scene.hold(200, 200, steps=0)) <= most(200, 4)


@pytest.mark.parametrize("strategy", READING)
def test_queues_of_stale_pages_are_forgotten(strategy):
    """Once no page is fresh, whatever the last ones showed, own requests are all that counts."""
    scene = EqualEnginesScene(strategy, 4, pages=dict.fromkeys(range(4), "fails"))
    for engine, waiting in zip(scene.engines, (0, 4, 13, 19), strict=True):
        engine.foreign = 20, waiting
    scene.step()
    scene.turn_bad()
    scene.now += 20.0
    scene.step()
    assert max(scene.hold(200, 200, steps=0)) <= most(200, 4)


@pytest.mark.parametrize("strategy", READING)
def test_an_engine_without_a_page_gets_its_share_of_requests(strategy):
    """Consecutive requests do not all go to an endpoint without a known load."""
    scene = EqualEnginesScene(strategy, 4, running=20, waiting=6, pages={0: "fails"})
    scene.step()
    scene.turn_bad()
    scene.now += 20.0
    for engine in range(1, 4):
        scene.due[engine] = scene.now
    for _ in range(24):
        scene.send(200, for_s=0.2)
        for _ in range(6):
            scene.step()
    assert scene.picks[scene.engines[0].address] <= 16
    assert scene.picks[scene.engines[0].address] >= 1


def test_every_strategy_is_tried():
    """A strategy that is added stands in one of the lists; `maximum` is `filter-chain`."""
    assert {*COUNTING, *PAGES_ALONE, "maximum"} == {*registry.profiles()}


@hypothesis.given(data=st.data(), strategy=st.sampled_from(COUNTING), size=st.integers(2, 12))
def test_no_engine_has_much_more_than_its_share(data, strategy, size):
    """Whatever the age of pages, and whatever others do, alike engines hold alike many.

    Requests come all at once, or no faster than the engines compute: what is known to be computed on
    one and not on another is no likeness.
    """
    scene = EqualEnginesScene(
        strategy,
        size,
        seed=data.draw(st.integers(0, 2**32), "seed"),
        running=data.draw(st.integers(0, 60), "running"),
        waiting=data.draw(st.integers(0, 30), "waiting"),
        periods=data.draw(
            st.dictionaries(st.integers(0, size - 1), st.floats(0.05, 20.0)), "periods"
        ),
    )
    tokens = data.draw(st.integers(10, 2000), "tokens")
    scene.serve(data.draw(st.integers(1, 60), "served"), tokens)
    total = data.draw(st.integers(1, 120), "held")
    least = math.ceil(tokens / (4000 * STEP_S * size))
    steps = data.draw(st.just(0) | st.integers(least, least + 3), "steps")
    queued = scene.hold(total, tokens, steps=steps)
    assert max(queued) <= most(total, size), queued


@hypothesis.given(
    strategy=st.sampled_from(READING),
    size=st.integers(2, 12),
    pages=st.dictionaries(
        st.integers(0, 11), st.sampled_from(("still", "low", "negative", "absurd", "fails"))
    ),
    seed=st.integers(0, 2**32),
    tokens=st.integers(10, 4000),
)
def test_distinct_prompts_spread_over_idle_engines(strategy, size, pages, seed, tokens):
    """Of as many prompts as there are idle engines none gets more than three, whatever pages say."""
    scene = EqualEnginesScene(strategy, size, seed=seed, pages=pages)
    scene.serve(20, tokens)
    scene.turn_bad()
    scene.step()
    queued = scene.hold(size, tokens, steps=0)
    assert max(queued) <= math.ceil(1.5) + 1, queued


def runs(strategy, page, *, size, seed, running, waiting):
    """Requests one engine gets of those held open, with the page named and with a true one."""
    counts = []
    for pages in ({0: page}, {}):
        scene = EqualEnginesScene(
            strategy, size, seed=seed, running=running, waiting=waiting, pages=pages
        )
        scene.serve(30, 200)
        scene.turn_bad()
        scene.serve(30, 200)
        scene.hold(6 * size, 200)
        # Long enough for a page to be stale, and for ours to be missed on one that hides them.
        for _ in range(160):
            scene.step()
        scene.picks.clear()
        counts.append(scene.hold(20 * size, 200)[0])
    return counts


#: A false page of one engine, and the work of others on all of them.
FALSE_PAGES = {
    "page": st.sampled_from(("still", "low", "negative", "absurd", "fails")),
    "seed": st.integers(0, 2**32),
    "running": st.integers(0, 40),
    "waiting": st.integers(0, 20),
}


@hypothesis.given(strategy=st.sampled_from(COUNTING), size=st.integers(2, 8), **FALSE_PAGES)
def test_no_engine_gains_requests_by_its_page(strategy, page, size, seed, running, waiting):
    """Once that can be known, it gets no more than with a true page, a tenth and chance apart."""
    worse, true = runs(strategy, page, size=size, seed=seed, running=running, waiting=waiting)
    assert worse <= 1.1 * true + 4, (worse, true)


@hypothesis.given(strategy=st.sampled_from(PAGES_ALONE), size=st.integers(4, 8), **FALSE_PAGES)
def test_a_false_page_draws_no_herd(strategy, page, size, seed, running, waiting):
    """By pages or chance alone it gets no more than with a true page, and twice its share."""
    worse, true = runs(strategy, page, size=size, seed=seed, running=running, waiting=waiting)
    assert worse <= true + 2 * 20, (worse, true)
