from __future__ import annotations

import asyncio
import contextlib

import msgspec
import pytest

from extproc.autoscaling.demand_estimator import PickerCounters
from extproc.autoscaling.interface import Demand, ScalingDecision, ScalingReason
from extproc.autoscaling.runtime.actuator import ActuatorError, AdvisoryActuator
from extproc.autoscaling.runtime.control_loop import ControlLoop, LoopMetrics
from extproc.autoscaling.runtime.demand_counters import DemandCounters
from extproc.config.autoscaling import ScalingSection
from extproc.discovery.endpoint_list import DiscoveredPool
from extproc.endpoint import Endpoint
from extproc.request import HttpRequest
from extproc.scheduling.plugin_guard import GuardFactory
from extproc.scrape import client, schedule
from extproc.server.pool_registry import PoolRegistry
from extproc.server.pool_runtime import RuntimeContext
from extproc.telemetry.counters import ProcessCounters
from extproc.telemetry.decision_log import DecisionLog
from extproc.telemetry.stream_recorder import StreamRecorder
from tests.support.scaling import configured

POLICY = {"window_s": 60.0, "interval_s": 5.0, "up": 2.0, "down": 1.0}


class FakeActuator:
    """Remembers what was asked for."""

    scales = True

    def __init__(self, spec):
        self.spec = spec
        self.can_scale = True
        self.fails = ""
        self.requested = []
        self.recalled = None

    def restore(self, replicas):
        self.recalled = replicas

    async def current_replicas(self, available):
        return ActuatorError(self.fails) if self.fails == "look" else self.spec

    async def scale(self, desired, spec):
        self.requested.append((desired.replicas, desired.reason))
        if self.fails:
            return ActuatorError(self.fails)
        self.spec = desired.replicas
        return None


class FakePeerCounters:
    """Counters of other pickers; None for a picker that cannot be read."""

    identity = "me"

    def __init__(self):
        self.reports = {}
        self.pushed = 0
        self.on_push = int
        self.reads = 0

    def last(self, pool):
        return self.reports

    async def read(self, pool):
        self.reads += 1
        return self.reports

    async def push(self):
        self.pushed += 1
        self.on_push()


class ControlLoopFixture:
    """A pool without a source, its loop, and a clock that a test turns."""

    def __init__(self, *, spec=0, policy="queue-depth", **scaling):
        self.now = 0.0
        counters = ProcessCounters()
        shared = RuntimeContext(
            counters,
            GuardFactory(lambda: 0.0, counters.plugins),
            client.ScrapeClient(timeout_s=1.0, cap_bytes=1),
            schedule.EndpointCounts(),
            lambda: self.now,
        )
        pool = {"kubernetes": {"inference_pool": "p", "namespace": "n"}}
        settings = configured(scaling={}, pool=pool, holding={"enabled": True})
        self.registry = PoolRegistry(
            settings, shared, configured={"n/p": ""}, is_discovery_synced=lambda: True
        )
        self.runtime = self.registry.by_name[""]
        self.actuator, self.others = FakeActuator(spec), FakePeerCounters()
        self.changes, self.items = [], []
        self.recorder = StreamRecorder(counters, DecisionLog(1), lambda: self.now)
        self.pool_counters = counters.for_pool("")
        self.counters = DemandCounters(self.runtime, self.pool_counters)
        params = POLICY if policy == "queue-depth" else {}
        self.loop = ControlLoop(
            self.runtime,
            ScalingSection(policy=policy, params=params, **{"max": 3, **scaling}),
            actuator=self.actuator,
            counters=self.counters,
            peers=self.others,
            clock=lambda: self.now,
            on_change=self.changes.append,
        )
        self.runtime.flow_controller.add_arrival_listener(self.loop.on_arrival)

    def come(self, *addresses):
        self.registry.on_pools_changed({"n/p": DiscoveredPool(tuple(map(Endpoint, addresses)))}, ())

    def ask(self):
        """A request comes; it waits where there is nothing."""
        headers = {":method": "POST", ":path": "/v1/completions"}
        prepared = self.runtime.parts.director.preparer.prepare(
            HttpRequest(headers, b'{"model": "m", "prompt": "x"}')
        )
        why = self.runtime.parts.director.decide(prepared, self.now)
        item = self.runtime.flow_controller.enqueue(prepared, why, self.now)
        self.items.append(item)
        return item

    async def pass_s(self, seconds):
        """Looks, as often as they are due."""
        until = self.now + seconds
        while self.now < until:
            self.now += await self.loop.step()


