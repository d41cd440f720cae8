"""Export of traces over OTLP with the OpenTelemetry SDK; imported only if traces are sent.

The event loop builds and encodes the spans of some sampled requests at a time; a thread of the SDK
sends them in batches. What the SDK logs goes into a line of ours, at the first failure and at its end.

The encoder is ours, because that of the SDK takes most of the time of a trace. Field numbers are those
of https://github.com/open-telemetry/opentelemetry-proto (trace.proto and common.proto at v1.7.0).
"""

from __future__ import annotations

import functools
import importlib
import logging
import random
import re
import struct
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, Literal

from opentelemetry.exporter.otlp.proto.common import trace_encoder
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import (
    BatchSpanProcessor,
    ConsoleSpanExporter,
    SpanExporter,
    SpanExportResult,
)
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, TraceFlags, TraceState
from opentelemetry.trace.status import Status, StatusCode

from extproc import distribution
from extproc.protocol.trace_context import TraceContext
from extproc.telemetry.log_format import DelayedCall, log_event
from extproc.telemetry.request_trace import (
    AttributeValue,
    SpanEvent,
    SpanRecord,
)

_log = logging.getLogger("extproc.traces")

#: Name of the service where `OTEL_SERVICE_NAME` and `OTEL_RESOURCE_ATTRIBUTES` say none.
_SERVICE: Final = "extproc"

#: What the SDK calls a service without a name.
_UNKNOWN_SERVICE: Final = "unknown_service"

#: Characters of what the SDK says of a failure.
_MAX_CAUSE: Final = 200

#: User and password of an address.
_USER: Final = re.compile(r"[^\s/@]+@")

_SAMPLED: Final = TraceFlags(TraceFlags.SAMPLED)
_UNSET: Final = Status(StatusCode.UNSET)

#: Characters of a text that is encoded once while it is common.
_MAX_COMMON: Final = 64

#: Ended requests whose spans are built together (count), and seconds that one waits for others. Code
#: that runs for one request in a hundred is not in the processor's caches: a trace then takes several
#: times as long. Sixteen take some 2 ms.
_MAX_ENDED: Final = 16
_ENDED_DELAY_S: Final = 2.0

#: Numbers below this one have their encoding kept.
_MAX_KEPT: Final = 4096

_pack_double: Final = struct.Struct("<d").pack
_pack_fixed64: Final = struct.Struct("<Q").pack

#: Flags of a span that say whether its parent is of another process, behind their tag.
_LOCAL_PARENT: Final = b"\x85\x01" + struct.pack("<I", 0x100)
_REMOTE_PARENT: Final = b"\x85\x01" + struct.pack("<I", 0x300)


class _Varints(dict[int, bytes]):
    """Numbers of 64 bits in the encoding of protobuf; small ones, as most lengths are, are kept."""

    def __missing__(self, value: int) -> bytes:
        data, rest = bytearray(), value
        while rest > 0x7F:
            data.append(rest & 0x7F | 0x80)
            rest >>= 7
        data.append(rest)
        if value < _MAX_KEPT:
            self[value] = bytes(data)
        return bytes(data)


class _Names(dict[str, bytes]):
    """Names of spans, events and attributes with their lengths; the configuration bounds them."""

    def __missing__(self, name: str) -> bytes:
        data = name.encode(errors="replace")
        field = self[name] = _VARINTS[len(data)] + data
        return field


_VARINTS: Final = _Varints()
_NAMES: Final = _Names()


def _encode_field(tag: bytes, data: bytes) -> bytes:
    return tag + _VARINTS[len(data)] + data


def _encode_value(value: AttributeValue) -> bytes:
    """A value as an AnyValue.

    Raises:
        ValueError: It is half of a surrogate pair, or has more than 64 bits.
    """
    if isinstance(value, str):
        data = value.encode()
        return b"\x0a" + _VARINTS[len(data)] + data
    if isinstance(value, float):
        return b"\x21" + _pack_double(value)
    if isinstance(value, bool):
        return b"\x10\x01" if value else b"\x10\x00"
    if isinstance(value, int):
        if not -(1 << 63) <= value < 1 << 63:
            raise ValueError
        return b"\x18" + _VARINTS[value & 0xFFFF_FFFF_FFFF_FFFF]
    items = [_encode_field(b"\x0a", _encode_value(item)) for item in value]
    return _encode_field(b"\x2a", b"".join(items))


