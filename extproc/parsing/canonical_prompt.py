r"""Prompts as stable bytes: markers, messages, content parts.

Every field starts with a marker byte from 0xF8 to 0xFF. UTF-8 never produces those, so a marker
cannot be forged by text, and no lengths or trailers are needed: a longer conversation extends the
bytes of a shorter one.

| marker | starts |
|---|---|
| `F8` | the cache salt, which isolates everything after it |
| `F9` | an option of the chat template, a letter and raw JSON: `F9 k {...}` |
| `FA` | reasoning text kept in the history |
| `FB` | the name of a speaker, or the id of an answered tool call |
| `FC` | tool calls, raw JSON |
| `FD` | a content part that is not text, as JSON with its blobs digested |
| `FE` | text; also one more text of a batch |
| `FF` | a message, with its role |
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mmh3
import msgspec

from extproc.parsing.tokens import Packed

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
#: Parts nested deeper than this are kept as they are: tool results nest two or three levels.
_DEEPEST = 16

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
        return b"".join([_part(part) for part in value])
    return b"" if value is None else _part(value)


def _part(part: object) -> bytes:
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
    return item(part)


def item(part: object) -> bytes:
    """A part that is not text, as one field; JSON that was not built stays as it is written."""
    if type(part) is msgspec.Raw:
        return PART + bytes(part)
    if type(part) is Packed:
        return PART + mmh3.mmh3_x64_128_digest(part.ids)
    return PART + msgspec.json.encode(_normalized(part, _DEEPEST))


def _normalized(value: Any, depth: int) -> Any:
    """A copy without cache breakpoints and with a digest for each blob."""
    if depth:
        if type(value) is dict:
            return {
                key: _normalized_field(key, field, depth - 1)
                for key, field in value.items()
                if key != _MOVING_KEY
            }
        if type(value) is list:
            return [_normalized(field, depth - 1) for field in value]
    if type(value) is str and len(value) >= _BLOB_BYTES and value.startswith("data:"):
        return digest(value)
    return value


def _normalized_field(key: str, value: Any, depth: int) -> Any:
    if type(value) is str and len(value) >= _BLOB_BYTES and key in _BLOB_KEYS:
        return digest(value)
    return _normalized(value, depth)


def loose_message(turn: Mapping[str, Any]) -> bytes:
    """A message, or another item of a history, that was decoded without a type.

    Anything without a role (tool calls and their results in the Responses API, reasoning) is one
    field of JSON under its type.
    """
    role = turn.get("role")
    if role is None:
        return MESSAGE + as_bytes(turn.get("type")) + item(turn)
    return MESSAGE + as_bytes(role) + content(turn.get("content"))
