"""Bounds and windows that the runner adds to a policy."""

import pytest

from extproc.autoscaling.demand_estimator import (
    DemandEstimator,
    EstimatorSettings,
    PickerCounters,
    TargetObservation,
)
from extproc.autoscaling.interface import PolicyRunner, ReplicaBounds, ScalingReason
from extproc.autoscaling.policies import AdaptivePolicy, KubeAIPolicy, QueueDepthPolicy
from tests.autoscaling.demands import TargetFixture, demand


def test_foreign_replicas_are_clamped_to_the_bounds():
    """A user set 9 where 3 are allowed, or 0 where 2 must be."""
    scaler = PolicyRunner(QueueDepthPolicy(), ReplicaBounds(min=2, max=3))
    assert scaler.step(demand(0.0, spec=9)).replicas == 3
    desired = scaler.step(demand(5.0, spec=0))
    assert (desired.replicas, desired.reason) == (2, ScalingReason.BOUNDS)


@pytest.mark.parametrize("complete", [True, False])
def test_the_bounds_are_the_reason_where_fewer_would_do_as_well(complete):
    """Unread counters or a short window keep replicas; the change comes from the bounds."""
    scaler = PolicyRunner(AdaptivePolicy(), ReplicaBounds(max=3))
    desired = scaler.step(demand(0.0, spec=9, complete=complete))
    assert (desired.replicas, desired.reason) == (3, ScalingReason.BOUNDS)


def test_the_reason_against_scale_down_is_reported():
    """First it has to watch, then all pickers have to be read."""
    target = TargetFixture(QueueDepthPolicy(), spec=3)
    assert target.run(30, complete=False).reason is ScalingReason.STEADY
    assert target.run(60, complete=False).reason is ScalingReason.INCOMPLETE_DATA
    assert target.spec == 3
    target = TargetFixture(KubeAIPolicy(window_s=600), spec=3)
    assert target.run(40).reason is ScalingReason.STABILIZING
    assert target.spec == 3


def test_a_long_gap_restarts_the_window():
    """A gap of more than half of a window clears the window."""
    target = TargetFixture(QueueDepthPolicy(), spec=3)
    target.run(50)
    target.now += 45
    target.run(50)
    assert target.spec == 3
    target.run(30)
    assert target.spec == 2


@pytest.mark.parametrize(
    ("policy", "load"),
    [(AdaptivePolicy(), 100), (KubeAIPolicy(), 100), (QueueDepthPolicy(change="proportional"), 4)],
)
def test_peers_that_return_do_not_scale_down(policy, load):
    """Counts without them are no demand: the window is filled before it counts."""
    target = TargetFixture(policy, spec=8)
    estimator = DemandEstimator(EstimatorSettings(grace_s=60.0))

    def run(seconds, in_flight, *, readable=True):
        counters = PickerCounters(in_flight=in_flight)
        for _ in range(round(seconds / policy.interval_s)):
            target.now += policy.interval_s
            pickers = {f"peer-{number}": counters if readable else None for number in range(3)}
            pickers["me"] = counters
            observation = TargetObservation(spec=target.spec, available=target.spec)
            target.step(estimator.read(target.now, pickers, observation))

    run(2000.0, load)
    steady = target.spec
    assert steady > 1
    run(900.0, load, readable=False)
    run(2000.0, load)
    assert target.spec == steady
    assert all(number >= steady for at, number in target.changes if at > 2000.0)
    run(3000.0, 0)
    assert target.spec == 0


def test_a_peer_that_misses_a_reading_does_not_restart_the_window():
    """Its last counters stand for it, so the counts are right."""
    target = TargetFixture(QueueDepthPolicy(), spec=3)
    for _ in range(7):
        target.run(5, complete=False)
        target.run(5)
    assert target.spec == 2


def test_an_unreadable_peer_does_not_prevent_scale_up():
    """A peer that cannot be read blocks fewer, not more."""
    target = TargetFixture(QueueDepthPolicy(), spec=1)
    target.run(65, held=50, complete=False)
    assert target.spec == 2
