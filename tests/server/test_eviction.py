"""Streams whose requests are evicted for others that wait, and what remains of them."""

from __future__ import annotations

import asyncio
import json
import logging

import grpc
import pytest

from extproc.config.settings import FlowControlSection
from extproc.endpoint import Load
from extproc.flow_control.rate_limit import RateLimit
from extproc.pool.endpoint_health import OutlierDetectionSettings
from extproc.pool.inference_policy import InferencePolicy
from extproc.protocol.messages import LbMetadata, MessageKind, ProcessingRequest
from extproc.server import stream_handler
from extproc.server.native_ext_proc import NativeExternalProcessor
from tests.server.test_native_ext_proc import ConnectionFake
from tests.server.test_stream_flow_control import MODES, WaitingStreamFixture, refusals, turned
from tests.support import ext_proc_script, serving

A, B = "10.0.0.1:8000", "10.0.0.2:8000"
BATCH = {"x-llm-d-inference-objective": "batch", "x-request-id": "r-batch"}
GOLD = {"x-llm-d-inference-objective": "gold", "x-request-id": "r-gold"}


class EvictionFixture(WaitingStreamFixture):
    """Streams of batches and users over busy endpoints, without a transport."""

    def __init__(self, *addresses, eviction=True, **holding):
        super().__init__(*addresses, eviction=eviction, **holding)
        policy = InferencePolicy({"gold": 10, "batch": -1, "later": -2}, ())
        self.pool_fixture.store.set_policy(policy)

    def free(self, address):
        """A scrape says that an endpoint has a place."""
        store = self.pool_fixture.store
        mark = store.begin_scrape(store.pool.find(address).endpoint)
        now = self.pool_fixture.now
        store.observe(mark, Load(at=now, engine="vllm", waiting=0.0, running=1.0), now)


def arm(stream, evicted):
    """Let a stream be evicted as a transport does; its answers go to `evicted`."""

    def evict():
        if not stream.can_evict:
            return False
        evicted.extend(stream.evict())
        stream.finish()
        return True

    stream.evictable.allow(evict)


def batch(fixture, **fields):
    """A routed request of priority -1, and the answers to come that end it."""
    stream, answers = fixture.send(headers=BATCH, tenant="batches", **fields)
    assert not refusals(answers)
    evicted = []
    if stream.evictable is not None:
        arm(stream, evicted)
    return stream, evicted


def respond(stream, *, body=b"", ends=False, status="200"):
    """Response headers, and a part of a stream of events where there is one."""
    headers = {":status": status, "content-type": "text/event-stream"}
    list(stream.handle(ProcessingRequest(MessageKind.RESPONSE_HEADERS, headers)))
    if body:
        event = ProcessingRequest(MessageKind.RESPONSE_BODY, body=body, end_of_stream=ends)
        list(stream.handle(event))


async def pump(fixture):
    """Let the queue be examined."""
    for _ in range(20):
        await asyncio.sleep(0)
    fixture.flow_controller.pump()


async def test_a_batch_is_evicted_for_a_user():
    """With 429, its reason and a time to try again; its engine has one request less."""
    fixture = EvictionFixture(A)
    _, evicted = batch(fixture)
    fixture.busy(A)
    waiting, _ = fixture.send(headers=GOLD)
    assert waiting.queued is not None
    await pump(fixture)
    (answer,) = evicted
    assert answer.status == 429
    headers = dict(answer.headers)
    assert headers["x-llm-d-request-dropped-reason"] == "evicted"
    assert int(headers["retry-after"]) == fixture.flow_controller.queue.wait_s(100.0)
    assert "higher priority" in json.loads(answer.body)["error"]["message"]
    assert fixture.pool_fixture.in_flight == 0
    evictor = fixture.flow_controller.evictor
    assert (evictor.issued, evictor.outcomes) == ({10: 1}, {"confirmed": 1})
    waiting.finish("cancelled")
    fixture.flow_controller.close()


