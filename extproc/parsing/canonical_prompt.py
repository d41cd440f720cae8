"""Prompts as stable bytes: markers, messages, content parts.

Every field starts with a marker byte from 0xF7 to 0xFF. UTF-8 never produces those, so a marker
cannot be forged by text, and no lengths or trailers are needed: a longer conversation extends the
bytes of a shorter one.

| marker | starts |
|---|---|
| `F7` | an image, a video or audio of the part before it: kind, size, and room for its tokens |
| `F8` | the cache salt, which isolates everything after it |
| `F9` | an option of the chat template, a letter and raw JSON: `F9 k {...}` |
| `FA` | reasoning text kept in the history |
| `FB` | the name of a speaker, or the id of an answered tool call |
| `FC` | tool calls, raw JSON |
| `FD` | a content part that is not text, as JSON with its blobs digested |
| `FE` | text; also one more text of a batch |
| `FF` | a message, with its role |

Prompts without a conversation are text, token ids (four little-endian bytes each), or batches of
either.
"""

from __future__ import annotations

import io
import sys
from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Literal

import mmh3
import msgspec

from extproc.parsing import media
from extproc.request import BYTES_PER_TOKEN

#: Bytes per packed token.
WIDTH = 4
#: Between two tokenized prompts of a batch. No vocabulary has a token 2**32 - 1.
SEPARATOR = b"\xff\xff\xff\xff"


#: Bytes of JSON that are decoded at once; each id takes up to 40 until it is packed.
_CHUNK_BYTES: Final = 32 * 1024
#: Longest JSON number that is an id, with white space around it (bytes).
_LONGEST_ID: Final = 64

_IDS = msgspec.json.Decoder(list[int])
_ENCODER = msgspec.json.Encoder()


class Packed(msgspec.Struct, frozen=True, gc=False):
    """Token ids that were packed while they were decoded.

    Attributes:
        ids: Four little-endian bytes per id.
    """

    ids: bytes


def scan(json: bytes) -> Packed | None:
    """Pack a JSON array of token ids, with its brackets, in chunks; None for any other JSON."""
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


def pack(ids: Sequence[Any]) -> bytes | None:
    """Four little-endian bytes per id; None if any value is not a uint32."""
    try:
        packed = array("I", ids)
    except (TypeError, OverflowError):
        return None
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def read_placeholders(features: Any) -> list[tuple[int, int, str]]:
    """(offset, length, hash) of each multimodal item; items of an unknown form are left out."""
    if type(features) is not dict:
        return []
    hashes, places = features.get("mm_hashes"), features.get("mm_placeholders")
    if type(hashes) is not dict or type(places) is not dict:
        return []
    placeholders = []
    for modality, spans in places.items():
        names = hashes.get(modality)
        if type(spans) is not list or type(names) is not list:
            continue
        for span, name in zip(spans, names, strict=False):
            if type(span) is dict and type(name) is str:
                offset, length = span.get("offset"), span.get("length")
                if type(offset) is int and type(length) is int:
                    placeholders.append((offset, length, name))
    return placeholders


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


SALT = b"\xf8"
OPTION = b"\xf9"
REASONING = b"\xfa"
NAME = b"\xfb"
CALLS = b"\xfc"
PART = b"\xfd"
TEXT = b"\xfe"
MESSAGE = b"\xff"

#: Content parts that are nothing but text, whatever else is in them.
TEXT_PARTS = frozenset({"text", "input_text", "output_text"})
#: Keys under which a part holds base64.
_BLOB_KEYS = frozenset({"data", "file_data", "image_embeds", "b64_json"})
#: Strings shorter than this are cheaper to keep than to digest.
_BLOB_BYTES = 64
#: Marks where the client wants an Anthropic cache breakpoint. It moves from turn to turn and is
#: not in the prompt.
_MOVING_KEY = "cache_control"
#: Parts of a list above which they are encoded so many at a time (count): each takes a tenth of the
#: time, and no client writes so many.
_MANY_PARTS = 64
#: Parts that are JSON whatever they hold.
_JSON_TYPES = frozenset({dict, list, int, float, bool, type(None)})
#: What JSON holds of a part that is text, or is not encoded as it is. Only parts with `content` hold
#: JSON as the client wrote it, with its line breaks. Types of media by their beginnings: to look for a
#: long text takes ten times as long.
_SPECIAL = tuple(
    b'"%b' % text.encode()
    for text in sorted(
        {"text", "content", _MOVING_KEY, "audio", "image", "input_", "video"} | _BLOB_KEYS
    )
)
#: Bytes of fields of media behind one part, above which no more are added.
_MAX_MEDIA_BYTES = 16 * 1024
#: Parts nested deeper than this are kept as they are: tool results nest two or three levels.
_DEEPEST = 16


