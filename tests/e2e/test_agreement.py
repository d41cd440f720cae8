"""The HTTP engine under a real Envoy against the offline simulator: a short run of the bench."""

from __future__ import annotations

import pytest

from bench import agreement
from extproc.simulator.fleet import scenario, workloads
from extproc.simulator.fleet.client import Client
from extproc.simulator.fleet.workloads import Lengths

#: At the machine's own speed, first tokens take some 300 ms: a few ms of Envoy, picker and client do
#: not show, and neither do twenty of a busy machine.
SMALL = scenario.Scenario(
    title="8 users with conversations of long prompts on 2 L4",
    fleet=(scenario.EngineGroup(count=2, profile="l4-8b-fp8", set={"kv_tokens": 40_000}),),
    workload=workloads.ConversationWorkload(
        conversations=16,
        turns=Lengths(mean=3),
        prompt=Lengths(mean=1500, deviation=300, lowest=500),
        output=Lengths(mean=8, deviation=2, lowest=2),
    ),
    client=Client(users=8, ramp_s=1.0, turnaround_s=0.02),
    picking=scenario.Picking(with_max_tokens=True),
)


@pytest.mark.slow
async def test_real_and_offline_runs_agree():
    """Requests, and what caches held of them. The bench judges their times on a quiet machine."""
    complete = agreement.scaled(SMALL, 1.0)
    expected = agreement.mean(agreement.offline(complete, "adaptive", seed=1, draws=8))
    result = await agreement.real(complete, "adaptive", seed=1)
    assert result["requests"] == expected["requests"] == 48
    assert result["hit_ratio"] == pytest.approx(expected["hit_ratio"], abs=0.1)
    assert all(result[name] > 0.0 for name in agreement.JUDGED)
