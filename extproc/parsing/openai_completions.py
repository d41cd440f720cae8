"""Surfaces whose prompt is one field: completions, images, embeddings, pooling.

Surfaces that read a prompt without inference: render, tokenize, count tokens.

They leave nothing in a prefix cache, so their prompt is empty: an index that learned from them
would believe in blocks no engine holds. The render surfaces refuse what the surfaces they render
for refuse; the other two are raw (docs/spec/protocol.md#request-paths, count_tokens).
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from extproc import decision
from extproc.decision import Rejection
from extproc.parsing import canonical_prompt, envelope, opaque, openai_chat
from extproc.request import HttpRequest, InferenceRequest

_NO_PROMPT: Final = "invalid completions request: must have prompt field"
_NO_IMAGE_PROMPT: Final = "invalid images generations request: must have prompt field"
_NO_INPUT: Final = "invalid embeddings request: must have input field"


class CompletionBody(envelope.Envelope, gc=False):
    """Fields that are read from a body with a `prompt`.

    `prompt_embeds` is vLLM's alternative to a prompt: base64 of a tensor.
    """

    prompt: Any = None
    prompt_embeds: Any = None


class EmbeddingInputBody(envelope.Envelope, gc=False):
    """Fields that are read from a body with an `input`; vLLM also embeds a conversation."""

    input: Any = None
    messages: Any = None


_DECODER = msgspec.json.Decoder(CompletionBody)
_INPUT_DECODER = msgspec.json.Decoder(EmbeddingInputBody)


def parse(raw: HttpRequest) -> InferenceRequest | Rejection:
    """Read a completions request; 400 without a model or a prompt."""
    return _prompted(raw, "completions", wanted=_NO_PROMPT)


def parse_images(raw: HttpRequest) -> InferenceRequest | Rejection:
    """Read an image generation request; 400 without a model or a prompt."""
    return _prompted(raw, "images", wanted=_NO_IMAGE_PROMPT)


def _prompted(raw: HttpRequest, api: str, *, wanted: str) -> InferenceRequest | Rejection:
    body = envelope.decode(_DECODER, raw, wanted=wanted)
    if isinstance(body, Rejection):
        return body
    prompt = canonical_prompt.prompt_of(body.prompt)
    if prompt is None and body.prompt_embeds is not None:
        prompt = canonical_prompt.text_prompt(canonical_prompt.item({"data": body.prompt_embeds}))
    if prompt is None:
        return decision.bad_request(wanted)
    return envelope.request(
        api, raw, body, prompt=canonical_prompt.with_cache_salt(prompt, body.cache_salt)
    )


def parse_embeddings(raw: HttpRequest) -> InferenceRequest | Rejection:
    """Read an embeddings request; 400 without a model, or with neither input nor messages."""
    return _embedded(raw, "embeddings")


def parse_pooling(raw: HttpRequest) -> InferenceRequest | Rejection:
    """Read a pooling request: 400 without a model. What it pools is the engine's business."""
    return _embedded(raw, "pooling")


def _embedded(raw: HttpRequest, api: str) -> InferenceRequest | Rejection:
    body = envelope.decode(_INPUT_DECODER, raw, wanted=_NO_INPUT)
    if isinstance(body, Rejection):
        return body
    prompt = canonical_prompt.prompt_of(body.input) or openai_chat.loose_prompt(body.messages)
    if prompt is None:
        if api == "embeddings":
            return decision.bad_request(_NO_INPUT)
        prompt = canonical_prompt.NOTHING
    return envelope.request(
        api, raw, body, prompt=canonical_prompt.with_cache_salt(prompt, body.cache_salt)
    )


def parse_chat(raw: HttpRequest) -> InferenceRequest | Rejection:
    """Read a chat request to be rendered."""
    return _unprompted(openai_chat.parse(raw), "chat_render")


def parse_completions(raw: HttpRequest) -> InferenceRequest | Rejection:
    """Read a completions request to be rendered."""
    return _unprompted(parse(raw), "completions_render")


def parse_tokenize(raw: HttpRequest) -> InferenceRequest:
    """Read a tokenize request; never refused."""
    return opaque.parse_envelope(raw, "tokenize")


def parse_count_tokens(raw: HttpRequest) -> InferenceRequest:
    """Read an Anthropic count_tokens request; never refused."""
    return opaque.parse_envelope(raw, "count_tokens")


def _unprompted(parsed: InferenceRequest | Rejection, api: str) -> InferenceRequest | Rejection:
    if isinstance(parsed, Rejection):
        return parsed
    return msgspec.structs.replace(parsed, api=api, prompt=b"", prompt_tokens=0, prompt_bytes=0)
