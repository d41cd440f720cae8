from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import weakref
from collections import Counter

import pytest

from extproc.decision import Deferral, Rejection
from extproc.demo import stack
from extproc.discovery.endpoint_list import DiscoveredPool
from extproc.endpoint import Endpoint
from extproc.pool import inference_policy
from extproc.prefix_cache.index import IndexBudget
from extproc.request import HttpRequest, RequestLabels
from extproc.scheduling.plugin_guard import GuardFactory
from extproc.scrape import client, schedule
from extproc.server.pool_registry import PoolRegistry
from extproc.server.pool_runtime import PoolRuntime, RuntimeContext
from extproc.telemetry.counters import ProcessCounters
from tests.support.config_text import read

A, B, C = "127.0.0.11:9", "127.0.0.12:9", "127.0.0.13:9"


def sites(text, *, written=None, heard=True, on_change=lambda: None, counters=None, **facts):
    counters = counters or ProcessCounters()
    shared = RuntimeContext(
        counters,
        GuardFactory(lambda: 0.0, counters.plugins),
        client.ScrapeClient(timeout_s=1.0, cap_bytes=1),
        schedule.EndpointCounts(),
        lambda: 1.0,
        **facts,
    )
    return PoolRegistry(
        read(text),
        shared,
        configured=written or {},
        is_discovery_synced=lambda: heard,
        on_change=on_change,
    )


def discovered(*addresses, **facts):
    return DiscoveredPool(tuple(Endpoint(address) for address in addresses), **facts)


def ask(subject, host="x", model="m", **headers):
    body = json.dumps({"model": model, "prompt": "x"}).encode()
    headers |= {":method": "POST", ":path": "/v1/completions", ":authority": host}
    return subject.pool_selector.route(HttpRequest(headers, body), 1.0)


def where(subject, **request):
    routed = ask(subject, **request)
    return getattr(routed.outcome, "endpoints", [routed.outcome])[0]


TWO = f"""
pools:
- {{name: a, endpoints: ['{A}'], match: {{hosts: [a]}}}}
- {{name: b, endpoints: ['{B}'], scheduling: {{strategy: random}}}}
"""


async def test_configured_pools_have_endpoints_after_sync():
    """Each pool has its own store, match and profile, and all pools have to be synced."""
    subject = sites(TWO)
    assert not subject.synced
    await subject.sync()
    assert subject.synced
    assert where(subject, host="a").address == A
    assert where(subject, host="z").address == B
    assert subject.profile == "adaptive,random"
    assert [len(pool.members) for pool in subject.pools().values()] == [1, 1]
    assert list(subject.views()) == ["a", "b"]


async def test_rewrites_name_the_models_that_have_series():
    """Also while the pool has no engine, and however many names clients make up."""
    counters = ProcessCounters()
    text = "pool: {rewrites: [{models: [m], targets: [{model: n}]}]}"
    (runtime,) = sites(text, counters=counters).by_name.values()
    series = counters.for_pool(runtime.name).series
    for model in (*map(str, range(100)), "m", "n"):
        series.find_refused(RequestLabels(model, model, "none", 0))
    assert {member.labels.target_model for member in series} >= {"m", "n", "other"}


async def test_a_tenant_has_one_limit_over_all_pools():
    """The model that a request names gives it no further allowance, before and after a reload."""
    limits = "flow_control: {{enabled: true, limits: {{t: {{requests_per_s: {}}}}}}}\n"
    subject = sites(TWO + limits.format(0.1))
    await subject.sync()

    def is_refused(host):
        routed = ask(subject, host=host, **{"x-llm-d-inference-fairness-id": "t"})
        reserved = subject.flow_controllers[routed.pool].reserve(routed.prepared, 1.0)
        return isinstance(reserved, Rejection)

    assert [is_refused(host) for host in "azaz"] == [False, True, True, True]
    subject.prepare_reload(read(TWO + limits.format(0.2)))()
    assert [is_refused(host) for host in "azaz"] == [False, False, True, True]


async def test_prefix_indexes_of_all_pools_share_one_bound():
    """Together they take what `prefix.max_bytes` allows, however many pools there are."""
    subject = sites(TWO, prefix_budget=IndexBudget(200_000))
    await subject.sync()
    indexes = [runtime.parts.index for runtime in subject.by_name.values()]
    for index in indexes:
        for number in range(2000):
            index.record((A, 0), [number])
    assert 150_000 < sum(index.bytes_estimate() for index in indexes) < 250_000


