"""gRPC framing and protobuf fields, read by hand because only `wire` may import protobuf.

A frame is one flag byte (0: not compressed), the message length as four big-endian bytes, and the
message. A message is a run of fields: a varint key `number << 3 | wire type`, then a varint (0),
eight bytes (1), a length and so many bytes (2), or four bytes (5).
"""

from __future__ import annotations

from typing import Final

HEADER_BYTES = 5

#: (field number, value): a varint or fixed number as int, anything with a length as a view of it, since
#: a copy at each level would make a body of some bytes several times as large.
Field = tuple[int, int | memoryview]

_FIXED = {1: 8, 5: 4}

#: Fields of one message that are read (count); a message with more is malformed. Token ids are one
#: field, since proto3 packs them.
MAX_FIELDS: Final = 4096


def message_of(body: bytes) -> memoryview | None:
    """The first message of a body; None when it is compressed or short."""
    if len(body) < HEADER_BYTES or body[0] != 0:
        return None
    stop = HEADER_BYTES + int.from_bytes(body[1:HEADER_BYTES], "big")
    return memoryview(body)[HEADER_BYTES:stop] if stop <= len(body) else None


def fields_of(message: memoryview) -> list[Field] | None:
    """The fields of a message in wire order.

    Returns:
        None when it is malformed, uses groups or has more than `MAX_FIELDS`.
    """
    fields: list[Field] = []
    at, end = 0, len(message)
    while at < end:
        if len(fields) == MAX_FIELDS:
            return None
        key, at = _varint(message, at)
        if at < 0 or key >> 3 == 0:
            return None
        kind = key & 7
        if kind == 0:
            value: int | memoryview
            value, at = _varint(message, at)
            if at < 0:
                return None
        else:
            size = _FIXED.get(kind)
            if kind == 2:
                size, at = _varint(message, at)
            if size is None or at < 0 or at + size > end:
                return None
            value = message[at : at + size]
            at += size
            if kind != 2:
                value = int.from_bytes(value, "little")
        fields.append((key >> 3, value))
    return fields


def _varint(message: memoryview, at: int) -> tuple[int, int]:
    """A varint and the place after it; minus one for the place when it is cut or too long."""
    value = 0
    for place, byte in enumerate(message[at : at + 10]):
        value |= (byte & 0x7F) << (7 * place)
        if byte < 0x80:
            return value & 0xFFFFFFFFFFFFFFFF, at + place + 1
    return 0, -1
