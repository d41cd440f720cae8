"""Export of spans: what a receiver of OTLP gets, and what happens without one."""

from __future__ import annotations

import asyncio
import logging
import math
import random
import threading
from collections import Counter

import pytest

from extproc.protocol.trace_context import TraceContext
from extproc.telemetry import otlp
from extproc.telemetry.request_trace import SpanEvent, SpanRecord
from tests.support import otlp_receiver
from tests.support.canary import CANARY

TRACE = TraceContext("0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331", 1, "c" * 16, "a=1")
NOW_S = 100.0


@pytest.fixture
def receiver():
    with otlp_receiver.receiving() as result:
        yield result


@pytest.fixture
def build_tracer(monkeypatch):
    """Builds tracers with an environment, and closes them."""
    tracers = []

    def build(protocol="grpc", *, max_queued_spans=2048, exporter="otlp", **environment):
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        tracer = otlp.OtlpTracer(
            exporter=exporter,
            protocol=protocol,
            max_queued_spans=max_queued_spans,
            max_batch_spans=min(512, max_queued_spans),
            clock=lambda: NOW_S,
            rng=random.Random(1),
            counts=counts,
        )
        tracers.append(tracer)
        return tracer

    counts = build.counts = Counter()
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "5")
    yield build
    for tracer in tracers:
        tracer.close(otlp_receiver.LIMIT_S)


def spans(**attributes):
    """The span of a request, and one below."""
    event = SpanEvent("candidate", 99.5, {"endpoint": "10.0.0.1:8000", "waiting": 3})
    root = SpanRecord(
        "gateway.request",
        TRACE.span_id,
        TRACE.parent_span_id,
        99.0,
        100.0,
        {"text": "é", "number": 1.5, "count": 3, "yes": True, "list": ["a", "b"], **attributes},
        [event],
        is_server=True,
        error="no response",
    )
    return [root, SpanRecord("pick_endpoints", "d" * 16, TRACE.span_id, 99.0, 99.5, {})]


@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
def test_spans_arrive_as_they_were(receiver, build_tracer, protocol):
    """Ids, times, attributes, events and status, over both protocols."""
    port = receiver.grpc_port if protocol == "grpc" else receiver.http_port
    tracer = build_tracer(
        protocol,
        OTEL_EXPORTER_OTLP_ENDPOINT=f"http://127.0.0.1:{port}",
        OTEL_RESOURCE_ATTRIBUTES="deployment.environment.name=test",
    )
    tracer.add(TRACE, spans())
    root = receiver.wait_for("gateway.request")
    assert (root.trace_id, root.span_id) == (TRACE.trace_id, TRACE.span_id)
    assert (root.parent_span_id, root.message.trace_state) == (TRACE.parent_span_id, "a=1")
    assert root.attributes == {
        "text": "é",
        "number": 1.5,
        "count": 3,
        "yes": True,
        "list": ["a", "b"],
    }
    assert root.events == [("candidate", {"endpoint": "10.0.0.1:8000", "waiting": 3})]
    message = root.message
    assert message.end_time_unix_nano - message.start_time_unix_nano == 1_000_000_000
    assert message.events[0].time_unix_nano - message.start_time_unix_nano == 500_000_000
    assert message.kind == message.SPAN_KIND_SERVER
    assert root.is_error
    assert message.status.message == "no response"
    child = receiver.wait_for("pick_endpoints")
    assert child.parent_span_id == root.span_id
    assert child.message.kind == message.SPAN_KIND_INTERNAL
    assert not child.is_error
    assert root.resource["service.name"] == "extproc"
    assert root.resource["deployment.environment.name"] == "test"


def test_service_has_the_name_of_the_environment(receiver, build_tracer):
    """`OTEL_SERVICE_NAME` beats the name of extproc."""
    tracer = build_tracer(
        OTEL_EXPORTER_OTLP_ENDPOINT=f"http://127.0.0.1:{receiver.grpc_port}",
        OTEL_SERVICE_NAME="picker-eu",
    )
    tracer.add(TRACE, spans())
    assert receiver.wait_for("gateway.request").resource["service.name"] == "picker-eu"


