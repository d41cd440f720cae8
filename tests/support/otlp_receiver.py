"""A receiver of traces: OTLP over gRPC and over HTTP, in threads, in OpenTelemetry's own messages."""

from __future__ import annotations

import contextlib
import gzip
import threading
from collections.abc import Iterator, Mapping
from concurrent import futures
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2
from opentelemetry.proto.common.v1 import common_pb2
from opentelemetry.proto.trace.v1 import trace_pb2

SERVICE = "opentelemetry.proto.collector.trace.v1.TraceService"

#: Seconds that spans may take on a busy machine.
LIMIT_S = 300.0


def to_python(value: common_pb2.AnyValue) -> Any:
    """The value of an attribute."""
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [to_python(item) for item in value.array_value.values]
    return getattr(value, kind)


def to_dict(attributes: Any) -> dict[str, Any]:
    """Attributes by name."""
    return {attribute.key: to_python(attribute.value) for attribute in attributes}


class ReceivedSpan:
    """A span as it was received, with the attributes of its resource."""

    def __init__(self, span: trace_pb2.Span, resource: Mapping[str, Any]) -> None:
        self.message = span
        self.resource = dict(resource)
        self.name = span.name
        self.trace_id = span.trace_id.hex()
        self.span_id = span.span_id.hex()
        self.parent_span_id = span.parent_span_id.hex()
        self.attributes = to_dict(span.attributes)
        self.events = [(event.name, to_dict(event.attributes)) for event in span.events]

    @property
    def is_error(self) -> bool:
        return self.message.status.code == trace_pb2.Status.STATUS_CODE_ERROR


class OtlpReceiver:
    """Receiver of exported spans.

    Attributes:
        grpc_port: Port of OTLP/gRPC.
        http_port: Port of OTLP/HTTP.
        requests: Exports so far, by protocol.
        fails: Whether every export is answered with an error.
    """

    def __init__(self) -> None:
        self.grpc_port = self.http_port = 0
        self.requests = {"grpc": 0, "http": 0}
        self.fails = False
        self._spans: list[ReceivedSpan] = []
        self._received = threading.Condition()

    def take(self, data: bytes, protocol: str) -> bool:
        """Take an export; False where it fails."""
        export = trace_service_pb2.ExportTraceServiceRequest.FromString(data)
        spans = [
            ReceivedSpan(span, to_dict(by_resource.resource.attributes))
            for by_resource in export.resource_spans
            for by_scope in by_resource.scope_spans
            for span in by_scope.spans
        ]
        with self._received:
            self.requests[protocol] += 1
            if not self.fails:
                self._spans += spans
            self._received.notify_all()
        return not self.fails

    @property
    def spans(self) -> list[ReceivedSpan]:
        """All spans so far."""
        with self._received:
            return list(self._spans)

    def wait_for(self, name: str, **attributes: Any) -> ReceivedSpan:
        """The first span of a name with these attributes, `__` standing for dots."""
        wanted = {key.replace("__", "."): value for key, value in attributes.items()}
        with self._received:
            span = self._received.wait_for(lambda: self._find(name, wanted), LIMIT_S)
        assert span, f"no span {name} with {wanted} among {[span.name for span in self.spans]}"
        return span

    def _find(self, name: str, attributes: Mapping[str, Any]) -> ReceivedSpan | None:
        for span in self._spans:
            if span.name == name and attributes.items() <= span.attributes.items():
                return span
        return None

    def wait_for_requests(self, protocol: str, count: int) -> None:
        """Wait until so many exports came, failed ones included."""
        with self._received:
            assert self._received.wait_for(lambda: self.requests[protocol] >= count, LIMIT_S)


@contextlib.contextmanager
def receiving() -> Iterator[OtlpReceiver]:
    """Receive traces on loopback."""
    receiver = OtlpReceiver()

    def export(data: bytes, context: grpc.ServicerContext) -> bytes:
        if not receiver.take(data, "grpc"):
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "refused by the test")
        return trace_service_pb2.ExportTraceServiceResponse().SerializeToString()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            data = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                data = gzip.decompress(data)
            taken = self.path == "/v1/traces" and receiver.take(data, "http")
            self.send_response(200 if taken else 400)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_):
            pass

    grpc_server = grpc.server(futures.ThreadPoolExecutor(max_workers=2))
    grpc_server.add_generic_rpc_handlers(
        (
            grpc.method_handlers_generic_handler(
                SERVICE, {"Export": grpc.unary_unary_rpc_method_handler(export)}
            ),
        )
    )
    receiver.grpc_port = grpc_server.add_insecure_port("127.0.0.1:0")
    grpc_server.start()
    http_server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    receiver.http_port = http_server.server_port
    thread = threading.Thread(target=http_server.serve_forever, daemon=True)
    thread.start()
    try:
        yield receiver
    finally:
        grpc_server.stop(None).wait()
        http_server.shutdown()
        http_server.server_close()
        thread.join()
