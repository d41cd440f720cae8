"""The messages Envoy sends most, read without a general parser.

A request costs four of them, and the general parser with its attribute per header costs more than
the decision. What is read here is exactly the encoding of a headers or body message with nothing
unusual in it; anything else is None, and the caller uses the general parser. A property test holds
the two against each other.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import chain

from google.protobuf.message import DecodeError

from extproc.protocol.events import NO_HEADERS, Event, Kind
from extproc.wire.pb import ext_proc_pb2 as pb

#: First byte of a ProcessingRequest (field number << 3 | 2) to kind.
_HEADERS = {0x12: Kind.REQUEST_HEADERS, 0x1A: Kind.RESPONSE_HEADERS}
_BODIES = {0x22: Kind.REQUEST_BODY, 0x2A: Kind.RESPONSE_BODY}

#: An empty `metadata_context` (field 8), which Envoy puts behind most messages.
_NO_METADATA = b"B\x00"

#: A HeaderValue{key = 1, raw_value = 3} with a short key: its key and its value. Tag bytes are
#: line feeds, which neither a name nor a value can hold (RFC 9110, 5.5; Envoy refuses them).
_PAIR = re.compile(
    r"\n.([0-9a-z:!#$%&'*+.^_`|~-]+)\x1a(?:[\x00-\x7f]|[\x80-\xff].)([^\n]*)", re.DOTALL
)

#: Bytes around a key and a value: tags and one-byte lengths of HeaderMap and HeaderValue.
_AROUND = 6


class ResponseHeaders(Mapping[str, str]):
    """Response headers that are only read as far as somebody asks.

    In the lean profile that is the status, which Envoy puts first.

    Args:
        headers: The headers as they came.
    """

    __slots__ = ("_headers", "_read")

    def __init__(self, headers: pb.HeaderMap) -> None:
        self._headers = headers
        self._read: dict[str, str] | None = None

    def __getitem__(self, name: str) -> str:
        if self._read is None:
            if name == ":status":
                for header in self._headers.headers:
                    if header.key == name and len(header.raw_value) == 3:
                        return header.raw_value.decode("latin-1")
                    break
            self._read = headers_of(self._headers)
        return self._read[name]

    def __iter__(self) -> Iterator[str]:
        if self._read is None:
            self._read = headers_of(self._headers)
        return iter(self._read)

    def __len__(self) -> int:
        return len(list(iter(self)))


def headers_of(headers: pb.HeaderMap) -> dict[str, str]:
    """Names in lower case; `raw_value` before `value`; of duplicates the last."""
    read = {}
    for header in headers.headers:
        raw = header.raw_value
        read[header.key.lower()] = raw.decode("latin-1") if raw else header.value
    return read


def read(data: bytes) -> tuple[Event, bytes] | None:
    """Read a message whose first field is a headers or body message.

    Args:
        data: One ProcessingRequest.

    Returns:
        The event without modes and hints, and the bytes of the fields behind it (empty if there
        is nothing in them); None if the message is not of the plain form.
    """
    try:
        size, at = _varint(data, 1)
        end = at + size
        if end > len(data):
            return None
        kind = _BODIES.get(data[0])
        if kind is not None:
            event = _body(kind, data, at, end)
        else:
            kind = _HEADERS.get(data[0])
            event = None if kind is None else _head(kind, data, at, end)
    except IndexError:
        # A length that lies led behind the end; the general parser says what that is.
        return None
    if event is None:
        return None
    rest = data[end:]
    return event, b"" if rest == _NO_METADATA else rest


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """The number at `at` and where it ends."""
    low = data[at]
    if low < 0x80:
        return low, at + 1
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


def _body(kind: Kind, data: bytes, at: int, end: int) -> Event | None:
    """HttpBody{body = 1, end_of_stream = 2}."""
    body = b""
    if at < end and data[at] == 0x0A:
        size, at = _varint(data, at + 1)
        body = data[at : at + size]
        at += size
    if at == end:
        return Event(kind, NO_HEADERS, body)
    if data[at:end] == b"\x10\x01":
        return Event(kind, NO_HEADERS, body, end_of_stream=True)
    return None


def _head(kind: Kind, data: bytes, at: int, end: int) -> Event | None:
    """HttpHeaders{headers = 1, end_of_stream = 3}."""
    if kind is Kind.RESPONSE_HEADERS:
        try:
            message = pb.HttpHeaders.FromString(data[at:end])
        except DecodeError:
            return None
        return Event(kind, ResponseHeaders(message.headers), b"", message.end_of_stream)
    if at >= end or data[at] != 0x0A:
        return None
    size, at = _varint(data, at + 1)
    stop = at + size
    closed = data[stop:end] == b"\x18\x01"
    if stop > end or not (closed or stop == end):
        return None
    headers = _header_map(data, at, stop)
    return None if headers is None else Event(kind, headers, b"", closed)


def _header_map(data: bytes, at: int, stop: int) -> dict[str, str] | None:
    """HeaderMap{headers = 1: HeaderValue}, of duplicates the last.

    The pattern finds the pairs, and their sizes must account for every byte. Anything else (a name
    in upper case, a `value` beside the `raw_value`, a line feed) leaves bytes over.
    """
    pairs = _PAIR.findall(data[at:stop].decode("latin-1"))
    size = len("".join(chain.from_iterable(pairs))) + _AROUND * len(pairs)
    # A length above 127 takes a second byte: once for a long value, once for its HeaderValue.
    if size != stop - at:
        for key, value in pairs:
            long = len(value)
            size += (long > 0x7F) + (long + len(key) + 4 + (long > 0x7F) > 0x7F)
            if len(key) > 0x7F or long > 0x3FF0:
                return None
    return dict(pairs) if size == stop - at else None
