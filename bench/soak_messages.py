"""Messages as Envoy sends them in FULL_DUPLEX_STREAMED."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from extproc.wire import protobuf_decoder
from extproc.wire.pb import ext_proc_pb2 as pb

_DUPLEX = 4


def headers(
    pairs: Mapping[str, str | bytes],
    *,
    response: bool = False,
    ends: bool = False,
    subset: Sequence[str] | None = None,
) -> bytes:
    """Headers of a request, with the modes, or of a response."""
    message = pb.ProcessingRequest()
    part = message.response_headers if response else message.request_headers
    if not response:
        message.protocol_config.request_body_mode = _DUPLEX
        message.protocol_config.response_body_mode = _DUPLEX
    for key, value in pairs.items():
        raw_value = value.encode() if isinstance(value, str) else value
        part.headers.headers.add(key=key, raw_value=raw_value)
    part.end_of_stream = ends
    if subset is not None:
        hint = message.metadata_context.filter_metadata[protobuf_decoder.SUBSET_NAMESPACE]
        hint.fields[protobuf_decoder.SUBSET_KEY].list_value.SetInParent()
        hint.fields[protobuf_decoder.SUBSET_KEY].list_value.extend(subset)
    return message.SerializeToString()


def body(content: bytes, *, response: bool = False, ends: bool = True) -> bytes:
    """A piece of a body."""
    message = pb.ProcessingRequest()
    part = message.response_body if response else message.request_body
    part.body = content
    part.end_of_stream = ends
    return message.SerializeToString()