def _encode_attribute(tag: bytes, name: str, value: AttributeValue) -> bytes:
    """An attribute as a field; empty where it cannot be encoded, as the SDK leaves it out."""
    try:
        data = _encode_value(value)
    except ValueError:
        return b""
    key, size = _NAMES[name], _VARINTS[len(data)]
    num_bytes = len(key) + len(size) + len(data) + 2
    return b"".join((tag, _VARINTS[num_bytes], b"\x0a", key, b"\x12", size, data))


#: The same of a short text or a number, cached: most are those of other traces.
_encode_common: Final = functools.lru_cache(maxsize=4096, typed=True)(_encode_attribute)


def _encode_attributes(tag: bytes, attributes: Mapping[str, AttributeValue]) -> bytes:
    fields = []
    for name, value in attributes.items():
        is_short = isinstance(value, str) and len(value) <= _MAX_COMMON
        is_common = is_short or type(value) is int
        encode = _encode_common if is_common else _encode_attribute
        fields.append(encode(tag, name, value))
    return b"".join(fields)


def _encode_event(event: SpanEvent, offset_ns: int) -> bytes:
    return (
        b"\x09"
        + _pack_fixed64(offset_ns + round(event.at_s * 1e9))
        + b"\x12"
        + _NAMES[event.name]
        + _encode_attributes(b"\x1a", event.attributes)
    )


def encode_span(span: SpanRecord, trace: TraceContext, *, state: str, offset_ns: int) -> bytes:
    """A span as a field of ScopeSpans.

    Args:
        state: Members of the trace state, without those that are invalid.
        offset_ns: Unix time less monotonic time.
    """
    parent = span.parent_span_id
    error = _encode_field(b"\x12", span.error.encode(errors="replace")) + b"\x18\x02"
    fields = (
        b"\x0a\x10",
        bytes.fromhex(trace.trace_id),
        b"\x12\x08",
        bytes.fromhex(span.span_id),
        _encode_field(b"\x1a", state.encode(errors="replace")) if state else b"",
        b"\x22\x08" + bytes.fromhex(parent) if parent else b"",
        b"\x2a",
        _NAMES[span.name],
        b"\x30\x02\x39" if span.is_server else b"\x30\x01\x39",
        _pack_fixed64(offset_ns + round(span.start_s * 1e9)),
        b"\x41",
        _pack_fixed64(offset_ns + round(span.end_s * 1e9)),
        _encode_attributes(b"\x4a", span.attributes),
        *[_encode_field(b"\x5a", _encode_event(event, offset_ns)) for event in span.events],
        _encode_field(b"\x7a", error) if span.error else b"\x7a\x00",
        _REMOTE_PARENT if parent and parent == trace.parent_span_id else _LOCAL_PARENT,
    )
    return _encode_field(b"\x12", b"".join(fields))


class EncodedSpan(ReadableSpan):
    """A span as the field that is sent, which takes the place of a span of the SDK in its queue.

    Args:
        frame: What the field is added to: a request with resource and scope, and without spans.
    """

    #: Read by the queue of the SDK, which takes sampled spans only.
    context = SpanContext(1, 1, is_remote=False, trace_flags=_SAMPLED)

    def __init__(self, data: bytes, frame: ExportTraceServiceRequest) -> None:
        self.data = data
        self.frame = frame


def encode_spans(spans: Sequence[ReadableSpan]) -> ExportTraceServiceRequest:
    """A request with encoded spans, or with those of the SDK of whatever else in the process uses it."""
    if not spans or not isinstance(spans[0], EncodedSpan):
        return trace_encoder.encode_spans(spans)
    request = ExportTraceServiceRequest()
    request.CopyFrom(spans[0].frame)
    fields = [span.data for span in spans if isinstance(span, EncodedSpan)]
    request.resource_spans[0].scope_spans[0].MergeFromString(b"".join(fields))
    return request


