"""Surfaces that read a prompt without inference: render, tokenize, count tokens.

They leave nothing in a prefix cache, so their prompt is empty: an index that learned from them
would believe in blocks no engine holds. The render surfaces refuse what the surfaces they render
for refuse; the other two are raw (docs/spec/protocol.md#request-paths, count_tokens).
"""

from __future__ import annotations

import msgspec

from extproc.decision import Rejection
from extproc.parsing import opaque, openai_chat, openai_completions
from extproc.request import HttpRequest, InferenceRequest


def parse_chat(raw: HttpRequest) -> InferenceRequest | Rejection:
    """Read a chat request to be rendered."""
    return _unprompted(openai_chat.parse(raw), "chat_render")


def parse_completions(raw: HttpRequest) -> InferenceRequest | Rejection:
    """Read a completions request to be rendered."""
    return _unprompted(openai_completions.parse(raw), "completions_render")


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