async def test_an_eviction_is_counted_logged_and_recorded(caplog):
    """As a refusal of the model that was routed, beside the decision, and once."""
    caplog.set_level(logging.INFO, "extproc.requests")
    fixture = EvictionFixture(A)
    batch(fixture)
    fixture.pool_fixture.now += 1.0
    fixture.busy(A)
    fixture.send(headers=GOLD)
    await pump(fixture)
    fixture.shared.observer.settle()
    counters = fixture.counters.for_pool("")
    assert counters.rejections == {(429, "evicted"): 1}
    assert counters.rejection_causes == {(429, "evicted"): 1}
    (series,) = [s for s in counters.series if s.labels.tenant == "batches"]
    assert (series.requests, series.running) == ({"429": 1}, 0)
    assert series.labels.priority == -1
    record = fixture.decisions.find("r-batch")
    assert (record.rejection.cause, record.model) == ("evicted", "m")
    assert len(fixture.decisions.list_same_id(record)) == 2
    (line,) = [r for r in caplog.records if r.name == "extproc.requests"]
    assert line.fields.items() >= {"model": "m", "status": 429, "cause": "evicted"}.items()


async def test_a_response_that_began_is_cut():
    """Nothing is refunded, and its stream has its status."""
    fixture = EvictionFixture(A, limit=RateLimit(tokens_per_s=10.0, burst_s=100.0))
    stream, evicted = batch(fixture)
    respond(stream, body=b"data: 1\n\n")
    fixture.busy(A)
    fixture.send(headers=GOLD)
    await pump(fixture)
    assert refusals(evicted) == [429]
    fixture.shared.observer.settle()
    (series,) = [s for s in fixture.counters.for_pool("").series if s.labels.tenant == "batches"]
    assert series.requests == {"200": 1}
    limiter = fixture.flow_controller.rate_limiter
    assert limiter.take("batches", 1000, fixture.pool_fixture.now).status == 429


async def test_the_tenant_of_an_evicted_request_gets_its_tokens_back():
    """From the limit, and from the tokens it attained."""
    fixture = EvictionFixture(A, limit=RateLimit(tokens_per_s=10.0, burst_s=100.0))
    batch(fixture, prompt="word " * 80)
    fixture.busy(A)
    fixture.send(headers=GOLD)
    await pump(fixture)
    now = fixture.pool_fixture.now
    assert fixture.flow_controller.queue.fair_share.attained("batches", now) == 0.0
    assert fixture.flow_controller.rate_limiter.take("batches", 1000, now).tokens == 1000


async def test_evictions_are_no_faults_of_the_engine():
    """However long the engine was silent."""
    fixture = EvictionFixture(A, B)
    pool_fixture = fixture.pool_fixture
    detector = pool_fixture.store.outlier_detector
    detector.reconfigure(OutlierDetectionSettings(failures=1), pool_fixture.now)
    pool_fixture.now += 1.0
    batch(fixture)
    pool_fixture.now += 50.0
    fixture.busy(A)
    fixture.busy(B)
    fixture.send(headers=GOLD)
    await pump(fixture)
    assert pool_fixture.in_flight == 0
    assert not any(member.condition.state for member in pool_fixture.store.pool.members)


async def test_a_response_that_ended_is_not_evicted():
    """The stream is over in all but name."""
    fixture = EvictionFixture(A)
    stream, evicted = batch(fixture)
    respond(stream, body=b"data: 1\n\n", ends=True)
    fixture.busy(A)
    fixture.send(headers=GOLD)
    await pump(fixture)
    assert evicted == []
    stream.finish()


async def test_a_client_that_left_is_not_evicted():
    """Nothing of it is known any longer."""
    fixture = EvictionFixture(A)
    stream, evicted = batch(fixture)
    stream.finish("cancelled")
    fixture.busy(A)
    fixture.send(headers=GOLD)
    await pump(fixture)
    assert evicted == []
    assert not fixture.flow_controller.evictor.may_help(10)


