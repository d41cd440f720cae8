"""Decoding of JSON bodies within bounds: work and memory grow linearly with the bytes.

Two bytes of JSON can make an object of a hundred. So a body is decoded at once only where it cannot
hold many values: where it is short, where it holds nothing but narrow types (`narrow_types`), or where
counting shows it. Any other one is decoded field by field: long texts become
UTF-8 without ever being one `str`, lists of token ids become bytes where a field may hold them, and
what has more values than the rest of the budget stays JSON, as the client wrote it. Equal beginnings
stay equal, so such a body still finds its prefix.

What surfaces get in place of a decoded value:

| type | what it stands for |
|---|---|
| `bytes` | a long text, as UTF-8 |
| `tokens.Packed` | a list of token ids |
| `msgspec.Raw` | JSON that has too many values to be built |
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Sequence
from typing import Any, Final, TypeVar

import msgspec

from extproc.parsing import canonical_prompt, narrow_types
from extproc.request import RequestBody

Decoded = TypeVar("Decoded", bound=msgspec.Struct)

#: Values that are built of any body (count); 135 bytes each where they are smallest. Prose and code of
#: 100 kB have fewer commas and brackets, so that most bodies are counted once and not cut into strings.
MAX_VALUES: Final = 8192
#: Bytes of a body that allow for one value more: under three times its size. Prose has a comma in 80.
_BYTES_PER_VALUE: Final = 48
#: Longest body that is decoded without counting first (bytes). One of empty objects takes 1.4 MiB and
#: some 4 ms, and one body is decoded at a time. Counting adds a fifth to the decoding of prose.
SHORT_BYTES: Final = 16 * 1024
#: Elements of one array that are looked at (count): messages, parts, documents, members of a batch.
#: An array of more stays JSON.
MAX_ELEMENTS: Final = 4096
#: Longest text, or body, with a character beyond U+FFFF that is decoded at once: its `str` takes four
#: bytes for each character, and its encoding as much again. Escapes are looked for in longer ones only,
#: since that takes as long as decoding.
_WIDE_BYTES: Final = 448 * 1024
_WIDE_ESCAPED_BYTES: Final = 1024 * 1024
#: First bytes of characters beyond U+FFFF in UTF-8.
_WIDE_LEADS = (b"\xf0", b"\xf1", b"\xf2", b"\xf3", b"\xf4")
#: Bytes of a text that are decoded at once.
_CHUNK_BYTES: Final = 64 * 1024
#: Values of JSON that is decoded at once as long as the budget lasts (count).
_CHEAP: Final = 64
#: Bytes of an array in which its first element begins.
_LONGEST_GAP: Final = 16
#: Bytes of a body for each quotation mark, below which its strings are gone through one by one.
_BYTES_PER_QUOTE: Final = 4096
#: Arrays and objects in one another that are looked into; below, JSON stays as it is.
_DEEPEST: Final = 4
#: Bytes of JSON for each value in it, up to which it is not looked into: it holds hardly any text, and
#: every time that it is gone through takes ten times as long as through text.
_BYTES_PER_DENSE_VALUE: Final = 4
#: Arrays that begin in one another. Going through them takes ten times as long as through others.
_DEEP = b"[" * 64

#: What stands before or between values.
_MARKS = (b",", b"{", b"[")
#: All other bytes. To drop these leaves few to be written, which takes two thirds of the time.
_NO_MARKS = bytes(set(range(256)).difference(b"".join(_MARKS)))
#: Bytes for each mark, above which marks are rare.
_RARE_BYTES: Final = 40
#: Bytes in the middle of the first chunk that show how dense the marks are.
_SAMPLE_BYTES: Final = 512

_OPENING_QUOTE = 0x22
_BACKSLASH = 0x5C
_OPENING_BRACKET = 0x5B
_OPENING_BRACE = 0x7B

#: Bytes of the longest escape of a JSON string: a backslash, `u` and four digits.
_ESCAPE_BYTES: Final = 6
_HIGH_SURROGATE = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}\Z")

_ABSENT = canonical_prompt.ABSENT
_DECODE = msgspec.json.Decoder().decode
_TEXT = msgspec.json.Decoder(str).decode


#: Decoders of the beginning of an array are tried for so many elements (count); the first for short
#: arrays, since the other one takes tens of microseconds for any.
_FEW = 64
#: Elements of the budget that the longer one takes besides those it finds (count).
_LONG_ARRAY = 256
#: Arrays of which the longer one is tried at once (bytes), so that they are gone through once; and
#: values that are looked into before they are measured.
_LONG_BYTES: Final = 16 * 1024


@functools.cache
def _attempts(kind: Any) -> Sequence[tuple[msgspec.json.Decoder[Any], int]]:
    """Decoders of arrays of a type, for few and many elements, and the budget that each takes."""
    return (_leading(_FEW + 1, kind), 1), (_leading(MAX_ELEMENTS + 1, kind), _LONG_ARRAY)


def _leading(count: int, kind: Any) -> msgspec.json.Decoder[Any]:
    """A decoder of the first elements of an array; the others are skipped, and not built."""
    names = [(f"element_{at}", kind, _ABSENT) for at in range(count)]
    return msgspec.json.Decoder(msgspec.defstruct("_First", names, array_like=True, gc=False))


def _is_there(element: Any) -> bool:
    return element is not _ABSENT


class _Object(msgspec.Struct, gc=False):
    """Fields that classify an object of a history."""

    type: msgspec.Raw = _ABSENT
    text: msgspec.Raw = _ABSENT
    role: msgspec.Raw = _ABSENT
    content: msgspec.Raw = _ABSENT


_OBJECT = msgspec.json.Decoder(_Object).decode


def num_values(json: RequestBody, most: int) -> int:
    """More values than JSON text has, strings included; counting stops soon after `most`."""
    counted, is_dense = 0, _estimate_marks(json) * _RARE_BYTES > len(json)
    for at in range(0, len(json), _CHUNK_BYTES):
        chunk = json[at : at + _CHUNK_BYTES]
        size = len(chunk)
        if is_dense:
            marks = len(chunk.translate(None, _NO_MARKS))
        else:
            # Replacing jumps from mark to mark, many times as fast where they are rare.
            marks = 3 * size
            for mark in _MARKS:
                marks -= len(chunk.replace(mark, b""))
        counted += marks
        if counted > most:
            break
        is_dense = marks * _RARE_BYTES > size
    return counted


def _estimate_marks(json: RequestBody) -> float:
    """Estimate the marks of JSON text by those in the middle of its first chunk."""
    middle = min(len(json), _CHUNK_BYTES) // 2
    sample = json[middle : middle + _SAMPLE_BYTES]
    marks = len(sample.translate(None, _NO_MARKS))
    return marks * len(json) / max(1, len(sample))


def is_light(body: RequestBody) -> bool:
    """True if a body can be decoded at once; short bodies always can.

    False where it may have too many values, or where a long text may have a wide character.
    """
    if len(body) <= SHORT_BYTES:
        return True
    most = _budget(body)
    texts = _cut_few(body)
    if texts is None:
        if _estimate_marks(body) <= most and not _is_wide(body) and num_values(body, most) <= most:
            return True
        texts = _cut_many(body, 2 * most)
        if texts is None:
            return False
    outside, longest_bytes = texts
    if num_values(outside, most) > most:
        return False
    return longest_bytes <= _WIDE_BYTES or not _is_wide(body)


def _cut_few(json: RequestBody) -> tuple[bytes, int] | None:
    """Bytes outside of strings, and the length of the longest string; None if there are many."""
    outside: list[RequestBody] = []
    start, at, is_inside, longest_bytes = 0, -1, False, 0
    find = json.find
    for _ in range(len(json) // _BYTES_PER_QUOTE):
        before, at = at, find(b'"', at + 1)
        if at < 0:
            if not is_inside:
                outside.append(json[start:])
            return b"".join(outside), longest_bytes
        if not is_inside:
            outside.append(json[start:at])
            is_inside, start = True, at + 1
        elif json[at - 1] != _BACKSLASH or not _is_escaping(json[before + 1 : at]):
            longest_bytes = max(longest_bytes, at - start)
            is_inside, start = False, at + 1
    return None


def _is_escaping(text: RequestBody) -> bool:
    """True if a piece of a string ends in an odd number of backslashes."""
    return (len(text) - len(text.rstrip(b"\\"))) % 2 == 1


def _cut_many(json: RequestBody, most: int) -> tuple[bytes, int] | None:
    """The same as `_cut_few`, without what is escaped; None if there are more quotation marks."""
    if b"\\" in json:
        # Of a run of backslashes each second one is escaped by the one before.
        json = json.replace(b"\\\\", b"").replace(b'\\"', b"")
    pieces = json.split(b'"', most)
    if len(pieces) > most:
        return None
    return b"".join(pieces[::2]), max(map(len, pieces))


def _budget(body: RequestBody) -> int:
    return MAX_VALUES + len(body) // _BYTES_PER_VALUE


def _is_wide(json: RequestBody) -> bool:
    if len(json) <= _WIDE_BYTES:
        return False
    if not json.isascii() and any(lead in json for lead in _WIDE_LEADS):
        return True
    # A search for one byte is forty times as fast as one for two.
    return len(json) > _WIDE_ESCAPED_BYTES and b"\\" in json and b"\\u" in json


def decode(decoder: msgspec.json.Decoder[Decoded], body: RequestBody) -> Decoded:
    """Decode a body into the struct of a surface.

    Raises:
        msgspec.DecodeError: The body is no JSON, or a typed field is of another type.
        UnicodeDecodeError: A text is no UTF-8.
        RecursionError: It nests too deep.
    """
    if len(body) <= SHORT_BYTES:
        return decoder.decode(body)
    decoded: Decoded | None = None
    if len(body) > narrow_types.LONGEST_IDS_BYTES:
        decoded = narrow_types.decode_around_ids(decoder.type, body)
    if decoded is None and len(body) <= narrow_types.LONGEST_BYTES and not _is_wide(body):
        decoded = narrow_types.decoder_for(decoder.type, len(body)).decode(body)
    if decoded is None:
        if is_light(body):
            return decoder.decode(body)
        decoded = StepwiseReading(body).struct(decoder.type, body)
    return decoded


class StepwiseReading:
    """The decoding of one body in steps, within a budget.

    Attributes:
        values_left: Values that may still be built (count).
        elements_left: Elements that may still be looked at (count).
    """

    def __init__(self, body: RequestBody) -> None:
        self.values_left = _budget(body)
        self.elements_left = 2 * MAX_ELEMENTS + self.values_left

    def struct(self, kind: Any, json: RequestBody | msgspec.Raw) -> Any:
        """A struct of a surface from its object."""
        twin, _ = _twin(kind)
        return self._build(kind, twin.decode(json))

    def _build(self, kind: Any, raws: Any) -> Any:
        """A struct of a surface from its fields as JSON."""
        _, elements = _twin(kind)
        raw_fields, ids_fields = _raw_fields(kind), narrow_types.ids_fields(kind)
        built = {}
        for field in kind.__struct_fields__:
            raw = getattr(raws, field)
            if raw is _ABSENT:
                continue
            if field in elements:
                built[field] = self._structs(elements[field], raw)
            elif field in raw_fields:
                built[field] = raw
            else:
                built[field] = self.value(raw, _DEEPEST, may_be_ids=field in ids_fields)
        return kind(**built)

    def _structs(self, kind: Any, raw: msgspec.Raw) -> list[Any] | None:
        """Messages; of too many, one whose content is all of them, as JSON."""
        first = bytes(memoryview(raw)[:1])
        if first == b"n":
            return None
        if first != b"[":
            raise msgspec.ValidationError("Expected `array | null`")
        twin, _ = _twin(kind)
        try:
            # With the array, since each time that JSON is gone through counts.
            elements = self._elements(raw, twin.type)
        except msgspec.ValidationError:
            # Not all are objects, which is refused where they are few enough to be looked at.
            if (elements := self._elements(raw)) is not None:
                raise
        if elements is None:
            return [kind(content=raw)]
        return [self._build(kind, element) for element in elements]

    def value(self, raw: msgspec.Raw, depth: int, *, may_be_ids: bool = False) -> Any:
        """A value of any type, as the table of the module has it.

        Args:
            depth: Arrays and objects in one another that may be looked into.
            may_be_ids: Whether it may list token ids, or lists of them.
        """
        first = memoryview(raw)[0]
        if first == _OPENING_QUOTE:
            return _text(raw)
        if first not in (_OPENING_BRACKET, _OPENING_BRACE):
            return _DECODE(raw)
        if (
            may_be_ids
            and first == _OPENING_BRACKET
            and (packed := canonical_prompt.scan(bytes(raw))) is not None
        ):
            return packed
        # What is long is looked into anyway, and its values are counted where they are found.
        is_long = depth > 0 and len(memoryview(raw)) > _LONG_BYTES
        if is_long and (read := self._look_into(raw, depth - 1, may_be_ids=may_be_ids)) is not None:
            return read
        is_wide, cost = _measure(bytes(raw), self.values_left)
        # Marks in texts are no values: what has many is looked into before it is paid for.
        if (
            depth
            and not is_long
            and cost > min(self.values_left, _CHEAP)
            and (read := self._look_into(raw, depth - 1, may_be_ids=may_be_ids)) is not None
        ):
            return read
        if is_wide or cost > self.values_left:
            return raw
        self.values_left -= cost
        return _DECODE(raw)

    def _look_into(
        self, raw: msgspec.Raw, depth: int, *, may_be_ids: bool
    ) -> dict[str, Any] | list[Any] | None:
        json = memoryview(raw)
        is_array = json[0] == _OPENING_BRACKET
        opening = bytes(json[1:_LONGEST_GAP]).lstrip()[:1]
        if may_be_ids and is_array and opening == b"[":
            # Members of a batch are token ids, which are packed however dense they are.
            return self._array(raw, 0, may_be_ids=True)
        # There is no text in an array of numbers.
        if is_array and opening not in b'"[{':
            return None
        # Once: what is dense within JSON that is not is little of it.
        if depth == _DEEPEST - 1 and _is_dense(bytes(raw)):
            return None
        if is_array:
            return self._array(raw, depth, may_be_ids=may_be_ids)
        return self._object(raw, depth)

    def _array(self, raw: msgspec.Raw, depth: int, *, may_be_ids: bool) -> list[Any] | None:
        elements = self._elements(raw)
        if elements is None:
            return None
        # An array in an array is a member of a batch: token ids, or nothing worth a look.
        return [
            self.value(
                element,
                depth if memoryview(element)[0] == _OPENING_BRACE else 0,
                may_be_ids=may_be_ids,
            )
            for element in elements
        ]

    def _elements(self, raw: msgspec.Raw, kind: Any = msgspec.Raw) -> list[Any] | None:
        """Elements of an array; None if they are too many, in it or in the body, or too deep.

        Raises:
            msgspec.ValidationError: One of the first elements is of another type.
        """
        if _DEEP in bytes(raw):
            return None
        is_long = len(memoryview(raw)) > _LONG_BYTES
        for decoder, cost in _attempts(kind)[is_long:]:
            if self.elements_left <= 0:
                return None
            first = decoder.decode(raw)
            names = first.__struct_fields__
            if getattr(first, names[-1]) is not _ABSENT:
                self.elements_left -= len(names) + cost
                continue
            elements = list(itertools.takewhile(_is_there, map(first.__getattribute__, names)))
            self.elements_left -= len(elements) + cost
            return elements
        return None

    def _object(self, raw: msgspec.Raw, depth: int) -> dict[str, Any] | None:
        """A message or a part of text; None for any other object."""
        parts = _OBJECT(raw)
        if parts.role is not _ABSENT and parts.content is not _ABSENT:
            content = self.value(parts.content, depth)
            return {"role": self.value(parts.role, 0), "content": content}
        if parts.text is not _ABSENT and parts.type is not _ABSENT:
            kind = self.value(parts.type, 0)
            if type(kind) is str and kind in canonical_prompt.TEXT_PARTS:
                return {"type": kind, "text": self.value(parts.text, 0)}
        return None


def _is_dense(json: bytes) -> bool:
    """True for JSON of little but short values. Its caller holds no copy of it."""
    most = len(json) // _BYTES_PER_DENSE_VALUE
    texts = _cut_few(json)
    return num_values(json if texts is None else texts[0], most) >= most


def _measure(json: bytes, most: int) -> tuple[bool, int]:
    """True if a wide character is in it, and its `num_values`. Its caller holds no copy of it."""
    return _is_wide(json), num_values(json, most)


def _text(raw: msgspec.Raw) -> str | bytes:
    """A string: as such while it is short, else as UTF-8, decoded in chunks."""
    json = bytes(raw)
    if len(json) <= _CHUNK_BYTES:
        return _TEXT(json)
    if json.isascii() and b"\\u" not in json:
        return json[1:-1] if b"\\" not in json else _TEXT(json).encode()
    pieces: list[bytes] = []
    at, end = 1, len(json) - 1
    while at < end:
        stop = _chunk_end(json, at, end)
        pieces.append(_TEXT(b'"%b"' % json[at:stop]).encode())
        at = stop
    return b"".join(pieces)


def _chunk_end(json: bytes, at: int, end: int) -> int:
    """End of a chunk of a string: between characters, outside of a surrogate pair."""
    if end - at <= _CHUNK_BYTES:
        return end
    stop = at + _CHUNK_BYTES
    if begun := _open_escape(json, at, stop):
        stop = begun
    limit = stop
    while stop > limit - 4 and json[stop] & 0xC0 == 0x80:
        stop -= 1
    pair = _HIGH_SURROGATE.search(json, max(at, stop - _ESCAPE_BYTES), stop)
    if pair and _open_escape(json, at, pair.start() + 1):
        stop = pair.start()
    return stop if stop > at else end


def _open_escape(json: bytes, at: int, stop: int) -> int:
    """Start of the escape that continues at `stop`; 0 for none. None is open at `at`."""
    last = json.rfind(b"\\", max(at, stop - _ESCAPE_BYTES + 1), stop)
    if last < 0:
        return 0
    run = json[at : last + 1]
    # Of a run of backslashes each second one is escaped by the one before.
    if (len(run) - len(run.rstrip(b"\\"))) % 2 == 0:
        return 0
    length = _ESCAPE_BYTES if json[last + 1 : last + 2] == b"u" else 2
    return last if last + length > stop else 0


@functools.cache
def _twin(kind: Any) -> tuple[msgspec.json.Decoder[Any], dict[str, Any]]:
    """A decoder that leaves every field of a struct as JSON, and its fields that list structs."""
    fields = msgspec.structs.fields(kind)
    twin = msgspec.defstruct(
        f"_{kind.__name__}", [(field.name, msgspec.Raw, _ABSENT) for field in fields], gc=False
    )
    return msgspec.json.Decoder(twin), {
        field.name: element
        for field in fields
        if (element := narrow_types.element_of(field.type)) is not None
    }


@functools.cache
def _raw_fields(kind: Any) -> frozenset[str]:
    """Fields that a surface takes as JSON anyway."""
    return frozenset(
        field.name for field in msgspec.structs.fields(kind) if field.type is msgspec.Raw
    )