class _LastMessage(logging.Filter):
    """Keeps the last message of the SDK out of the log: it would repeat with every batch.

    Attributes:
        template: The same without its values, which may be a header with a secret.
    """

    def __init__(self) -> None:
        super().__init__()
        self.text = self.template = ""

    def clear(self) -> None:
        """Forget the message."""
        self.text = self.template = ""

    def filter(self, record: logging.LogRecord) -> bool:
        """Keep the message without line breaks."""
        # The address of the exporter may have a password, which the limit could leave without its `@`.
        self.text = _USER.sub("", " ".join(record.getMessage().split()))[:_MAX_CAUSE]
        self.template = " ".join(str(record.msg).split())[:_MAX_CAUSE]
        return False


#: Shared, as the loggers of the SDK are.
_MESSAGES: Final = _LastMessage()


class _CountedExporter(SpanExporter):
    """Exporter that counts spans, and logs the first failure and its end. Runs in the thread.

    Args:
        counts: Spans by result, `exported` or `failed`; updated here.
    """

    def __init__(
        self, exporter: SpanExporter, counts: Counter[str], messages: _LastMessage
    ) -> None:
        self._exporter = exporter
        self._counts = counts
        self._messages = messages
        self._num_failed = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send spans; a failure costs them and nothing else."""
        self._messages.clear()
        try:
            result = self._exporter.export(spans)
            cause = self._messages.text
        except Exception as error:  # noqa: BLE001 - counted and logged, as any failure
            result, cause = SpanExportResult.FAILURE, type(error).__name__
        if result is SpanExportResult.SUCCESS:
            self._counts["exported"] += len(spans)
            if self._num_failed:
                log_event(_log, logging.INFO, "span export works again", failed=self._num_failed)
                self._num_failed = 0
            return result
        self._counts["failed"] += len(spans)
        if not self._num_failed:
            log_event(_log, logging.WARNING, "span export failed", cause=cause or None)
        self._num_failed += len(spans)
        return result

    def shutdown(self) -> None:
        """Close the connection."""
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Send what the exporter itself holds."""
        return self._exporter.force_flush(timeout_millis)


