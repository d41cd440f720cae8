"""Any ext_proc message, read with the general parser.

Total: bytes that are no message become `Kind.GARBAGE`, which fits no phase. A decoder that raised
would end the stream with status UNKNOWN and no trace of why.
"""

from __future__ import annotations

from collections.abc import Mapping

from google.protobuf.message import DecodeError

from extproc.protocol.messages import NO_HEADERS, Event, Kind
from extproc.wire import metadata
from extproc.wire.pb import ext_proc_pb2 as pb

_KINDS: Mapping[str | None, Kind] = {
    "request_headers": Kind.REQUEST_HEADERS,
    "request_body": Kind.REQUEST_BODY,
    "request_trailers": Kind.REQUEST_TRAILERS,
    "response_headers": Kind.RESPONSE_HEADERS,
    "response_body": Kind.RESPONSE_BODY,
    "response_trailers": Kind.RESPONSE_TRAILERS,
}
_GARBAGE = Event(Kind.GARBAGE)


def read(data: bytes) -> Event:
    """Read one ProcessingRequest."""
    try:
        message = pb.ProcessingRequest.FromString(data)
    except DecodeError:
        return _GARBAGE
    kind = _KINDS.get(message.WhichOneof("request"), Kind.UNKNOWN)
    modes, hints = metadata.of(message)
    match kind:
        case Kind.REQUEST_BODY:
            part = message.request_body
            return Event(kind, NO_HEADERS, part.body, part.end_of_stream, modes, hints)
        case Kind.RESPONSE_BODY:
            part = message.response_body
            return Event(kind, NO_HEADERS, part.body, part.end_of_stream, modes, hints)
        case Kind.REQUEST_HEADERS:
            head = message.request_headers
            return Event(kind, _headers(head.headers), b"", head.end_of_stream, modes, hints)
        case Kind.RESPONSE_HEADERS:
            head = message.response_headers
            return Event(kind, _headers(head.headers), b"", head.end_of_stream, modes, hints)
        case _:
            return Event(kind, modes=modes, hints=hints)


def _headers(headers: pb.HeaderMap) -> dict[str, str]:
    """Names in lower case; `raw_value` before `value`; of duplicates the last."""
    read = {}
    for header in headers.headers:
        raw = header.raw_value
        read[header.key.lower()] = raw.decode("latin-1") if raw else header.value
    return read
