"""Streams without gRPC: what is learned from them, and what bugs leave behind."""

from __future__ import annotations

import json
import random

import pytest

from extproc.endpoint import Endpoint
from extproc.protocol.body_buffer import BufferBudget
from extproc.protocol.exchange import ExchangeSettings
from extproc.protocol.messages import (
    BodyMode,
    BodyModes,
    ContinueResponse,
    ImmediateResponse,
    LbMetadata,
    MessageKind,
    ProcessingRequest,
    WithRequestCost,
)
from extproc.protocol.response_handling import TAIL_BYTES
from extproc.routing.pool_selector import PoolRoute, PoolSelector
from extproc.scheduling.pickers import MaxScorePicker
from extproc.scheduling.profile import SchedulerProfile
from extproc.scheduling.session_affinity import SessionAffinityFilter
from extproc.server import stream_context, stream_handler
from extproc.simulator import api_responses
from extproc.telemetry.counters import REMOVED_ENDPOINT, ProcessCounters
from extproc.telemetry.decision_log import DecisionLog
from extproc.telemetry.pool_log import LoggedRequestRecorder
from extproc.telemetry.request_series import merge_histogram
from extproc.telemetry.stream_recorder import StreamRecorder
from tests.parsing.builders import field, frame
from tests.support.canary import AUTHORIZATION, CANARY
from tests.support.pool_fixture import PoolFixture

FIRST, SECOND = "10.0.0.1:8000", "10.0.0.2:8000"
MODES = BodyModes(BodyMode.FULL_DUPLEX_STREAMED, BodyMode.BUFFERED)
HEADERS = ProcessingRequest(
    MessageKind.REQUEST_HEADERS,
    dict([(":method", "POST"), (":path", "/v1/completions"), AUTHORIZATION]),
    modes=MODES,
)
TEXT = f"{CANARY} text " * 50
BODY = ProcessingRequest(
    MessageKind.REQUEST_BODY,
    body=json.dumps({"model": "m", "prompt": TEXT}).encode(),
    end_of_stream=True,
)
ANSWERED = {":status": "200", "content-type": "application/json"}


def answer(prompt_tokens):
    """The response of an engine that counted so many prompt tokens."""
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": 1}
    body = json.dumps({"choices": [], "usage": usage}).encode()
    return (
        ProcessingRequest(MessageKind.RESPONSE_HEADERS, ANSWERED),
        ProcessingRequest(MessageKind.RESPONSE_BODY, body=body, end_of_stream=True),
    )


class StreamFixture:
    """Streams over one pool, one after the other."""

    def __init__(
        self,
        *addresses,
        max_streams=100,
        profile="balanced",
        request_cost=(),
        has_llmd_names=False,
    ):
        self.pool_fixture = PoolFixture(dict.fromkeys(addresses or (FIRST,)), profile=profile)
        self.budget = BufferBudget(1 << 30)
        self.counters = ProcessCounters(has_llmd_names=has_llmd_names)
        self.decisions = DecisionLog(10)
        self.shared = stream_context.StreamContext(
            pool_selector=PoolSelector([PoolRoute("", self.pool_fixture.director)]),
            exchange_settings=ExchangeSettings(max_body_bytes=1 << 20),
            body_budget=self.budget,
            observer=StreamRecorder(
                self.counters, self.decisions, lambda: self.pool_fixture.now, LoggedRequestRecorder
            ),
            clock=lambda: self.pool_fixture.now,
            rng=random.Random(1),
            settings=stream_context.StreamSettings(
                max_streams=max_streams, request_cost=dict(request_cost)
            ),
        )

    def begin(self, *events):
        """A stream that took these events, and the replies to the last of them."""
        stream = stream_handler.open_stream(self.shared)
        replies = []
        for event in events:
            replies = list(stream.handle(event))
        return stream, replies

    @property
    def accounts(self):
        """Open requests and bytes of streams."""
        return self.pool_fixture.in_flight, self.budget.held_bytes


class StreamBugError(Exception):
    """Exception of broken parts."""


def broken(*_, **__):
    """Any method with a bug."""
    raise StreamBugError(CANARY)


