"""The beginning of the first user message: what hash-by-prefix strategies key on."""

from __future__ import annotations

import re

from extproc.parsing import framing
from extproc.request import Request

#: What starts the next field.
_MARKER = re.compile(rb"[\xf8-\xff]")

#: How a user's message starts in a framed prompt.
_USER = framing.MESSAGE + b"user"

#: Bytes of the first user message that are looked at; four for each character of the longest
#: prefix anybody may configure.
LONGEST_BYTES = 4 * 4096


def of(request: Request) -> str:
    """The text parts of the first user message, or the prompt of a completion.

    KubeAI's rule (seeds report 3.1): chat takes the first message with role user and ignores
    system prompt, images and tools; completions take the prompt, of a list its first element;
    embeddings, rerank and audio have none.

    Args:
        request: A parsed request.

    Returns:
        At most `LONGEST_BYTES` bytes as text; empty when the surface has none.
    """
    prompt = request.prompt
    if request.api == "completions":
        return _text(prompt, prompt.find(framing.TEXT))
    begin = prompt.find(_USER)
    if begin < 0:
        return ""
    end = prompt.find(framing.MESSAGE, begin + 1)
    message = prompt[begin : end if end >= 0 else begin + len(_USER) + LONGEST_BYTES]
    pieces = message.split(framing.TEXT)[1:]
    return "".join(_text(framing.TEXT + piece, 0) for piece in pieces)[:LONGEST_BYTES]


def _text(framed: bytes, at: int) -> str:
    """The text of the field that starts at `at`."""
    if at < 0:
        return ""
    text = framed[at + 1 : at + 1 + LONGEST_BYTES]
    return _MARKER.split(text, 1)[0].decode("utf-8", "ignore")
