"""Traces of streams: which requests begin a span, and what engines receive."""

from __future__ import annotations

import random
import subprocess
import sys

import msgspec
import pytest

from extproc import telemetry
from extproc.config.tracing import TracingSection
from extproc.errors import ConfigError
from extproc.protocol.messages import MessageKind, ProcessingRequest
from extproc.protocol.trace_context import TraceSampler, parse_traceparent
from extproc.server.app import EndpointPickerProcess
from extproc.server.stream_handler import open_stream
from extproc.telemetry.decision_log import DecisionLog
from extproc.telemetry.stream_recorder import StreamRecorder
from tests.server.test_stream_handler import BODY, HEADERS, MODES, StreamFixture, answer
from tests.support import ext_proc_script, serving
from tests.support.pool_fixture import PoolFixture

TRACE, SPAN, OTHER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331", "a" * 16
SAMPLED, UNSAMPLED = f"00-{TRACE}-{SPAN}-01", f"00-{TRACE}-{SPAN}-00"
ENDPOINT = "10.0.0.1:8000"


def sampler(ratio=0.0):
    return TraceSampler(ratio, is_parent_based=True, rng=random.Random(1))


class TracedStreams(StreamFixture):
    """Streams whose spans are kept."""

    def __init__(self, ratio=0.0, **arguments):
        super().__init__(**arguments)
        self.traces = []
        self.decisions = DecisionLog(10)
        self.shared.trace_sampler = sampler(ratio)
        self.shared.observer = StreamRecorder(
            self.counters, self.decisions, self.shared.clock, tracer=self
        )

    def make_span_id(self):
        return self.shared.trace_sampler.make_span_id()

    def add(self, trace, spans):
        root, *others = spans
        self.traces.append((trace, [span.name for span in (root, *others)], root))


def headers(**values):
    fields = {**HEADERS.headers, **values}
    return ProcessingRequest(MessageKind.REQUEST_HEADERS, fields, modes=MODES)


def set_headers(replies):
    """The headers that the engine gets from the first reply."""
    return dict(replies[0].set_headers)


def test_engine_continues_the_clients_trace():
    """The engine's parent is our span, and ours has the client's as its parent."""
    scene = TracedStreams()
    stream, replies = scene.begin(headers(traceparent=SAMPLED), BODY)
    received = parse_traceparent(set_headers(replies)["traceparent"])
    assert (received.trace_id, received.is_sampled) == (TRACE, True)
    for event in answer(100):
        list(stream.handle(event))
    assert not scene.traces
    stream.finish()
    ((trace, names, root),) = scene.traces
    assert (trace.trace_id, trace.parent_span_id, trace.span_id) == (TRACE, SPAN, received.span_id)
    assert names[0] == "gateway.request"
    assert root.attributes["http.response.status_code"] == 200
    assert root.attributes["gen_ai.usage.input_tokens"] == 100


@pytest.mark.parametrize("fields", [{"traceparent": UNSAMPLED}, {}])
def test_unsampled_request_has_neither_span_nor_header(fields):
    """Nothing is built, and the header of the client goes on as it came."""
    scene = TracedStreams()
    stream, replies = scene.begin(headers(**fields), BODY)
    assert "traceparent" not in set_headers(replies)
    stream.finish()
    assert not scene.traces


def test_request_without_caller_starts_a_trace():
    """By chance, if no caller decided before."""
    scene = TracedStreams(ratio=1.0)
    stream, replies = scene.begin(headers(), BODY)
    stream.finish()
    ((trace, _, root),) = scene.traces
    assert set_headers(replies)["traceparent"] == trace.traceparent
    assert root.error == "no response"
    assert scene.decisions.find(trace.trace_id) is not None


@pytest.mark.parametrize(
    ("events", "cause"),
    [
        (
            (ProcessingRequest(MessageKind.REQUEST_BODY, body=b"{", end_of_stream=True),),
            "bad-request",
        ),
        (
            (ProcessingRequest(MessageKind.REQUEST_BODY, body=b"x" * (2 << 20)),),
            "body-too-large",
        ),
    ],
)
def test_refused_requests_are_traced(events, cause):
    """Before or after its body is complete, with the cause."""
    scene = TracedStreams()
    stream, (reply,) = scene.begin(headers(traceparent=SAMPLED), *events)
    stream.finish()
    ((_, names, root),) = scene.traces
    assert (names, root.attributes["error.type"]) == (["gateway.request"], cause)
    assert root.attributes["http.response.status_code"] == reply.status


START = ProcessingRequest(MessageKind.REQUEST_BODY, body=b"{")


def test_a_client_that_leaves_while_its_body_arrives_is_traced():
    """Its span ends with the status of clients that left, and it is recorded by its id."""
    scene = TracedStreams()
    stream, _ = scene.begin(headers(traceparent=SAMPLED, **{"x-request-id": "left"}), START)
    stream.finish("cancelled")
    ((_, names, root),) = scene.traces
    assert (names, root.error) == (["gateway.request"], "abandoned: client-left")
    assert root.attributes["http.response.status_code"] == 499
    assert scene.decisions.find("left").rejection.cause == "client-left"