async def test_only_engines_that_the_waiting_request_may_use_lose_requests():
    """A batch on another engine goes on."""
    fixture = EvictionFixture(A, B)
    _, first = batch(fixture)
    _, second = batch(fixture)
    fixture.busy(A)
    fixture.busy(B)
    waiting = stream_handler.open_stream(fixture.shared)
    headers = {":method": "POST", ":path": "/v1/completions", **GOLD}
    head = ProcessingRequest(
        MessageKind.REQUEST_HEADERS, headers, modes=MODES, hints=LbMetadata(subset=(B,))
    )
    body = json.dumps({"model": "m", "prompt": "x"}).encode()
    tail = ProcessingRequest(MessageKind.REQUEST_BODY, body=body, end_of_stream=True)
    assert [*waiting.handle(head), *waiting.handle(tail)] == []
    assert waiting.queued is not None
    await pump(fixture)
    assert len(first) + len(second) == 1
    (member_a, member_b) = (fixture.pool_fixture.store.pool.find(x) for x in (A, B))
    assert (member_a.account.in_flight, member_b.account.in_flight) == (1, 0)


@pytest.mark.parametrize("headers", [{}, GOLD], ids=["default", "gold"])
async def test_requests_from_priority_0_on_are_never_tracked(headers):
    """Their streams cost nothing more than without eviction."""
    fixture = EvictionFixture(A)
    stream, _ = fixture.send(headers=headers)
    assert stream.evictable is None


async def test_without_the_switch_nothing_is_tracked():
    """The switch is off by default."""
    assert not FlowControlSection().eviction
    fixture = EvictionFixture(A, eviction=False)
    stream, _ = batch(fixture)
    assert stream.evictable is None


async def test_a_draining_process_evicts_nothing():
    """Streams of routed requests are over then."""
    fixture = EvictionFixture(A)
    stream, evicted = batch(fixture)
    stream.end()
    fixture.busy(A)
    fixture.send(headers=GOLD)
    await pump(fixture)
    assert evicted == []


async def test_a_waiting_user_goes_when_the_page_shows_the_room():
    """One eviction was enough."""
    fixture = EvictionFixture(A)
    _, first = batch(fixture)
    _, second = batch(fixture)
    fixture.busy(A)
    waiting, _ = fixture.send(headers=GOLD)
    await pump(fixture)
    await pump(fixture)
    assert (len(first), len(second)) == (0, 1)
    fixture.pool_fixture.now += 1.0
    fixture.free(A)
    fixture.flow_controller.notify_capacity()
    await turned(waiting)
    assert (len(first), len(second)) == (0, 1)


async def test_native_calls_end_with_their_eviction():
    """The answer leaves at once, then the stream ends, and nothing that comes later is answered."""
    fixture = EvictionFixture(A)
    servicer = NativeExternalProcessor(fixture.shared)
    connection = ConnectionFake(None)
    call = servicer.open(connection, 1)
    headers = {":method": "POST", ":path": "/v1/completions", **BATCH}
    call.on_message(ext_proc_script.request_headers(headers).encode(("DUPLEX", "BUFFERED")))
    body = json.dumps({"model": "m", "prompt": "x"}).encode()
    call.on_message(ext_proc_script.request_body(body, ends=True).encode(None))
    assert not call.stream.is_over
    fixture.busy(A)
    fixture.send(headers=GOLD)
    await pump(fixture)
    assert connection.replies[-1] == "immediate_response"
    assert servicer.num_streams == 0
    assert fixture.pool_fixture.in_flight == 0
    assert not call.evict()


def serve(fixture, transport):
    """A server of the fixture's pool and queue."""
    controllers = {"": fixture.flow_controller}
    return serving.serving(fixture.pool_fixture, flow_controllers=controllers, transport=transport)


