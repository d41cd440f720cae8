"""Tests of the search of weights: its points, the best of them, and bounds by hand."""

import math

import pytest

from bench import frontier, limits
from extproc.scheduling.estimated_time import EstimatedTime
from extproc.simulator import profiles, simulation_runs
from extproc.simulator.fleet.sim_request import RequestSpec


def test_the_first_point_is_the_default_and_all_are_the_same_every_time():
    """Another run simulates the same weights."""
    first, *others = frontier.points(5)
    default = EstimatedTime()
    assert {name: getattr(default, name) for name in frontier.FACTORS} == {
        name: value for name, value in first.items() if name != "tie_share"
    }
    assert [first, *others] == frontier.points(5)
    assert frontier.points(3) == frontier.points(5)[:4]


def test_weights_are_a_profile_that_can_be_run():
    """Every point can be turned into the settings of a picker."""
    column = simulation_runs.column(
        frontier.variant(frontier.points(1)[1]), folder=frontier.proof.SCENARIOS, where="here"
    )
    assert column.settings is not None


def test_a_point_that_another_one_beats_in_both_is_left_out():
    """Of four, one answers most, one is soonest, one is between; the fourth is worse than that."""
    points = [
        {"figures": {"requests_per_s": rate, "ttft_mean_s": wait}}
        for rate, wait in ((10, 3.0), (9, 2.0), (8, 2.5), (7, 1.0))
    ]
    front = frontier.best(points, "ttft_mean_s")
    assert [point["figures"]["requests_per_s"] for point in front] == [10, 9, 7]


def test_what_a_request_before_had_is_not_computed_again():
    """Two prompts of 40 and 72 tokens with two blocks in common; the last token always is computed."""
    works = [
        RequestSpec(40, 5, [1, 2, 3]),
        RequestSpec(72, 5, [1, 2, 4, 5]),
        RequestSpec(32, 5, [1, 2]),
    ]
    assert [left for _, left in limits.serve_once([(work, 0) for work in works])] == [40, 40, 16]


def test_answers_of_the_turn_before_are_cached():
    """A second turn of 64 tokens whose first had 16 and an answer of 30."""
    session = [RequestSpec(16, 30, [1]), RequestSpec(64, 9, [1, 2, 3, 4])]
    assert [left for _, left in limits.serve_once(list(limits.find_uncached(session)))] == [16, 18]


def test_limits_are_those_of_the_fastest_engine_and_of_full_batches():
    """Two engines, 10 ms an iteration, 1 ms a prompt token, 2 ms a sequence, four open at most."""
    engine = profiles.EngineProfile(
        name="x",
        base_s=0.010,
        prefill_s_per_token=0.001,
        decode_s_per_seq=0.002,
        context_s_per_token=0.0,
        kv_tokens=1000,
    )
    works = [(RequestSpec(100, 11, []), 100), (RequestSpec(50, 11, []), 50)]
    bounds = limits.find_bounds([engine, engine], iter(works), most_open=4)
    assert bounds["ttft_mean_s"] == pytest.approx(0.085)
    assert bounds["ttft_p99_s"] == pytest.approx(0.11)
    # 0.15 s of prompts, and 20 tokens at half of an iteration and 2 ms each, on two engines.
    assert bounds["requests_per_s"] == pytest.approx(2 / ((0.15 + 20 * 0.007) / 2))
    assert limits.find_bounds([engine], iter(works), most_open=math.inf)["requests_per_s"] > 3
