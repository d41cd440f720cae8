"""Protobuf decoder: any ext_proc message, with the protobuf library.

Total: bytes that are no message become `MessageKind.GARBAGE`, which fits no phase. A decoder that raised
would end the stream with status UNKNOWN and no trace of why.
"""

from __future__ import annotations

from collections.abc import Mapping

from google.protobuf.message import DecodeError

from extproc.protocol.messages import NO_HEADERS, MessageKind, ProcessingRequest
from extproc.wire import metadata
from extproc.wire.pb import ext_proc_pb2

_KINDS: Mapping[str | None, MessageKind] = {
    "request_headers": MessageKind.REQUEST_HEADERS,
    "request_body": MessageKind.REQUEST_BODY,
    "request_trailers": MessageKind.REQUEST_TRAILERS,
    "response_headers": MessageKind.RESPONSE_HEADERS,
    "response_body": MessageKind.RESPONSE_BODY,
    "response_trailers": MessageKind.RESPONSE_TRAILERS,
}
_GARBAGE = ProcessingRequest(MessageKind.GARBAGE)


def read(data: bytes) -> ProcessingRequest:
    """Decode a ProcessingRequest."""
    try:
        message = ext_proc_pb2.ProcessingRequest.FromString(data)
    except DecodeError:
        return _GARBAGE
    kind = _KINDS.get(message.WhichOneof("request"), MessageKind.UNKNOWN)
    modes, hints = metadata.parse_attributes(message)
    match kind:
        case MessageKind.REQUEST_BODY:
            part = message.request_body
            return ProcessingRequest(kind, NO_HEADERS, part.body, part.end_of_stream, modes, hints)
        case MessageKind.RESPONSE_BODY:
            part = message.response_body
            return ProcessingRequest(kind, NO_HEADERS, part.body, part.end_of_stream, modes, hints)
        case MessageKind.REQUEST_HEADERS:
            head = message.request_headers
            return ProcessingRequest(
                kind, _headers(head.headers), b"", head.end_of_stream, modes, hints
            )
        case MessageKind.RESPONSE_HEADERS:
            head = message.response_headers
            return ProcessingRequest(
                kind, _headers(head.headers), b"", head.end_of_stream, modes, hints
            )
        case _:
            return ProcessingRequest(kind, modes=modes, hints=hints)


def _headers(headers: ext_proc_pb2.HeaderMap) -> dict[str, str]:
    """Decode headers: lower case names, `raw_value` before `value`, last of duplicates."""
    read = {}
    for header in headers.headers:
        raw = header.raw_value
        read[header.key.lower()] = raw.decode("latin-1") if raw else header.value
    return read