async def test_control_loop_decides_nothing_before_the_pool_is_synced():
    """Endpoints that were never listed are no reason to scale."""
    fixture = ControlLoopFixture(spec=2)
    assert await fixture.loop.step() < 1.0
    assert (fixture.loop.desired, fixture.actuator.requested) == (None, [])


async def test_a_queued_request_wakes_the_loop():
    """At once, without reading peers; other actuators are notified."""
    fixture = ControlLoopFixture()
    fixture.come()
    running = asyncio.ensure_future(fixture.loop.run())
    while not fixture.changes:
        await asyncio.sleep(0)
    reads = fixture.others.reads
    fixture.ask()
    while not fixture.actuator.requested:
        await asyncio.sleep(0)
    assert fixture.actuator.requested == [(1, ScalingReason.WAKE)]
    while not fixture.others.pushed:
        await asyncio.sleep(0)
    assert fixture.others.reads == reads
    # Now that one starts, others that wait are no reason to hurry.
    fixture.ask()
    for _ in range(10):
        await asyncio.sleep(0)
    assert len(fixture.actuator.requested) == 1
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running


async def test_a_loop_that_is_cancelled_as_it_is_woken_ends():
    """Cancelled in the turn in which a request is queued, which ends the pause as well."""
    fixture = ControlLoopFixture()
    fixture.come()
    running = asyncio.ensure_future(fixture.loop.run())
    while not fixture.changes:
        await asyncio.sleep(0)
    for _ in range(10):
        await asyncio.sleep(0)
    fixture.ask()
    running.cancel()
    for _ in range(10):
        await asyncio.sleep(0)
    assert running.cancelled()


async def test_a_request_that_left_does_not_count_as_waiting():
    """The time from zero is that of the request that was waited for, not of an earlier one."""
    fixture = ControlLoopFixture()
    fixture.come()
    fixture.actuator.fails = "scale"
    item = fixture.ask()
    fixture.loop._woken.clear()
    await fixture.loop.step(immediate=True)
    fixture.runtime.flow_controller.cancel(item, fixture.now)
    fixture.actuator.fails = ""
    await fixture.pass_s(7200.0)
    fixture.ask()
    fixture.now += 3.0
    fixture.loop._woken.clear()
    await fixture.loop.step(immediate=True)
    assert fixture.loop.metrics.wake_s == 3.0


async def test_only_the_leader_scales():
    """A follower knows the number and asks for nothing, but tells the others that it waits."""
    fixture = ControlLoopFixture()
    fixture.actuator.can_scale = False
    fixture.come()
    fixture.ask()
    assert await fixture.loop.step(immediate=True) == 1.0
    assert fixture.loop.active
    assert (fixture.actuator.requested, fixture.others.pushed) == ([], 1)


async def test_replicas_that_may_not_scale_wake_each_other_once():
    """With a request at each: what they push is no reason for another step before the retry."""
    pair = [ControlLoopFixture(), ControlLoopFixture()]
    for fixture, other in (pair, reversed(pair)):
        fixture.actuator.can_scale = False
        fixture.come()
        fixture.ask()
        fixture.others.on_push = other.loop.wake
    for fixture in pair * 5:
        if fixture.loop.is_woken:
            fixture.loop._woken.clear()
            await fixture.loop.step(immediate=True)
    assert [fixture.others.pushed for fixture in pair] == [1, 1]


@pytest.mark.parametrize("fails", ["no right", "look"])
async def test_requests_that_come_before_a_retry_make_for_no_other_step(fails):
    """Also those that come during the failed step; the first of a later time does again."""
    fixture = ControlLoopFixture()
    fixture.come()
    fixture.ask()
    fixture.actuator.fails, fixture.others.on_push = fails, fixture.ask
    assert fixture.loop.is_woken
    assert await fixture.loop.step(immediate=True) == 1.0
    fixture.ask()
    fixture.loop.wake()
    assert not fixture.loop.is_woken
    fixture.others.on_push = int
    assert await fixture.loop.step() == 1.0
    assert fixture.others.pushed == 2
    for item in fixture.items:
        fixture.runtime.flow_controller.cancel(item, fixture.now)
    assert await fixture.loop.step() == 5.0
    fixture.ask()
    assert fixture.loop.is_woken


