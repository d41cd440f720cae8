"""Codec of ext_proc messages: bytes to `ProcessingRequest`, `ProcessingResponse` to bytes.

Both directions are total: bytes that are no message become `MessageKind.GARBAGE`, which fits no phase.
A decoder that raised would end the stream with status UNKNOWN and no trace of why.

The most frequent messages are decoded without the protobuf library: a request costs four of them,
and its decoder, with an attribute per header, costs more than the decision. What is decoded here is
exactly the encoding of a headers or body message with nothing unusual in it; anything else is left
to `protobuf_decoder`. A property test compares the two.

Between two messages of a stream the processor's caches fill with other work, so what counts is how
much code and data a message touches: a single function decodes it, and lengths of one or two bytes
are read in place.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import chain
from typing import Any

from extproc.protocol.headers import COST, DESTINATION, SCORES
from extproc.protocol.messages import (
    NO_HEADERS,
    BodyMode,
    BodyMutation,
    ContinueResponse,
    Headers,
    ImmediateResponse,
    MessageKind,
    ProcessingRequest,
    ProcessingResponse,
    ResponseHeadersMutation,
    RouteResponse,
    StreamedBodyResponse,
    WithDecision,
    WithRequestCost,
)
from extproc.wire import protobuf_decoder
from extproc.wire.pb import ext_proc_pb2

#: gRPC method the data plane calls (EPP protocol 004).
SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"
METHOD = "Process"

#: Tag byte of each answer in ProcessingResponse's oneof (field number << 3 | 2).
_FIELDS: Mapping[MessageKind, bytes] = {
    MessageKind.REQUEST_HEADERS: b"\x0a",
    MessageKind.RESPONSE_HEADERS: b"\x12",
    MessageKind.REQUEST_BODY: b"\x1a",
    MessageKind.RESPONSE_BODY: b"\x22",
    MessageKind.REQUEST_TRAILERS: b"\x2a",
    MessageKind.RESPONSE_TRAILERS: b"\x32",
}
#: The same by position: an enum hashes in Python, an index does not.
_TAGS = tuple(_FIELDS.get(kind, b"") for kind in MessageKind)
_EMPTY_COMMON = b"\x02\x0a\x00"
_TRAILERS = frozenset({MessageKind.REQUEST_TRAILERS, MessageKind.RESPONSE_TRAILERS})


def encode(reply: ProcessingResponse) -> bytes:
    """Encode a ProcessingResponse."""
    return _WRITERS[type(reply)](reply)


def encode_pieces(reply: ProcessingResponse) -> Sequence[bytes | memoryview]:
    """Encode a ProcessingResponse in pieces; the chunk of a body is one of them, and not copied."""
    return _chunk_pieces(reply) if type(reply) is StreamedBodyResponse else (encode(reply),)


_NUMBERS = tuple(tag[0] if tag else 0 for tag in _TAGS)
_FIVE_LENGTHS = struct.Struct("<BHBHBHBHBH").pack
#: Sizes of a body for which its length and all those around it take two bytes.
_TWO_BYTES = (0x80, 0x4000 - 14)
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


def _write_chunk(reply: StreamedBodyResponse) -> bytes:
    """BodyResponse{CommonResponse{BodyMutation{StreamedBodyResponse}}}, framed by hand.

    One copy of the body. The general encoder would copy it at each of the four levels.
    """
    size = len(reply.body)
    if _TWO_BYTES[0] <= size < _TWO_BYTES[1] and not reply.destination:
        return _write_short_chunk(reply, size)
    return b"".join(_chunk_pieces(reply))


def _chunk_pieces(reply: StreamedBodyResponse) -> Sequence[bytes | memoryview]:
    body = reply.body
    end = b"\x10\x01" if reply.end_of_stream else b""
    head = _chunk_head(reply.answers, len(body), len(end))
    if reply.destination:
        end += _metadata(reply.destination)
    return [piece for piece in (head, body, end) if piece]


@lru_cache(maxsize=64)
def _chunk_head(answers: MessageKind, size: int, end_bytes: int) -> bytes:
    """Tags and lengths before the bytes of a chunk; most chunks of a body are as long."""
    head = b"\x0a" + _varint(size) if size else b""
    size += end_bytes
    for tag in (b"\x1a", b"\x1a", b"\x0a", _TAGS[answers]):
        head = tag + _varint(len(head) + size) + head
    return head


def _write_short_chunk(reply: StreamedBodyResponse, size: int) -> bytes:
    """Encode a chunk for which each of the five lengths takes two bytes."""
    inner = size + (5 if reply.end_of_stream else 3)
    mutation, common, outer = inner + 3, inner + 6, inner + 9
    # Of n = 128 h + l the two bytes are l + 128 and h, in that order: n + 128 h + 128.
    head = _FIVE_LENGTHS(
        _NUMBERS[reply.answers],
        outer + (outer & 0x3F80) + 0x80,
        0x0A,
        common + (common & 0x3F80) + 0x80,
        0x1A,
        mutation + (mutation & 0x3F80) + 0x80,
        0x1A,
        inner + (inner & 0x3F80) + 0x80,
        0x0A,
        size + (size & 0x3F80) + 0x80,
    )
    return b"".join((head, reply.body, b"\x10\x01" if reply.end_of_stream else b""))


@lru_cache(maxsize=4096)
def _metadata(destination: str) -> bytes:
    """The `dynamic_metadata` field alone; protobuf fields concatenate."""
    response = ext_proc_pb2.ProcessingResponse()
    _balancer_fields(response)[DESTINATION].string_value = destination
    return response.SerializeToString()


def _balancer_fields(response: ext_proc_pb2.ProcessingResponse) -> Any:
    """Fields of the dynamic metadata for Envoy's load balancer."""
    namespaces = response.dynamic_metadata.fields
    return namespaces[protobuf_decoder.BALANCER_NAMESPACE].struct_value.fields