class TextPart(msgspec.Struct, gc=False):
    """A content part that is nothing but text, as `bounded_decoder` has it in large bodies."""

    type: Literal["text", "input_text", "output_text"]
    text: str


#: A raw field the body does not have; compared by identity.
ABSENT = msgspec.Raw()
#: Raw JSON that says nothing.
_VOID = frozenset({b"", b"null", b"[]", b"{}", b'""'})


def digest(blob: str) -> str:
    """32 hexadecimal digits (mmh3, 128 bits) that stand for a blob."""
    return mmh3.mmh3_x64_128_digest(blob.encode()).hex()


def as_bytes(value: object) -> bytes:
    """Text as UTF-8, nothing as nothing, anything else as JSON."""
    if type(value) is str:
        return value.encode()
    if type(value) is bytes:
        return value
    return b"" if value is None else msgspec.json.encode(value)


def salt(value: object) -> bytes:
    """The cache salt field; empty when there is no salt."""
    if type(value) is bytes:
        return SALT + value
    return SALT + value.encode() if type(value) is str and value else b""


def option(letter: bytes, raw: msgspec.Raw) -> bytes:
    """A template option field; empty when the option is absent, null or empty."""
    if raw is ABSENT:
        return b""
    text = bytes(raw)
    return b"" if text in _VOID else OPTION + letter + text


def calls(raw: msgspec.Raw) -> bytes:
    """A tool calls field; empty when there are none."""
    text = bytes(raw)
    return b"" if text in _VOID else CALLS + text


def content(value: object) -> bytes:
    """Message content: a string, a list of parts, one part, or nothing."""
    if type(value) is str:
        return TEXT + value.encode()
    if type(value) is bytes:
        return TEXT + value
    if type(value) is list:
        if len(value) > _MANY_PARTS:
            return _many_parts(value)
        return b"".join([_part(part) for part in value])
    return b"" if value is None else _part(value)


def _many_parts(parts: list[Any]) -> bytes:
    """Parts of a long list; those that are nothing but JSON are encoded many at a time.

    The list is emptied, so that its parts are not in memory with all that was made of them.
    """
    fields: list[bytes] = []
    for at in range(0, len(parts), _MANY_PARTS):
        row = parts[at : at + _MANY_PARTS]
        parts[at : at + _MANY_PARTS] = [None] * len(row)
        first = row[0]
        lines = b""
        # Messages, which may be long, are not encoded in vain.
        if not (type(first) is dict and "content" in first) and _JSON_TYPES.issuperset(
            map(type, row)
        ):
            lines = _ENCODER.encode_lines(row)
        if not lines or any(map(lines.__contains__, _SPECIAL)):
            is_counted = at < media.MAX_ITEMS
            fields += [_part(part, counts_media=is_counted) for part in row]
        else:
            fields += (PART, lines[:-1].replace(b"\n", PART))
    return b"".join(fields)


def _part(part: object, *, counts_media: bool = True) -> bytes:
    if type(part) is TextPart:
        return TEXT + part.text.encode()
    if type(part) is str:
        return TEXT + part.encode()
    if type(part) is bytes:
        return TEXT + part
    if type(part) is dict:
        kind, text = part.get("type"), part.get("text")
        if type(text) is bytes:
            return TEXT + text
        if type(text) is str and type(kind) is str and kind in TEXT_PARTS:
            return TEXT + text.encode()
        if kind is None:
            part = media.add_type(part)
    return item(part, counts_media=counts_media)


def item(part: object, *, counts_media: bool = True) -> bytes:
    """A part that is not text, as one field; JSON that was not built stays as it is written.

    Args:
        counts_media: Whether fields of its images, videos and audio follow.
    """
    if type(part) is msgspec.Raw:
        return PART + bytes(part)
    if type(part) is Packed:
        return PART + mmh3.mmh3_x64_128_digest(part.ids)
    fields = bytearray() if counts_media else None
    json = PART + msgspec.json.encode(_normalized(part, _DEEPEST, fields))
    if not fields:
        return json
    own = part.get("type") if type(part) is dict else None
    if type(own) is str and own in media.KINDS:
        return json + media.with_json_bytes(bytes(fields), len(json))
    return json + fields


def _normalized(value: Any, depth: int, media_fields: bytearray | None) -> Any:
    """A copy without cache breakpoints and with a digest for each blob; adds fields of media."""
    if depth:
        if type(value) is dict:
            if media_fields is not None and len(media_fields) < _MAX_MEDIA_BYTES:
                kind = value.get("type")
                if type(kind) is str and (item_kind := media.KINDS.get(kind)) is not None:
                    media_fields += media.field(value, item_kind)
            return _normalized_object(value, depth - 1, media_fields)
        if type(value) is list:
            # Near the top only, so that nothing is encoded again and again.
            if len(value) > _MANY_PARTS and depth >= _DEEPEST - 2 and _is_normalized(value):
                return value
            return [_normalized(field, depth - 1, media_fields) for field in value]
    if type(value) is str and len(value) >= _BLOB_BYTES and value.startswith("data:"):
        return digest(value)
    return value


