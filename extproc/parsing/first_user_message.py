"""First user message: the key of hash-by-prefix strategies."""

from __future__ import annotations

import msgspec

from extproc.parsing import canonical_prompt, surfaces
from extproc.parsing.preparsed import PreparsedRequest
from extproc.request import HttpRequest, InferenceRequest

#: What starts the next field; the likely ones first. Eight searches for one byte each are thirty
#: times as fast as one for a class of eight.
_MARKERS = tuple(bytes([marker]) for marker in range(0xFF, 0xF7, -1))

_SEPARATOR = len(canonical_prompt.SEPARATOR)

#: How a user's message starts in a framed prompt.
_USER = canonical_prompt.MESSAGE + b"user"

#: Bytes of the first user message that are looked at; four for each character of the longest
#: prefix that may be configured.
LONGEST_BYTES = 4 * 4096

#: Characters of which no text takes more than `LONGEST_BYTES`.
_PART_CHARACTERS = LONGEST_BYTES // 4


def first_user_message(request: InferenceRequest) -> str:
    """The text parts of the first user message, or the prompt of a completion.

    KubeAI's rule (docs/spec/prior-systems.md#prefixhash): chat takes the first message with role
    user and ignores system prompt, images and tools; completions take the prompt, of a list its
    first element; embeddings, rerank and audio have none.

    Args:
        request: A parsed request.

    Returns:
        At most `LONGEST_BYTES` bytes as text; empty when the surface has none.
    """
    prompt = request.prompt
    if request.api in surfaces.PLAIN_TEXT:
        # The first text of a prompt has no marker; a cache salt before it ends with a separator.
        at = (
            prompt.find(canonical_prompt.SEPARATOR) + _SEPARATOR
            if prompt.startswith(canonical_prompt.SALT)
            else 0
        )
        return _text(prompt, at, len(prompt))
    begin = _first_user(prompt)
    if begin < 0:
        return ""
    end = prompt.find(canonical_prompt.MESSAGE, begin + 1)
    if end < 0:
        end = begin + len(_USER) + 2 * LONGEST_BYTES  # markers count, too
    text = ""
    at = prompt.find(canonical_prompt.TEXT, begin, end)
    while at >= 0 and len(text) < LONGEST_BYTES:
        following = prompt.find(canonical_prompt.TEXT, at + 1, end)
        text += _text(prompt, at + 1, following if following >= 0 else end)
        at = following
    return text[:LONGEST_BYTES]


def reduced(request: InferenceRequest) -> bytes:
    """The shortest prompt with the opening of a request; empty for a request without one."""
    text = first_user_message(request)
    if not text:
        return b""
    if request.api in surfaces.PLAIN_TEXT:
        return text.encode()
    # Parts, since of one text no more than `LONGEST_BYTES` are read; the marker behind is their end.
    parts = (text[at : at + _PART_CHARACTERS] for at in range(0, len(text), _PART_CHARACTERS))
    return b"".join(
        (
            _USER,
            *(canonical_prompt.TEXT + part.encode() for part in parts),
            canonical_prompt.MESSAGE,
        )
    )


def reduce_preparsed(raw: HttpRequest) -> HttpRequest:
    """The request as it is queued: a stored prompt is reduced to its first user message."""
    if type(raw) is not PreparsedRequest or not isinstance(raw.outcome, InferenceRequest):
        return raw
    outcome = msgspec.structs.replace(raw.outcome, prompt=reduced(raw.outcome))
    return msgspec.structs.replace(raw, outcome=outcome)


def no_message(_: InferenceRequest) -> str:
    """Replacement of `first_user_message` for profiles that do not read it."""
    return ""


def _first_user(prompt: bytes) -> int:
    """Offset of the first user message, -1 if there is none.

    A search for one byte is several times as fast as one for the marker with its role, and most
    often the user's message is the first or follows one system prompt.
    """
    begin = prompt.find(canonical_prompt.MESSAGE)
    if begin < 0 or prompt.startswith(_USER, begin):
        return begin
    begin = prompt.find(canonical_prompt.MESSAGE, begin + 1)
    if begin < 0 or prompt.startswith(_USER, begin):
        return begin
    return prompt.find(_USER, begin)


def _text(prompt: bytes, begin: int, end: int) -> str:
    """The text that starts at `begin` and does not reach beyond its field and `end`."""
    end = min(end, begin + LONGEST_BYTES)
    try:
        return prompt[begin:end].decode()
    except UnicodeDecodeError:
        pass  # another field follows, or the cut goes through a character
    for marker in _MARKERS:
        marker_at = prompt.find(marker, begin, end)
        if marker_at >= 0:
            end = marker_at
    return prompt[begin:end].decode("utf-8", "ignore")
