from hypothesis import given
from hypothesis import strategies as st

from extproc.endpoint import EngineCounters, Load
from extproc.pool.engine_counters import PrefillCounter


def page(running, first_tokens, finished):
    counters = EngineCounters(first_tokens=first_tokens, finished=finished)
    return Load(running=running, counters=counters)


def test_requests_without_a_first_token_are_counted():
    counter = PrefillCounter()
    assert counter.update(page(3.0, 0.0, 0.0)) == 3.0
    assert counter.update(page(3.0, 2.0, 0.0)) == 1.0
    assert counter.update(page(2.0, 3.0, 1.0)) == 0.0


def test_requests_given_up_are_left_out_from_the_next_page_on_that_shows_them():
    """Two of four that decode are given up, and never count as finished."""
    counter = PrefillCounter()
    assert counter.update(page(4.0, 4.0, 0.0)) == 0.0
    assert counter.update(page(2.0, 4.0, 0.0)) == 0.0
    assert counter.update(page(3.0, 4.0, 0.0)) == 1.0


def test_an_engine_that_served_before_has_no_prompt_under_way_as_far_as_known():
    assert PrefillCounter().update(page(5.0, 1000.0, 900.0)) == 0.0


def test_finished_requests_without_first_tokens_change_nothing_for_good():
    """Requests given up before their first token, where these count as finished."""
    counter = PrefillCounter()
    assert counter.update(page(0.0, 0.0, 7.0)) == 0.0
    assert counter.update(page(2.0, 1.0, 7.0)) == 1.0


def test_a_page_without_the_counters_shows_none():
    assert PrefillCounter().update(page(2.0, None, 1.0)) == 0.0
    assert PrefillCounter().update(page(2.0, 1.0, None)) == 0.0


COUNTS = st.integers(0, 1000).map(float)


@given(st.lists(st.tuples(COUNTS, COUNTS, COUNTS), max_size=20))
def test_the_count_is_between_none_and_all(pages):
    counter = PrefillCounter()
    for running, first_tokens, finished in pages:
        assert 0.0 <= counter.update(page(running, first_tokens, finished)) <= running
