"""vLLM's own gRPC surface: `vllm.grpc.engine.VllmEngine`, methods Generate and Embed.

Field numbers are those of `vllm/grpc/vllm_engine.proto` in vLLM (commit 0cdf3ea, package
`vllm.grpc.engine`). Routers that took the file over kept them and added field 7, multimodal
inputs. Fields not in this table are skipped. The surface names no model.

| message | fields read |
|---|---|
| GenerateRequest | 2 tokenized, 3 text (one of the two), 4 sampling_params, 5 stream, 7 mm_inputs |
| EmbedRequest | 2 tokenized |
| TokenizedInput | 2 input_ids (repeated uint32, packed or not) |
| SamplingParams | 8 max_tokens |
| MultimodalInputs | 5 mm_placeholders {1 offset, 2 length}, 6 mm_hashes |

gRPC framing and protobuf fields are read in place: messages of protobuf would copy a body at each
level, which the limits on memory for hostile bodies do not allow.

A frame is one flag byte (0: not compressed), the message length as four big-endian bytes, and the
message. A message is a run of fields: a varint key `number << 3 | wire type`, then a varint (0),
eight bytes (1), a length and so many bytes (2), or four bytes (5).
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Final

import msgspec

from extproc import decision
from extproc.decision import Rejection
from extproc.parsing import canonical_prompt, envelope
from extproc.request import HttpRequest, InferenceRequest, RequestBody

HEADER_BYTES = 5

#: (field number, value): a varint as int, anything with a length as a view of it, since a copy at each
#: level would make a body of some bytes several times as large.
Field = tuple[int, int | memoryview]

_FIXED = {1: 8, 5: 4}

#: Fields of one message that are read (count); a message with more is malformed. Token ids are one
#: field, since proto3 packs them.
MAX_FIELDS: Final = 4096

#: Bytes of varints that are decoded at once; each id takes up to 40 until it is packed.
_CHUNK_BYTES: Final = 32 * 1024
#: Chunks of a field that hold values of more bytes than a uint32 takes, and are read in a loop (count).
_MAX_LOOPED_CHUNKS: Final = 4

_HIGH_BYTES = bytes(range(0x80, 0x100))
#: Bytes of the longest uint32 as a varint.
_VARINT_BYTES: Final = 5
#: What seven bits, the nth of a varint, add to the nth byte of its value, and to the one below.
_LOWERED = [bytes((b & 0x7F) >> at for b in range(256)) for at in range(canonical_prompt.WIDTH)]
_RAISED = [
    bytes((b << (7 - at)) & 0xFF for b in range(256)) for at in range(canonical_prompt.WIDTH)
]


def message_of(body: RequestBody) -> memoryview | None:
    """The first message of a body; None when it is compressed or short."""
    if len(body) < HEADER_BYTES or body[0] != 0:
        return None
    stop = HEADER_BYTES + int.from_bytes(body[1:HEADER_BYTES], "big")
    return memoryview(body)[HEADER_BYTES:stop] if stop <= len(body) else None


def fields_of(message: memoryview) -> list[Field] | None:
    """Fields in wire order without fixed numbers, as no field of the table is one.

    Returns:
        None for a malformed message, groups, or more than `MAX_FIELDS`.
    """
    fields: list[Field] = []
    at, end, num_fields = 0, len(message), 0
    while at < end:
        num_fields += 1
        if num_fields > MAX_FIELDS:
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
                continue
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


def pack_id(value: int) -> bytes:
    """One id, cut to 32 bits as protobuf parsers do."""
    return (value & 0xFFFFFFFF).to_bytes(canonical_prompt.WIDTH, "little")


def count_varints(packed: bytes | memoryview) -> int:
    """Values in a protobuf field of varints (count)."""
    chunks = range(0, len(packed), _CHUNK_BYTES)
    return sum(
        len(bytes(packed[at : at + _CHUNK_BYTES]).translate(None, _HIGH_BYTES)) for at in chunks
    )


def reserve(rows: io.BytesIO, count: int) -> None:
    """Make room for packed ids at once: a buffer that grows takes an eighth more."""
    if count:
        rows.seek(count * canonical_prompt.WIDTH - 1)
        rows.write(b"\0")
        rows.seek(0)


def pack_varints(packed: bytes | memoryview, rows: io.BytesIO) -> bool:
    """Pack a protobuf field of uint32 values, a chunk at a time.

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
            row = None if values is None else canonical_prompt.pack(values)
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
        row = bytearray(canonical_prompt.WIDTH * len(chunk))
        row[:: canonical_prompt.WIDTH] = chunk
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
    row = bytearray(canonical_prompt.WIDTH * len(planes[0]))
    for at, plane in enumerate(planes[: canonical_prompt.WIDTH]):
        value = int.from_bytes(plane.translate(_LOWERED[at]), "little")
        if at + 1 < len(planes):
            value |= int.from_bytes(planes[at + 1].translate(_RAISED[at]), "little")
        row[at :: canonical_prompt.WIDTH] = value.to_bytes(len(plane), "little")
    return row


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


