"""From request path to surface: a literal table of path suffixes.

Source: docs/spec/protocol.md#request-paths.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from extproc.request import HttpRequest

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