async def test_a_configured_pool_follows_kubernetes():
    """Its key is known; endpoints and policy arrive, and its end is a 503 of that pool alone."""
    text = f"""
pools:
- {{name: a, kubernetes: {{inference_pool: p, namespace: n}}, match: {{hosts: [a]}}}}
- {{name: b, endpoints: ['{B}']}}
"""
    subject = sites(text, written={"n/p": "a"})
    await subject.sync()
    assert not subject.synced
    rules = (inference_policy.RewriteRule(("m",), (inference_policy.TargetModel("n"),)),)
    subject.on_pools_changed(
        {"n/p": discovered(A, policy=inference_policy.InferencePolicy({}, rules))}, ()
    )
    assert subject.synced
    routed = ask(subject, host="a")
    assert (routed.pool, routed.outcome.model_rewrite) == ("a", "n")
    subject.on_pools_changed({"n/p": discovered(exists=False)}, ())
    assert subject.synced
    assert where(subject, host="a").status == 503
    assert where(subject, host="z").address == B


async def test_requests_that_wait_for_a_removed_pool_are_refused():
    """A pool that Kubernetes removes answers with 503, and not as a picker that stops."""
    subject = sites("cluster: {discover_pools: cluster}\nflow_control: {enabled: true}")
    subject.on_pools_changed({"n/p": discovered(A)}, ())
    runtime = subject.by_name["n/p"]
    headers = {":method": "POST", ":path": "/v1/completions"}
    prepared = runtime.parts.director.preparer.prepare(
        HttpRequest(headers, b'{"model": "m", "prompt": "x"}')
    )
    busy = Deferral(1.0, Rejection(429, "busy", reason="x"))
    queued = runtime.flow_controller.enqueue(prepared, busy, 1.0)
    subject.on_pools_changed({}, ["n/p"])
    rejection = queued.admission.result()
    assert (rejection.status, rejection.cause) == (503, "no-endpoints")
    assert rejection.message == "the pool is no longer served"


async def test_a_process_without_its_only_pool_is_not_ready():
    """A picker whose only pool was deleted is not ready.

    Source: docs/reference/protocol-conformance.md#point-65.
    """
    subject = sites("pool: {kubernetes: {inference_pool: p, namespace: n}}", written={"n/p": ""})
    subject.on_pools_changed({"n/p": discovered(A)}, ())
    assert subject.synced
    subject.on_pools_changed({"n/p": discovered(exists=False)}, ())
    assert not subject.synced


@pytest.mark.parametrize(
    ("before", "message"),
    [((), "pool  is not there; see its name"), ((discovered(A),), "pool  is gone")],
)
async def test_a_missing_pool_differs_from_a_deleted_pool(caplog, before, message):
    """A pool that never existed is not reported as deleted."""
    subject = sites("pool: {kubernetes: {inference_pool: p, namespace: n}}", written={"n/p": ""})
    for change in (*before, discovered(exists=False)):
        subject.on_pools_changed({"n/p": change}, ())
    lines = [record.message for record in caplog.records if record.name == "extproc.server"]
    assert [line for line in lines if line.startswith(message)]
    assert len(lines) == 1


async def test_readiness_waits_for_kubernetes_discovery():
    """Pools of a discovery source are unknown until its first complete list."""
    assert not sites("cluster: {discover_pools: cluster}", heard=False).synced
    assert sites("cluster: {discover_pools: cluster}").synced


ANY_CLAIM = "cluster: {discover_pools: cluster, match_rules: [{pools: ['*']}]}\n"


