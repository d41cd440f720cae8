"""Narrow types: structs of surfaces whose decoded values stay small beside their JSON.

Surfaces type their fields `Any`, and a value of `Any` may take a hundred times its bytes. Nearly all
bodies hold the same few things: roles by name, texts, parts of text, token ids. A struct of just these
stays within four times a body's size, however the body is written, and nothing has to be counted.

A field is a single value unless it is annotated with one of the types below.
"""

from __future__ import annotations

import functools
from typing import Annotated, Any, Final, Literal, NamedTuple, TypedDict, get_args

import msgspec

from extproc.parsing import canonical_prompt
from extproc.request import RequestBody

#: Longest bodies for which that holds, and of a surface whose token ids are decoded (bytes): a message
#: takes 89 bytes and has at least 16, an id takes 41 and may have 4.
LONGEST_BYTES: Final = 1024 * 1024
LONGEST_IDS_BYTES: Final = 256 * 1024

#: What stands for token ids in the rest of their body, as text and as JSON; no text has a NUL in it.
_IDS_TEXT: Final = "\0ids"
_IDS_JSON: Final = b'"\\u0000ids"'
#: Bytes between the name of a field and its value (count).
_LONGEST_GAP: Final = 16

#: Messages from which on a body is not decoded into narrow types (count).
_MAX_MESSAGES: Final = 4096


class _EnvelopeObject(TypedDict, total=False):
    """Keys that surfaces read in an object; others are skipped."""

    id: str | None
    session_id: str | None
    user_id: str | None
    effort: str | None
    max_new_tokens: int | float | None
    max_tokens: int | float | None


_Value = str | int | float | bool | None
_Role = Literal["system", "developer", "user", "assistant", "tool", "function"]
_Ids = _Value | list[int]

#: The role of a message; required.
Role = Annotated[Any, _Role]
#: Text, or parts of text.
Content = Annotated[Any, _Value | list[canonical_prompt.TextPart]]
#: Text, or messages.
Messages = Annotated[Any, _Value | list[canonical_prompt.TextMessage]]
#: Text, or token ids.
TextOrIds = Annotated[Any, _Ids]
#: An object of which a few keys are read.
Object = Annotated[Any, _Value | _EnvelopeObject]


class NarrowDecoder(NamedTuple):
    """A decoder of a struct with the names of another one, and narrow types.

    Attributes:
        messages: Fields that list structs.
        ids: Fields that may list token ids.
    """

    decoder: msgspec.json.Decoder[Any]
    messages: tuple[str, ...]
    ids: tuple[str, ...]

    def decode(self, body: RequestBody) -> Any:
        """Decode a body; None where it holds anything else, or more messages.

        Raises:
            msgspec.DecodeError: The body is no JSON.
            UnicodeDecodeError: A text is no UTF-8.
            RecursionError: It nests too deep.
        """
        try:
            decoded = self.decoder.decode(body)
        except msgspec.ValidationError:
            return None
        for name in self.messages:
            messages = getattr(decoded, name)
            if messages is not None and len(messages) > _MAX_MESSAGES:
                return None
        for name in self.ids:
            ids = getattr(decoded, name)
            if type(ids) is list and ids:
                packed = canonical_prompt.pack(ids)
                if packed is None:
                    return None
                setattr(decoded, name, canonical_prompt.Packed(packed))
        return decoded


def decoder_for(kind: Any, num_bytes: int) -> NarrowDecoder:
    """The decoder of a surface's struct for a body of so many bytes."""
    return _build(kind, num_bytes <= LONGEST_IDS_BYTES)


def decode_around_ids(kind: Any, body: RequestBody) -> Any:
    """Decode a body of any length that is short but for its token ids.

    The ids are packed a chunk at a time, and what is around them is decoded.

    Returns:
        The narrow struct; None for any other body.
    """
    for name in ids_fields(kind):
        key = b'"%b"' % name.encode()
        at = body.find(key)
        begin = at + len(key)
        start = body.find(b"[", begin, begin + _LONGEST_GAP) if at >= 0 else -1
        stop = body.find(b"]", start) + 1 if start >= 0 else 0
        if not stop or body[begin:start].strip() != b":":
            continue
        if start + len(body) - stop > LONGEST_IDS_BYTES:
            continue
        rest = b"".join((body[:start], _IDS_JSON, body[stop:]))
        # Once: then what is decoded as this text was written here, and not in a text of the client.
        if rest.count(_IDS_JSON) > 1:
            continue
        try:
            decoded = decoder_for(kind, LONGEST_BYTES).decode(rest)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None
        if decoded is None or getattr(decoded, name) != _IDS_TEXT:
            continue
        packed = canonical_prompt.scan(bytes(body[start:stop]))
        if packed is None:
            return None
        setattr(decoded, name, packed)
        return decoded
    return None


@functools.cache
def ids_fields(kind: Any) -> tuple[str, ...]:
    """Fields of a struct that may list token ids."""
    fields = msgspec.structs.fields(kind)
    return tuple(field.name for field in fields if field.type == TextOrIds)


@functools.cache
def _build(kind: Any, has_ids: bool) -> NarrowDecoder:  # noqa: FBT001 - the key of a cache
    fields = msgspec.structs.fields(kind)
    return NarrowDecoder(
        msgspec.json.Decoder(_narrow(kind, has_ids=has_ids)),
        tuple(field.name for field in fields if element_of(field.type) is not None),
        ids_fields(kind) if has_ids else (),
    )


def _narrow(kind: Any, *, has_ids: bool) -> type[msgspec.Struct]:
    fields: list[Any] = []
    for field in msgspec.structs.fields(kind):
        narrow: Any = field.type
        element = element_of(narrow)
        if element is not None:
            narrow = list[_narrow(element, has_ids=has_ids)] | None  # type: ignore[misc]
        elif narrow is Any:
            narrow = _Value
        elif narrow is not msgspec.Raw:
            narrow = get_args(narrow)[1]
            narrow = _Value if narrow == _Ids and not has_ids else narrow
        # Without a default where a field is required.
        fields.append((field.name, narrow, *(() if narrow is _Role else (field.default,))))
    return msgspec.defstruct(f"_Narrow{kind.__name__}", fields, gc=False)


def element_of(kind: Any) -> Any:
    """The struct of a field `list[struct] | None`; None for any other field."""
    for member in getattr(kind, "__args__", ()):
        for element in getattr(member, "__args__", ()):
            if isinstance(element, type) and issubclass(element, msgspec.Struct):
                return element
    return None
