from __future__ import annotations

import asyncio

import msgspec
import pytest

from extproc.autoscaling.runtime.autoscaler import Autoscaler
from extproc.autoscaling.runtime.control_loop import ControlLoop
from extproc.config import loader
from extproc.decision import Rejection, all_busy
from extproc.discovery.endpoint_list import DiscoveredPool
from extproc.endpoint import DEFAULT_STEP_TIMES, Endpoint, EngineCounters, Load
from extproc.errors import ConfigError
from extproc.request import HttpRequest
from extproc.scheduling.plugin_guard import GuardFactory
from extproc.scrape import client, schedule
from extproc.server.peer_addresses import PeerAddresses
from extproc.server.pool_registry import PoolRegistry
from extproc.server.pool_runtime import RuntimeContext
from extproc.telemetry.counters import ProcessCounters
from tests.autoscaling import demands

HEAD = "apiVersion: extproc/v1alpha1\nkind: ExtProcConfig\ncluster: {discover_pools: cluster}\n"
RULES = "[{pools: ['a/*'], max: 3, policy: kubeai}, {pools: ['b/*'], annotations: false}]"


class AutoscalerFixture:
    """Pools from Kubernetes, their autoscaler, and a clock that a test turns."""

    def __init__(self, rules=RULES, more="", on_step=lambda _: None):
        text = f"{HEAD}flow_control: {{enabled: true}}\nautoscaling: {{discovered_pools: {rules}}}\n{more}"
        settings = loader.settings(loader.parse(text, where="f.yaml"))
        self.now = 0.0
        self.listed = self.leads = True
        self.counters = counters = ProcessCounters()
        self.supervisor = counters.supervisor
        http = client.ScrapeClient(timeout_s=1.0, cap_bytes=1)
        guards = GuardFactory(lambda: 0.0, counters.plugins)
        shared = RuntimeContext(counters, guards, http, schedule.EndpointCounts(), lambda: self.now)
        self.gone = []
        self.registry = PoolRegistry(
            settings,
            shared,
            configured={},
            is_discovery_synced=lambda: self.listed,
            on_change=self.sync_pools,
        )
        self.subject = Autoscaler(
            settings,
            self.registry,
            counters,
            is_leader=lambda: self.leads,
            clock=lambda: self.now,
            addresses=PeerAddresses((), where="autoscaling.peers"),
            on_step=on_step,
            on_removed=lambda loop: self.gone.append(loop.name),
        )

    def sync_pools(self):
        self.subject.sync_pools()

    def bring(self, *keys, **texts):
        annotations = {f"extproc/scale-{name}": text for name, text in texts.items()}
        pool = DiscoveredPool((Endpoint("127.0.0.1:9"),), annotations=annotations)
        self.registry.on_pools_changed(dict.fromkeys(keys, pool), ())

    def take_away(self, *keys):
        self.registry.on_pools_changed({}, keys)

    def queue(self, key):
        """A request of a pool joins its queue."""
        runtime = self.registry.by_name[key]
        headers = {":method": "POST", ":path": "/v1/completions"}
        prepared = runtime.parts.director.preparer.prepare(
            HttpRequest(headers, b'{"model": "m", "prompt": "x"}')
        )
        item = runtime.flow_controller.enqueue(prepared, all_busy(1.0), self.now)
        assert not isinstance(item, Rejection)
        return item

    @property
    def scaled(self):
        return sorted(self.subject.loops)


def test_discovered_pools_are_scaled_while_they_exist():
    """Those a rule is for, by name, in figures and for KEDA alike."""
    fixture = AutoscalerFixture()
    fixture.bring("a/x", "b/y", "c/z")
    assert fixture.scaled == ["a/x", "b/y"]
    assert set(fixture.subject.metrics()) == {"a/x", "b/y"}
    fixture.take_away("a/x")
    assert fixture.scaled == ["b/y"]
    assert fixture.gone == ["a/x"]
    assert set(fixture.subject.metrics()) == {"b/y"}


async def test_a_queued_request_wakes_the_loop_of_its_pool():
    """And no longer once the pool is left alone."""
    fixture = AutoscalerFixture()
    fixture.bring("a/x")
    loop = fixture.subject.loops["a/x"]
    fixture.queue("a/x")
    assert loop.is_woken
    again = AutoscalerFixture()
    again.bring("a/x")
    loop = again.subject.loops["a/x"]
    again.bring("a/x", target="none")
    again.queue("a/x")
    assert not loop.is_woken
    assert again.scaled == []


def test_learned_state_survives_a_change_of_bounds():
    """Another loop goes on where the one before stopped; the same wish makes no other loop."""
    fixture = AutoscalerFixture()
    fixture.bring("a/x", max="2")
    first = fixture.subject.loops["a/x"]
    fixture.bring("a/x", max="2")
    assert fixture.subject.loops["a/x"] is first
    first.scaler.step(demands.demand(now=1.0, spec=1))
    before = first.state().scaler
    fixture.bring("a/x", max="3")
    second = fixture.subject.loops["a/x"]
    assert second is not first
    assert second.state().scaler == before