async def test_the_report_of_a_peer_is_not_answered_with_a_push():
    """No request waits here that others would have to know; the first one is still in a hurry."""
    fixture = ControlLoopFixture()
    fixture.actuator.can_scale = False
    fixture.come()
    fixture.others.reports = {"other": PickerCounters(held=1)}
    fixture.loop.wake()
    assert fixture.loop.is_woken
    fixture.loop._woken.clear()
    await fixture.loop.step(immediate=True)
    assert fixture.others.pushed == 0
    fixture.ask()
    assert fixture.loop.is_woken


async def test_an_unreadable_peer_prevents_scale_down():
    """Nothing is taken away while it is so, and something is added as ever."""
    fixture = ControlLoopFixture(spec=3)
    fixture.come("127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3")
    fixture.others.reports = {"other": None}
    await fixture.pass_s(300.0)
    assert fixture.actuator.requested == []
    assert fixture.loop.desired.reason == ScalingReason.INCOMPLETE_DATA
    fixture.others.reports = {"other": PickerCounters(in_flight=0)}
    await fixture.pass_s(70.0)
    assert fixture.actuator.requested[0][0] == 2
    busy = ControlLoopFixture(spec=1)
    busy.come("127.0.0.1:1")
    busy.others.reports = {"other": None, "third": PickerCounters(in_flight=9)}
    await busy.pass_s(120.0)
    assert (2, ScalingReason.UP) in busy.actuator.requested


@pytest.mark.parametrize("policy", ["queue-depth", "adaptive", "kubeai"])
async def test_scale_down_waits_for_a_complete_window(policy):
    """Whatever the policy, after a start without memory."""
    fixture = ControlLoopFixture(spec=3, policy=policy)
    fixture.come("127.0.0.1:1")
    await fixture.pass_s(min(50.0, fixture.loop.scaler.policy.watch_s - 5.0))
    assert fixture.actuator.requested == []


@pytest.mark.parametrize("policy", ["adaptive", "kubeai", "queue-depth"])
async def test_an_outage_of_engines_does_not_lower_advice(policy):
    """Failed engines are still requested, also where the loop changed nothing before."""
    fixture = ControlLoopFixture(policy=policy)
    fixture.loop.actuator = AdvisoryActuator()
    fixture.come("127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3")
    await fixture.pass_s(10.0)
    fixture.come()
    await fixture.pass_s(10.0)
    assert fixture.loop.desired.replicas == 3


async def test_an_outage_of_the_api_server_is_no_cold_start():
    """Replicas that another program requested in it had any time to start."""
    fixture = ControlLoopFixture(spec=1, policy="adaptive")
    fixture.come("127.0.0.1:1")
    await fixture.pass_s(60.0)
    fixture.actuator.fails = "look"
    await fixture.pass_s(3600.0)
    fixture.actuator.fails, fixture.actuator.spec = "", 2
    fixture.come("127.0.0.1:1", "127.0.0.1:2")
    await fixture.pass_s(10.0)
    assert fixture.loop.demand.cold_start_s == 60.0


@pytest.mark.parametrize("scales", [True, False])
async def test_advisory_replicas_are_logged_as_advice(scales, caplog):
    """Without a target the line does not read as if something was scaled."""
    caplog.set_level("INFO", "extproc.server")
    fixture = ControlLoopFixture(min=2)
    fixture.actuator.scales = scales
    fixture.come()
    await fixture.pass_s(10.0)
    (line,) = [text for text in caplog.messages if "from 0 to 2 replicas" in text]
    assert ("nothing is scaled, as there is no target" in line) is not scales


