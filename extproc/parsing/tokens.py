"""Token ids as bytes: four little-endian bytes per token."""

from __future__ import annotations

import io
import sys
from array import array
from collections.abc import Iterable, Sequence
from typing import Any, Final

import mmh3
import msgspec

#: Bytes per packed token.
WIDTH = 4
#: Between two tokenized prompts of a batch. No vocabulary has a token 2**32 - 1.
SEPARATOR = b"\xff\xff\xff\xff"


#: Bytes of JSON or of varints that are decoded at once; each id takes up to 40 until it is packed.
_CHUNK_BYTES: Final = 32 * 1024
#: Longest JSON number that is an id, with white space around it (bytes).
_LONGEST_ID: Final = 64
#: Chunks of a field that hold values of more bytes than a uint32 takes, and are read in a loop (count).
_MAX_LOOPED_CHUNKS: Final = 4

_HIGH_BYTES = bytes(range(0x80, 0x100))
#: Bytes of the longest uint32 as a varint.
_VARINT_BYTES: Final = 5
#: What seven bits, the nth of a varint, add to the nth byte of its value, and to the one below.
_LOWERED = [bytes((b & 0x7F) >> at for b in range(256)) for at in range(WIDTH)]
_RAISED = [bytes((b << (7 - at)) & 0xFF for b in range(256)) for at in range(WIDTH)]

_IDS = msgspec.json.Decoder(list[int])


class Packed(msgspec.Struct, frozen=True, gc=False):
    """Token ids that were packed while they were decoded.

    Attributes:
        ids: Four little-endian bytes per id.
    """

    ids: bytes


def scan(json: bytes) -> Packed | None:
    """Pack a JSON array of token ids, a chunk at a time; None for any other JSON.

    Args:
        json: An array, from its opening to its closing bracket.
    """
    packed = io.BytesIO()
    at, end = 1, len(json) - 1
    while at < end:
        stop = end
        if end - at > _CHUNK_BYTES:
            stop = json.find(b",", at + _CHUNK_BYTES, min(end, at + _CHUNK_BYTES + _LONGEST_ID))
            if stop < 0:
                return None
        try:
            row = pack(_IDS.decode(b"[%b]" % json[at:stop]))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None
        if not row:
            return None
        packed.write(row)
        at = stop + 1
    # This hands over the buffer, while `tobytes` of an array would copy it.
    return Packed(packed.getvalue()) if packed.tell() else None


def pack_id(value: int) -> bytes:
    """One id, cut to 32 bits as protobuf parsers do."""
    return (value & 0xFFFFFFFF).to_bytes(WIDTH, "little")


def count_varints(packed: bytes | memoryview) -> int:
    """Values in a protobuf field of varints (count)."""
    chunks = range(0, len(packed), _CHUNK_BYTES)
    return sum(
        len(bytes(packed[at : at + _CHUNK_BYTES]).translate(None, _HIGH_BYTES)) for at in chunks
    )


def reserve(rows: io.BytesIO, count: int) -> None:
    """Make room for packed ids at once: a buffer that grows takes an eighth more."""
    if count:
        rows.seek(count * WIDTH - 1)
        rows.write(b"\0")
        rows.seek(0)


def pack_varints(packed: bytes | memoryview, rows: io.BytesIO) -> bool:
    """Pack a protobuf field of uint32 values, a chunk at a time.

    Args:
        packed: The field.
        rows: Where packed ids go.

    Returns:
        False as where `unpack_varints` gives None. Values of more bytes than a uint32 takes are read
        in `_MAX_LOOPED_CHUNKS` chunks at most, since that is slow and no encoder writes them; False
        beyond.
    """
    at, num_looped = 0, 0
    while at < len(packed):
        stop = min(at + _CHUNK_BYTES, len(packed))
        # A value has ten bytes at most, and ends with the first below 0x80.
        while stop < len(packed) and packed[stop - 1] >= 0x80 and stop < at + _CHUNK_BYTES + 10:
            stop += 1
        chunk = bytes(packed[at:stop])
        if chunk[-1] >= 0x80:
            return False
        row = _pack_short(chunk)
        if row is None:
            num_looped += 1
            values = unpack_varints(chunk) if num_looped <= _MAX_LOOPED_CHUNKS else None
            row = None if values is None else pack(values)
            if row is None:
                return False
        rows.write(row)
        at = stop
    return True


