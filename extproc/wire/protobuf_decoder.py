"""Protobuf decoder: any ext_proc message, with the protobuf library.

Total: bytes that are no message become `MessageKind.GARBAGE`, which fits no phase. A decoder that
raised would end the stream with status UNKNOWN and no trace of why.

Body modes and metadata follow the message itself. They repeat, since modes belong to a listener and
metadata to a destination, so the results are cached.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from google.protobuf.message import DecodeError
from google.protobuf.struct_pb2 import Value

from extproc.protocol.headers import tokens
from extproc.protocol.messages import (
    BODY_MODE_TRAITS,
    DEFAULT_BODY_MODES,
    NO_HEADERS,
    BodyMode,
    BodyModes,
    LbMetadata,
    MessageKind,
    ProcessingRequest,
)
from extproc.wire.pb import ext_proc_pb2

BALANCER_NAMESPACE = "envoy.lb"
SUBSET_NAMESPACE = "envoy.lb.subset_hint"
SUBSET_KEY = "x-gateway-destination-endpoint-subset"
SERVED_KEY = "x-gateway-destination-endpoint-served"

_NO_LB_METADATA = LbMetadata()


def parse_attributes(
    message: ext_proc_pb2.ProcessingRequest,
) -> tuple[BodyModes | None, LbMetadata | None]:
    """Body modes and metadata of a message; None where it has none."""
    modes = hints = None
    if message.HasField("protocol_config"):
        config = message.protocol_config
        modes = BodyModes(_mode(config.request_body_mode), _mode(config.response_body_mode))
    if message.HasField("metadata_context"):
        hints = _lb_metadata(message.metadata_context)
        if hints == _NO_LB_METADATA:
            hints = None
    return modes, hints


def parse_trailing_fields(rest: bytes) -> tuple[BodyModes | None, LbMetadata | None]:
    """Body modes and metadata in the fields after the first.

    Fields of a message concatenate, so what is behind the first one reads on its own.

    Raises:
        LookupError: There is something else, or it is damaged.
    """
    try:
        message = ext_proc_pb2.ProcessingRequest.FromString(rest)
    except DecodeError as error:
        raise LookupError from error
    if message.WhichOneof("request") is not None:
        raise LookupError
    return parse_attributes(message)


#: `parse_trailing_fields` for short fields, of which there are few different ones.
parse_trailing_fields_cached = lru_cache(maxsize=1024)(parse_trailing_fields)
MAX_CACHED_BYTES = 256


def _mode(number: int) -> BodyMode:
    """Decode a body mode; unknown numbers stream, as all newer modes do."""
    return BodyMode(number) if number in BODY_MODE_TRAITS else DEFAULT_BODY_MODES.request


def _lb_metadata(metadata: ext_proc_pb2.Metadata) -> LbMetadata:
    namespaces = metadata.filter_metadata
    subset = None
    if SUBSET_NAMESPACE in namespaces:
        fields = namespaces[SUBSET_NAMESPACE].fields
        if SUBSET_KEY in fields:
            subset = _subset_tokens(fields[SUBSET_KEY])
    served = ""
    balancer = BALANCER_NAMESPACE in namespaces
    if balancer:
        fields = namespaces[BALANCER_NAMESPACE].fields
        if SERVED_KEY in fields:
            served = fields[SERVED_KEY].string_value
    return LbMetadata(subset, balancer, served)


def _subset_tokens(value: Value) -> tuple[str, ...] | None:
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
    return tokens(",".join(parts))


_KINDS: Mapping[str | None, MessageKind] = {
    "request_headers": MessageKind.REQUEST_HEADERS,
    "request_body": MessageKind.REQUEST_BODY,
    "request_trailers": MessageKind.REQUEST_TRAILERS,
    "response_headers": MessageKind.RESPONSE_HEADERS,
    "response_body": MessageKind.RESPONSE_BODY,
    "response_trailers": MessageKind.RESPONSE_TRAILERS,
}
_BODIES = frozenset({MessageKind.REQUEST_BODY, MessageKind.RESPONSE_BODY})
_WITH_CONTENT = _BODIES | {MessageKind.REQUEST_HEADERS, MessageKind.RESPONSE_HEADERS}
_GARBAGE = ProcessingRequest(MessageKind.GARBAGE)


def decode(data: bytes) -> ProcessingRequest:
    """Decode a ProcessingRequest."""
    try:
        message = ext_proc_pb2.ProcessingRequest.FromString(data)
    except DecodeError:
        return _GARBAGE
    name = message.WhichOneof("request")
    kind = _KINDS.get(name, MessageKind.UNKNOWN)
    modes, hints = parse_attributes(message)
    if name is None or kind not in _WITH_CONTENT:
        return ProcessingRequest(kind, modes=modes, hints=hints)
    part: Any = getattr(message, name)
    if kind in _BODIES:
        return ProcessingRequest(kind, NO_HEADERS, part.body, part.end_of_stream, modes, hints)
    return ProcessingRequest(kind, _headers(part.headers), b"", part.end_of_stream, modes, hints)


def _headers(headers: ext_proc_pb2.HeaderMap) -> dict[str, str]:
    """Decode headers: lower case names, `raw_value` before `value`, last of duplicates."""
    pairs = {}
    for header in headers.headers:
        raw = header.raw_value
        pairs[header.key.lower()] = raw.decode("latin-1") if raw else header.value
    return pairs