async def test_a_failed_action_is_retried_and_logged_once(caplog):
    """With a request waiting after a second; otherwise at the next look."""
    caplog.set_level("INFO", "extproc.server")
    fixture = ControlLoopFixture()
    fixture.come()
    fixture.ask()
    fixture.actuator.fails = "no right"
    assert await fixture.loop.step() == 1.0
    assert await fixture.loop.step() == 1.0
    assert caplog.messages.count("autoscaling: no right") == 1
    fixture.actuator.fails = "look"
    assert await fixture.loop.step() == 1.0
    fixture.actuator.fails = ""
    assert await fixture.loop.step() == 5.0
    assert fixture.actuator.spec == 1
    assert "autoscaling: scaling works again" in caplog.messages
    assert fixture.loop.metrics.snapshot().failures == 3


async def test_a_failed_action_for_which_no_request_waits_is_retried_at_the_next_interval():
    """A program or an API server that fails gets no more requests than otherwise."""
    fixture = ControlLoopFixture(min=2)
    fixture.come()
    fixture.actuator.fails = "no right"
    assert await fixture.loop.step() == 5.0
    assert len(fixture.actuator.requested) == 1


async def test_control_loop_continues_from_restored_state():
    """With the same policy."""
    fixture, other = ControlLoopFixture(spec=2), ControlLoopFixture(spec=2)
    for scene in (fixture, other):
        scene.come("127.0.0.1:1", "127.0.0.1:2")
    await fixture.pass_s(60.0)
    other.now = 1000.0
    other.loop.restore(fixture.loop.state(), shift_s=1000.0 - fixture.now)
    await other.loop.step()
    assert other.loop.desired.reason != ScalingReason.STABILIZING
    assert other.actuator.recalled == 2


@pytest.mark.parametrize(
    ("policy", "memory", "level"),
    [
        ("kubeai", {}, "INFO"),
        ("queue-depth", 7, "WARNING"),
        ("queue-depth", {"spec": 2}, "WARNING"),
    ],
)
async def test_state_that_the_policy_cannot_read_costs_nothing_else(policy, memory, level, caplog):
    """Requested replicas and what was learned of engines are of no policy; a log line says so."""
    caplog.set_level("INFO", "extproc.server")
    fixture, other = ControlLoopFixture(spec=2), ControlLoopFixture(spec=2, policy=policy)
    fixture.come("127.0.0.1:1", "127.0.0.1:2")
    await fixture.pass_s(60.0)
    saved = fixture.loop.state()
    scaler = msgspec.structs.replace(saved.scaler, memory=memory)
    fresh = other.loop.state().scaler
    caplog.clear()
    other.loop.restore(msgspec.structs.replace(saved, scaler=scaler), shift_s=0.0)
    assert other.loop.state() == msgspec.structs.replace(saved, scaler=fresh)
    assert other.actuator.recalled == 2
    (record,) = caplog.records
    assert record.levelname == level
    assert f"expected state of policy {policy}, got state of 'queue-depth'" in record.getMessage()


def test_a_loop_without_a_step_has_no_gauges():
    """Before the first step only failures are counted."""
    metrics = LoopMetrics(60.0)
    metrics.failures += 1
    assert metrics.snapshot().gauges == {}
    assert metrics.snapshot().failures == 1


def test_metrics_show_demand_decision_and_changes():
    """Queue depth, request rate, replicas by state, and changes by reason are reported."""
    metrics = LoopMetrics(60.0)
    for now, queued in ((0.0, 0), (30.0, 6), (60.0, 12)):
        demand = Demand(now=now, spec=3, available=2, held=queued)
        counters = {
            "a": PickerCounters(arrived=now * 2),
            "b": PickerCounters(arrived=now),
            "c": None,
        }
        metrics.record(demand, ScalingDecision(3, ScalingReason.UP), counters)
    metrics.changes["up"] += 1
    shown = metrics.snapshot()
    assert shown.gauges["queue_depth"] == 6.0
    assert shown.gauges["queue_depth_mean"] == pytest.approx((3.0 + 6.0) / 2)
    assert shown.gauges["requests_per_second"] == pytest.approx(3.0)
    assert shown.gauges["desired_replicas"] == 3.0
    assert shown.replicas == {"spec": 3, "available": 2, "starting": 1}
    assert shown.changes == {"up": 1}