def test_a_stream_that_a_drain_ends_is_no_client_that_left():
    """The log and the counters say that this process stops."""
    scene = TracedStreams()
    stream, _ = scene.begin(headers(traceparent=SAMPLED, **{"x-request-id": "cut"}), START)
    scene.shared.start_draining()
    stream.finish("cancelled")
    rejection = scene.decisions.find("cut").rejection
    assert (rejection.status, rejection.cause) == (503, "shutting-down")


def test_an_early_answer_of_envoy_is_traced():
    """With the status of the answer."""
    scene = TracedStreams()
    answer_of_envoy = ProcessingRequest(MessageKind.RESPONSE_HEADERS, {":status": "413"})
    stream, _ = scene.begin(headers(traceparent=SAMPLED), START, answer_of_envoy)
    stream.finish()
    ((_, _, root),) = scene.traces
    assert root.error == "abandoned: answered-by-envoy"
    assert root.attributes["http.response.status_code"] == 413


@pytest.mark.parametrize("result", ["protocol", "error"])
def test_a_stream_that_breaks_is_not_abandoned(result):
    """Its client did not leave."""
    scene = TracedStreams()
    stream, _ = scene.begin(headers(traceparent=SAMPLED), START)
    stream.finish(result)
    assert not scene.traces


def test_overload_is_traced():
    """A request that finds too many streams was not even read."""
    scene = TracedStreams(max_streams=0)
    stream = open_stream(scene.shared, lambda: SAMPLED)
    stream.reject_overload(headers())
    stream.finish()
    ((trace, _, root),) = scene.traces
    assert (trace.parent_span_id, root.error) == (SPAN, "refused: too-many-streams")


def test_bug_of_the_sampler_costs_no_request(monkeypatch):
    """A request is routed whatever becomes of its trace."""
    scene = TracedStreams()
    monkeypatch.setattr(scene.shared.trace_sampler, "start", lambda *_: 1 / 0)
    stream, replies = scene.begin(headers(traceparent=SAMPLED), BODY)
    assert replies[0].destination == ENDPOINT
    stream.finish()
    assert sum(scene.counters.exceptions.values()) == 1
    assert scene.accounts == (0, 0)


def test_bug_of_the_export_costs_no_request():
    """An exception at the end is counted, and the accounts are closed."""
    scene = TracedStreams()
    scene.add = lambda *_: 1 / 0
    stream, _ = scene.begin(headers(traceparent=SAMPLED), BODY)
    stream.finish()
    assert sum(scene.counters.exceptions.values()) == 1
    assert scene.accounts == (0, 0)
    assert scene.decisions.find(TRACE) is not None


@pytest.mark.parametrize("transport", ["grpcio", "native"])
@pytest.mark.parametrize(
    ("client", "data_plane", "expected"),
    [
        (None, f"00-{TRACE}-{OTHER}-01", TRACE),
        (SAMPLED, f"00-{TRACE}-{OTHER}-01", TRACE),
        (None, f"00-{TRACE}-{OTHER}-00", None),
        (None, None, None),
    ],
)
def test_data_plane_names_its_span_in_the_call(transport, client, data_plane, expected):
    """With traces of Envoy, the metadata of its call have its span, even without one of the client."""
    metadata = [("traceparent", data_plane)] if data_plane else []
    fields = {**ext_proc_script.PLAIN, **({"traceparent": client} if client else {})}

    async def trial():
        pool = PoolFixture({ENDPOINT: None})
        async with serving.serving(pool, trace_sampler=sampler(), transport=transport) as server:
            stream = serving.Stream(server.channel, metadata=metadata)
            await stream.say(ext_proc_script.request_headers(fields, ends=True))
            (reply,) = await stream.hear()
            await stream.end()
            return reply

    set_by_us = dict(serving.run(trial()).sets)
    if expected is None:
        assert "traceparent" not in set_by_us
    else:
        received = parse_traceparent(set_by_us["traceparent"])
        assert received.trace_id == expected
        assert received.span_id not in {SPAN, OTHER}


LOADED = """
import sys
from extproc.server.app import EndpointPickerProcess
from tests.support import serving
EndpointPickerProcess(serving.settings("10.0.0.1:8000"))
print([name for name in sys.modules if name.partition(".")[0] == "opentelemetry"])
"""


def test_nothing_of_opentelemetry_is_loaded_without_traces():
    """A picker without a collector imports none of it."""
    done = subprocess.run(
        [sys.executable, "-c", LOADED], capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"


ON = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1", "OTEL_BSP_SCHEDULE_DELAY": "3600000"}


def test_extra_is_needed_only_where_traces_are_demanded(monkeypatch, caplog):
    """With the variables alone requests are served without traces; with the setting it is an error."""
    for name, value in ON.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setitem(sys.modules, "extproc.telemetry.otlp", None)
    monkeypatch.delattr(telemetry, "otlp", raising=False)
    picker = EndpointPickerProcess(serving.settings(ENDPOINT))
    assert picker.servicer.shared.trace_sampler is None
    assert "no traces are sent" in caplog.text
    assert "extproc-epp[otel]" in caplog.text
    demanded = msgspec.structs.replace(
        serving.settings(ENDPOINT), tracing=TracingSection(enabled=True)
    )
    with pytest.raises(ConfigError, match="OpenTelemetry SDK"):
        EndpointPickerProcess(demanded)
