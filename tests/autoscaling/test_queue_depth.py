"""The queue-depth trigger: formula, window, steps, zero.

Source: docs/spec/prior-systems.md#queue-depth-trigger.
"""

import pytest

from extproc.autoscaling.interface import ReplicaBounds, ScalingReason
from extproc.autoscaling.policies.queue_depth import QueueDepthPolicy
from tests.autoscaling.demands import Plant


def test_the_first_queued_request_adds_a_replica():
    """At once, whatever the thresholds."""
    target_fixture = Plant(QueueDepthPolicy())
    target_fixture.run(10)
    desired = target_fixture.tick(held=1)
    assert (desired.replicas, desired.reason) == (1, ScalingReason.WAKE)


def test_scale_up_requires_a_depth_above_the_threshold():
    """A depth of exactly `up` adds nothing; above it adds one."""
    target_fixture = Plant(QueueDepthPolicy(), spec=1)
    target_fixture.run(300, in_flight=5)
    assert target_fixture.spec == 1
    target_fixture.run(60, in_flight=6)
    assert target_fixture.spec == 2


def test_a_depth_equal_to_down_removes_nothing():
    """Below `down` takes one."""
    target_fixture = Plant(QueueDepthPolicy(), spec=2)
    target_fixture.run(300, in_flight=2)
    assert target_fixture.spec == 2
    target_fixture.run(65, in_flight=1)
    assert target_fixture.spec == 1


def test_a_window_has_a_single_change():
    """A deep queue adds one replica a window, which counts from when it was asked for."""
    target_fixture = Plant(QueueDepthPolicy(), spec=1, cold_s=45)
    target_fixture.run(250, held=100)
    assert [replicas for _, replicas in target_fixture.changes] == [2, 3, 4, 5]
    gaps = [
        b - a
        for (a, _), (b, _) in zip(target_fixture.changes, target_fixture.changes[1:], strict=False)
    ]
    assert gaps == [60, 60, 60]


def test_starting_replicas_count():
    """Twelve requests for one that answers and one that starts are a depth of 6, not of 12."""
    policy = QueueDepthPolicy(up=7)
    target_fixture = Plant(policy, spec=1, cold_s=1000)
    target_fixture.run(60, held=12)
    target_fixture.run(600, held=12)
    assert target_fixture.spec == 2


def test_mean_and_sustained_differ_on_an_intermittent_queue():
    """Half of the time 14, half 0: the mean of 7 is above 5, but not all the time."""
    for over, expected in (("mean", 2), ("sustained", 1)):
        target_fixture = Plant(QueueDepthPolicy(over=over), ReplicaBounds(max=2), spec=1)
        for _ in range(30):
            target_fixture.run(5, held=14)
            target_fixture.run(5, held=0, in_flight=1)
        assert target_fixture.spec == expected


def test_proportional_steps_reach_the_depth_at_once():
    """Sixty requests at 5 each are 12 replicas."""
    target_fixture = Plant(QueueDepthPolicy(change="proportional"), ReplicaBounds(max=20), spec=1)
    target_fixture.run(65, held=60)
    assert target_fixture.spec == 12


def test_step_size_adds_several_replicas():
    """The step is a parameter."""
    target_fixture = Plant(QueueDepthPolicy(step_size=3), spec=1)
    target_fixture.run(65, held=60)
    assert target_fixture.spec == 4


def test_the_last_replica_is_removed_after_a_window_without_requests():
    """Not one request of a whole window, however shallow the mean."""
    target_fixture = Plant(QueueDepthPolicy(), spec=1)
    target_fixture.run(300, in_flight=1)
    for _ in range(20):
        target_fixture.run(5, in_flight=1)
        target_fixture.run(50)
    assert target_fixture.spec == 1
    target_fixture.run(15)
    assert target_fixture.spec == 0


def test_foreign_requests_count():
    """Traffic past the pickers shows in the engines' own numbers."""
    target_fixture = Plant(QueueDepthPolicy(), spec=1)
    target_fixture.run(65, in_flight=1, waiting=4, running=2)
    assert target_fixture.spec == 2


@pytest.mark.parametrize("policy", [QueueDepthPolicy(), QueueDepthPolicy(over="sustained")])
def test_published_thresholds_leave_the_second_replica_off(policy):
    """Five requests in the system at most: one replica, as in the published 1/30 s run."""
    target_fixture = Plant(policy, ReplicaBounds(max=2), spec=1)
    for queued in (0, 1, 2, 3, 4, 4, 3, 2, 1, 0) * 5:
        target_fixture.run(30, held=queued, in_flight=1)
    assert target_fixture.spec == 1