async def test_discovered_pools_come_and_go():
    """Each is a pool by its key, claimed by annotations, and forgotten when it is gone."""
    subject = sites(ANY_CLAIM + "scheduling: {strategy: random}")
    first = {"n/p": discovered(A, annotations={"extproc/hosts": "A"}), "n/q": discovered(B)}
    assert subject.labels() == {"pool": "", "profile": ""}
    subject.on_pools_changed(first, ())
    assert subject.labels() == {"pool": "", "profile": "random"}
    assert ask(subject, host="a").pool == "n/p"
    assert ask(subject, host="b").pool == "n/q"
    subject.by_name["n/q"].parts.store.set_endpoints([], 2.0)
    subject.on_pools_changed({"n/q": discovered(C)}, ())
    assert where(subject, host="b").address == C
    subject.on_pools_changed({"n/p": discovered(A, annotations={"extproc/hosts": "c"})}, ())
    assert ask(subject, host="c").pool == "n/p"
    retained = subject.by_name["n/p"]
    subject.on_pools_changed({}, frozenset({"n/q"}))
    assert list(subject.by_name) == ["n/p"]
    assert subject.by_name["n/p"] is retained
    assert "n/q" not in retained._shared.counters.pools
    assert ask(subject, host="b").outcome.status == 404
    assert subject.by_name["n/p"].profile == "random"


@contextlib.asynccontextmanager
async def running(subject):
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(subject.run())
        yield
        task.cancel()


async def loops(*names):
    """Let the loop turn until exactly these pools have their loops."""
    names_of_tasks = None
    for _ in range(100):
        names_of_tasks = {task.get_name() for task in asyncio.all_tasks()}
        if {name for name in names_of_tasks if name.startswith("pool ")} == set(names):
            return
        await asyncio.sleep(0)
    raise AssertionError(names_of_tasks)


async def test_loops_run_for_existing_pools():
    """A pool that comes gets its loops, one that goes loses them, a change of endpoints none."""
    subject = sites("cluster: {discover_pools: cluster}")
    async with running(subject):
        subject.on_pools_changed({"n/p": discovered(A)}, ())
        await loops("pool n/p")
        subject.on_pools_changed({"n/q": discovered(B), "n/p": discovered(C)}, frozenset())
        await loops("pool n/p", "pool n/q")
        subject.on_pools_changed({}, {"n/p"})
        await loops("pool n/q")
    await loops()


@pytest.mark.parametrize("is_emptied", [False, True])
async def test_a_removed_pool_is_freed(is_emptied):
    """Nothing of a pool stays that had endpoints and requests, whether its pods leave first or not."""
    subject = sites("cluster: {discover_pools: cluster}")
    async with running(subject):
        subject.on_pools_changed({"n/keep": discovered(B), "n/p": discovered(A)}, ())
        await loops("pool n/keep", "pool n/p")
        parts = subject.by_name["n/p"].parts
        parts.director.route(
            HttpRequest({":method": "POST", ":path": "/v1/completions"}, b"{}"), 1.0
        )
        left = weakref.ref(parts.store), weakref.ref(parts.director), weakref.ref(parts.index)
        del parts
        if is_emptied:
            subject.on_pools_changed({"n/p": discovered()}, ())
        subject.on_pools_changed({}, {"n/p"})
        await loops("pool n/keep")
        await asyncio.sleep(0)  # the callbacks of its task
        gc.collect()
        assert [reference() for reference in left] == [None, None, None]


async def test_the_index_of_a_removed_pool_takes_no_room():
    """The pools that stay have the whole bound at once, before the garbage collector runs."""
    subject = sites("cluster: {discover_pools: cluster}", prefix_budget=IndexBudget(200_000))
    subject.on_pools_changed({"n/keep": discovered(B), "n/p": discovered(A)}, ())
    indexes = [subject.by_name[name].parts.index for name in ("n/p", "n/keep")]
    subject.on_pools_changed({}, {"n/p"})
    for index in indexes:
        for number in range(2000):
            index.record((A, 0), [number])
    assert indexes[1].bytes_estimate() > 150_000


async def test_plugins_that_a_reload_replaces_are_freed():
    """Their memory goes with them; a plugin that stays keeps its own."""
    profile = (
        "profile: {scorers: [{kind: session-affinity-scorer, params: {strategy: session_id}}]}"
    )
    text = f"scheduling: {{{profile}}}\npool: {{endpoints: ['{A}']}}"
    subject = sites(text)
    await subject.sync()

    def memory():
        (scorer,) = subject.by_name[""].parts.director.routing.profile.scorers
        return weakref.ref(scorer[0].memory)

    before = memory()
    subject.prepare_reload(read(f"{text}\nhealth: {{failures: 2}}"))()
    assert memory()() is before() is not None
    subject.prepare_reload(read(f"pool: {{endpoints: ['{A}']}}"))()
    gc.collect()
    assert before() is None


