"""KubeAI's autoscaler, number by number (docs/spec/prior-systems.md#autoscaler)."""

import pytest

from extproc.autoscaling.interface import ReplicaBounds
from extproc.autoscaling.policies import KubeAIPolicy
from tests.autoscaling.demands import TargetFixture


def test_a_load_step_is_followed_over_ten_minutes():
    """From idle to 400 active requests, 100 per replica: replica n + 1 after 150 n seconds."""
    target = TargetFixture(KubeAIPolicy())
    target.run(600)
    target.tick(held=1)
    assert target.changes == [(600, 1)]
    target.run(900, in_flight=400)
    # avg = 400 t / 600 passes 100 after 150 s; the sample at 150 s makes it exactly 100.
    assert target.changes[1:] == [(760, 2), (910, 3), (1060, 4)]


def test_the_last_replica_is_removed_after_the_window_and_the_delay():
    """The average is 0 after 60 empty samples, and three more must agree."""
    target = TargetFixture(KubeAIPolicy(), spec=1)
    target.run(600, in_flight=1)
    target.run(900)
    assert target.changes == [(600 + 600 + 30, 0)]


def test_any_active_request_keeps_a_replica():
    """An average above 0 is one replica."""
    target = TargetFixture(KubeAIPolicy(), spec=1)
    target.run(600)
    target.run(10, in_flight=1)
    target.run(590)
    assert target.spec == 1


def test_scale_down_removes_all_surplus_replicas_at_once():
    """After three earlier lower ticks the fourth jumps to the number."""
    target = TargetFixture(KubeAIPolicy(target_requests=1, window_s=100), spec=0)
    target.run(200, in_flight=8)
    assert target.spec == 8
    for left in (2,) * 10:
        target.run(10, in_flight=left)
    down = [replicas for at, replicas in target.changes if at > 200]
    # avg falls by 0.6 a tick: 7.4 is still 8, 6.8, 6.2 and 5.6 are lower, 5.0 is applied; 4.4 is
    # still 5, and so on to 2.0.
    assert down == [5, 2]


def test_the_decrease_counter_is_kept_between_decreases():
    """Once it went down, it goes on down with every lower tick."""
    target = TargetFixture(
        KubeAIPolicy(target_requests=1, window_s=100), ReplicaBounds(max=50), spec=0
    )
    target.run(200, in_flight=20)
    target.run(100, in_flight=0)
    gone = [(at, replicas) for at, replicas in target.changes if at > 200]
    assert gone == [(240, 12), (250, 10), (260, 8), (270, 6), (280, 4), (290, 2), (300, 0)]


def test_a_tick_that_is_not_lower_resets_the_counter():
    """Up or equal resets the counter."""
    target = TargetFixture(KubeAIPolicy(target_requests=1, window_s=10, down_delay_s=30), spec=2)
    target.run(30, in_flight=1)
    target.run(10, in_flight=2)
    target.run(30, in_flight=1)
    assert target.spec == 2
    target.run(10, in_flight=1)
    assert target.spec == 1


def test_between_ticks_only_a_queued_request_counts():
    """The ring moves every interval; a step in between wakes a target and changes nothing else."""
    target = TargetFixture(KubeAIPolicy(target_requests=1, window_s=20))
    target.run(10)
    for _ in range(5):
        target.now += 1
        target.tick(in_flight=9)
    assert target.spec == 0
    target.tick(held=1)
    assert target.spec == 1


def test_the_average_is_capped_by_the_bounds():
    """No more than max, whatever the load."""
    target = TargetFixture(KubeAIPolicy(), ReplicaBounds(min=1, max=3), spec=1)
    target.run(1200, in_flight=100_000)
    assert target.spec == 3


@pytest.mark.parametrize("late_s", [0.5, 7.0, 35.0])
def test_missed_ticks_are_skipped(late_s):
    """One sample for each tick that was made."""
    target = TargetFixture(KubeAIPolicy(target_requests=1, window_s=30))
    target.tick()
    target.now += 10 + late_s
    target.tick(in_flight=3)
    assert target.spec == 1  # ceil(3 / 3)
