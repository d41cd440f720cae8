"""The messages Envoy sends most, read without a general parser.

A request costs four of them, and the general parser with its attribute per header costs more than
the decision. What is read here is exactly the encoding of a headers or body message with nothing
unusual in it; anything else is None, and the caller uses the general parser. A property test holds
the two against each other.
"""

from __future__ import annotations

from extproc.protocol.events import NO_HEADERS, Event, Kind

#: First byte of a ProcessingRequest (field number << 3 | 2) to kind.
_HEADERS = {0x12: Kind.REQUEST_HEADERS, 0x1A: Kind.RESPONSE_HEADERS}
_BODIES = {0x22: Kind.REQUEST_BODY, 0x2A: Kind.RESPONSE_BODY}

#: An empty `metadata_context` (field 8), which Envoy puts behind most messages.
_NO_METADATA = b"B\x00"

#: Header names in the encoding and as text; bounded, since names come from clients.
_names: dict[bytes, str] = {}
_MOST_NAMES = 4096


def read(data: bytes) -> tuple[Event, bytes] | None:
    """Read a message whose first field is a headers or body message.

    Args:
        data: One ProcessingRequest.

    Returns:
        The event without modes and hints, and the bytes of the fields behind it (empty if there
        is nothing in them); None if the message is not of the plain form.
    """
    if len(data) < 2:
        return None
    size, at = _varint(data, 1)
    end = at + size
    if end > len(data):
        return None
    rest = data[end:]
    if rest == _NO_METADATA:
        rest = b""
    kind = _BODIES.get(data[0])
    try:
        if kind is not None:
            event = _body(kind, data, at, end)
        else:
            kind = _HEADERS.get(data[0])
            event = None if kind is None else _head(kind, data, at, end)
    except IndexError:
        # A length that lies led behind the end; the general parser says what that is.
        return None
    return None if event is None else (event, rest)


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """The number at `at` and where it ends; a huge one if it is cut."""
    number = shift = 0
    for end in range(at, min(len(data), at + 5)):
        byte = data[end]
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number, end + 1
        shift += 7
    return 1 << 62, at


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
    """HeaderMap{headers = 1: HeaderValue{key = 1, raw_value = 3}}, of duplicates the last."""
    headers = {}
    names = _names
    while at < stop:
        if data[at] != 0x0A:
            return None
        size = data[at + 1]
        at += 2
        if size > 0x7F:
            size, at = _varint(data, at - 1)
        after = at + size
        key_size = data[at + 1]
        key_end = at + 2 + key_size
        if after > stop or size < 4 or data[at] != 0x0A or key_size > 0x7F or key_end + 2 > after:
            return None
        value_size, value_at = data[key_end + 1], key_end + 2
        if value_size > 0x7F:
            value_size, value_at = _varint(data, key_end + 1)
        if data[key_end] != 0x1A or value_at + value_size != after:
            return None
        key = data[at + 2 : key_end]
        name = names.get(key)
        if name is None:
            # The general parser rejects names that are not UTF-8.
            if not key.isascii():
                return None
            name = _name(key)
        headers[name] = data[value_at:after].decode("latin-1")
        at = after
    return headers


def _name(key: bytes) -> str:
    name = key.decode("ascii").lower()
    if len(_names) < _MOST_NAMES:
        _names[key] = name
    return name
