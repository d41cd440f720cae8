"""Trailing fields of a message: body modes and metadata.

They repeat: modes are a listener's, metadata a destination's. So readings are remembered.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from google.protobuf.message import DecodeError

from extproc.protocol.headers import tokens
from extproc.protocol.messages import (
    BODY_MODE_TRAITS,
    DEFAULT_BODY_MODES,
    BodyMode,
    BodyModes,
    LbMetadata,
)
from extproc.wire.pb import ext_proc_pb2

if TYPE_CHECKING:
    from google.protobuf.struct_pb2 import Value

BALANCER_NAMESPACE = "envoy.lb"
SUBSET_NAMESPACE = "envoy.lb.subset_hint"
SUBSET_KEY = "x-gateway-destination-endpoint-subset"
SERVED_KEY = "x-gateway-destination-endpoint-served"

_NO_HINTS = LbMetadata()


def parse_attributes(
    message: ext_proc_pb2.ProcessingRequest,
) -> tuple[BodyModes | None, LbMetadata | None]:
    """Body modes and metadata of a message; None where it has none."""
    modes = hints = None
    if message.HasField("protocol_config"):
        config = message.protocol_config
        modes = BodyModes(_mode(config.request_body_mode), _mode(config.response_body_mode))
    if message.HasField("metadata_context"):
        hints = _hints(message.metadata_context)
        if hints == _NO_HINTS:
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
LONGEST_KNOWN = 256


def _mode(number: int) -> BodyMode:
    """Decode a body mode; unknown numbers stream, as all newer modes do."""
    return BodyMode(number) if number in BODY_MODE_TRAITS else DEFAULT_BODY_MODES.request


def _hints(metadata: ext_proc_pb2.Metadata) -> LbMetadata:
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
    return LbMetadata(subset, balancer, served)


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
    return tokens(",".join(parts))
