"""Entry of parsing: turns an HTTP request into an inference request or a rejection.

From request path to surface: a literal table of path suffixes.

Source: docs/spec/protocol.md#request-paths.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Final

import msgspec

from extproc import decision
from extproc.decision import Rejection
from extproc.parsing import (
    anthropic_messages,
    envelope,
    multipart,
    opaque,
    openai_chat,
    openai_completions,
    openai_responses,
    preparsed,
    vllm_api,
    vllm_grpc,
)
from extproc.request import MAX_NAME_BYTES, HttpRequest, InferenceRequest, is_long_name

#: Any path that is not in the table.
OPAQUE = "opaque"

#: A gRPC method that is not in the table: routed as it is, its answer not looked at
#: (docs/spec/protocol.md#response-flow).
GRPC = "grpc"

#: Path suffix, in whole segments, to surface (`Request.api`). The longest suffix wins.
SURFACES: Mapping[str, str] = {
    "chat/completions": "chat",
    "chat/completions/render": "chat_render",
    "completions": "completions",
    "completions/render": "completions_render",
    "embeddings": "embeddings",
    "responses": "responses",
    "conversations": "conversations",
    "images/generations": "images",
    "audio/transcriptions": "transcriptions",
    "audio/translations": "translations",
    "messages": "messages",
    "messages/count_tokens": "count_tokens",
    "rerank": "rerank",
    "score": "score",
    "pooling": "pooling",
    "tokenize": "tokenize",
    "inference/v1/generate": "generate",
    "generate": "sglang_generate",
    "vllm.grpc.engine.VllmEngine/Generate": "grpc_generate",
    "vllm.grpc.engine.VllmEngine/Embed": "grpc_embed",
}

#: Where the path is read, in order, and what it is when none of them is there.
PATH_HEADERS = (":path", "x-original-path", "x-forwarded-path")
DEFAULT_PATH = "/v1/completions"

_DEEPEST = max(suffix.count("/") for suffix in SURFACES) + 1


def path_of(raw: HttpRequest) -> str:
    """The path as sent, from the first header that has one; query string included."""
    headers = raw.headers
    for name in PATH_HEADERS:
        path = headers.get(name)
        if path:
            return path
    return DEFAULT_PATH


#: Paths that are remembered, far more than real traffic has, and their longest (characters).
_MOST_KNOWN = 512
_LONGEST_KNOWN = 256


def surface_of(path: str) -> str:
    """The surface of a path without query and trailing slashes, longest suffix first."""
    return _known(path) if len(path) <= _LONGEST_KNOWN else _surface_of(path)


def _surface_of(path: str) -> str:
    segments = path.partition("?")[0].rstrip("/").split("/")
    for depth in range(min(_DEEPEST, len(segments)), 0, -1):
        surface = SURFACES.get("/".join(segments[-depth:]))
        if surface is not None:
            return surface
    return OPAQUE


_known = lru_cache(maxsize=_MOST_KNOWN)(_surface_of)


#: Surface (a value of `paths.SURFACES`) to the function that reads it.
PARSERS: Mapping[str, Callable[[HttpRequest], InferenceRequest | Rejection]] = {
    "chat": openai_chat.parse,
    "chat_render": openai_completions.parse_chat,
    "completions": openai_completions.parse,
    "completions_render": openai_completions.parse_completions,
    "embeddings": openai_completions.parse_embeddings,
    "responses": openai_responses.parse,
    "conversations": openai_responses.parse_conversation,
    "images": openai_completions.parse_images,
    "transcriptions": multipart.parse_transcriptions,
    "translations": multipart.parse_translations,
    "messages": anthropic_messages.parse,
    "count_tokens": openai_completions.parse_count_tokens,
    "rerank": vllm_api.parse_rerank,
    "score": vllm_api.parse_score,
    "pooling": openai_completions.parse_pooling,
    "tokenize": openai_completions.parse_tokenize,
    "generate": vllm_api.parse,
    "sglang_generate": vllm_api.parse_native,
    "grpc_generate": vllm_grpc.parse_generate,
    "grpc_embed": vllm_grpc.parse_embed,
}

#: The rejection of a model or adapter name above the limit.
LONG_NAME: Final = decision.bad_request(
    f"expected a model or adapter name of at most {MAX_NAME_BYTES} bytes, got a longer one; "
    "correct the name"
)

#: Surfaces whose parser makes the best of a cut body: it refuses nothing and wants no prompt.
TOTAL = frozenset({"transcriptions", "translations", "count_tokens", "tokenize"})


def parse(raw: HttpRequest) -> InferenceRequest | Rejection:
    """Parse a request. Total: any bytes give a request or a rejection.

    Args:
        raw: A request whose body is complete, or marked as truncated.

    Returns:
        The request, `opaque` when there is no body or the path is not in the table (`grpc` when it
        is a gRPC method); or a rejection with status 400 (docs/spec/protocol.md#request-flow) on a
        path that is, and on every path for a model or adapter name that is too long.
    """
    if type(raw) is preparsed.PreparsedRequest:
        return raw.outcome
    if opaque.is_bodiless(raw):
        return _check_names(opaque.unparsed_request(raw, OPAQUE), raw)
    read = _read(raw)
    return read if isinstance(read, Rejection) else _check_names(read, raw)


def parse_supplied(raw: HttpRequest, model: str) -> InferenceRequest | Rejection | None:
    """Parse a request without a model as if a header had named it.

    Args:
        raw: A request that `parse` refuses with `envelope.NO_MODEL`.
        model: Its model.

    Returns:
        As of `parse`; None where its body was read before, and something else is wrong with it.
    """
    if type(raw) is preparsed.PreparsedRequest:
        supplied = raw.supplied
        return None if supplied is None else msgspec.structs.replace(supplied, model=model)
    headers = {**raw.headers, envelope.MODEL_HEADERS[0]: model}
    return parse(msgspec.structs.replace(raw, headers=headers))


def _check_names(request: InferenceRequest, raw: HttpRequest) -> InferenceRequest | Rejection:
    """The request, or a rejection if a name is longer than any valid name."""
    model, adapter, header = request.model, request.adapter, envelope.model_header(raw.headers)
    # A character has four bytes at most: most names need no closer look.
    if 4 * (len(model) + len(adapter) + len(header)) <= MAX_NAME_BYTES:
        return request
    return LONG_NAME if any(map(is_long_name, (model, adapter, header))) else request


def _read(raw: HttpRequest) -> InferenceRequest | Rejection:
    """Parse a request with a body."""
    api = surface_of(path_of(raw))
    reader = PARSERS.get(api)
    if reader is None and raw.headers.get("content-type", "").startswith("application/grpc"):
        return opaque.unparsed_request(raw, GRPC)
    if raw.truncated and api not in TOTAL:
        return opaque.parse_truncated(raw, api)
    try:
        return opaque.parse(raw, api) if reader is None else reader(raw)
    except RecursionError:
        # Decoding stayed within the interpreter's depth, and writing the value again did not.
        return opaque.unparsed_request(raw, api) if reader is None else envelope.too_deep()
