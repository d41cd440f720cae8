from __future__ import annotations

import msgspec
import pytest

from bench import agreement, replay_agreement
from extproc.simulator.fleet import scenario


@pytest.mark.parametrize("name", list(agreement.SCENARIOS))
def test_scenarios_can_be_run_both_ways(name):
    """They are valid, and every field their machines change is a flag of `extproc engine`."""
    definition = agreement.SCENARIOS[name]
    scenario.check(definition, where=name)
    for engines in definition.fleet:
        for field, value in engines.set.items():
            assert agreement.flag(field, value)


def test_a_scenario_at_another_speed_predicts_the_same_in_less_time():
    """Twice the pace halves all times but the client's own, and leaves hits and counts alone."""
    definition = agreement.SCENARIOS["poisson"]
    workload = msgspec.structs.replace(definition.workload, adapters=0)
    definition = msgspec.structs.replace(definition, workload=workload)
    slow, fast = (
        agreement.offline(agreement.scaled(definition, speed), "round-robin", seed=1)[0]
        for speed in (1.0, 2.0)
    )
    assert fast["requests"] == slow["requests"]
    assert fast["hit_ratio"] == pytest.approx(slow["hit_ratio"])
    assert fast["ttft_mean_s"] == pytest.approx(slow["ttft_mean_s"] / 2)
    assert fast["requests_per_s"] == pytest.approx(slow["requests_per_s"] * 2)


def a_replay(**facts):
    """A row of a recorded run and its replay."""
    row = {"ttft_mean_s": 0.4, "timers_late_ms": 1.0, "ratio": 1.1, "agreement": 1.0}
    return {**row, "slowness": 1.02, **facts}


def test_a_run_on_a_late_machine_does_not_count():
    """Lateness is judged by the time to the first token, 3 ms are always good enough; so is TPOT."""
    assert not replay_agreement.is_late(a_replay(timers_late_ms=7.9))
    assert replay_agreement.is_late(a_replay(timers_late_ms=8.1))
    assert not replay_agreement.is_late(a_replay(timers_late_ms=3.0, ttft_mean_s=0.01))
    assert replay_agreement.is_late(a_replay(slowness=1.06))


def test_every_replay_has_to_be_within_the_bounds():
    """Without a run nothing is shown."""
    assert replay_agreement.is_replay_met({"runs": [a_replay(), a_replay(ratio=0.86)]})
    for runs in ([], [a_replay(ratio=1.16)], [a_replay(agreement=0.98)]):
        assert not replay_agreement.is_replay_met({"runs": runs})


def test_new_decisions_out_of_bounds_are_named_beside_the_bar():
    """The bar is of the recorded decisions alone."""
    runs = [
        a_replay(ratio=0.852, ratio_of_new_decisions=0.816),
        a_replay(ratio_of_new_decisions=1.15),
    ]
    assert replay_agreement.is_replay_met({"runs": runs})
    text = "0.85, 1.10; with new decisions, 1 of 2 outside of 15 % (0.816)"
    assert replay_agreement.replay_ratios({"runs": runs}) == text


def test_the_worst_deviation_is_of_what_is_judged():
    """Throughput and mean TTFT count, in either direction; the rest is only reported."""
    ratio = {"requests_per_s": 1.02, "ttft_mean_s": 0.93, "ttft_p99_s": 1.8}
    assert agreement.worst({"closed": {"adaptive": {"ratio": ratio}}}) == pytest.approx(0.07)