def test_close_sends_what_waits(receiver, build_tracer):
    """Spans that no batch took yet leave before the end."""
    tracer = build_tracer(
        OTEL_EXPORTER_OTLP_ENDPOINT=f"http://127.0.0.1:{receiver.grpc_port}",
        OTEL_BSP_SCHEDULE_DELAY="3600000",
    )
    tracer.add(TRACE, spans())
    tracer.close(otlp_receiver.LIMIT_S)
    assert [span.name for span in receiver.spans] == ["gateway.request", "pick_endpoints"]
    assert build_tracer.counts == {"exported": 2, "failed": 0, "dropped": 0}


def test_spans_are_built_for_several_requests_at_once(build_tracer):
    """The sixteenth request builds those of all, and the end of the tracer those of the rest."""
    tracer, built = build_tracer(exporter="console"), []

    def lazy_spans(number):
        built.append(number)
        yield from spans()

    async def add(numbers):
        for number in numbers:
            tracer.add(TRACE, lazy_spans(number))

    asyncio.run(add(range(15)))
    assert built == []
    asyncio.run(add([15]))
    assert built == list(range(16))
    asyncio.run(add([16]))
    tracer.close(otlp_receiver.LIMIT_S)
    assert built == list(range(17))


def test_failures_are_logged_once_and_counted(receiver, build_tracer, caplog):
    """The first failed export is a line with its cause, and so is the first that works again."""
    caplog.set_level("INFO", "extproc.traces")
    receiver.fails = True
    tracer = build_tracer(OTEL_EXPORTER_OTLP_ENDPOINT=f"http://127.0.0.1:{receiver.grpc_port}")
    for count in (1, 2, 3):
        tracer.add(TRACE, spans(count=count))
        receiver.wait_for_requests("grpc", count)
    receiver.fails = False
    tracer.add(TRACE, spans(count=4))
    receiver.wait_for("gateway.request", count=4)
    tracer.close(otlp_receiver.LIMIT_S)
    assert [record.message for record in caplog.records] == [
        "span export failed",
        "span export works again",
    ]
    assert "INVALID_ARGUMENT" in caplog.records[0].fields["cause"]
    assert caplog.records[1].fields == {"failed": 6}
    assert build_tracer.counts == {"exported": 2, "failed": 6, "dropped": 0}


class HeldExporter:
    """An exporter that never ends an export."""

    def __init__(self):
        self.began = threading.Event()
        self.released = threading.Event()

    def export(self, batch):
        self.began.set()
        self.released.wait(otlp_receiver.LIMIT_S)
        return otlp.SpanExportResult.SUCCESS

    def shutdown(self):
        pass


def test_queue_is_bounded(build_tracer, monkeypatch):
    """Spans beyond the bound are dropped and counted, those being sent included."""
    exporter = HeldExporter()
    monkeypatch.setattr(otlp, "_load_exporter", lambda *_: (lambda: exporter, False))
    tracer = build_tracer(max_queued_spans=10)
    for _ in range(7):
        tracer.add(TRACE, spans())
    assert exporter.began.wait(otlp_receiver.LIMIT_S)
    assert build_tracer.counts == {"exported": 0, "failed": 0, "dropped": 4}
    exporter.released.set()


def test_exporter_that_raises_costs_its_spans(build_tracer, monkeypatch, caplog):
    """A bug of an exporter is a failure like any other."""
    exporter = HeldExporter()
    monkeypatch.setattr(otlp, "_load_exporter", lambda *_: (lambda: exporter, False))

    def broken(_):
        exporter.began.set()
        raise KeyError

    exporter.export = broken
    tracer = build_tracer()
    tracer.add(TRACE, spans())
    assert exporter.began.wait(otlp_receiver.LIMIT_S)
    tracer.close(otlp_receiver.LIMIT_S)
    assert build_tracer.counts["failed"] == 2
    (record,) = caplog.records
    assert record.fields == {"cause": "KeyError"}


def test_a_password_of_the_endpoint_is_not_logged(build_tracer, monkeypatch, caplog):
    """The SDK names the address to which it exports, and gRPC says what it cannot resolve."""
    exporter, logger = HeldExporter(), logging.getLogger("opentelemetry.exporter.of-tests")
    monkeypatch.setattr(otlp, "_load_exporter", lambda *_: (lambda: exporter, False))

    def fail(_):
        logger.error("Failed to export traces to user:%s@127.0.0.1:9, code: 1", CANARY)
        exporter.began.set()
        return otlp.SpanExportResult.FAILURE

    exporter.export = fail
    tracer = build_tracer()
    tracer.add(TRACE, spans())
    assert exporter.began.wait(otlp_receiver.LIMIT_S)
    tracer.close(otlp_receiver.LIMIT_S)
    (record,) = caplog.records
    assert record.fields == {"cause": "Failed to export traces to 127.0.0.1:9, code: 1"}


