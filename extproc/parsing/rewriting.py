r"""Where in a body another model name goes: the bytes of that one value, and nothing else.

JSON is never written again: keys in another order break tool schemas and exact prefix matches. So
the value is looked for in the bytes. Only the top-level key `model` counts, however it is escaped
(`"mod\u0065l"`), and of several the last one, as JSON decoders have it. A JSON object without the
key gets it as its first member; a multipart form is edited in its last field of that name.

Driven by `dispatch`, for the few requests whose model gets another name.
"""

from __future__ import annotations

import re
from typing import Any, Final

import msgspec

from extproc.decision import Splice
from extproc.parsing import multipart, paths, preparsed
from extproc.parsing.preparsed import ModelPlace
from extproc.request import RawRequest

#: Places that are tried before the body is walked through (count). Usually the first is right.
MOST_TRIES: Final = 3

#: Strings and brackets looked at on that walk (count), which bounds the time a made-up body can
#: take to some 0.1 s. A conversation of 10,000 messages has 60,000.
MOST_TOKENS: Final = 200_000

#: The next string or bracket. Possessive, so that no input makes it try again.
_TOKEN = re.compile(rb'[^"{}\[\]]*+("[^"\\]*+(?:\\.[^"\\]*+)*+"|[{}\[\]])', re.DOTALL)
_OPENED = re.compile(rb"[ \t\r\n]*+\{[ \t\r\n]*+")
_COLON = re.compile(rb"[ \t\r\n]*+:[ \t\r\n]*+")
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)

_KEY = b'"model"'


class _Named(msgspec.Struct, gc=False):
    model: Any = None


_NAMED = msgspec.json.Decoder(_Named)


def splice(raw: RawRequest, model: str) -> Splice | None:
    """The edit after which a body names another model.

    Args:
        raw: The request.
        model: The name to put in.

    Returns:
        None where the body was not shown, is neither a JSON object nor a form, was cut before the
        name, or where its `model` is no string.
    """
    place = raw.place if type(raw) is preparsed.PreparsedRequest else find_place(raw)
    return None if place is None else place.fill(model)


def find_place(raw: RawRequest) -> ModelPlace | None:
    """Where in a body another model name goes; None as of `splice`."""
    content_type = raw.headers.get("content-type", "")
    if not raw.body or content_type.startswith("application/grpc"):
        return None
    if paths.surface_of(paths.path_of(raw)) in {"transcriptions", "translations"}:
        span = multipart.model_span(raw)
        if span is not None:
            # A cut form may go on with the value.
            is_cut = raw.truncated and span[1] == len(raw.body)
            return None if is_cut else ModelPlace(*span, is_form=True)
    tried = None if raw.truncated else _tried(raw.body)
    return tried or _walked(raw.body, whole=not raw.truncated)


def _tried(body: bytes) -> ModelPlace | None:
    """Change what looks like the value, and see whether a decoder reads the change.

    A decoder and a copy take a tenth of the time of the walk.
    """
    old = _model_of(body)
    if old is None:
        return None
    other = old + "-"
    written = msgspec.json.encode(other)
    at = len(body)
    for _ in range(MOST_TRIES):
        at = body.rfind(_KEY, 0, at)
        if at < 0:
            break
        colon = _COLON.match(body, at + len(_KEY))
        value = colon and _STRING.match(body, colon.end())
        if value and _model_of(Splice(*value.span(), written).apply(body)) == other:
            return ModelPlace(*value.span())
    return None


def _model_of(body: bytes) -> str | None:
    try:
        model = _NAMED.decode(body).model
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return model if type(model) is str else None


def _walked(body: bytes, *, whole: bool) -> ModelPlace | None:
    """Find the value by its depth; also in a cut body, and where the key is escaped or missing."""
    opened = _OPENED.match(body)
    if opened is None:
        return None
    found = False
    span: tuple[int, int] | None = None
    depth, at, match = 1, opened.end(), _TOKEN.match
    for _ in range(MOST_TOKENS):
        token = match(body, at)
        if token is None:
            # The end, which only a cut body reaches with a bracket open.
            break
        at = token.end()
        start = token.start(1)
        first = body[start]
        if first == 0x22:
            if depth == 1 and _is_model(body[start:at]) and (colon := _COLON.match(body, at)):
                value = _STRING.match(body, colon.end())
                found, span = True, value and value.span()
                at = value.end() if value else colon.end()
        elif first in b"{[":
            depth += 1
        else:
            depth -= 1
            if not depth:
                break
    else:
        return None
    if span is not None:
        return ModelPlace(*span)
    if found or not whole:
        return None
    start = opened.end()
    after = b"" if body[start : start + 1] == b"}" else b","
    return ModelPlace(start, start, before=_KEY + b":", after=after)


def _is_model(string: bytes) -> bool:
    """Whether a JSON string reads `model`."""
    if string == _KEY:
        return True
    # The longest way to write five characters takes six bytes each.
    if b"\\" not in string or len(string) > 32:
        return False
    try:
        return bool(msgspec.json.decode(string) == "model")
    except (msgspec.DecodeError, UnicodeDecodeError):
        return False