def _add_headers(mutation: ext_proc_pb2.HeaderMutation, headers: Headers) -> None:
    """Set a header; Envoy reads `raw_value` and rejects a header with both values."""
    for name, value in headers:
        mutation.set_headers.add().header.MergeFrom(
            ext_proc_pb2.HeaderValue(key=name, raw_value=value.encode("latin-1", "replace"))
        )


def _write_route(reply: RouteResponse) -> bytes:
    """HeadersResponse or BodyResponse{CommonResponse{HeaderMutation}} and metadata, framed by hand.

    A request id or a trace makes it unique. The protobuf library takes 50 us for it where that is one
    request in a hundred, since its code is not in the processor's caches then.
    """
    headers = ((DESTINATION, reply.destination), *reply.set_headers)
    mutation = b"".join([_set_header(name, value) for name, value in headers])
    for name in reply.remove_headers:
        mutation += b"\x12" + _varint(len(name.encode())) + name.encode()
    # `clear_route_cache` takes effect only together with a header mutation
    # (docs/spec/protocol.md#full-duplex-rules).
    common = b"".join((b"\x12", _varint(len(mutation)), mutation, b"\x28\x01"))
    metadata = _scored_metadata(reply) if reply.scores else _metadata(reply.destination)
    if reply.body is not None:
        return _with_body(reply.answers, common, reply.body, metadata)
    response = b"\x0a" + _varint(len(common)) + common
    return b"".join((_TAGS[reply.answers], _varint(len(response)), response, metadata))


def _set_header(name: str, value: str) -> bytes:
    """A header to set as a field of HeaderMutation; Envoy reads `raw_value`, and rejects both values."""
    key, raw = name.encode(), value.encode("latin-1", "replace")
    header = b"".join((b"\x0a", _varint(len(key)), key, b"\x1a", _varint(len(raw)), raw))
    option = b"\x0a" + _varint(len(header)) + header
    return b"\x0a" + _varint(len(option)) + option


def _scored_metadata(reply: RouteResponse) -> bytes:
    """The `dynamic_metadata` field with scores of endpoints."""
    response = ext_proc_pb2.ProcessingResponse()
    balancer = _balancer_fields(response)
    balancer[DESTINATION].string_value = reply.destination
    scores = balancer[SCORES].struct_value.fields
    for address, score in reply.scores:
        scores[address].number_value = score
    return response.SerializeToString()


