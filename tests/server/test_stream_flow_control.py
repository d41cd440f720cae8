"""Streams whose requests wait, and what their tenants may take."""

from __future__ import annotations

import asyncio
import gc
import json
import random
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.config.settings import FlowControlSection
from extproc.endpoint import Endpoint, Load
from extproc.flow_control.rate_limit import RateLimit
from extproc.pool.inference_policy import InferencePolicy, RewriteRule, TargetModel
from extproc.protocol import messages
from extproc.protocol.body_buffer import BufferBudget
from extproc.protocol.exchange import ExchangeSettings
from extproc.protocol.messages import BodyMode, BodyModes, MessageKind, ProcessingRequest
from extproc.request import RequestLabels
from extproc.routing.pool_selector import PoolRoute, PoolSelector
from extproc.server import stream_context, stream_handler
from extproc.server.flow_control_shell import AsyncFlowController
from extproc.telemetry.counters import ProcessCounters
from extproc.telemetry.decision_log import DecisionLog
from extproc.telemetry.pool_log import LoggedRequestRecorder
from extproc.telemetry.stream_recorder import StreamRecorder
from tests.support.pool_fixture import PoolFixture

A = "10.0.0.1:8000"
MODES = BodyModes(BodyMode.FULL_DUPLEX_STREAMED, BodyMode.BUFFERED)


class WaitingStreamFixture:
    """Real streams over a real flow controller and director, at the time of the pool."""

    def __init__(self, *addresses, **holding):
        self.pool_fixture = PoolFixture(dict.fromkeys(addresses))
        routing = self.pool_fixture.director.routing
        settings = routing.settings.__class__(stale_after_s=60.0, busy_s=0.5)
        self.pool_fixture.director.reconfigure(routing.__class__(routing.profile, {}, settings))
        self.counters = ProcessCounters()
        self.decisions = DecisionLog(10)
        observer = StreamRecorder(
            self.counters, self.decisions, lambda: self.pool_fixture.now, LoggedRequestRecorder
        )
        self.flow_controller = AsyncFlowController(
            self.pool_fixture.director,
            FlowControlSection(enabled=True, **holding),
            clock=lambda: self.pool_fixture.now,
            on_exception=observer.on_exception,
        )
        self.shared = stream_context.StreamContext(
            pool_selector=PoolSelector([PoolRoute("", self.pool_fixture.director)]),
            exchange_settings=ExchangeSettings(max_body_bytes=64 << 20),
            body_budget=BufferBudget(512 << 20),
            observer=observer,
            clock=lambda: self.pool_fixture.now,
            rng=random.Random(0),
            settings=stream_context.StreamSettings(max_streams=100),
            flow_controllers={"": self.flow_controller},
        )

    def send(self, *, prompt="x", tenant="t", headers=None, **fields):
        """A stream whose request was read, and the answers to it."""
        stream = stream_handler.open_stream(self.shared)
        headers = {
            ":method": "POST",
            ":path": "/v1/completions",
            "x-llm-d-inference-fairness-id": tenant,
            **(headers or {}),
        }
        body = json.dumps({"model": "m", "prompt": prompt, **fields}).encode()
        answers = list(
            stream.handle(ProcessingRequest(MessageKind.REQUEST_HEADERS, headers, modes=MODES))
        )
        answers += stream.handle(
            ProcessingRequest(MessageKind.REQUEST_BODY, body=body, end_of_stream=True)
        )
        return stream, answers

    def busy(self, address):
        """A scrape says that an endpoint has no place."""
        store = self.pool_fixture.store
        mark = store.begin_scrape(store.pool.find(address).endpoint)
        load = Load(
            at=self.pool_fixture.now, engine="vllm", waiting=20.0, running=8.0, kv_usage=0.5
        )
        store.observe(mark, load, self.pool_fixture.now)

    def list_endpoints(self, *addresses):
        """These are all endpoints."""
        self.pool_fixture.store.set_endpoints(
            [Endpoint(address) for address in addresses], self.pool_fixture.now
        )
        self.flow_controller.notify_capacity()