class OtlpTracer:
    """Sends the traces of requests in batches from a thread.

    The exporter reads its other settings from the environment: endpoint, headers, TLS, time-out,
    compression, size and interval of batches.

    Args:
        exporter: `otlp`, or `console` for JSON on standard output.
        max_queued_spans: Spans that wait for export; more are dropped (count).
        rng: Source of span ids; replicas need different ones.
        counts: Spans by result: `exported`, `failed` or `dropped`; updated here.
    """

    def __init__(
        self,
        *,
        exporter: Literal["otlp", "console"],
        protocol: Literal["grpc", "http/protobuf"],
        max_queued_spans: int,
        max_batch_spans: int,
        clock: Callable[[], float],
        rng: random.Random,
        counts: Counter[str],
    ) -> None:
        self._clock = clock
        self._rng = rng
        self._counts = counts
        self._max_queued = max_queued_spans
        self._num_added = 0
        self._ended: deque[tuple[TraceContext, Iterable[SpanRecord]]] = deque()
        self._due_spans = DelayedCall(self._queue_ended)
        self._queue_lock = threading.Lock()  # `close` runs in a thread of its own
        # Two threads count, each under names of its own, and a page may be read meanwhile.
        counts.update({"exported": 0, "failed": 0, "dropped": 0})
        version = distribution.installed_version()
        self._resource = _build_resource(version)
        self._scope = InstrumentationScope("extproc", version)
        build_exporter, takes_encoded = _load_exporter(exporter, protocol)
        self._frame = self._build_frame() if takes_encoded else None
        messages = _capture_log()
        messages.clear()
        self._processor = BatchSpanProcessor(
            _CountedExporter(build_exporter(), counts, messages),
            max_queue_size=max_queued_spans,
            max_export_batch_size=max_batch_spans,
        )
        if messages.template:
            log_event(_log, logging.WARNING, "a variable is ignored", cause=messages.template)

    def make_span_id(self) -> str:
        """Draw an id for a span."""
        return f"{self._rng.getrandbits(64) or 1:016x}"

    def add(self, trace: TraceContext, spans: Iterable[SpanRecord]) -> None:
        """Take the spans of a request, which are read a moment later; returns at once."""
        self._ended.append((trace, spans))
        is_due = self._due_spans.schedule(_ENDED_DELAY_S)
        if not is_due or len(self._ended) >= _MAX_ENDED:
            self._queue_ended()

    def _queue_ended(self) -> None:
        ended = self._ended
        with self._queue_lock:
            while ended:
                trace, spans = ended.popleft()
                self._queue(trace, list(spans))

    def _queue(self, trace: TraceContext, spans: Sequence[SpanRecord]) -> None:
        """Queue the spans of a request, or drop them where too many wait."""
        counts = self._counts
        waiting = self._num_added - counts["exported"] - counts["failed"]
        if waiting + len(spans) > self._max_queued:
            counts["dropped"] += len(spans)
            return
        self._num_added += len(spans)
        offset_ns = time.time_ns() - round(self._clock() * 1e9)
        state = TraceState.from_header([trace.tracestate]) if trace.tracestate else TraceState()
        frame, queue = self._frame, self._processor.on_end
        if frame is None:
            for span in spans:
                queue(self._build_span(span, trace, state, offset_ns))
            return
        text = ",".join([f"{key}={value}" for key, value in state.items()])
        for span in spans:
            data = encode_span(span, trace, state=text, offset_ns=offset_ns)
            queue(EncodedSpan(data, frame))

    def close(self, timeout_s: float) -> None:
        """Send what waits, as far as the time allows; blocks."""
        self._queue_ended()
        closing = threading.Thread(target=self._processor.shutdown, daemon=True)
        closing.start()
        closing.join(timeout_s)

    def _build_frame(self) -> ExportTraceServiceRequest:
        """The request around spans, which the SDK makes."""
        span = ReadableSpan(
            "",
            SpanContext(1, 1, is_remote=False),
            resource=self._resource,
            instrumentation_scope=self._scope,
        )
        request = trace_encoder.encode_spans([span])
        request.resource_spans[0].scope_spans[0].ClearField("spans")
        return request

    def _build_span(
        self, span: SpanRecord, trace: TraceContext, state: TraceState, offset_ns: int
    ) -> ReadableSpan:
        """A span of the SDK, for exporters that do not encode it."""
        trace_id, parent_id = int(trace.trace_id, 16), span.parent_span_id

        def build_context(span_id: str, *, is_remote: bool) -> SpanContext:
            return SpanContext(trace_id, int(span_id, 16), is_remote, _SAMPLED, state)

        return ReadableSpan(
            name=span.name,
            context=build_context(span.span_id, is_remote=False),
            parent=build_context(parent_id, is_remote=parent_id == trace.parent_span_id)
            if parent_id
            else None,
            resource=self._resource,
            attributes=span.attributes,
            events=[
                Event(event.name, event.attributes, offset_ns + round(event.at_s * 1e9))
                for event in span.events
            ],
            kind=SpanKind.SERVER if span.is_server else SpanKind.INTERNAL,
            status=Status(StatusCode.ERROR, span.error) if span.error else _UNSET,
            start_time=offset_ns + round(span.start_s * 1e9),
            end_time=offset_ns + round(span.end_s * 1e9),
            instrumentation_scope=self._scope,
        )


def _build_resource(version: str | None) -> Resource:
    """Build what the spans are of; names of the environment come before ours."""
    ours: dict[str, str] = {SERVICE_VERSION: version} if version else {}
    resource = Resource.create(ours)
    if str(resource.attributes.get(SERVICE_NAME, "")).startswith(_UNKNOWN_SERVICE):
        resource = Resource.create({SERVICE_NAME: _SERVICE, **ours})
    return resource


def _capture_log() -> _LastMessage:
    """Take the messages of the SDK and its exporters, whose loggers exist once they are imported."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("opentelemetry."):
            logging.getLogger(name).addFilter(_MESSAGES)
    return _MESSAGES


def _load_exporter(
    exporter: Literal["otlp", "console"], protocol: Literal["grpc", "http/protobuf"]
) -> tuple[Callable[[], SpanExporter], bool]:
    """Load what builds the exporter, with a transport, and say whether it takes encoded spans."""
    if exporter == "console":
        return functools.partial(ConsoleSpanExporter, out=sys.stdout), False
    name = f"opentelemetry.exporter.otlp.proto.{protocol.partition('/')[0]}.trace_exporter"
    module = importlib.import_module(name)
    # The exporters have no setting for it. Of a version without that name, spans go to its encoder.
    takes_encoded = hasattr(module, "encode_spans")
    if takes_encoded:
        vars(module)["encode_spans"] = encode_spans
    return module.OTLPSpanExporter, takes_encoded