_INVALID: Final = decision.bad_request("invalid or unsupported gRPC payload")

_TOKENIZED: Final = 2
_TEXT: Final = 3
_SAMPLING: Final = 4
_STREAM: Final = 5
_MULTIMODAL: Final = 7
#: The two inputs of a Generate call share a oneof.
_OTHER_INPUT: Final = {_TOKENIZED: _TEXT, _TEXT: _TOKENIZED}
_INPUT_IDS: Final = 2
_MAX_TOKENS: Final = 8
_PLACEHOLDERS: Final = 5
_HASHES: Final = 6
_OFFSET: Final = 1
_LENGTH: Final = 2

#: Longest message with the place of a multimodal item that is read (bytes): two numbers.
_LONGEST_SPAN: Final = 32


def parse_generate(raw: HttpRequest, api: str) -> InferenceRequest | Rejection:
    """Read a Generate call; 400 for a bad frame or a message without input."""
    fields = _fields(raw)
    if fields is None:
        return _INVALID
    parts = _parts_of(fields)
    flags = {number: value for number, value in fields if isinstance(value, int)}
    prompt = _tokenized(parts.get(_TOKENIZED, ()), _placeholders(parts.get(_MULTIMODAL, ())))
    if prompt is None:
        if _TEXT not in parts:
            return _INVALID
        prompt = canonical_prompt.text_prompt(bytes(parts[_TEXT][-1]))
    return msgspec.structs.replace(
        envelope.unparsed_request(raw, api),
        prompt=prompt.content,
        prompt_tokens=prompt.tokens,
        prompt_bytes=prompt.text_bytes,
        stream=bool(flags.get(_STREAM)),
        max_tokens=_max_tokens(parts.get(_SAMPLING, ())),
    )


def parse_embed(raw: HttpRequest, api: str) -> InferenceRequest | Rejection:
    """Read an Embed call; 400 for a bad frame or a message without token ids."""
    fields = _fields(raw)
    prompt = None if fields is None else _tokenized(_parts_of(fields).get(_TOKENIZED, ()))
    if prompt is None:
        return _INVALID
    return msgspec.structs.replace(
        envelope.unparsed_request(raw, api),
        prompt=prompt.content,
        prompt_tokens=prompt.tokens,
    )


def _fields(raw: HttpRequest) -> list[Field] | None:
    message = message_of(raw.body)
    return None if message is None else fields_of(message)


def _parts_of(fields: Sequence[Field]) -> dict[int, list[memoryview]]:
    """Values with a length by field number; of the two inputs, which share a oneof, the last one."""
    parts: dict[int, list[memoryview]] = {}
    for number, value in fields:
        if isinstance(value, memoryview):
            parts.pop(_OTHER_INPUT.get(number, 0), None)
            parts.setdefault(number, []).append(value)
    return parts


def _merge_fields(parts: Sequence[memoryview]) -> list[Field]:
    """Fields of an embedded message, whose occurrences add up; empty where `fields_of` gives None."""
    merged: list[Field] = []
    for part in parts:
        fields = fields_of(part)
        if fields is None or len(merged) + len(fields) > MAX_FIELDS:
            return []
        merged += fields
    return merged


def _tokenized(
    parts: Sequence[memoryview], placeholders: Sequence[tuple[int, int, str]] = ()
) -> canonical_prompt.Prompt | None:
    values = [value for number, value in _merge_fields(parts) if number == _INPUT_IDS]
    rows = io.BytesIO()
    counts = (1 if isinstance(value, int) else count_varints(value) for value in values)
    reserve(rows, sum(counts))
    for value in values:
        if isinstance(value, int):
            rows.write(pack_id(value))
        elif not pack_varints(value, rows):
            return None
    canonical_prompt.stamp(rows, placeholders)
    packed = rows.getvalue()
    return (
        canonical_prompt.Prompt(packed, len(packed) // canonical_prompt.WIDTH) if packed else None
    )


def _max_tokens(parts: Sequence[memoryview]) -> int | None:
    value = dict(_merge_fields(parts)).get(_MAX_TOKENS)
    return min(value & 0xFFFFFFFF, envelope.TOKEN_LIMIT) if isinstance(value, int) else None


def _placeholders(parts: Sequence[memoryview]) -> list[tuple[int, int, str]]:
    """(offset, length, hash) of each multimodal item; empty when the message is malformed."""
    spans: list[tuple[int, int]] = []
    hashes: list[str] = []
    for number, value in _merge_fields(parts):
        if number == _PLACEHOLDERS and isinstance(value, memoryview):
            span = dict(fields_of(value[:_LONGEST_SPAN]) or ())
            offset, length = span.get(_OFFSET, 0), span.get(_LENGTH, 0)
            if isinstance(offset, int) and isinstance(length, int):
                spans.append((offset, length))
        elif number == _HASHES and isinstance(value, memoryview):
            hashes.append(value.hex())
    return [(*span, content) for span, content in zip(spans, hashes, strict=False)]
