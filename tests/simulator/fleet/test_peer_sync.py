"""Pickers of a simulated world that tell each other of their requests."""

from __future__ import annotations

from statistics import fmean

import pytest

from extproc.config import loader
from extproc.simulator.fleet import scenario, simulation, workloads
from extproc.simulator.fleet.client import Client
from extproc.simulator.fleet.workloads import Lengths

TURNAROUND_S = 0.002


def hit_ratio(pickers: int, delay_s: float | None) -> float:
    """40 users who chat without pause, on two engines whose caches are too small for all of them."""
    definition = scenario.Scenario(
        title="chat",
        fleet=(
            scenario.EngineGroup(
                count=2, profile="l4-8b-fp8", set={"kv_tokens": 11_000, "max_model_len": 11_000}
            ),
        ),
        workload=workloads.ConversationWorkload(
            conversations=100,
            turns=Lengths(mean=7, shape="exponential", lowest=5),
            prompt=Lengths(mean=143, deviation=130, shape="lognormal", lowest=10, highest=1500),
            output=Lengths(mean=9, deviation=1, lowest=1, highest=10),
        ),
        client=Client(users=40, ramp_s=0.5, turnaround_s=TURNAROUND_S),
        picking=scenario.Picking(replicas=pickers, share_delay_s=delay_s),
    )
    text = "{apiVersion: extproc/v1alpha1, kind: ExtProcConfig, scheduling: {strategy: adaptive}}"
    settings = loader.settings(loader.parse(text, where="test"))
    return fmean(simulation.run(definition, settings, seed=seed).hit_ratio for seed in (1, 2))


@pytest.mark.proof
def test_the_next_turn_may_come_before_the_news_that_the_last_one_ended():
    """Hits stay where a fact takes longer than the client does, by a little and by much."""
    alone = hit_ratio(1, None)
    for delay_s in (0.9 * TURNAROUND_S, 0.005, 0.05):
        assert hit_ratio(2, delay_s) > 0.8 * alone
