from __future__ import annotations

import msgspec
import pytest

from bench import agreement
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


def test_the_worst_deviation_is_of_what_is_judged():
    """Throughput and mean TTFT count, in either direction; the rest is only reported."""
    ratio = {"requests_per_s": 1.02, "ttft_mean_s": 0.93, "ttft_p99_s": 1.8}
    assert agreement.worst({"closed": {"adaptive": {"ratio": ratio}}}) == pytest.approx(0.07)
