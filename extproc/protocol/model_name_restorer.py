"""Model name restorer: writes the client's model name back into a response.

A request that was given another model name is answered under that name. Only the model an answer
names for itself is changed: the first `model` of a document, at its top level or directly in the
object that an event of the Responses API (`response`) or the Messages API (`message`) wraps, and
only where it is exactly the name the engine was asked for. Text a model generated is inside of
strings and never looks like that.

A document is the whole body, or each line of a stream of events. Nothing is held back but bytes
that may be the beginning of such a model, so that no complete event waits.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Final

import msgspec

_KEY: Final = b'"model"'
_SPACES: Final = b" \t\r\n"

#: Blanks around the colon that are looked through (count). Engines write none or one; it bounds
#: what is held back.
_MAX_SPACES: Final = 16

#: Keys of objects that stand for the answer in an event of the Responses and the Messages API.
_WRAPPERS: Final = frozenset({b'"response"', b'"message"'})

#: Bytes of a key that are kept, to tell a wrapper.
_MAX_KEY_BYTES: Final = 12

#: Brackets and strings of one document that are looked at (count). Engines write the name among the
#: first dozen members; beyond it an answer stays as it is, and costs nothing more.
_MAX_TOKENS: Final = 16_384

#: Lines of one piece with the key `model` that are looked at (count), 15 to 30 ms; those after them
#: stay as they are. Data planes send up to a megabyte at once, and an event with a model has 200 bytes.
MAX_LINES: Final = 4096

_token = re.compile(rb'["{}\[\]]').search
_named = re.compile(rb'"model"[ \t\r\n]{0,16}+:').match

_QUOTE, _OBJECT, _ARRAY = b'"{['

#: Characters of a string up to its end; possessive, so that no text makes it try again.
_characters: Final = re.compile(rb'[^"\\]*+(?:\\.[^"\\]*+)*+', re.DOTALL).match

_Matcher = Callable[[bytes, int, int], "re.Match[bytes] | None"]

#: What stands before the name, and before that of a usual document: members without depth, up to
#: the model, in one step. Names are no part of a pattern, since clients choose them, and compiling
#: one takes milliseconds.
_before: _Matcher = re.compile(rb'"model"[ \t\r\n]{0,16}+:[ \t\r\n]{0,16}+').match
_before_flat: _Matcher = re.compile(
    rb'(?:data: ?+)?+\{ ?+(?:(?!"model")"[^"\\]*+": ?+(?:"[^"\\]*+"|[-+.\w]++), ?+)*+"model": ?+'
).match


class ModelNameRestorer:
    """Rewrites the model name in one response.

    Args:
        engine_model: The model name in the request to the engine.
        client_model: The model name in the request of the client.
        events: Whether every line is a document of its own.
    """

    __slots__ = (
        "_client_model",
        "_depth",
        "_escaped",
        "_events",
        "_fresh",
        "_held",
        "_inside",
        "_key",
        "_left",
        "_longest_bytes",
        "_names",
        "_over",
        "_wrapped",
    )

    def __init__(self, engine_model: str, client_model: str, *, events: bool) -> None:
        # As most engines write it, and as those that keep to ASCII do.
        self._names = tuple({msgspec.json.encode(engine_model), json.dumps(engine_model).encode()})
        # Bytes that can be the beginning of a model, and one more, which shows that they are not.
        self._longest_bytes = (
            len(_KEY) + _MAX_SPACES + len(b":") + _MAX_SPACES + max(map(len, self._names)) + 1
        )
        self._client_model = msgspec.json.encode(client_model)
        self._events = events
        self._held = b""
        self._start_document()

    def pass_on(self, chunk: bytes, *, last: bool) -> bytes:
        """Rewrite the next bytes of the response; empty while they may begin a match."""
        text = self._held + chunk if self._held else chunk
        changed: list[bytes] = []
        at, size, lines_left = 0, len(text), MAX_LINES
        while at < size:
            if self._events and not self._depth and not self._inside:
                key = text.find(_KEY, at) if lines_left > 0 else -1
                passed = text.rfind(b"\n", at, key if key >= 0 else size) + 1
                if passed:
                    changed.append(text[at:passed])
                    self._start_document()
                    at = passed
                    continue
            lines_left -= 1
            line = text.find(b"\n", at) + 1 if self._events else 0
            end = line or size
            at = self._scan(text, at, end, complete=bool(line) or last, changed=changed)
            if at < end:
                break
            if line:
                self._start_document()
        self._held = text[at:]
        return b"".join(changed)

    def rest(self) -> bytes:
        """The withheld bytes, if the response ended without a last chunk."""
        held, self._held = self._held, b""
        return held

    def _start_document(self) -> None:
        """A document begins."""
        self._depth = 0
        self._fresh = True
        self._inside = self._escaped = self._wrapped = self._over = False
        self._left = _MAX_TOKENS
        self._key = b""

    def _scan(self, text: bytes, at: int, end: int, *, complete: bool, changed: list[bytes]) -> int:
        """Go through a part of a document.

        Args:
            complete: Whether the document ends there.
            changed: Takes the bytes as they become.

        Returns:
            How far it was decided what becomes of it.
        """
        start = at
        if self._fresh:
            self._fresh = False
            start = self._change(_before_flat, text, at, end, start=start, changed=changed)
        while not self._over:
            if self._inside:
                at = self._skip_string(text, at, end)
                if self._inside:
                    break
            token = self._next_token(text, at, end)
            if token is None:
                break
            at = token.start()
            if text[at] == _QUOTE:
                if self._depth == 1 or (self._depth == 2 and self._wrapped):
                    start = self._change(_before, text, at, end, start=start, changed=changed)
                    if self._over:
                        break
                    rest = text[at : min(end, at + self._longest_bytes)]
                    if not complete and self._undecided(rest):
                        changed.append(text[start:at])
                        return at
                    # Another name stands there: it is the engine's own affair.
                    self._over = _named(text, at, end) is not None
                self._inside, self._key = True, b'"'
            else:
                self._on_bracket(text[at])
            at += 1
        changed.append(text[start:end])
        return end

    def _next_token(self, text: bytes, at: int, end: int) -> re.Match[bytes] | None:
        """The next bracket or quote, up to the limit of tokens per document."""
        self._left -= 1
        self._over = self._left < 0
        return None if self._over else _token(text, at, end)

    def _change(
        self,
        before: _Matcher,
        text: bytes,
        at: int,
        end: int,
        *,
        start: int,
        changed: list[bytes],
    ) -> int:
        """Replace the engine's model name if it follows; returns the end of the copied text."""
        match = before(text, at, end)
        if match is None:
            return start
        name_at = match.end()
        for name in self._names:
            if text.startswith(name, name_at, end):
                changed += (text[start:name_at], self._client_model)
                self._over = True
                return name_at + len(name)
        return start

    def _on_bracket(self, bracket: int) -> None:
        """A bracket outside of strings."""
        if bracket not in b"{[":
            self._depth = max(0, self._depth - 1)
            return
        self._depth += 1
        if self._depth == 2:
            self._wrapped = bracket == _OBJECT and self._key in _WRAPPERS

    def _skip_string(self, text: bytes, at: int, end: int) -> int:
        """Go to the end of the string we are in, or of what there is of it."""
        start = at
        if self._escaped and at < end:
            self._escaped = False
            at += 1
        quote = text.find(b'"', at, end)
        stop = quote if quote >= 0 else end
        # Two searches for one byte are many times as fast as one for a class of them.
        if text.find(b"\\", at, stop) >= 0 and (characters := _characters(text, at, end)):
            stop = characters.end()
        at = stop
        if at < end:
            # A quote, or a backslash whose character is still to come.
            self._escaped = text[at] != _QUOTE
            self._inside = self._escaped
            at += 1
        if self._depth == 1 and len(self._key) < _MAX_KEY_BYTES:
            self._key += text[start : min(at, start + _MAX_KEY_BYTES)]
        return at

    def _undecided(self, rest: bytes) -> bool:
        """True if more bytes could complete a match of these, which begin with a quote."""
        if len(rest) <= len(_KEY):
            return _KEY.startswith(rest)
        if not rest.startswith(_KEY):
            return False
        behind = rest[len(_KEY) :]
        value = behind.lstrip(_SPACES)
        if len(behind) - len(value) > _MAX_SPACES:
            return False
        if not value:
            return True
        if not value.startswith(b":"):
            return False
        name = value[1:].lstrip(_SPACES)
        if len(value) - 1 - len(name) > _MAX_SPACES:
            return False
        return any(model_name.startswith(name) for model_name in self._names)


def for_response(
    headers: Mapping[str, str], engine_model: str, client_model: str
) -> ModelNameRestorer | None:
    """Build the restorer of a response.

    Returns:
        None where names are equal or empty, and where the answer is neither JSON nor a stream of
        events, or is compressed.
    """
    if not engine_model or not client_model or engine_model == client_model:
        return None
    if headers.get("content-encoding", "identity") != "identity":
        return None
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    lines = kind in {"text/event-stream", "application/x-ndjson", "application/jsonl"}
    if not lines and kind != "application/json" and not kind.endswith("+json"):
        return None
    return ModelNameRestorer(engine_model, client_model, events=lines)