def refusals(answers):
    """Status codes of immediate responses."""
    return [answer.status for answer in answers if isinstance(answer, messages.ImmediateResponse)]


async def turned(stream):
    """Let the loop turn until a stream's wait is over."""
    for _ in range(50):
        if stream.queued is None or stream.queued.admission.done():
            return stream.queued.admission.result()
        await asyncio.sleep(0)
    raise AssertionError("the wait goes on")


async def test_a_finished_answer_dispatches_a_queued_request():
    """At once, and not with the next scrape or timer."""
    fixture = WaitingStreamFixture(A)
    # 100 us for each of 6000 tokens: more than the half second from which an endpoint is busy.
    served, _ = fixture.send(prompt="a " + "word " * 4800)
    waiting, answers = fixture.send(prompt="b " + "word " * 4800)
    assert answers == []
    assert waiting.queued is not None
    served.finish()
    await turned(waiting)
    assert fixture.flow_controller.outcomes == {"dispatched": 1}
    waiting.finish()
    assert fixture.pool_fixture.in_flight == 0
    fixture.flow_controller.close()


async def test_a_client_that_leaves_after_its_admission_frees_its_place():
    """The next request goes on at once, and not with the next scrape or timer."""
    fixture = WaitingStreamFixture(A)
    served, _ = fixture.send(prompt="a " + "word " * 4800)
    leaving, _ = fixture.send(prompt="b " + "word " * 4800)
    waiting, _ = fixture.send(prompt="c " + "word " * 4800)
    served.finish()
    await turned(leaving)
    assert not waiting.queued.admission.done()
    leaving.finish("cancelled")
    await turned(waiting)
    waiting.finish()
    assert fixture.pool_fixture.in_flight == 0
    fixture.flow_controller.close()


async def test_streams_apply_the_limit_of_the_tenant():
    """A request over the limit gets 429, and charges no endpoint."""
    fixture = WaitingStreamFixture(A, limit=RateLimit(requests_per_s=0.1, burst_s=10.0))
    first, answers = fixture.send()
    assert refusals(answers) == []
    second, answers = fixture.send()
    assert refusals(answers) == [429]
    assert fixture.pool_fixture.in_flight == 1
    _, answers = fixture.send(tenant="other")
    assert refusals(answers) == []
    first.finish()
    second.finish()
    third, answers = fixture.send()
    assert refusals(answers) == [429]
    third.finish()


@pytest.mark.parametrize("is_admitted", [False, True])
async def test_a_client_that_leaves_the_queue_is_counted_and_logged(caplog, is_admitted):
    """With status 499 and its model, and not as a refusal, also just after its admission."""
    fixture = WaitingStreamFixture(timeout_s=300.0)
    stream, _ = fixture.send()
    if is_admitted:
        fixture.list_endpoints(A)
        await turned(stream)
    stream.finish("cancelled")
    counters = fixture.counters.for_pool("")
    assert [series.requests for series in counters.series] == [{"499": 1}]
    assert not counters.rejection_causes
    (line,) = [record for record in caplog.records if record.name == "extproc.requests"]
    assert line.message == "request abandoned"
    assert line.fields.items() >= {"model": "m", "status": 499, "cause": "client-left"}.items()
    assert fixture.pool_fixture.in_flight == 0


async def test_a_refused_request_counts_by_the_model_of_its_client_and_its_target():
    """As one that is routed; its priority counts, too."""
    fixture = WaitingStreamFixture(limit=RateLimit(requests_per_s=0.1, burst_s=10.0))
    rule = RewriteRule(("m",), (TargetModel("n"),))
    fixture.pool_fixture.store.set_policy(InferencePolicy({"gold": 10}, (rule,)))
    gold = {"x-llm-d-inference-objective": "gold"}
    waiting, _ = fixture.send(headers=gold)
    _, answers = fixture.send(headers=gold)
    assert refusals(answers) == [429]
    waiting.finish("cancelled")
    (series,) = fixture.counters.for_pool("").series
    assert series.labels == RequestLabels("m", "n", "t", 10)
    assert series.requests == {"499": 1, "429": 1}


