"""Surfaces whose prompt is a single field: completions, images, embeddings, pooling."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from extproc import decision
from extproc.decision import Rejection
from extproc.parsing import canonical_prompt, envelope, narrow_types, openai_chat
from extproc.request import HttpRequest, InferenceRequest

_NO_PROMPT: Final = "invalid completions request: must have prompt field"
_NO_IMAGE_PROMPT: Final = "invalid images generations request: must have prompt field"
_NO_INPUT: Final = "invalid embeddings request: must have input field"


class CompletionBody(envelope.Envelope, gc=False):
    """Fields that are read from a body with a `prompt`.

    `prompt_embeds` is vLLM's alternative to a prompt: base64 of a tensor.
    """

    prompt: narrow_types.TextOrIds = None
    prompt_embeds: Any = None


class EmbeddingInputBody(envelope.Envelope, gc=False):
    """Fields that are read from a body with an `input`; vLLM also embeds a conversation."""

    input: narrow_types.TextOrIds = None
    messages: Any = None


_DECODER = msgspec.json.Decoder(CompletionBody)
_INPUT_DECODER = msgspec.json.Decoder(EmbeddingInputBody)


def parse(raw: HttpRequest, api: str) -> InferenceRequest | Rejection:
    """Read a request for completions or images; 400 without a model or a prompt."""
    wanted = _NO_IMAGE_PROMPT if api == "images" else _NO_PROMPT
    body = envelope.decode(_DECODER, raw, wanted=wanted)
    if isinstance(body, Rejection):
        return body
    prompt = canonical_prompt.prompt_of(body.prompt)
    if prompt is None and body.prompt_embeds is not None:
        prompt = canonical_prompt.text_prompt(canonical_prompt.item({"data": body.prompt_embeds}))
    if prompt is None:
        return decision.bad_request(wanted)
    if body.cache_salt:
        prompt = canonical_prompt.with_cache_salt(prompt, body.cache_salt)
    return envelope.request(api, raw, body, prompt=prompt)


def parse_embeddings(raw: HttpRequest, api: str) -> InferenceRequest | Rejection:
    """Read an embeddings request; 400 without a model, or with neither input nor messages."""
    return _parse_input(raw, api, is_required=True)


def parse_pooling(raw: HttpRequest, api: str) -> InferenceRequest | Rejection:
    """Read a pooling request: 400 without a model. The engine judges its input."""
    return _parse_input(raw, api, is_required=False)


def _parse_input(raw: HttpRequest, api: str, *, is_required: bool) -> InferenceRequest | Rejection:
    body = envelope.decode(_INPUT_DECODER, raw, wanted=_NO_INPUT)
    if isinstance(body, Rejection):
        return body
    prompt = canonical_prompt.prompt_of(body.input) or openai_chat.loose_prompt(body.messages)
    if prompt is None:
        if is_required:
            return decision.bad_request(_NO_INPUT)
        prompt = canonical_prompt.NOTHING
    return envelope.request(
        api, raw, body, prompt=canonical_prompt.with_cache_salt(prompt, body.cache_salt)
    )
