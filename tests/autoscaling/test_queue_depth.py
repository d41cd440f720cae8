"""The queue-depth trigger: formula, window, steps, zero.

Source: docs/spec/prior-systems.md#queue-depth-trigger.
"""

import pytest

from extproc.autoscaling.interface import ReplicaBounds, ScalingReason
from extproc.autoscaling.policies import QueueDepthPolicy
from tests.autoscaling.demands import TargetFixture


def test_the_first_queued_request_adds_a_replica():
    """At once, whatever the thresholds."""
    target = TargetFixture(QueueDepthPolicy())
    target.run(10)
    desired = target.tick(held=1)
    assert (desired.replicas, desired.reason) == (1, ScalingReason.WAKE)


def test_scale_up_requires_a_depth_above_the_threshold():
    """A depth of exactly `up` adds nothing; above it adds one."""
    target = TargetFixture(QueueDepthPolicy(), spec=1)
    target.run(300, in_flight=5)
    assert target.spec == 1
    target.run(60, in_flight=6)
    assert target.spec == 2


def test_a_depth_equal_to_down_removes_nothing():
    """Below `down` takes one."""
    target = TargetFixture(QueueDepthPolicy(), spec=2)
    target.run(300, in_flight=2)
    assert target.spec == 2
    target.run(65, in_flight=1)
    assert target.spec == 1


def test_a_window_has_a_single_change():
    """A deep queue adds one replica a window, which counts from when it was asked for."""
    target = TargetFixture(QueueDepthPolicy(), spec=1, cold_s=45)
    target.run(250, held=100)
    assert [replicas for _, replicas in target.changes] == [2, 3, 4, 5]
    gaps = [b - a for (a, _), (b, _) in zip(target.changes, target.changes[1:], strict=False)]
    assert gaps == [60, 60, 60]


def test_starting_replicas_count():
    """Twelve requests for one that answers and one that starts are a depth of 6, not of 12."""
    policy = QueueDepthPolicy(up=7)
    target = TargetFixture(policy, spec=1, cold_s=1000)
    target.run(60, held=12)
    target.run(600, held=12)
    assert target.spec == 2


def test_mean_and_sustained_differ_on_an_intermittent_queue():
    """Half of the time 14, half 0: the mean of 7 is above 5, but not all the time."""
    for over, expected in (("mean", 2), ("sustained", 1)):
        target = TargetFixture(QueueDepthPolicy(over=over), ReplicaBounds(max=2), spec=1)
        for _ in range(30):
            target.run(5, held=14)
            target.run(5, held=0, in_flight=1)
        assert target.spec == expected


def test_proportional_steps_reach_the_depth_at_once():
    """Sixty requests at 5 each are 12 replicas."""
    target = TargetFixture(QueueDepthPolicy(change="proportional"), ReplicaBounds(max=20), spec=1)
    target.run(65, held=60)
    assert target.spec == 12


def test_step_size_adds_several_replicas():
    """The step is a parameter."""
    target = TargetFixture(QueueDepthPolicy(step_size=3), spec=1)
    target.run(65, held=60)
    assert target.spec == 4


def test_the_last_replica_is_removed_after_a_window_without_requests():
    """Not one request of a whole window, however shallow the mean."""
    target = TargetFixture(QueueDepthPolicy(), spec=1)
    target.run(300, in_flight=1)
    for _ in range(20):
        target.run(5, in_flight=1)
        target.run(50)
    assert target.spec == 1
    target.run(15)
    assert target.spec == 0


def test_requests_between_two_looks_keep_the_last_replica():
    """They arrived and ended, so that no look has shown them."""
    target = TargetFixture(QueueDepthPolicy(window_s=60.0), spec=1)
    target.run(300, arriving=0.1)
    assert target.changes == []
    target.run(65)
    assert target.spec == 0


def test_foreign_requests_count():
    """Traffic past the pickers shows in the engines' own numbers."""
    target = TargetFixture(QueueDepthPolicy(), spec=1)
    target.run(65, in_flight=1, waiting=4, running=2)
    assert target.spec == 2


@pytest.mark.parametrize("policy", [QueueDepthPolicy(), QueueDepthPolicy(over="sustained")])
def test_published_thresholds_leave_the_second_replica_off(policy):
    """Five requests in the system at most: one replica, as in the published 1/30 s run."""
    target = TargetFixture(policy, ReplicaBounds(max=2), spec=1)
    for queued in (0, 1, 2, 3, 4, 4, 3, 2, 1, 0) * 5:
        target.run(30, held=queued, in_flight=1)
    assert target.spec == 1