async def test_earlier_traffic_is_no_demand_of_a_loop_with_other_bounds():
    """Totals go on where clients that waited left, and for answers without usage."""
    fixture = AutoscalerFixture()
    fixture.bring("a/x", max="2")
    counters = fixture.counters.for_pool("a/x")
    counters.record_finished([("127.0.0.1:9", "200")])
    item = fixture.queue("a/x")
    await fixture.subject.loops["a/x"].step()
    before = fixture.subject._own_counters()
    fixture.registry.by_name["a/x"].flow_controller.cancel(item, fixture.now)
    fixture.bring("a/x", max="thre")
    store = fixture.registry.by_name["a/x"].parts.store
    for tick in range(10):
        steps = 20.0 * tick
        page = EngineCounters(
            steps=steps, step_tokens=steps, generated_tokens=steps, finished=float(tick)
        )
        load = Load(at=float(tick), running=1.0, counters=page)
        store.observe(store.begin_scrape(store.pool.members[0].endpoint), load, float(tick))
    fixture.bring("a/x", max="3")
    assert store.pool.members[0].rates.output_tokens != DEFAULT_STEP_TIMES.output_tokens
    after = fixture.subject._own_counters()
    assert msgspec.structs.replace(after["a/x"], held=1) == before["a/x"]
    assert before["a/x"].held == 1


def test_an_object_is_scaled_for_the_first_of_two_pools(caplog):
    """The first by name keeps it; the other one has it when the first is gone."""
    fixture = AutoscalerFixture()
    fixture.bring("a/x", "a/y", target="vllm")
    assert fixture.scaled == ["a/x"]
    assert "pool a/y is not scaled: what it names is scaled for pool a/x" in caplog.text
    fixture.bring("a/y", target="vllm")
    assert caplog.text.count("a/y is not scaled") == 1
    fixture.take_away("a/x")
    assert fixture.scaled == ["a/y"]


def test_a_pool_has_the_object_that_another_pool_gives_up(caplog):
    """At once, whatever their names; two pools that swap objects keep what they learned."""
    fixture = AutoscalerFixture()
    fixture.bring("a/y", target="vllm")
    fixture.bring("a/x", target="vllm")
    assert fixture.scaled == ["a/y"]
    fixture.bring("a/y", target="other")
    assert fixture.scaled == ["a/x", "a/y"]
    before = {}
    for name, loop in fixture.subject.loops.items():
        loop.scaler.step(demands.demand(now=float(len(before) + 1), spec=1))
        before[name] = loop.state().scaler
    caplog.clear()
    pools = {
        name: DiscoveredPool(
            (Endpoint("127.0.0.1:9"),), annotations={"extproc/scale-target": target}
        )
        for name, target in {"a/x": "other", "a/y": "vllm"}.items()
    }
    fixture.registry.on_pools_changed(pools, ())
    assert {name: loop.state().scaler for name, loop in fixture.subject.loops.items()} == before
    targets = {name: pool.target.name for name, pool in fixture.subject._scaled.items()}
    assert targets == {"a/x": "other", "a/y": "vllm"}
    assert "is not scaled" not in caplog.text


def test_a_pool_keeps_its_object_when_its_bounds_change():
    """Also where another pool with an earlier name wants the object at the same time."""
    fixture = AutoscalerFixture()
    fixture.bring("a/x", target="vllm", max="2")
    fixture.bring("a/a", "a/x", target="vllm", max="3")
    assert fixture.scaled == ["a/x"]


def test_autoscaler_scales_an_object_for_a_single_pool_whatever_its_version(caplog):
    """Another version of its API names the same object."""
    fixture = AutoscalerFixture()
    fixture.bring("a/x", target="g.io/v1/fleets/Fleet/vllm")
    fixture.bring("a/y", target="g.io/v2/fleets/Fleet/vllm")
    assert fixture.scaled == ["a/x"]
    assert "pool a/y is not scaled: what it names is scaled for pool a/x" in caplog.text


def test_configured_pools_may_not_name_one_object(monkeypatch):
    """Also where a single one of them writes out the namespace in which extproc runs."""
    monkeypatch.setenv("NAMESPACE", "n")
    pools = """pools:
- {name: a, endpoints_file: x, autoscaling: {target: {name: t}}}
- {name: b, endpoints_file: y, autoscaling: {target: {name: t, namespace: %s}}}
"""
    with pytest.raises(ConfigError, match=r"autoscaling of pool b: .* got that of pool a; "):
        AutoscalerFixture(more=pools % "n")
    assert AutoscalerFixture(more=pools % "m").scaled == ["a", "b"]


