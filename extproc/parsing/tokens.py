"""Token ids as bytes: four little-endian bytes per token."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Sequence
from typing import Any

import mmh3

#: Bytes per packed token.
WIDTH = 4
#: Between two tokenised prompts of a batch. No vocabulary has a token 2**32 - 1.
SEPARATOR = b"\xff\xff\xff\xff"


def pack(ids: Sequence[Any]) -> bytes | None:
    """Four little-endian bytes per id; None when something in there is not a uint32."""
    try:
        packed = array("I", ids)
    except (TypeError, OverflowError):
        return None
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_varints(packed: bytes) -> list[int] | None:
    """The uint32 values of a packed protobuf field; None when one is cut or longer than 64 bits.

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


def stamp(packed: bytes, placeholders: Iterable[tuple[int, int, str]]) -> bytes:
    """Write what an image is over its placeholder tokens, which are alike for all images.

    Args:
        packed: Packed token ids.
        placeholders: (offset in tokens, length in tokens, content hash) per multimodal item;
            items outside the prompt are ignored.

    Returns:
        The packed ids with up to four tokens of each placeholder replaced by a digest of the hash.
    """
    stamped = bytearray(packed)
    for offset, length, content in placeholders:
        start = offset * WIDTH
        stop = min(start + WIDTH * min(length, WIDTH), len(stamped))
        if 0 <= start < stop:
            stamped[start:stop] = mmh3.mmh3_x64_128_digest(content.encode())[: stop - start]
    return bytes(stamped)