@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
def test_wrong_header_is_named_without_its_value(build_tracer, protocol, caplog):
    """Messages of the SDK about a header may contain a key, so that only our own text is logged."""
    build_tracer(protocol, OTEL_EXPORTER_OTLP_HEADERS=CANARY)
    (record,) = caplog.records
    assert record.message == "a variable is ignored"
    assert "Header format invalid" in record.fields["cause"]
    assert CANARY not in caplog.text


def test_console_prints_spans(build_tracer, capsys):
    """The exporter for a look on one's own machine writes JSON."""
    tracer = build_tracer(exporter="console")
    tracer.add(TRACE, spans())
    tracer.close(otlp_receiver.LIMIT_S)
    assert TRACE.trace_id in capsys.readouterr().out


class CollectingExporter:
    """An exporter that keeps the request of what it is to send."""

    def __init__(self):
        self.requests = []

    def export(self, batch):
        self.requests.append(otlp.encode_spans(batch))
        return otlp.SpanExportResult.SUCCESS

    def shutdown(self):
        pass


def random_attributes(rng):
    values = [
        lambda: rng.choice(["", "plain", "é\n☃", "x" * rng.randrange(20_000), "half \ud800"]),
        lambda: rng.choice([0, 1, 127, 128, -1, 1 << 63, -(1 << 63), rng.getrandbits(62)]),
        lambda: rng.choice([0.0, -0.0, 1e300, math.inf, rng.random()]),
        lambda: rng.random() < 0.5,
        lambda: [f"endpoint {n}" for n in range(rng.randrange(4))],
        lambda: [rng.random() for _ in range(rng.randrange(30))],
    ]
    names = [f"name.{n}" for n in range(12)] + ["é" * 100]
    return {name: rng.choice(values)() for name in rng.sample(names, rng.randrange(len(names)))}


def random_trace(rng):
    """A trace of up to three spans, of which the first one is of the request."""
    parent = rng.choice(["", f"{rng.getrandbits(64) or 1:016x}"])
    state = rng.choice(["", "a=1", "b=2,a=1", "a@b=c d", "not a state", "a=1,a=2"])
    trace = TraceContext(f"{rng.getrandbits(128) or 1:032x}", "b" * 16, 1, parent, state)
    spans = [
        SpanRecord(
            rng.choice(["gateway.request", "é"]),
            trace.span_id if number == 0 else f"{number:016x}",
            parent if number == 0 else trace.span_id,
            rng.uniform(90.0, 99.0),
            rng.uniform(99.0, 100.0),
            random_attributes(rng),
            [
                SpanEvent("candidate", rng.uniform(90.0, 99.0), random_attributes(rng))
                for _ in range(rng.randrange(3))
            ],
            is_server=rng.random() < 0.5,
            error=rng.choice(["", "no response", "é" * 100]),
        )
        for number in range(rng.randrange(1, 4))
    ]
    return trace, spans


def test_encoder_sends_what_that_of_the_sdk_sends(build_tracer, monkeypatch):
    """Requests of random spans are equal, field by field."""
    exporters = CollectingExporter(), CollectingExporter()
    rng = random.Random(1)
    traces = [random_trace(rng) for _ in range(100)]
    monkeypatch.setattr(otlp.time, "time_ns", lambda: 1_800_000_000_123_456_789)
    loaded = [(lambda: exporters[0], True), (lambda: exporters[1], False)]
    monkeypatch.setattr(otlp, "_load_exporter", lambda *_: loaded.pop(0))
    for _ in exporters:
        tracer = build_tracer(OTEL_RESOURCE_ATTRIBUTES="a=b", OTEL_BSP_SCHEDULE_DELAY="3600000")
        for trace, spans_of_trace in traces:
            tracer.add(trace, spans_of_trace)
        tracer.close(otlp_receiver.LIMIT_S)
    ours, theirs = (exporter.requests for exporter in exporters)
    assert len(ours[0].resource_spans[0].scope_spans[0].spans) > len(traces)
    assert ours == theirs
