"""Opaque requests: on an unknown path, or with a cut body.

None of these is ever refused. What can be read cheaply is read, so that a request on an unknown
path still finds its model and its prefix (GIE conformance posts `{model, prompt}` to paths of its
own; SageMaker posts any OpenAI body to `/invocations`).
"""

from __future__ import annotations

import re
from typing import Any, Final

import msgspec

from extproc.parsing import bounded_decoder, canonical_prompt, envelope, narrow_types, openai_api
from extproc.request import HttpRequest, InferenceRequest

#: Larger bodies on unknown paths are not looked into: uploads, not prompts.
LARGEST_BYTES: Final = 1 << 20

#: Largest size of a cut body for which its `content-length` counts (bytes): a larger claim must not
#: make an endpoint look busy.
MAX_LENGTH: Final = 64 << 20

_MODEL = re.compile(rb'"model"\s*:\s*("(?:[^"\\]|\\.){0,1024}")')
_STREAM = re.compile(rb'"stream"\s*:\s*true')


class LooseBody(envelope.Envelope, gc=False):
    """The usual places of a prompt."""

    prompt: narrow_types.TextOrIds = None
    messages: Any = None
    input: narrow_types.TextOrIds = None


_DECODER = msgspec.json.Decoder(LooseBody)
_ENVELOPE = msgspec.json.Decoder(envelope.Envelope)


def parse(raw: HttpRequest, api: str) -> InferenceRequest:
    """Read model and prompt if the body is a small JSON object that has them."""
    body = _decode(_DECODER, raw)
    if body is None:
        return envelope.unparsed_request(raw, api)
    prompt = (
        canonical_prompt.prompt_of(body.prompt)
        or openai_api.loose_prompt(body.messages)
        or canonical_prompt.prompt_of(body.input)
        or canonical_prompt.NOTHING
    )
    return envelope.request(
        api, raw, body, prompt=canonical_prompt.with_cache_salt(prompt, body.cache_salt)
    )


def parse_envelope(raw: HttpRequest, api: str) -> InferenceRequest:
    """Read everything but the prompt, for work that leaves nothing in a prefix cache."""
    body = _decode(_ENVELOPE, raw)
    if body is None:
        return envelope.unparsed_request(raw, api)
    return envelope.request(api, raw, body, prompt=canonical_prompt.NOTHING)


def _decode(
    decoder: msgspec.json.Decoder[envelope.BodyT], raw: HttpRequest
) -> envelope.BodyT | None:
    if len(raw.body) > LARGEST_BYTES or not raw.body[:64].lstrip().startswith(b"{"):
        return None
    try:
        return bounded_decoder.decode(decoder, raw.body)
    except (ValueError, RecursionError):
        return None


def parse_truncated(raw: HttpRequest, api: str) -> InferenceRequest:
    """Read a body of which only the beginning was shown (BUFFERED_PARTIAL).

    The raw bytes are the prompt: equal beginnings of bodies are equal beginnings of prompts, as
    long as a client writes its fields in one order. `content-length` tells the whole size.
    """
    match = _MODEL.search(raw.body)
    model = _unquote(match[1]) if match else ""
    content_length = raw.headers.get("content-length", "")
    length = int(content_length) if content_length.isdecimal() and len(content_length) < 16 else 0
    length = max(min(length, MAX_LENGTH), len(raw.body))
    return InferenceRequest(
        api,
        model=model or envelope.model_header(raw.headers),
        prompt=bytes(raw.body),
        prompt_tokens=canonical_prompt.estimate(length),
        stream=_STREAM.search(raw.body) is not None,
        session=envelope.session_of_headers(raw.headers),
        subset=raw.subset,
        prompt_bytes=length,
    )


def _unquote(text: bytes) -> str:
    try:
        return str(msgspec.json.decode(text))
    except ValueError:
        return ""