def _with_body(answers: MessageKind, common: bytes, body: bytes, rest: bytes) -> bytes:
    """Encode a body mutation by hand, with a single copy of the body."""
    mutation = b"\x0a" + _varint(len(body))
    mutation = b"\x1a" + _varint(len(mutation) + len(body)) + mutation
    inner = b"\x0a" + _varint(len(common) + len(mutation) + len(body))
    outer = _varint(len(inner) + len(common) + len(mutation) + len(body))
    return b"".join((_TAGS[answers], outer, inner, common, mutation, body, rest))


_cached_route = lru_cache(maxsize=4096)(_write_route)


def _write_cached_route(reply: RouteResponse) -> bytes:
    # Most decisions differ only in the destination; headers, a body or scores make one unique.
    unique = reply.set_headers or reply.body is not None or reply.scores
    return _write_route(reply) if unique else _cached_route(reply)


@lru_cache(maxsize=4096)
def _write_continue(reply: ContinueResponse) -> bytes:
    dynamic_metadata = _metadata(reply.destination) if reply.destination else b""
    rest = b"\x00" if reply.answers in _TRAILERS else _EMPTY_COMMON
    return _TAGS[reply.answers] + rest + dynamic_metadata


@lru_cache(maxsize=256)
def _write_response_headers(reply: ResponseHeadersMutation) -> bytes:
    """HeadersResponse{CommonResponse{HeaderMutation}} and modes; by hand, as a request id is unique."""
    mutation = b"".join([_set_header(name, value) for name, value in reply.set_headers])
    for name in reply.remove_headers:
        mutation += b"\x12" + _varint(len(name.encode())) + name.encode()
    common = b"\x12" + _varint(len(mutation)) + mutation if mutation else b""
    response = b"\x0a" + _varint(len(common)) + common
    override = b"" if reply.response_body is None else _mode_override(reply.response_body)
    return b"".join((b"\x12", _varint(len(response)), response, override))


@lru_cache(maxsize=8)
def _mode_override(response_body: BodyMode) -> bytes:
    """The `mode_override` field alone; protobuf fields concatenate."""
    response = ext_proc_pb2.ProcessingResponse()
    override = response.mode_override
    override.response_body_mode = response_body
    override.response_header_mode = 1  # SEND
    override.response_trailer_mode = 1  # SEND: the stream still ends when the answer does
    return response.SerializeToString()


def _write_body_mutation(reply: BodyMutation) -> bytes:
    response = ext_proc_pb2.ProcessingResponse()
    common = response.response_body.response
    common.body_mutation.body = reply.body
    if reply.set_headers:
        _add_headers(common.header_mutation, reply.set_headers)
    return response.SerializeToString()


def _write_request_cost(reply: WithRequestCost) -> bytes:
    response = ext_proc_pb2.ProcessingResponse()
    _balancer_fields(response)[COST].number_value = reply.cost
    return encode(reply.reply) + response.SerializeToString()


def _write_decision(reply: WithDecision) -> bytes:
    """A reply whose `dynamic_metadata` is one field: not every parser merges two of them."""
    text = reply.text.encode(errors="replace")
    named, encoded = reply.reply, encode(reply.reply)
    if type(named) is not RouteResponse:
        return b"".join((encoded, _cached_decision_head(b"", len(text)), text))
    if named.scores:
        # Scores make it unique, and it is large.
        metadata = _scored_metadata(named)
        head = _decision_head(metadata, len(text))
    else:
        metadata = _metadata(named.destination)
        head = _cached_decision_head(metadata, len(text))
    return b"".join((encoded[: -len(metadata)], head, text))


def _decision_head(metadata: bytes, size: int) -> bytes:
    """All of `dynamic_metadata` but the decision at its end.

    Args:
        metadata: The field without the decision; empty without such a field.
        size: Of the decision (bytes).
    """
    head = b"\x1a" + _varint(size)
    for tag in (b"\x0a\x08decision\x12", b"\x0a", b"\x2a", b"\x0a\x07extproc\x12", b"\x0a"):
        head = tag + _varint(len(head) + size) + head
    others = ext_proc_pb2.ProcessingResponse.FromString(metadata).dynamic_metadata
    head = others.SerializeToString() + head
    return b"\x42" + _varint(len(head) + size) + head


