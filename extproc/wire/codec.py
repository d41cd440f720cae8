"""ext_proc messages: bytes to `Event`, `Reply` to bytes.

Both directions are total: bytes that are no message become `Kind.GARBAGE`, which fits no phase. A
decoder that raised would end the stream with status UNKNOWN and no trace of why.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING

from google.protobuf.message import DecodeError

from extproc.protocol.events import NO_HEADERS, UNDECLARED, BodyMode, Event, Hints, Kind, Modes
from extproc.protocol.headers import DESTINATION
from extproc.protocol.replies import Answered, Chunk, Continue, Headers, Refuse, Reply, Route
from extproc.wire import frames
from extproc.wire.pb import ext_proc_pb2 as pb

if TYPE_CHECKING:
    from google.protobuf.struct_pb2 import Value

#: gRPC method the data plane calls (EPP protocol 004).
SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"
METHOD = "Process"

BALANCER_NAMESPACE = "envoy.lb"
SUBSET_NAMESPACE = "envoy.lb.subset_hint"
SUBSET_KEY = "x-gateway-destination-endpoint-subset"
SERVED_KEY = "x-gateway-destination-endpoint-served"

_KINDS: Mapping[str | None, Kind] = {
    "request_headers": Kind.REQUEST_HEADERS,
    "request_body": Kind.REQUEST_BODY,
    "request_trailers": Kind.REQUEST_TRAILERS,
    "response_headers": Kind.RESPONSE_HEADERS,
    "response_body": Kind.RESPONSE_BODY,
    "response_trailers": Kind.RESPONSE_TRAILERS,
}

#: Tag byte of each answer in ProcessingResponse's oneof (field number << 3 | 2).
_FIELDS: Mapping[Kind, bytes] = {
    Kind.REQUEST_HEADERS: b"\x0a",
    Kind.RESPONSE_HEADERS: b"\x12",
    Kind.REQUEST_BODY: b"\x1a",
    Kind.RESPONSE_BODY: b"\x22",
    Kind.REQUEST_TRAILERS: b"\x2a",
    Kind.RESPONSE_TRAILERS: b"\x32",
}
#: The same by position: an enum hashes in Python, an index does not.
_TAGS = tuple(_FIELDS.get(kind, b"") for kind in Kind)
_EMPTY_COMMON = b"\x02\x0a\x00"
_TRAILERS = frozenset({Kind.REQUEST_TRAILERS, Kind.RESPONSE_TRAILERS})
_GARBAGE = Event(Kind.GARBAGE)


def decode(data: bytes) -> Event:
    """Read one ProcessingRequest."""
    plain = frames.read(data)
    if plain is None:
        return _decode(data)
    event, rest = plain
    if not rest:
        return event
    behind = _known_behind(rest) if len(rest) <= _LONGEST_KNOWN else _behind(rest)
    if behind is None:
        return _decode(data)
    modes, hints = behind
    return Event(event.kind, event.headers, event.body, event.end_of_stream, modes, hints)


def _behind(rest: bytes) -> tuple[Modes | None, Hints | None] | None:
    """Modes and hints in the fields behind the message; None if there is anything else.

    Fields of a message concatenate, so what is behind the first one reads on its own. There are
    few different short ones: the modes of a listener, one `envoy.lb` per destination.
    """
    try:
        message = pb.ProcessingRequest.FromString(rest)
    except DecodeError:
        return None
    if message.WhichOneof("request") is not None:
        return None
    return (
        _modes(message.protocol_config) if message.HasField("protocol_config") else None,
        _hints(message.metadata_context) if message.HasField("metadata_context") else None,
    )


_known_behind = lru_cache(maxsize=1024)(_behind)
_LONGEST_KNOWN = 256


def _decode(data: bytes) -> Event:
    """Read one ProcessingRequest with the general parser."""
    try:
        message = pb.ProcessingRequest.FromString(data)
    except DecodeError:
        return _GARBAGE
    kind = _KINDS.get(message.WhichOneof("request"), Kind.UNKNOWN)
    modes = _modes(message.protocol_config) if message.HasField("protocol_config") else None
    hints = _hints(message.metadata_context) if message.HasField("metadata_context") else None
    match kind:
        case Kind.REQUEST_BODY:
            part = message.request_body
            return Event(kind, NO_HEADERS, part.body, part.end_of_stream, modes, hints)
        case Kind.RESPONSE_BODY:
            part = message.response_body
            return Event(kind, NO_HEADERS, part.body, part.end_of_stream, modes, hints)
        case Kind.REQUEST_HEADERS:
            head = message.request_headers
            return Event(
                kind, frames.headers_of(head.headers), b"", head.end_of_stream, modes, hints
            )
        case Kind.RESPONSE_HEADERS:
            head = message.response_headers
            return Event(
                kind, frames.headers_of(head.headers), b"", head.end_of_stream, modes, hints
            )
        case _:
            return Event(kind, modes=modes, hints=hints)


def encode(reply: Reply) -> bytes:
    """Write one ProcessingResponse."""
    match reply:
        case Chunk():
            return _chunk(reply)
        case Route():
            # Most picks differ only in the destination; a request id makes one unique.
            return _route(reply) if reply.set_headers else _cached_route(reply)
        case Continue():
            return _continue(reply)
        case Answered():
            return _answered(reply)
        case Refuse():
            return _refuse(reply)


def _modes(config: pb.ProtocolConfiguration) -> Modes:
    return Modes(_mode(config.request_body_mode), _mode(config.response_body_mode))


def _mode(number: int) -> BodyMode:
    """A mode by number; one we do not know streams, as all newer modes do."""
    return BodyMode(number) if 0 <= number <= BodyMode.FULL_DUPLEX_STREAMED else UNDECLARED.request


def _hints(metadata: pb.Metadata) -> Hints:
    namespaces = metadata.filter_metadata
    subset = None
    if SUBSET_NAMESPACE in namespaces:
        fields = namespaces[SUBSET_NAMESPACE].fields
        if SUBSET_KEY in fields:
            subset = _tokens(fields[SUBSET_KEY])
    served = ""
    balancer = BALANCER_NAMESPACE in namespaces
    if balancer:
        fields = namespaces[BALANCER_NAMESPACE].fields
        if SERVED_KEY in fields:
            served = fields[SERVED_KEY].string_value
    return Hints(subset, balancer, served)


def _tokens(value: Value) -> tuple[str, ...] | None:
    """A subset hint: a list of strings or one string, each split on commas and trimmed.

    Elements that are not strings are ignored. A value of another type is no hint.
    """
    match value.WhichOneof("kind"):
        case "list_value":
            parts = [element.string_value for element in value.list_value.values]
        case "string_value":
            parts = [value.string_value]
        case _:
            return None
    tokens = [token.strip() for part in parts for token in part.split(",")]
    return tuple(token for token in tokens if token)


_SHORT = tuple(bytes([number]) for number in range(0x80))


def _varint(number: int) -> bytes:
    if number < 0x80:
        return _SHORT[number]
    if number < 0x4000:
        return bytes((number & 0x7F | 0x80, number >> 7))
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


def _chunk(reply: Chunk) -> bytes:
    """BodyResponse{CommonResponse{BodyMutation{StreamedBodyResponse}}}, framed by hand.

    One copy of the body. The general encoder would copy it at each of the four levels.
    """
    size = len(reply.body)
    head = b"\x0a" + _varint(size) if size else b""
    end = b"\x10\x01" if reply.end_of_stream else b""
    inner = len(head) + size + len(end)
    streamed = b"\x1a" + _varint(inner)
    mutation = b"\x1a" + _varint(len(streamed) + inner)
    common = b"\x0a" + _varint(len(mutation) + len(streamed) + inner)
    outer = _varint(len(common) + len(mutation) + len(streamed) + inner)
    tag = _TAGS[reply.answers]
    metadata = _metadata(reply.destination) if reply.destination else b""
    return b"".join((tag, outer, common, mutation, streamed, head, reply.body, end, metadata))


@lru_cache(maxsize=4096)
def _metadata(destination: str) -> bytes:
    """The `dynamic_metadata` field alone; protobuf fields concatenate."""
    response = pb.ProcessingResponse()
    _tell(response, destination)
    return response.SerializeToString()


def _tell(response: pb.ProcessingResponse, destination: str) -> None:
    balancer = response.dynamic_metadata.fields[BALANCER_NAMESPACE].struct_value
    balancer.fields[DESTINATION].string_value = destination


def _set(mutation: pb.HeaderMutation, headers: Headers) -> None:
    """Envoy reads `raw_value` and rejects a header with both values set."""
    for name, value in headers:
        mutation.set_headers.add().header.MergeFrom(
            pb.HeaderValue(key=name, raw_value=value.encode("latin-1", "replace"))
        )


def _route(reply: Route) -> bytes:
    response = pb.ProcessingResponse()
    if reply.answers is Kind.REQUEST_BODY:
        common = response.request_body.response
    else:
        common = response.request_headers.response
    # Takes effect only together with a header mutation (EPP protocol report 1.4).
    common.clear_route_cache = True
    _set(common.header_mutation, ((DESTINATION, reply.destination), *reply.set_headers))
    common.header_mutation.remove_headers.extend(reply.remove_headers)
    _tell(response, reply.destination)
    return response.SerializeToString()


_cached_route = lru_cache(maxsize=4096)(_route)


def _continue(reply: Continue) -> bytes:
    metadata = _metadata(reply.destination) if reply.destination else b""
    rest = b"\x00" if reply.answers in _TRAILERS else _EMPTY_COMMON
    return _TAGS[reply.answers] + rest + metadata


@lru_cache(maxsize=256)
def _answered(reply: Answered) -> bytes:
    response = pb.ProcessingResponse()
    response.response_headers.response.SetInParent()
    _set(response.response_headers.response.header_mutation, reply.set_headers)
    if not reply.set_headers:
        response.response_headers.response.ClearField("header_mutation")
    if reply.response_body is not None:
        override = response.mode_override
        override.response_body_mode = reply.response_body
        override.response_header_mode = 1  # SEND
        override.response_trailer_mode = 1  # SEND: the stream still ends when the answer does
    return response.SerializeToString()


def _refuse(reply: Refuse) -> bytes:
    immediate = pb.ImmediateResponse(body=reply.body, details="extproc")
    immediate.status.code = reply.status
    _set(immediate.headers, reply.headers)
    if reply.grpc_status is not None:
        immediate.grpc_status.status = reply.grpc_status
    return pb.ProcessingResponse(immediate_response=immediate).SerializeToString()