def test_an_invalid_annotation_scales_nothing(caplog):
    """It is said once, and the pool is scaled once it can be."""
    fixture = AutoscalerFixture()
    fixture.bring("a/x", max="2")
    fixture.bring("a/x", max="many")
    assert fixture.scaled == []
    assert "annotation of a/x: extproc/scale-max" in caplog.text
    fixture.bring("a/x", max="3")
    assert fixture.scaled == ["a/x"]


def test_learned_state_survives_an_invalid_annotation():
    """A mistyped annotation that is corrected costs nothing that was learned; a new pool has nothing."""
    fixture = AutoscalerFixture()
    fixture.bring("a/x", max="2")
    loop = fixture.subject.loops["a/x"]
    loop.scaler.step(demands.demand(now=1.0, spec=1))
    before = loop.state()
    fixture.bring("a/x", max="thre")
    assert fixture.scaled == []
    fixture.bring("a/x", max="3")
    assert fixture.subject.loops["a/x"].state() == before
    fixture.bring("a/x", max="thre")
    fixture.take_away("a/x")
    fixture.bring("a/x", max="3")
    assert fixture.subject.loops["a/x"].state() != before


class EventsFixture:
    """Takes Events in place of an API server."""

    def __init__(self):
        self.written = []

    async def write_event(self, about, reason, note, *, warning):
        self.written.append((f"{about.kind} {about.namespace}/{about.name}", reason, note, warning))


async def test_autoscaler_counts_and_reports_annotations_that_it_refused():
    """On the metrics page and in an Event on the pool, until the pool is gone."""
    fixture, cluster = AutoscalerFixture(), EventsFixture()
    fixture.bring("a/x", target="apps/v1%2Fnamespaces%2Fkube-system/deployments/Deployment/coredns")
    fixture.bring("a/y", max="many")
    fixture.bring("a/y", max="2")
    assert fixture.scaled == ["a/y"]
    refusals = {name: metrics.refusals for name, metrics in fixture.subject.metrics().items()}
    assert refusals == {"a/x": 1, "a/y": 1}
    await fixture.subject.report(cluster)
    ((about, reason, note, warning),) = cluster.written
    assert (about, reason, warning) == ("InferencePool a/x", "InvalidAnnotation", True)
    assert "expected an API version" in note
    await fixture.subject.report(cluster)
    assert len(cluster.written) == 1
    fixture.take_away("a/x")
    assert set(fixture.subject.metrics()) == {"a/y"}


class StateStoreFixture:
    """A store whose content cannot be read."""

    async def load(self):
        raise UnicodeDecodeError("utf-8", b"x", 0, 1, "what was kept")

    async def save(self, pools):
        raise OverflowError


async def test_stored_state_that_raises_does_not_stop_the_start(caplog):
    """Every replica reads it: none would start."""
    fixture = AutoscalerFixture()
    fixture.subject._state_store, fixture.subject._cluster = StateStoreFixture(), None
    await fixture.subject.start()
    assert fixture.supervisor.failures["autoscaling"] == 1
    assert "what was kept" not in caplog.text


async def test_a_pool_that_raises_stops_no_other_pool(monkeypatch):
    """Its annotations may raise, and so may its loop: the other pool is looked at."""
    fixture = AutoscalerFixture()
    fixture.subject._state_store = StateStoreFixture()
    fixture.subject._save_s = 0.001
    real, looked, failures = ControlLoop.step, asyncio.Event(), asyncio.Queue()
    supervisor = fixture.supervisor
    record_error = supervisor.record_error

    async def step(loop, *, immediate=False):
        if loop.name == "a/x":
            raise OverflowError
        looked.set()
        return await real(loop, immediate=immediate)

    def count(loop, error, *, instance=""):
        record_error(loop, error, instance=instance)
        failures.put_nowait(loop)

    monkeypatch.setattr(ControlLoop, "step", step)
    monkeypatch.setattr(supervisor, "record_error", count)
    fixture.bring("a/x", "b/y")
    task = asyncio.ensure_future(fixture.subject.run())
    async with asyncio.timeout(300):
        await looked.wait()
        assert [await failures.get() for _ in range(2)] == ["autoscaling"] * 2
    assert not task.done()
    assert supervisor.failures["autoscaling"] >= 2
    assert supervisor.degraded == ["autoscaling"]
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    rescale = Autoscaler._update_pool

    def raising(subject, name, runtime):
        if name == "a/x":
            raise OverflowError
        rescale(subject, name, runtime)

    monkeypatch.setattr(Autoscaler, "_update_pool", raising)
    fixture.bring("a/x", "b/y", max="2")
    assert fixture.scaled == ["a/x", "b/y"]
    fixture.bring("a/z")
    assert "a/z" in fixture.scaled


async def test_an_observer_of_steps_may_raise():
    """An exception of what KEDA's streams do after a step does not end the loop."""
    fixture = AutoscalerFixture(on_step={}.__getitem__)
    fixture.bring("a/x")
    await fixture.subject.loops["a/x"].step()
    assert fixture.supervisor.failures["autoscaling"] == 1