async def test_a_refused_client_that_leaves_is_not_abandoned():
    """It is counted once, by its refusal, and one without a request not at all."""
    fixture = WaitingStreamFixture(A, limit=RateLimit(requests_per_s=0.1, burst_s=10.0))
    routed, _ = fixture.send()
    refused, answers = fixture.send()
    assert refusals(answers) == [429]
    refused.finish("cancelled")
    stream_handler.open_stream(fixture.shared).finish("cancelled")
    routed.finish("cancelled")
    (series,) = fixture.counters.for_pool("").series
    assert series.requests == {"429": 1, "none": 1}


@pytest.mark.parametrize("limited", [False, True])
async def test_a_routed_request_keeps_no_prompt(limited):
    """While its answer runs a stream keeps tenant and tokens, whether the request waited or not."""
    limit = RateLimit(tokens_per_s=1e9) if limited else None
    fixture = WaitingStreamFixture(limit=limit, timeout_s=300.0)
    mib = 1 << 20
    tracemalloc.start()
    try:
        queued = [fixture.send(prompt=f"{n} " + "x" * mib)[0] for n in range(4)]
        assert all(stream.queued is not None for stream in queued)
        fixture.list_endpoints(A)
        for stream in queued:
            while stream.queued is not None:
                fixture.pool_fixture.now += 40.0
                fixture.flow_controller.pump()
                if stream.queued.admission.done():
                    list(stream.resume(stream.queued.admission.result()))
        served = [fixture.send(prompt=f"{n} " + "y" * mib)[0] for n in range(4)]
        for stream in served:
            if stream.queued is not None:
                fixture.pool_fixture.now += 40.0
                fixture.flow_controller.pump()
                list(stream.resume(stream.queued.admission.result()))
        gc.collect()
        assert all(stream.is_routed for stream in (*queued, *served))
        assert tracemalloc.get_traced_memory()[0] < mib / 2
    finally:
        tracemalloc.stop()
    for stream in (*queued, *served):
        stream.finish()


async def test_tokens_of_unserved_requests_are_refunded():
    """Refused at once, expired, displaced or left: the tenant may take all of it again."""
    limit = RateLimit(requests_per_s=0.001, tokens_per_s=0.001, burst_s=1000.0)
    fixture = WaitingStreamFixture(limit=limit, max_requests=1, empty_timeout_s=5.0)
    waiting, _ = fixture.send(max_tokens=100)
    for _ in range(20):
        refused, answers = fixture.send(max_tokens=100)
        assert refusals(answers) == [429]
        refused.finish()
    fixture.pool_fixture.now += 6.0
    fixture.flow_controller.pump()
    answers = list(waiting.resume(await turned(waiting)))
    assert refusals(answers) == [503]
    waiting.finish()
    leaving, _ = fixture.send(max_tokens=100)
    leaving.finish()
    granted, _ = fixture.send(max_tokens=100)
    fixture.list_endpoints(A)
    await turned(granted)
    granted.finish()
    assert fixture.pool_fixture.in_flight == 0
    served, answers = fixture.send()
    assert refusals(answers) == []
    served.finish()
    late, answers = fixture.send()
    assert refusals(answers) == [429]
    late.finish()


