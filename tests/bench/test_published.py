"""The simulator against what was published, and the default strategy against the best of it.

Few seeds, to be quick; `bench.proof` runs more, and `docs/benchmarks` says what was fitted.
"""

from functools import cache
from pathlib import Path
from statistics import fmean

import msgspec
import pytest

from bench import proof, published
from extproc.simulator import simulation_runs

pytestmark = pytest.mark.proof

SCENARIOS = Path(proof.SCENARIOS)

#: Conversations of unpublished scenarios, where a fifth shows the same.
SHORTER = {"heterogeneous": 500}


@cache
def simulated(scenario, strategy, seed, /):
    """One run of a committed scenario."""
    plan = simulation_runs.plan(
        SCENARIOS / f"{scenario}.yaml", strategies=[strategy], configs=(), seeds=[seed]
    )
    definition = plan.scenario
    if scenario in SHORTER:
        workload = msgspec.structs.replace(definition.workload, conversations=SHORTER[scenario])
        definition = msgspec.structs.replace(definition, workload=workload)
    return simulation_runs.run(definition, plan.columns[0], seed=seed, trace=plan.trace)


@pytest.mark.parametrize(("most", "strategy"), published.L4)
def test_kubeai_runs_are_reproduced(most, strategy):
    """Each of the twelve published runs: rate within 10 %, time per output token within 15 %."""
    rate, _, tpot_ms, *_ = published.L4[most, strategy]
    # How prefix hash divides conversations differs from seed to seed, most where few are open.
    seeds = (1, 2) if (most, strategy) == (800, "prefix-hash") else (1,)
    runs = [simulated(f"l4-published-{most}", strategy, seed) for seed in seeds]
    assert [run.failed for run in runs] == [{}] * len(seeds)
    assert fmean(run.requests_per_s for run in runs) == pytest.approx(rate, rel=0.10)
    assert fmean(run.tpot_s.mean for run in runs) * 1e3 == pytest.approx(tpot_ms, rel=0.15)


@pytest.mark.parametrize("most", [800, 1600, 3200, 8000])
def test_kubeai_strategies_keep_their_order(most):
    """Prefix hash answers most, round robin no more than least load."""
    robin, least, hashed = (
        simulated(f"l4-published-{most}", name, 1).requests_per_s
        for name in ("round-robin", "least-load", "prefix-hash")
    )
    assert hashed > 1.3 * least
    assert least >= 0.99 * robin


@pytest.mark.parametrize(("scenario", "strategy"), published.K6)
def test_k6_runs_are_reproduced(scenario, strategy):
    """Both scenarios and both strategies: rate and mean time within 10 %, p95 within 15 %."""
    rate, mean_s, *_, p95_s = published.K6[scenario, strategy]
    run = simulated(scenario, strategy, 1)
    assert run.requests_per_s == pytest.approx(rate, rel=0.10)
    assert run.e2e_s.mean == pytest.approx(mean_s, rel=0.10)
    assert run.e2e_s.p95 == pytest.approx(p95_s, rel=0.15)


def test_adaptive_keeps_caches_where_conversations_do_not_fit():
    """Shorter on average than prefix hash, without the longer tail that prefix hash pays for it."""
    adaptive = simulated("k6-s2", "adaptive", 1)
    assert adaptive.e2e_s.mean <= 0.9 * simulated("k6-s2", "prefix-hash", 1).e2e_s.mean
    assert adaptive.e2e_s.p95 <= 1.05 * simulated("k6-s2", "least-load", 1).e2e_s.p95


def test_adaptive_waits_least_where_engines_are_unlike():
    """Half of the engines at half speed: no first tokens come 5 % sooner on average."""
    adaptive = simulated("heterogeneous", "adaptive", 1).ttft_s.mean
    for name in ("lmetric", "balanced"):
        assert adaptive <= 1.05 * simulated("heterogeneous", name, 1).ttft_s.mean