_cached_decision_head = lru_cache(maxsize=4096)(_decision_head)


def _write_immediate_response(reply: ImmediateResponse) -> bytes:
    immediate = ext_proc_pb2.ImmediateResponse(body=reply.body, details="extproc")
    immediate.status.code = reply.status
    _add_headers(immediate.headers, reply.headers)
    if reply.grpc_status is not None:
        immediate.grpc_status.status = reply.grpc_status
    return ext_proc_pb2.ProcessingResponse(immediate_response=immediate).SerializeToString()


#: Every kind of reply to its writer. What repeats is remembered.
_WRITERS: Mapping[type[ProcessingResponse], Callable[[Any], bytes]] = {
    StreamedBodyResponse: _write_chunk,
    RouteResponse: _write_cached_route,
    ContinueResponse: _write_continue,
    BodyMutation: _write_body_mutation,
    ResponseHeadersMutation: _write_response_headers,
    ImmediateResponse: _write_immediate_response,
    WithRequestCost: _write_request_cost,
    WithDecision: _write_decision,
}


#: First byte of a ProcessingRequest (field number << 3 | 2) to kind, and to `end_of_stream`.
_KINDS = {
    0x12: MessageKind.REQUEST_HEADERS,
    0x1A: MessageKind.RESPONSE_HEADERS,
    0x22: MessageKind.REQUEST_BODY,
    0x2A: MessageKind.RESPONSE_BODY,
}
_END_OF_STREAM = {0x12: b"\x18\x01", 0x1A: b"\x18\x01", 0x22: b"\x10\x01", 0x2A: b"\x10\x01"}
_BODIES = frozenset({MessageKind.REQUEST_BODY, MessageKind.RESPONSE_BODY})

#: A HeaderValue{key = 1, raw_value = 3} with a short key: its key and its value. Tag bytes are
#: line feeds, which neither a name nor a value can hold (RFC 9110, 5.5; Envoy refuses them). A length
#: may be one as well, so that a match begins with the tag and the length of the HeaderValue.
_PAIR = re.compile(
    r"\n[\x80-\xff]?+[\x00-\x7f]\n.([0-9a-z:!#$%&'*+.^_`|~-]++)"
    r"\x1a[\x80-\xff]?+[\x00-\x7f]([^\n]*+)",
    re.DOTALL,
)
_find_pairs = _PAIR.findall

#: Bytes around a key and a value: tags and one-byte lengths of HeaderMap and HeaderValue.
_PAIR_OVERHEAD_BYTES = 6

#: Longest headers of an answer that are remembered (bytes); bounds what the memory takes.
_MAX_CACHED_BYTES = 512

#: Most that a message may hold besides the body that it begins with (bytes). Envoy takes headers of 60
#: KiB by default, and a hint with 16,384 endpoints has 400 KiB. A megabyte of short headers is decoded
#: in some 50 ms.
MAX_HEAD_BYTES = 1024 * 1024

#: Error of a message that holds more.
LARGE_HEAD = f"a message has more than {MAX_HEAD_BYTES} bytes of headers or metadata"

#: Up to this size (bytes) a message says no more than that a body ends.
_MAX_END_BYTES = 16


def has_large_head(data: bytes | bytearray) -> bool:
    """Check if a message holds more than `MAX_HEAD_BYTES` besides the body that it begins with.

    A body counts where encoders put it: first in its message, which is the first field.
    """
    size = len(data)
    if size <= MAX_HEAD_BYTES:
        return False
    # Without a length of several bytes there is no large body.
    if _KINDS.get(data[0]) in _BODIES and data[1] > 0x7F:
        field_bytes, start = _read_varint(data, 1)
        if data[start] == 0x0A and data[start + 1] > 0x7F:
            body_bytes, at = _read_varint(data, start + 1)
            # A length that leads behind the field is a lie.
            if at + body_bytes <= start + field_bytes:
                return size - body_bytes > MAX_HEAD_BYTES
    return True


