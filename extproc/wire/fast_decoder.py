"""Fast decoder: the most frequent messages of Envoy, without the protobuf library.

A request costs four of them, and the general parser with its attribute per header costs more than
the decision. What is read here is exactly the encoding of a headers or body message with nothing
unusual in it; anything else is left to the general parser. A property test holds the two against
each other.

Between two messages of a stream the processor's caches fill with other work, so what counts is how
much code and data a message touches: one function reads it, and lengths of one or two bytes are
read in place.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from itertools import chain

from extproc.protocol.messages import NO_HEADERS, MessageKind, ProcessingRequest
from extproc.wire import metadata, protobuf_decoder

#: First byte of a ProcessingRequest (field number << 3 | 2) to kind, and to `end_of_stream`.
_KINDS = {
    0x12: MessageKind.REQUEST_HEADERS,
    0x1A: MessageKind.RESPONSE_HEADERS,
    0x22: MessageKind.REQUEST_BODY,
    0x2A: MessageKind.RESPONSE_BODY,
}
_CLOSED = {0x12: b"\x18\x01", 0x1A: b"\x18\x01", 0x22: b"\x10\x01", 0x2A: b"\x10\x01"}
_BODIES = frozenset({MessageKind.REQUEST_BODY, MessageKind.RESPONSE_BODY})

#: A HeaderValue{key = 1, raw_value = 3} with a short key: its key and its value. Tag bytes are
#: line feeds, which neither a name nor a value can hold (RFC 9110, 5.5; Envoy refuses them).
_PAIR = re.compile(
    r"\n.([0-9a-z:!#$%&'*+.^_`|~-]+)\x1a(?:[\x00-\x7f]|[\x80-\xff].)([^\n]*)", re.DOTALL
)
_pairs = _PAIR.findall

#: Bytes around a key and a value: tags and one-byte lengths of HeaderMap and HeaderValue.
_AROUND = 6

#: Longest headers of an answer that are remembered (bytes); bounds what the memory takes.
_LONGEST_KNOWN = 512

#: Up to this size (bytes) a message says no more than that a body ends.
_LONGEST_END = 16


def read(data: bytes) -> ProcessingRequest:
    """Decode a ProcessingRequest; by hand for plain headers and body messages.

    Ends of bodies are all alike, and headers of answers repeat: of streamed ones the date differs,
    once a second. Those are read once. Headers of requests hold their id.
    """
    size = len(data)
    if size <= _LONGEST_END or (size <= _LONGEST_KNOWN and data[0] == 0x1A):
        return _known(data)
    return _read(data)


def _read(data: bytes) -> ProcessingRequest:
    try:
        size = data[1]
        at = 2
        if size > 0x7F:
            high = data[2]
            if high > 0x7F:
                size, at = _varint(data, 1)
            else:
                size = size & 0x7F | high << 7
                at = 3
        end = at + size
        rest = data[end:]
        known = (
            metadata.parse_trailing_fields_cached
            if len(rest) <= metadata.LONGEST_KNOWN
            else metadata.parse_trailing_fields
        )
        modes, hints = known(rest)
        # HttpHeaders{headers = 1, end_of_stream = 3}, HttpBody{body = 1, end_of_stream = 2}
        stop = at
        if at < end and data[at] == 0x0A:
            size = data[at + 1]
            at += 2
            if size > 0x7F:
                high = data[at]
                if high > 0x7F:
                    size, at = _varint(data, at - 1)
                else:
                    size = size & 0x7F | high << 7
                    at += 1
            stop = at + size
        last = data[stop:end]
        if end <= len(data) and (stop == end or last == _CLOSED[data[0]]):
            kind = _KINDS[data[0]]
            if kind in _BODIES:
                return ProcessingRequest(kind, NO_HEADERS, data[at:stop], bool(last), modes, hints)
            return ProcessingRequest(
                kind, _header_map(data[at:stop]), b"", bool(last), modes, hints
            )
    except LookupError:
        # A length that lies led behind the end, or something is there that is not plain.
        pass
    return protobuf_decoder.read(data)


def _varint(data: bytes, at: int) -> tuple[int, int]:
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


def _header_map(data: bytes) -> Mapping[str, str]:
    """Decode HeaderMap{headers = 1: HeaderValue}; the last of duplicates counts.

    The pattern finds the pairs, and their sizes must account for every byte. Anything else (a name
    in upper case, a `value` beside the `raw_value`, a line feed) leaves bytes over.

    Raises:
        LookupError: It is not plain.
    """
    pairs = _pairs(data.decode("latin-1"))
    size = len("".join(chain.from_iterable(pairs))) + _AROUND * len(pairs)
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


_known = lru_cache(maxsize=256)(_read)