@pytest.mark.parametrize("status", ["400", "404", "429", "500", "503"])
async def test_a_request_that_an_engine_refuses_takes_no_tokens(status):
    """Nothing was computed; it counts as a request, so that no client may refuse itself for nothing."""
    limit = RateLimit(requests_per_s=0.011, tokens_per_s=0.2, burst_s=1000.0)
    fixture = WaitingStreamFixture(A, limit=limit)
    for _ in range(10):
        refused, answers = fixture.send(max_tokens=100)
        assert refusals(answers) == []
        head = {":status": status, "content-type": "application/json"}
        list(refused.handle(ProcessingRequest(MessageKind.RESPONSE_HEADERS, head)))
        error = ProcessingRequest(MessageKind.RESPONSE_BODY, body=b"{}", end_of_stream=True)
        list(refused.handle(error))
        refused.finish()
    account = fixture.flow_controller.rate_limiter._account("t", fixture.pool_fixture.now)
    assert (account.requests.level, account.tokens.level) == (1.0, 200.0)
    served, answers = fixture.send(max_tokens=100)
    assert refusals(answers) == []
    list(served.handle(ProcessingRequest(MessageKind.RESPONSE_HEADERS, {":status": "200"})))
    served.finish()
    assert account.tokens.level < 100.0


async def test_a_client_that_leaves_an_anthropic_stream_pays_its_maximum():
    """The first event reports zero tokens of the answer, which is no usage yet."""
    fixture = WaitingStreamFixture(A, limit=RateLimit(tokens_per_s=0.2, burst_s=1000.0))
    left, _ = fixture.send(max_tokens=150)
    head = {":status": "200", "content-type": "text/event-stream"}
    list(left.handle(ProcessingRequest(MessageKind.RESPONSE_HEADERS, head)))
    usage = b'{"input_tokens":1,"output_tokens":0}'
    event = (
        b'event: message_start\ndata: {"type":"message_start","message":{"usage":%b}}\n\n' % usage
    )
    list(left.handle(ProcessingRequest(MessageKind.RESPONSE_BODY, body=event)))
    left.finish("cancelled")
    late, answers = fixture.send(max_tokens=150)
    assert refusals(answers) == [429]
    late.finish()


@given(
    st.lists(st.sampled_from(["send", "leave", "serve", "expire", "end"]), max_size=40),
    st.integers(0, 1 << 16),
)
def test_the_token_allowance_is_conserved(steps, seed):
    """A tenant's bucket lacks what requests in hand or served took, and nothing else."""
    asyncio.run(_conserved(steps, random.Random(seed)))


async def _conserved(steps, rng):
    limit = RateLimit(requests_per_s=0.0, tokens_per_s=0.0)
    fixture = WaitingStreamFixture(A, limit=limit, max_requests=3, timeout_s=5.0)
    open_, served = [], 0
    # A rate of nothing fills nothing up, so that levels are exact.
    account = fixture.flow_controller.rate_limiter._account("t", fixture.pool_fixture.now)
    account.requests.level = account.requests.full = 1e6
    account.tokens.level = account.tokens.full = 1e6
    for step in steps:
        if step == "send":
            stream, _ = fixture.send(prompt="word " * rng.randint(1, 4000), max_tokens=10)
            open_.append(stream)
        elif step == "leave" and open_:
            stream = open_.pop(rng.randrange(len(open_)))
            served += stream.is_routed
            stream.finish()
        elif step == "expire":
            fixture.pool_fixture.now += 6.0
            fixture.flow_controller.pump()
        elif step == "end":
            fixture.busy(A)
        else:
            fixture.list_endpoints(A)
            fixture.flow_controller.pump()
        for stream in open_:
            if stream.queued is not None and stream.queued.admission.done() and rng.random() < 0.5:
                list(stream.resume(stream.queued.admission.result()))
        charged = [s for s in open_ if s.is_routed or s.queued is not None]
        assert account.requests.level == 1e6 - len(charged) - served
        if not charged and not served:
            assert account.tokens.level == 1e6
    for stream in open_:
        served += stream.is_routed
        stream.finish()
    assert account.requests.level == 1e6 - served
    fixture.flow_controller.close()
