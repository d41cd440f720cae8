"""Autoscaling simulated: what was published is reproduced, and what the default policy makes of it.

Few seeds, to be quick; `docs/benchmarks/autoscaling.md` has more.
"""

from functools import cache
from pathlib import Path
from statistics import fmean

import msgspec
import pytest

from bench import proof, published, scaling
from extproc.simulator import simulation_runs

pytestmark = pytest.mark.proof

SCENARIOS = Path(proof.SCENARIOS)
SEEDS = (1, 2, 3)


@cache
def planned(scenario):
    """A committed scenario."""
    return simulation_runs.plan(
        SCENARIOS / f"{scenario}.yaml", strategies=(), configs=(), seeds=SEEDS
    )


@cache
def simulated(scenario, strategy, seed, restarts=()):
    """One run of it."""
    plan = planned(scenario)
    column = next(candidate for candidate in plan.columns if candidate.name == strategy)
    if restarts:
        scaled = msgspec.structs.replace(plan.scenario.autoscaling, restarts_s=restarts)
        column = msgspec.structs.replace(column, autoscaling=scaled)
    return simulation_runs.run(plan.scenario, column, seed=seed, trace="")


def runs(scenario, strategy):
    """All seeds."""
    return [simulated(scenario, strategy, seed) for seed in SEEDS]


@pytest.mark.parametrize("profile", published.WALLAROO)
def test_published_runs_are_reproduced(profile):
    """Wallaroo's policy and a serial engine: the mean of all three profiles within 15 %."""
    mean_s, *_ = published.WALLAROO[profile]
    mean = fmean(scaling.mean_of_responses_s(run) for run in runs(profile, "published"))
    assert mean == pytest.approx(mean_s, rel=0.15)


def test_where_two_replicas_suffice_nobody_is_lost():
    """1/30 s: all answered, 54 s on average and p95 115 s at most, with 1.5 replicas that answer."""
    summaries = runs("wallaroo-c", "adaptive")
    assert [run.failed for run in summaries] == [{}] * len(summaries)
    assert fmean(run.e2e_s.mean for run in summaries) <= 54
    assert fmean(run.e2e_s.p95 for run in summaries) <= 115
    assert fmean(run.scaling.mean_available for run in summaries) <= 1.5


@pytest.mark.parametrize("profile", ["wallaroo-a", "wallaroo-b"])
def test_what_two_replicas_cannot_carry_is_refused_in_time(profile):
    """429 or 503 with Retry-After, both within the hold budget, and nothing is cut or lost."""
    budget_s = planned(profile).scenario.autoscaling.hold.budget_s
    for run in runs(profile, "adaptive"):
        assert set(run.failed) <= {"rejected 429", "rejected 503"}
        assert run.failed
        assert run.refusals.rejected == sum(run.failed.values())
        assert run.refusals.latest_s <= budget_s
        assert run.refusals.retry_after_most_s <= budget_s
        assert max(run.ttft_quantiles_s) <= budget_s + 1
        # Replicas answer as many as they can.
        assert run.requests >= 100


@pytest.mark.parametrize("profile", ["wallaroo-a", "wallaroo-b", "wallaroo-c"])
def test_back_to_zero_within_window_and_cool_down(profile):
    """The last replica goes 300 s after the last request."""
    for run in runs(profile, "adaptive"):
        assert run.scaling.to_least_s <= 300 + 5


def test_restarts_under_load_change_nothing():
    """Pickers replaced five times: the same answers to the same moment, the same replicas."""
    restarts = (97.0, 333.0, 500.0, 801.0, 1333.0)
    for seed in SEEDS[:2]:
        summary = simulated("wallaroo-c", "adaptive", seed)
        assert msgspec.json.encode(
            simulated("wallaroo-c", "adaptive", seed, restarts)
        ) == msgspec.json.encode(summary)


def test_kubeai_follows_a_step_over_minutes():
    """The second replica after 600 * 100 / 360 = 167 s, the fourth after 500; zero after 10 minutes."""
    run = simulated("kubeai-step", "kubeai", 1)
    assert scaling.asked_at_s(run, 2) == pytest.approx(170, abs=15)
    assert scaling.asked_at_s(run, 4) == pytest.approx(510, abs=20)
    assert 600 <= run.scaling.to_least_s <= 640


def test_adaptive_follows_a_step_within_seconds():
    """Five replicas after the first look, and all 9,000 answered in two thirds of the time."""
    run, other = (simulated("kubeai-step", name, 1) for name in ("adaptive", "kubeai"))
    assert scaling.asked_at_s(run, 5) <= 15
    assert run.failed == {}
    assert run.duration_s < 0.7 * other.duration_s
    assert run.e2e_s.p95 < 0.5 * other.e2e_s.p95