async def test_a_pool_that_raises_stops_no_other_pool(monkeypatch):
    """An exception for one discovered pool is counted, and the other pools are served."""
    received = []

    def listener():
        received.append(set(subject.by_name))
        raise OSError

    subject = sites("cluster: {discover_pools: cluster}", on_change=listener)
    real = PoolRuntime.on_discovered

    def take(runtime, discovered):
        if runtime.name == "n/bad":
            raise OverflowError
        real(runtime, discovered)

    monkeypatch.setattr(PoolRuntime, "on_discovered", take)
    subject.on_pools_changed(
        {"n/a": discovered(A), "n/bad": discovered(B), "n/c": discovered(C)}, ()
    )
    assert [len(pool.members) for pool in subject.pools().values()] == [1, 0, 1]
    assert received == [{"n/a", "n/bad", "n/c"}]
    assert subject.supervisor.failures["pools"] == 2
    subject.on_pools_changed({}, {"n/a"})
    assert set(subject.by_name) == {"n/bad", "n/c"}


async def test_loops_of_a_pool_that_raise_stop_no_other(monkeypatch):
    """A pool whose loops cannot be started is tried again, and the others run."""
    subject = sites(TWO)
    ran = asyncio.Event()

    async def run(runtime):
        if runtime.name == "a":
            raise TypeError
        ran.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(PoolRuntime, "run", run)
    async with running(subject):
        await ran.wait()
        while not subject.supervisor.degraded:
            await asyncio.sleep(0)
        await loops("pool a", "pool b")
    assert subject.supervisor.failures["pools"] == 1
    assert subject.supervisor.degraded == []


async def test_only_the_leader_listens_for_kv_events():
    """A replica that leads accepts connections of engines, and none before and after."""
    port, is_standby = stack.free_port(), True
    text = f"""
pool: {{endpoints: ['{A}']}}
kv_events: {{enabled: true, bind: 'tcp://127.0.0.1:{port}'}}
"""
    subject = sites(text, is_standby=lambda: is_standby)
    await subject.sync()

    async def is_listening():
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        except ConnectionError:  # refused, or reset where the listener closes meanwhile
            return False
        writer.close()
        return True

    running = asyncio.ensure_future(subject.run())
    try:
        async with asyncio.timeout(300):
            assert not await is_listening()
            is_standby = False
            while not await is_listening():
                await asyncio.sleep(0.01)
            is_standby = True
            while await is_listening():
                await asyncio.sleep(0.01)
    finally:
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running


async def test_series_of_endpoints_that_leave_together_are_dropped_in_one_pass():
    """Thousands may leave at once: to look at all series for each would hold the event loop."""

    class CountedSeries(Counter):
        """Series, and how often all of them were looked at."""

        passes = 0

        def __iter__(self):
            self.passes += 1
            return super().__iter__()

    counters = ProcessCounters()
    subject = sites("cluster: {discover_pools: cluster}", counters=counters)
    addresses = [f"127.0.1.{number}:9" for number in range(1, 100)]
    subject.on_pools_changed({"n/p": discovered(A, *addresses)}, ())
    counts = counters.for_pool("n/p")
    counts.responses = responses = CountedSeries({(at, "200"): 1 for at in (A, *addresses)})
    subject.on_pools_changed({"n/p": discovered(A)}, ())
    assert (dict(responses.items()), responses.passes) == ({(A, "200"): 1}, 1)


async def test_failed_scrapes_stay_counted_when_their_endpoint_leaves():
    """A sum over endpoints that falls looks like a restart, and its rate leaps."""
    counters = ProcessCounters()
    subject = sites(TWO, counters=counters)
    await subject.sync()
    scrapes = asyncio.ensure_future(subject.by_name["a"].scraper.run())
    errors = counters.for_pool("a").poll_errors
    async with asyncio.timeout(5.0):
        while not errors["metrics-data-source"]:
            await asyncio.sleep(0)
    scrapes.cancel()
    await asyncio.wait([scrapes])
    counted = dict(errors)
    counters.for_pool("a").forget(A)
    assert dict(errors) == counted