async def open_batch(scene):
    """A stream of a data plane whose request of priority -1 is routed."""
    stream = scene.stream(("DUPLEX", "NONE"))
    headers = {":method": "POST", ":path": "/v1/completions", **BATCH}
    body = json.dumps({"model": "m", "prompt": "x"}).encode()
    await stream.say(
        ext_proc_script.request_headers(headers),
        ext_proc_script.request_body(body, ends=True),
    )
    await stream.hear(2)
    return stream


async def evict(fixture):
    """Send a request that waits, and pump until the batch is evicted for it; returns that request.

    grpcio may report a write of a stream later than its client reads it.
    """
    fixture.busy(A)
    waiting, _ = fixture.send(headers=GOLD)
    async with asyncio.timeout(60):
        while not fixture.flow_controller.evictor.issued:
            fixture.flow_controller.pump()
            await asyncio.sleep(0)
    return waiting


@pytest.mark.parametrize("transport", ["native", "grpcio"])
@pytest.mark.parametrize("has_response", [False, True], ids=["silent", "responding"])
async def test_the_data_plane_hears_of_an_eviction(transport, has_response):
    """Unasked, on both transports, and before the end of the stream."""
    fixture = EvictionFixture(A)
    async with serve(fixture, transport) as scene:
        stream = await open_batch(scene)
        if has_response:
            await stream.say(ext_proc_script.response_headers({":status": "200"}))
            await stream.hear()
        waiting = await evict(fixture)
        (answer,) = await stream.hear()
        assert (answer.part, answer.status) == ("immediate_response", 429)
        # As Envoy does after an immediate response.
        assert await stream.end() is grpc.StatusCode.OK
        await scene.idle()
        assert fixture.pool_fixture.in_flight == 0
        assert not fixture.flow_controller.evictor.may_help(10)
        waiting.finish("cancelled")


@pytest.mark.parametrize("transport", ["native", "grpcio"])
async def test_a_client_that_leaves_with_its_eviction_leaves_nothing(transport):
    """The reset may come before the answer was written, or after."""
    fixture = EvictionFixture(A)
    async with serve(fixture, transport) as scene:
        for _ in range(8):
            fixture.free(A)
            stream = await open_batch(scene)
            fixture.busy(A)
            waiting, _ = fixture.send(headers=GOLD)
            stream.call.cancel()
            fixture.flow_controller.pump()
            await scene.idle()
            waiting.finish("cancelled")
            fixture.pool_fixture.now += 10.0
        assert fixture.pool_fixture.in_flight == 0
        assert not fixture.flow_controller.evictor.may_help(10)


@pytest.mark.parametrize("transport", ["native", "grpcio"])
async def test_a_drain_ends_evicted_streams_as_well(transport):
    """Though their data plane says nothing."""
    fixture = EvictionFixture(A)
    async with serve(fixture, transport) as scene:
        stream = await open_batch(scene)
        (await evict(fixture)).finish("cancelled")
        await scene.drain(5.0)
        assert [answer.part for answer in await stream.rest()] == ["immediate_response"]
        assert await stream.call.code() is grpc.StatusCode.OK
        await scene.idle()
        assert fixture.pool_fixture.in_flight == 0


async def test_a_data_plane_has_time_to_end_an_evicted_stream():
    """It is cut off by the second check for stalled requests from then on, on grpcio."""
    fixture = EvictionFixture(A)
    async with serve(fixture, "grpcio") as scene:
        stream = await open_batch(scene)
        (await evict(fixture)).finish("cancelled")
        await scene.servicer.refuse_stalled()
        (answer,) = await stream.hear()
        assert answer.part == "immediate_response"
        assert fixture.pool_fixture.in_flight == 1
        await scene.servicer.refuse_stalled()
        assert await stream.rest() == []
        assert await stream.call.code() is grpc.StatusCode.OK
        await scene.idle()
        assert fixture.pool_fixture.in_flight == 0
