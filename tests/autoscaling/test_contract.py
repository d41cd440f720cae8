"""Contract of every policy, for any observations."""

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from extproc.autoscaling import policies
from extproc.autoscaling.interface import Demand, PolicyRunner, ReplicaBounds, RunnerState
from extproc.errors import ConfigError
from tests.support.seeded import examples

KINDS = list(policies.POLICIES)
#: Quarters, so that shifted clocks say the same to the last digit.
seconds = st.integers(1, 240).map(lambda quarters: quarters / 4)


@st.composite
def bounds(draw):
    """Bounds that are some."""
    low = draw(st.integers(0, 5))
    return ReplicaBounds(min=low, max=draw(st.integers(max(1, low), 12)))


def facts(spec, available, **others):
    """Observations of a target at one moment, at any time."""
    return Demand(now=0.0, spec=spec, available=min(spec, available), **others)


moments = st.builds(
    facts,
    spec=st.integers(0, 12),
    available=st.integers(0, 12),
    held=st.sampled_from([0, 0, 1, 7, 300]),
    in_flight=st.sampled_from([0, 0, 1, 5, 200]),
    running=st.sampled_from([0.0, 1.0, 64.0]),
    arriving=st.sampled_from([0.0, 0.5, 1.2, 40.0]),
    request_work=st.sampled_from([0.0, 0.2, 35.0]),
    throughput=st.sampled_from([0.0, 1.0, 20.0]),
    cold_start_s=st.sampled_from([0.0, 5.0, 600.0]),
    complete=st.booleans(),
)


def in_order(steps):
    """One after the other, so many seconds apart."""
    now, series = 17.0, []
    for demand, pause_s in steps:
        series.append(msgspec.structs.replace(demand, now=now))
        now += pause_s
    return series


def demands():
    """Possible observations of a target, whose spec others may change as well."""
    return st.lists(st.tuples(moments, seconds), min_size=1, max_size=25).map(in_order)


def tried(count):
    """So many; making them is what takes the time, on a busy machine more than expected."""
    return settings(
        max_examples=examples(count), deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )


@pytest.mark.parametrize("kind", KINDS)
@tried(25)
@given(series=demands(), within=bounds())
def test_policy_stays_within_bounds(kind, series, within):
    """Never fewer than `min` nor more than `max`."""
    scaler = PolicyRunner(policies.POLICIES[kind](), within)
    for demand in series:
        assert within.min <= scaler.step(demand).replicas <= within.max


@pytest.mark.parametrize("kind", KINDS)
@tried(25)
@given(series=demands(), within=bounds())
def test_no_scale_down_while_a_peer_is_unreadable(kind, series, within):
    """Counters that are missing are no reason to take a replica away."""
    scaler = PolicyRunner(policies.POLICIES[kind](), within)
    for demand in series:
        desired = scaler.step(demand)
        if not demand.complete:
            assert desired.replicas >= within.clamp(demand.spec)


@pytest.mark.parametrize("kind", KINDS)
@tried(25)
@given(series=demands(), within=bounds())
def test_no_scale_down_before_a_complete_window(kind, series, within):
    """Never fewer replicas within a window of the first step."""
    policy = policies.POLICIES[kind]()
    scaler = PolicyRunner(policy, within)
    for demand in series:
        desired = scaler.step(demand)
        if demand.now - series[0].now < policy.watch_s:
            assert desired.replicas >= within.clamp(demand.spec)


@pytest.mark.parametrize("kind", KINDS)
@tried(25)
@given(series=demands(), within=bounds())
def test_a_request_that_waits_at_zero_gets_a_replica(kind, series, within):
    """No request waits for a fleet of none."""
    scaler = PolicyRunner(policies.POLICIES[kind](), within)
    for demand in series:
        desired = scaler.step(demand)
        if demand.held:
            assert desired.replicas >= 1


@pytest.mark.parametrize("kind", KINDS)
@tried(25)
@given(series=demands(), within=bounds(), split=st.integers(0, 25), shift=st.integers(-500, 500))
def test_a_restart_keeps_the_replicas(kind, series, within, split, shift):
    """Another scaler goes on from JSON, on another clock, as the first one would have."""
    first = PolicyRunner(policies.POLICIES[kind](), within)
    for demand in series[:split]:
        first.step(demand)
    second = PolicyRunner(policies.POLICIES[kind](), within)
    written = msgspec.json.encode(first.state())
    if series[:split]:
        assert second.restore(msgspec.json.decode(written, type=RunnerState), shift_s=float(shift))
    for demand in series[split:]:
        moved = msgspec.structs.replace(demand, now=demand.now + shift)
        assert second.step(moved) == first.step(demand)


@pytest.mark.parametrize("kind", KINDS)
@tried(10)
@given(series=demands(), within=bounds())
def test_memory_does_not_grow_with_time(kind, series, within):
    """The state is bounded by the window, not by the run time."""
    scaler = PolicyRunner(policies.POLICIES[kind](), within)
    for n in range(300):
        demand = series[n % len(series)]
        scaler.step(msgspec.structs.replace(demand, now=2000.0 + 5 * n))
    assert len(msgspec.json.encode(scaler.state())) < 20_000


@pytest.mark.parametrize("kind", KINDS)
def test_state_of_another_policy_is_refused(kind):
    """State of another kind or shape leaves a scaler as it was."""
    scaler = PolicyRunner(policies.POLICIES[kind](), ReplicaBounds())
    assert not scaler.restore(RunnerState("another", 0.0, None, {}))
    assert not scaler.restore(RunnerState(kind, 0.0, None, 7))
    assert scaler.state().since is None


@pytest.mark.parametrize("kind", KINDS)
def test_kinds_are_listed_under_their_own_names(kind):
    """The name in the catalogue is the kind of the class, and every parameter is explained."""
    cls = policies.POLICIES[kind]
    assert cls.kind == kind
    for field in cls.__struct_fields__:
        assert f"{field}: " in cls.__doc__


def test_a_policy_is_made_from_its_parameters():
    """Names and values come from a configuration."""
    assert policies.make_policy("queue-depth", {"up": 2}, where="autoscaling").up == 2


@pytest.mark.parametrize(
    ("kind", "params", "message"),
    [
        ("queue-deep", {}, "one of adaptive, kubeai, queue-depth"),
        ("kubeai", {"targets": 1}, "target_requests"),
        ("kubeai", {"target_requests": 0}, "> 0"),
    ],
)
def test_an_unknown_policy_is_refused(kind, params, message):
    """The error says what there is."""
    with pytest.raises(ConfigError, match=message):
        policies.make_policy(kind, params, where="autoscaling")