def decode(data: bytes | bytearray) -> ProcessingRequest:
    """Decode a ProcessingRequest; by hand for plain headers and body messages.

    Ends of bodies are all alike, and headers of answers repeat: of streamed ones the date differs,
    once a second. Those are read once. Headers of requests hold their id.

    Args:
        data: The message; a bytearray becomes the body in it, without a copy.
    """
    size = len(data)
    if size <= _MAX_END_BYTES or (size <= _MAX_CACHED_BYTES and data[0] == 0x1A):
        return _decode_cached(bytes(data))
    return _decode(data)


def _decode(data: bytes | bytearray) -> ProcessingRequest:
    try:
        size = data[1]
        at = 2
        if size > 0x7F:
            high = data[2]
            if high > 0x7F:
                size, at = _read_varint(data, 1)
            else:
                size = size & 0x7F | high << 7
                at = 3
        end = at + size
        modes = hints = None
        if end < len(data):
            rest = bytes(data[end:])
            parse = (
                protobuf_decoder.parse_trailing_fields_cached
                if len(rest) <= protobuf_decoder.MAX_CACHED_BYTES
                else protobuf_decoder.parse_trailing_fields
            )
            modes, hints = parse(rest)
        # HttpHeaders{headers = 1, end_of_stream = 3}, HttpBody{body = 1, end_of_stream = 2}
        stop = at
        if at < end and data[at] == 0x0A:
            size = data[at + 1]
            at += 2
            if size > 0x7F:
                high = data[at]
                if high > 0x7F:
                    size, at = _read_varint(data, at - 1)
                else:
                    size = size & 0x7F | high << 7
                    at += 1
            stop = at + size
        last = data[stop:end]
        if end <= len(data) and (stop == end or last == _END_OF_STREAM[data[0]]):
            kind = _KINDS[data[0]]
            if kind in _BODIES:
                body = _cut_out(data, at, stop) if isinstance(data, bytearray) else data[at:stop]
                return ProcessingRequest(kind, NO_HEADERS, body, bool(last), modes, hints)
            return ProcessingRequest(
                kind, _header_map(data[at:stop]), b"", bool(last), modes, hints
            )
    except LookupError:
        # A length that lies led behind the end, or something is there that is not plain.
        pass
    return protobuf_decoder.decode(bytes(data))


def _cut_out(data: bytearray, start: int, stop: int) -> bytearray:
    """Drop what is around `data[start:stop]`: two bytes at an end move nothing, and are not freed."""
    del data[stop:]
    del data[:start]
    return data


def _read_varint(data: bytes | bytearray, at: int) -> tuple[int, int]:
    """The number at `at` and its end."""
    low = data[at]
    high = data[at + 1]
    if high < 0x80:
        return low & 0x7F | high << 7, at + 2
    number, shift, at = low & 0x7F | (high & 0x7F) << 7, 14, at + 2
    while shift < 64:
        byte = data[at]
        number |= (byte & 0x7F) << shift
        at += 1
        if byte < 0x80:
            break
        shift += 7
    return number, at


def _header_map(data: bytes | bytearray) -> Mapping[str, str]:
    """Decode HeaderMap{headers = 1: HeaderValue}; the last of duplicates counts.

    The pattern finds the pairs, and their sizes must account for every byte. Anything else (a name
    in upper case, a `value` beside the `raw_value`, a line feed) leaves bytes over.

    Raises:
        LookupError: It is not plain.
    """
    pairs = _find_pairs(data.decode("latin-1"))
    size = len("".join(chain.from_iterable(pairs))) + _PAIR_OVERHEAD_BYTES * len(pairs)
    # A length above 127 takes a second byte: once for a long value, once for its HeaderValue.
    if size != len(data):
        for key, value in pairs:
            long = len(value)
            size += (long > 0x7F) + (long + len(key) + 4 + (long > 0x7F) > 0x7F)
            if len(key) > 0x7F or long > 0x3FF0:
                raise LookupError
        if size != len(data):
            raise LookupError
    return dict(pairs)


_decode_cached = lru_cache(maxsize=256)(_decode)
