"""Export of traces over OTLP with the OpenTelemetry SDK; imported only if traces are sent.

The event loop builds the spans of a sampled request; a thread of the SDK encodes and sends them in
batches. What the SDK logs goes into a line of ours, at the first failure and at its end.
"""

from __future__ import annotations

import functools
import logging
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Literal

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
from extproc.telemetry.log_format import log_event
from extproc.telemetry.request_recorder import RequestRecorder
from extproc.telemetry.request_trace import SpanRecord, TracedRequest

_log = logging.getLogger("extproc.traces")

#: Name of the service where `OTEL_SERVICE_NAME` and `OTEL_RESOURCE_ATTRIBUTES` say none.
_SERVICE: Final = "extproc"

#: What the SDK calls a service without a name.
_UNKNOWN_SERVICE: Final = "unknown_service"

#: Characters of what the SDK says of a failure.
_MAX_CAUSE: Final = 200

_SAMPLED: Final = TraceFlags(TraceFlags.SAMPLED)
_UNSET: Final = Status(StatusCode.UNSET)


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
        self.text = " ".join(record.getMessage().split())[:_MAX_CAUSE]
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
        # Two threads count, each under names of its own, and a page may be read meanwhile.
        counts.update({"exported": 0, "failed": 0, "dropped": 0})
        version = distribution.installed_version()
        self._resource = _build_resource(version)
        self._scope = InstrumentationScope("extproc", version)
        build_exporter = _load_exporter(exporter, protocol)
        messages = _capture_log()
        messages.clear()
        self._processor = BatchSpanProcessor(
            _CountedExporter(build_exporter(), counts, messages),
            max_queue_size=max_queued_spans,
            max_export_batch_size=max_batch_spans,
        )
        if messages.template:
            log_event(_log, logging.WARNING, "a variable is ignored", cause=messages.template)

    def observe(
        self, recorder: RequestRecorder, trace: TraceContext, *, started_s: float
    ) -> TracedRequest:
        """Create the observer of a traced request."""
        return TracedRequest(recorder, trace, started_s=started_s, sink=self)

    def make_span_id(self) -> str:
        """Draw an id for a span."""
        return f"{self._rng.getrandbits(64) or 1:016x}"

    def add(self, trace: TraceContext, spans: Sequence[SpanRecord]) -> None:
        """Queue the spans of a request, or drop them where too many wait; returns at once."""
        counts = self._counts
        waiting = self._num_added - counts["exported"] - counts["failed"]
        if waiting + len(spans) > self._max_queued:
            counts["dropped"] += len(spans)
            return
        self._num_added += len(spans)
        offset_ns = time.time_ns() - round(self._clock() * 1e9)
        state = TraceState.from_header([trace.tracestate]) if trace.tracestate else None
        trace_id = int(trace.trace_id, 16)
        contexts = {
            span.span_id: SpanContext(
                trace_id,
                int(span.span_id, 16),
                is_remote=False,
                trace_flags=_SAMPLED,
                trace_state=state,
            )
            for span in spans
        }
        if trace.parent_span_id:
            contexts[trace.parent_span_id] = SpanContext(
                trace_id,
                int(trace.parent_span_id, 16),
                is_remote=True,
                trace_flags=_SAMPLED,
                trace_state=state,
            )
        for span in spans:
            self._processor.on_end(self._build_span(span, contexts, offset_ns))

    def close(self, timeout_s: float) -> None:
        """Send what waits, as far as the time allows; blocks."""
        closing = threading.Thread(target=self._processor.shutdown, daemon=True)
        closing.start()
        closing.join(timeout_s)

    def _build_span(
        self, span: SpanRecord, contexts: Mapping[str, SpanContext], offset_ns: int
    ) -> ReadableSpan:
        return ReadableSpan(
            name=span.name,
            context=contexts[span.span_id],
            parent=contexts.get(span.parent_span_id),
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


class _HashedResource(Resource):
    """Resource whose hash is computed once; the encoder hashes it for every span.

    Delete it once https://github.com/open-telemetry/opentelemetry-python caches it: 10 % of an export.
    """

    @functools.cached_property
    def _hash(self) -> int:
        return super().__hash__()

    def __eq__(self, other: object) -> bool:
        """Equal to a resource with the same attributes."""
        return self is other or super().__eq__(other)

    def __hash__(self) -> int:
        """As of any resource."""
        return self._hash


def _build_resource(version: str | None) -> Resource:
    """Build what the spans are of; names of the environment come before ours."""
    ours: dict[str, str] = {SERVICE_VERSION: version} if version else {}
    resource = Resource.create(ours)
    if str(resource.attributes.get(SERVICE_NAME, "")).startswith(_UNKNOWN_SERVICE):
        resource = Resource.create({SERVICE_NAME: _SERVICE, **ours})
    return _HashedResource(resource.attributes, resource.schema_url)


def _capture_log() -> _LastMessage:
    """Take the messages of the SDK and its exporters, whose loggers exist once they are imported."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("opentelemetry."):
            logging.getLogger(name).addFilter(_MESSAGES)
    return _MESSAGES


def _load_exporter(
    exporter: Literal["otlp", "console"], protocol: Literal["grpc", "http/protobuf"]
) -> Callable[[], SpanExporter]:
    """Load what builds the exporter; each loads a transport of its own."""
    if exporter == "console":
        return functools.partial(ConsoleSpanExporter, out=sys.stdout)
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc import trace_exporter as over_grpc  # noqa: PLC0415

        return over_grpc.OTLPSpanExporter
    from opentelemetry.exporter.otlp.proto.http import trace_exporter as over_http  # noqa: PLC0415

    return over_http.OTLPSpanExporter