def _pack_short(chunk: bytes) -> bytes | bytearray | None:
    """Pack varints of up to five bytes; None where a longer one is among them.

    All bytes are taken as one large number. Shifts and masks move the second, third, ... byte of
    every varint to the place of its first, and `translate` drops the other places: a tenth of the
    time that a loop takes.
    """
    if chunk.isascii():
        row = bytearray(WIDTH * len(chunk))
        row[::WIDTH] = chunk
        return row
    size = len(chunk)
    text = int.from_bytes(chunk, "little")
    highs = text & int.from_bytes(b"\x80" * size, "little")
    payload, goes_on = text ^ highs, highs - (highs >> 7)
    # A varint begins where the byte before does not go on.
    others = highs << 8
    reached = goes_on & ~(others - (others >> 7))
    planes = [(payload | others).to_bytes(size, "little").translate(None, _HIGH_BYTES)]
    while reached:
        if len(planes) == _VARINT_BYTES:
            return None
        lane = (payload >> (8 * len(planes))) & reached
        planes.append((lane | others).to_bytes(size, "little").translate(None, _HIGH_BYTES))
        reached &= goes_on >> (8 * (len(planes) - 1))
    row = bytearray(WIDTH * len(planes[0]))
    for at, plane in enumerate(planes[:WIDTH]):
        value = int.from_bytes(plane.translate(_LOWERED[at]), "little")
        if at + 1 < len(planes):
            value |= int.from_bytes(planes[at + 1].translate(_RAISED[at]), "little")
        row[at::WIDTH] = value.to_bytes(len(plane), "little")
    return row


def pack(ids: Sequence[Any]) -> bytes | None:
    """Four little-endian bytes per id; None if any value is not a uint32."""
    try:
        packed = array("I", ids)
    except (TypeError, OverflowError):
        return None
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_varints(packed: bytes) -> list[int] | None:
    """Values of a packed uint32 field; None if any is cut or longer than 64 bits.

    Values above 32 bits are cut to 32, as protobuf parsers do. Ids of up to 21 bits, which cover
    every vocabulary, take the short way.
    """
    if packed and packed[-1] >= 0x80:
        return None
    values: list[int] = []
    rest = iter(packed)
    for first in rest:
        if first < 0x80:
            values.append(first)
            continue
        second = next(rest)
        if second < 0x80:
            values.append(first & 0x7F | second << 7)
            continue
        third = next(rest)
        value = first & 0x7F | (second & 0x7F) << 7 | (third & 0x7F) << 14
        place, byte = 21, third
        while byte >= 0x80:
            byte = next(rest)
            value |= (byte & 0x7F) << place
            place += 7
            if place > 70:
                return None
        values.append(value & 0xFFFFFFFF)
    return values


def stamp(rows: io.BytesIO, placeholders: Iterable[tuple[int, int, str]]) -> None:
    """Write image hashes over placeholder tokens, which are equal for all images.

    Up to four tokens of each placeholder become a digest of the hash.

    Args:
        rows: Packed token ids.
        placeholders: (offset in tokens, length in tokens, content hash) per multimodal item;
            items outside the prompt are ignored.
    """
    with rows.getbuffer() as stamped:
        for offset, length, content in placeholders:
            start = offset * WIDTH
            stop = min(start + WIDTH * min(length, WIDTH), len(stamped))
            if 0 <= start < stop:
                digest = mmh3.mmh3_x64_128_digest(content.encode())
                stamped[start:stop] = digest[: stop - start]