def test_stream_learns_from_the_usage_of_answers():
    """Bytes per token of a model are learned from what answers report."""
    scene = StreamFixture()
    for _ in range(10):
        stream, _ = scene.begin(HEADERS, BODY, *answer(len(TEXT) // 2))
        stream.finish()
    assert scene.pool_fixture.store.bytes_per_token.bytes_per_token("m") == pytest.approx(
        2.0, rel=0.05
    )
    assert scene.counters.for_pool("").usage["prompt"] == 10 * len(TEXT) // 2


def test_stream_reads_the_usage_of_grpc_answers():
    """Tokens of vLLM's gRPC messages count, with a cost, where the response is shown."""
    scene = StreamFixture(request_cost={"prompt": 1.0, "completion": 2.0, "cached": -0.5})
    path, content_type = "/vllm.grpc.engine.VllmEngine/Generate", "application/grpc"
    headers = {":method": "POST", ":path": path, "content-type": content_type}
    request = frame(field(3, TEXT.encode()))
    stream, _ = scene.begin(
        ProcessingRequest(MessageKind.REQUEST_HEADERS, headers, modes=MODES),
        ProcessingRequest(MessageKind.REQUEST_BODY, body=request, end_of_stream=True),
        ProcessingRequest(MessageKind.RESPONSE_HEADERS, {**ANSWERED, "content-type": content_type}),
    )
    counts = field(3, 7) + field(4, 10) + field(5, 4)
    response = frame(field(2, counts))
    for piece in (response[:9], response[9:]):
        list(stream.handle(ProcessingRequest(MessageKind.RESPONSE_BODY, body=piece)))
    (reply,) = stream.handle(ProcessingRequest(MessageKind.RESPONSE_TRAILERS))
    assert isinstance(reply, WithRequestCost)
    assert reply.cost == 7 + 2 * 10 - 0.5 * 4
    stream.finish()
    reported = scene.counters.for_pool("").usage
    assert reported == {"prompt": 7, "completion": 10, "cached": 4}


@pytest.mark.parametrize("has_llmd_names", [False, True])
def test_sizes_of_bodies_count_where_metrics_have_the_names_of_llmd(has_llmd_names):
    """Those of requests, and of responses that are complete, also where their middle is not kept."""
    scene = StreamFixture(has_llmd_names=has_llmd_names)
    pieces = [b"x" * TAIL_BYTES, b"y" * 10, b"z"]
    for count in (2, 3):  # the first response is cut
        stream, _ = scene.begin(
            HEADERS, BODY, ProcessingRequest(MessageKind.RESPONSE_HEADERS, ANSWERED)
        )
        for piece in pieces[:count]:
            is_last = piece is pieces[-1]
            list(
                stream.handle(
                    ProcessingRequest(MessageKind.RESPONSE_BODY, body=piece, end_of_stream=is_last)
                )
            )
        stream.finish()
    (series,) = scene.counters.for_pool("").series
    sizes = [
        merge_histogram([series.histograms], f"{kind}_bytes") for kind in ("request", "response")
    ]
    expected = [2.0 * len(BODY.body), TAIL_BYTES + 11.0]
    assert [size and size.total for size in sizes] == (expected if has_llmd_names else [None, None])


@pytest.mark.parametrize("has_llmd_names", [False, True])
def test_time_to_a_refusal_counts_where_metrics_have_the_names_of_llmd(has_llmd_names):
    """From the first message on; the stream is over then."""
    scene = StreamFixture(has_llmd_names=has_llmd_names)
    stream, _ = scene.begin(HEADERS)
    scene.pool_fixture.now += 3.0
    list(stream.handle(ProcessingRequest(MessageKind.REQUEST_BODY, body=b"{", end_of_stream=True)))
    stream.finish()
    counters = scene.counters
    durations_s = [counters.request_processing_s.total, counters.stream_duration_s.total]
    assert durations_s == ([3.0, 3.0] if has_llmd_names else [0.0, 0.0])


@pytest.mark.parametrize("begun", [(), (HEADERS,)])
def test_stream_without_a_decision_reads_usage_for_the_cost(begun):
    """Envoy may answer before a request is routed, or ask about a response alone."""
    scene = StreamFixture(request_cost={"prompt": 1.0})
    stream, _ = scene.begin(*begun, *answer(5))
    stream.finish()
    assert not scene.counters.exceptions


def test_stream_charges_the_endpoint_that_served():
    """An answer of another endpoint than the chosen one is that one's from its headers on."""
    scene = StreamFixture(FIRST, SECOND)
    stream, _ = scene.begin(HEADERS, BODY)
    other = ({FIRST, SECOND} - {stream.address}).pop()
    hints = LbMetadata(None, False, other)
    list(stream.handle(ProcessingRequest(MessageKind.RESPONSE_HEADERS, ANSWERED, hints=hints)))
    assert stream.address == other
    members = {member.endpoint.address: member for member in scene.pool_fixture.store.pool.members}
    assert members[other].account.in_flight == 1
    stream.finish()
    assert scene.counters.for_pool("").responses == {(other, "200"): 1}
    assert scene.accounts == (0, 0)


def test_usage_is_compared_with_the_endpoint_that_served():
    """Whichever was chosen: the reported hits are those of the endpoint that answered."""
    scene = StreamFixture(FIRST, SECOND)
    store, model = scene.pool_fixture.store, scene.pool_fixture.cache_model
    stream, _ = scene.begin(HEADERS, BODY)
    addresses = stream.address, ({FIRST, SECOND} - {stream.address}).pop()
    served = LbMetadata(None, False, addresses[1])
    list(stream.handle(ProcessingRequest(MessageKind.RESPONSE_HEADERS, ANSWERED, hints=served)))
    usage = {"prompt_tokens": 400, "prompt_tokens_details": {"cached_tokens": 360}}
    body = json.dumps({"usage": usage}).encode()
    list(stream.handle(ProcessingRequest(MessageKind.RESPONSE_BODY, body=body, end_of_stream=True)))
    stream.finish()
    states = [model.state_of(store.pool.find(address).endpoint) for address in addresses]
    assert [state.calibration._hit for state in states] == [0, 360]


def test_a_rejected_stream_leaves_nothing():
    """Above `max_streams` a request is refused with 429, whatever its first event is."""
    scene = StreamFixture(max_streams=0)
    stream = stream_handler.open_stream(scene.shared)
    (response,) = stream.reject_overload(HEADERS)
    assert (response.status, stream.is_over) == (429, True)
    stream.finish()
    assert scene.counters.for_pool("").rejections == {(429, "rejected-saturated"): 1}


@pytest.mark.parametrize(
    ("path", "content_type", "grpc_status", "beginning"),
    [
        ("/v1/messages", "application/json", None, b'{"type":"error"'),
        ("/vllm.grpc.engine.VllmEngine/Generate", "application/grpc", 8, b"inference error"),
    ],
)
def test_overload_is_answered_in_the_form_of_the_request(
    path, content_type, grpc_status, beginning
):
    """With its id, which is in the log of rejections as well."""
    scene = StreamFixture(max_streams=0)
    scene.shared.exchange_settings = ExchangeSettings(max_body_bytes=1 << 20, request_id=True)
    stream = stream_handler.open_stream(scene.shared)
    headers = {":path": path, "content-type": content_type, "x-request-id": "7"}
    event = ProcessingRequest(MessageKind.REQUEST_HEADERS, headers, modes=MODES)
    (response,) = stream.reject_overload(event)
    assert response.body.startswith(beginning)
    assert (response.grpc_status, ("x-request-id", "7") in response.headers) == (grpc_status, True)
    stream.finish()
    assert [record.id for record in scene.decisions.latest()] == ["7"]
    assert scene.accounts == (0, 0)


@pytest.mark.parametrize("step", ["on_response_headers", "release", "on_usage"])
def test_a_stream_releases_everything_despite_an_exception(monkeypatch, step):
    """A step that raises at the end, or while something is learned, costs no other step."""
    scene = StreamFixture()
    original = getattr(scene.pool_fixture.director, step)

    def half(*args, **named):
        original(*args, **named)
        broken()

    monkeypatch.setattr(scene.pool_fixture.director, step, half)
    stream, replies = scene.begin(HEADERS, BODY, *answer(10))
    assert replies == [ContinueResponse(MessageKind.RESPONSE_BODY)]
    stream.finish()
    assert scene.accounts == (0, 0)
    counted = scene.counters.for_pool("")
    assert (counted.responses, counted.usage["prompt"]) == ({(FIRST, "200"): 1}, 10)
    assert {kind: count for (kind, _), count in scene.counters.exceptions.items()} == {
        "StreamBugError": 1
    }


@pytest.mark.parametrize(("part", "name"), [("index", "record"), ("counts", "notify_committed")])
def test_stream_whose_decision_cannot_be_committed_is_answered_with_500(monkeypatch, part, name):
    """Nothing is charged to an endpoint that will not see the request."""
    scene = StreamFixture()
    monkeypatch.setattr(getattr(scene.pool_fixture, part), name, broken)
    stream, _ = scene.begin(HEADERS)
    with pytest.raises(StreamBugError):
        list(stream.handle(BODY))
    (response,) = stream.fail()
    assert (response.status, stream.is_over) == (500, True)
    stream.finish()
    assert scene.accounts == (0, 0)


def test_a_stream_that_fails_after_the_pick_releases_its_request(monkeypatch):
    """A request that never left is no answer that an endpoint failed to give."""
    scene = StreamFixture()
    stream, _ = scene.begin(HEADERS)
    monkeypatch.setattr(type(stream.exchange), "apply_outcome", broken)
    with pytest.raises(StreamBugError):
        list(stream.handle(BODY))
    (response,) = stream.fail()
    assert isinstance(response, ImmediateResponse)
    stream.finish()
    assert scene.accounts == (0, 0)
    (member,) = scene.pool_fixture.store.pool.members
    assert member.account.answered == 0


def test_a_stream_that_fails_during_the_response_sends_nothing():
    """Envoy passes the response on by then: no other status can be put in its place."""
    scene = StreamFixture()
    stream, _ = scene.begin(
        HEADERS, BODY, ProcessingRequest(MessageKind.RESPONSE_HEADERS, ANSWERED)
    )
    assert list(stream.fail()) == []
    stream.finish()
    assert scene.accounts == (0, 0)
    assert scene.counters.for_pool("").responses == {(FIRST, "200"): 1}


def test_a_session_is_remembered_for_the_endpoint_that_answered():
    """The response names another endpoint than the chosen one."""
    affinity = SessionAffinityFilter(strategy="session_id")
    profile = SchedulerProfile("p", (affinity,), (), MaxScorePicker())
    scene = StreamFixture(FIRST, SECOND, profile=profile)
    session = {**HEADERS.headers, "x-session-id": "s"}
    headers = ProcessingRequest(MessageKind.REQUEST_HEADERS, session, modes=MODES)
    stream, _ = scene.begin(headers, BODY)
    other = SECOND if stream.address == FIRST else FIRST
    hints = LbMetadata(None, False, other)
    list(stream.handle(ProcessingRequest(MessageKind.RESPONSE_HEADERS, ANSWERED, hints=hints)))
    stream.finish()
    assert affinity.memory.find("s", scene.pool_fixture.now) == other


def test_a_stream_of_a_removed_endpoint_leaves_no_series():
    """Pods come and go under addresses without end: their last answers count under one name."""
    scene = StreamFixture()
    for number in range(50):
        address = f"10.0.1.{number}:8000"
        scene.pool_fixture.store.set_endpoints([Endpoint(address)], scene.pool_fixture.now)
        answered, _ = scene.begin(HEADERS, BODY, *answer(10))
        silent, _ = scene.begin(HEADERS, BODY)
        scene.pool_fixture.store.set_endpoints([], scene.pool_fixture.now)
        scene.counters.for_pool("").forget(address)
        answered.finish()
        silent.finish()
    counted = scene.counters.for_pool("")
    assert counted.responses == {(REMOVED_ENDPOINT, "200"): 50}
    assert counted.without_response == {REMOVED_ENDPOINT: 50}
    assert not counted.requests_routed


def answers(api, *, is_stream):
    """Answer of the simulated engine under an id of its own."""
    writer = api_responses.SURFACES[api].writer
    generated = api_responses.GenerationAnswer(
        id="made-up",
        created=0,
        model="m",
        text="hello",
        prompt_tokens=3,
        cached_tokens=0,
        output_tokens=1,
        finish="stop",
    )
    if not is_stream:
        return writer.body(generated)
    around = b"hello".join(writer.frame(generated))
    return writer.opening(generated) + around + writer.closing(generated, include_usage=True)


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(
    ("api", "prefix"),
    [
        ("/v1/chat/completions", "chatcmpl-"),
        ("/v1/completions", "cmpl-"),
        ("/v1/responses", "resp_"),
        ("/v1/messages", "msg_"),
    ],
)
def test_requests_are_found_by_the_ids_of_their_answers(api, prefix, is_stream):
    """Engines that make up the id of an answer, and one of their own in its headers."""
    scene = StreamFixture()
    kind = "text/event-stream" if is_stream else "application/json"
    headers = {":status": "200", "content-type": kind, "x-request-id": "of-the-engine"}
    body = answers(api, is_stream=is_stream)
    events = [
        ProcessingRequest(MessageKind.RESPONSE_HEADERS, headers),
        *(
            ProcessingRequest(MessageKind.RESPONSE_BODY, body=body[at : at + 100])
            for at in range(0, len(body), 100)
        ),
        ProcessingRequest(MessageKind.RESPONSE_BODY, end_of_stream=True),
    ]
    stream, _ = scene.begin(HEADERS, BODY, *events)
    stream.finish()
    (record,) = scene.decisions.latest()
    for name in (record.id, f"{prefix}made-up", "of-the-engine"):
        assert scene.decisions.find(name) is record
    assert scene.decisions.find("another") is None