def _is_normalized(values: list[Any]) -> bool:
    """True if a list surely has neither cache breakpoints nor blobs nor media."""
    json = msgspec.json.encode(values)
    return not any(map(json.__contains__, _SPECIAL))


def _normalized_object(
    value: Mapping[str, Any], depth: int, media_fields: bytearray | None
) -> dict[str, Any]:
    copied = {}
    for key, field in value.items():
        if key == _MOVING_KEY:
            continue
        # Most fields are short texts, and a call takes as long as all else here.
        if type(field) is not str:
            copied[key] = _normalized(field, depth, media_fields)
        elif len(field) >= _BLOB_BYTES and (key in _BLOB_KEYS or field.startswith("data:")):
            copied[key] = digest(field)
        else:
            copied[key] = field
    return copied


class TextMessage(msgspec.Struct, gc=False):
    """A message of texts, as `bounded_decoder` has it in large bodies."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[TextPart] | None = None


def loose_message(turn: Mapping[str, Any]) -> bytes:
    """A message, or another item of a history, that was decoded without a type.

    Anything without a role (tool calls and their results in the Responses API, reasoning) is one
    field of JSON under its type.
    """
    role = turn.get("role")
    if role is None:
        return MESSAGE + as_bytes(turn.get("type")) + item(turn)
    return MESSAGE + as_bytes(role) + content(turn.get("content"))


class Prompt(msgspec.Struct, frozen=True, gc=False):
    """A prompt and its size.

    Attributes:
        content: Stable bytes: equal beginnings are equal bytes.
        tokens: Exact for token ids, else estimated; the sum over a batch.
        text_bytes: Bytes of text that `tokens` is estimated from; 0 for token ids.
    """

    content: bytes
    tokens: int
    text_bytes: int = 0


NOTHING = Prompt(b"", 0)


def estimate(size: int) -> int:
    """Tokens in so many bytes of text: a quarter, at least one when there is any."""
    return size // BYTES_PER_TOKEN or (1 if size else 0)


def text_prompt(content: bytes) -> Prompt:
    """A prompt already put into stable bytes, with an estimate of its tokens."""
    size = len(content)
    # As `estimate`, without a call.
    return Prompt(content, size // BYTES_PER_TOKEN or (1 if size else 0), size)


def joined_prompt(fields: list[bytes]) -> Prompt:
    """The prompt of fields, which are cleared: laying it out takes as much again."""
    content = b"".join(fields)
    fields.clear()
    size = len(content)
    # As `text_prompt`, without a call.
    return Prompt(content, size // BYTES_PER_TOKEN or (1 if size else 0), size)


def prompt_of(value: object) -> Prompt | None:
    """Read a `prompt` or `input` value.

    A string is its UTF-8; token ids are four little-endian bytes each, so that blocks of bytes are
    blocks of tokens. Of a batch the first member comes first, the others follow after separators.

    Returns:
        None when the value is absent, empty as a list, or of a type no surface takes.
    """
    if type(value) is str:
        return text_prompt(value.encode())
    if type(value) is Packed:
        return Prompt(value.ids, len(value.ids) // WIDTH)
    if type(value) is bytes:
        return text_prompt(value)
    if type(value) is dict or type(value) is msgspec.Raw:
        return text_prompt(item(value))
    if type(value) is not list or not value:
        return None
    first = value[0]
    if type(first) is int:
        packed = pack(value)
        if packed is not None:
            return Prompt(packed, len(value))
    elif type(first) is list or type(first) is Packed:
        batch = [_packed(ids) for ids in value]
        rows = [row for row in batch if row is not None]
        if len(rows) == len(batch):
            return Prompt(SEPARATOR.join(rows), sum(map(len, rows)) // WIDTH)
    # The first text has no marker before it: alone or first in a batch, it is the same prefix.
    data = content(value)
    return text_prompt(data.removeprefix(TEXT))


def _packed(ids: object) -> bytes | None:
    if type(ids) is Packed:
        return ids.ids
    return pack(ids) if type(ids) is list else None


def with_cache_salt(prompt: Prompt, cache_salt: object) -> Prompt:
    """The prompt behind its cache salt. Salted token ids keep their alignment.

    The salt is padded with zero bytes to whole tokens and closed by a separator.
    """
    head = salt(cache_salt) if cache_salt else b""
    if not head:
        return prompt
    padding = b"\0" * (-len(head) % WIDTH)
    content = head + padding + SEPARATOR + prompt.content
    return Prompt(content, prompt.tokens, prompt.text_bytes)
