"""Bounds and windows that the runner adds to a policy."""

from extproc.autoscaling.interface import PolicyRunner, ReplicaBounds, ScalingReason
from extproc.autoscaling.policies import KubeAIPolicy, QueueDepthPolicy
from tests.autoscaling.demands import TargetFixture, demand


def test_foreign_replicas_are_clamped_to_the_bounds():
    """A user set 9 where 3 are allowed, or 0 where 2 must be."""
    scaler = PolicyRunner(QueueDepthPolicy(), ReplicaBounds(min=2, max=3))
    assert scaler.step(demand(0.0, spec=9)).replicas == 3
    desired = scaler.step(demand(5.0, spec=0))
    assert (desired.replicas, desired.reason) == (2, ScalingReason.BOUNDS)


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


def test_an_unreadable_peer_does_not_prevent_scale_up():
    """A peer that cannot be read blocks fewer, not more."""
    target = TargetFixture(QueueDepthPolicy(), spec=1)
    target.run(65, held=50, complete=False)
    assert target.spec == 2
