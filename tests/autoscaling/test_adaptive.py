"""The default policy: token work against what engines do, and what is on its way."""

from extproc.autoscaling.interface import ReplicaBounds, ScalingReason
from extproc.autoscaling.policies import AdaptivePolicy
from tests.autoscaling.demands import TargetFixture

WIDE = ReplicaBounds(max=100)


def test_a_load_step_is_followed_within_seconds():
    """Work for ten replicas is seen as such when three looks agree, less what chance explains."""
    target = TargetFixture(AdaptivePolicy(), WIDE, spec=1)
    target.run(300, arriving=0.1, request_work=0.1)
    target.run(15, arriving=8.0, request_work=0.1)
    # m = 8, less sqrt(8 * 0.1 / 15) = 0.23, over 0.8.
    assert target.spec == 9
    assert target.now - target.changes[0][0] <= 10


def test_few_long_requests_are_no_load_step():
    """One request of 35 s within 15 s is chance, not a rate of 2.3."""
    target = TargetFixture(AdaptivePolicy(), WIDE, spec=1)
    target.run(300)
    target.run(5, arriving=7.0, request_work=35.0, in_flight=1)
    target.run(10, arriving=0.0, request_work=35.0, in_flight=1)
    assert target.spec == 1


def test_the_first_burst_is_met_in_several_steps():
    """From zero: 4 at first, then twice as many."""
    target = TargetFixture(AdaptivePolicy(), WIDE, cold_s=60)
    target.now = 5.0
    target.tick(held=300, request_work=30.0)
    target.run(10, held=300, request_work=30.0)
    assert [replicas for _, replicas in target.changes] == [4, 8, 16]


def test_starting_replicas_are_counted():
    """A backlog that starting replicas take care of within the wait calls for no more."""
    policy = AdaptivePolicy(wait_s=20)
    target = TargetFixture(policy, WIDE, spec=1, cold_s=60)
    target.run(120, request_work=1.0, in_flight=1)
    # 100 s of work wait: the one that answers does 60 of them in the minute that another one takes,
    # and 40 are left for two within 20 s.
    backlog = {"request_work": 1.0, "held": 100, "in_flight": 1}
    target.run(5, **backlog)
    assert target.spec == 2
    target.run(15, **backlog | {"held": 90})
    target.run(40, **backlog | {"held": 40})
    assert [replicas for _, replicas in target.changes] == [2]


def test_a_backlog_that_drains_in_time_adds_no_replica():
    """Half a minute of work for one replica is not worth a cold start of one."""
    target = TargetFixture(AdaptivePolicy(), WIDE, spec=1)
    target.run(120, request_work=1.0, held=60, in_flight=1)
    assert target.spec == 1


def test_requests_within_a_batch_are_no_backlog():
    """Fifty at once where an engine has room for fifty wait for nothing."""
    target = TargetFixture(AdaptivePolicy(), WIDE, spec=1)
    facts = {"request_work": 10.0, "throughput": 20.0, "in_flight": 50}
    target.run(120, concurrency=50.0, **facts)
    assert target.spec == 1
    target.run(60, concurrency=1.0, throughput=1.0, request_work=10.0, in_flight=50)
    assert target.spec > 1


def test_scale_down_is_slow():
    """Fewer replicas must have been enough during the whole window."""
    target = TargetFixture(AdaptivePolicy(down_s=60, window_s=60), WIDE, spec=8)
    target.run(300, arriving=6.5, request_work=0.1, in_flight=8)
    assert target.spec == 8
    before = target.now
    target.run(300, arriving=1.0, request_work=0.1, in_flight=1)
    assert target.changes
    assert target.changes[0][0] - before >= 60
    assert target.spec == 1


def test_the_last_replica_is_removed_after_idle_s():
    """`idle_s` after the last request, to the tick."""
    target = TargetFixture(AdaptivePolicy(idle_s=300), spec=1)
    target.run(200, in_flight=1, arriving=0.5)
    last = target.now
    desired = target.run(295)
    assert desired.reason is ScalingReason.STEADY
    target.run(20)
    assert target.changes == [(last + 300, 0)]


def test_no_replica_is_started_for_requests_before_the_idle_time():
    """The rate of a window longer than `idle_s` is above zero; the next request starts one."""
    target = TargetFixture(AdaptivePolicy(idle_s=0, window_s=60), spec=1)
    target.run(200, in_flight=1, arriving=0.5)
    last = target.now
    target.run(100)
    assert target.changes == [(last + 5, 0)]
    target.run(5, held=1)
    assert target.changes[1:] == [(last + 105, 1)]


def test_single_requests_keep_a_replica():
    """A request now and then, more often than the cool-down, is not a cold start each."""
    target = TargetFixture(AdaptivePolicy(idle_s=300), spec=1)
    for _ in range(10):
        target.run(250)
        target.run(5, in_flight=1)
    assert target.changes == []


def test_requests_between_two_looks_keep_a_replica():
    """Steady short requests of which none is open at a tick."""
    target = TargetFixture(AdaptivePolicy(idle_s=300), spec=1)
    target.run(1000, arriving=0.01)
    assert target.changes == []


def test_an_unknown_throughput_adds_no_replica():
    """A replica of which nothing is known is not divided by."""
    target = TargetFixture(AdaptivePolicy(), WIDE, spec=2)
    target.run(60, throughput=0.0, arriving=5.0, in_flight=3)
    assert target.spec == 2


def test_large_fleets_have_headroom():
    """Work for 40 replicas is 50 at 80 %."""
    target = TargetFixture(AdaptivePolicy(), WIDE, spec=40)
    target.run(200, arriving=40.0, request_work=0.1, in_flight=40)
    assert target.spec == 50
