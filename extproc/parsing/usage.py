"""Token usage at the end of a response, and the ids by which its client may know it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

import msgspec

#: Largest usage object that is read. vLLM's, with both detail objects, has under 300 bytes.
_MAX_USAGE_BYTES = 2048

#: Usage objects looked at from the end: Anthropic splits its usage over two events.
_MAX_OBJECTS = 4

#: Most tokens of one kind that one answer can have used; a report of more counts as none.
MAX_TOKENS: Final = 2**31 - 1

_MARK = b'"usage"'

#: Member `id` of an object; a quote inside of a text has a backslash before it. Longer ids are none.
_ID_KEY = b'"id"'
_ID: Final = re.compile(rb'"id"\s*:\s*"([^"\\]{1,256})"')

#: Where ids are looked for: bytes from the beginning, as most engines write them first, and from the
#: last mark on, as llama.cpp writes the id of an answer behind `usage`.
_ID_HEAD_BYTES = 1024
_ID_BYTES = 300

#: What `read` tells apart.
UsageKind = Literal["prompt", "completion", "cached"]


class _Usage(msgspec.Struct):
    """Typed `Any`, so that one field of an unexpected type does not hide the others."""

    prompt_tokens: Any = None
    completion_tokens: Any = None
    input_tokens: Any = None
    output_tokens: Any = None
    cache_read_input_tokens: Any = None
    prompt_tokens_details: Any = None
    input_tokens_details: Any = None


_decoder = msgspec.json.Decoder(_Usage)


def read(tail: bytes) -> Mapping[str, int]:
    """Tokens the engine reported, by kind: `prompt`, `completion`, `cached`, `media`.

    `media` are those of images, videos and audio in the prompt, which vLLM reports
    (`prompt_tokens_details.multimodal_tokens`). Reads OpenAI chat, completions and responses and
    Anthropic messages, whole or as SSE. Chunk borders do not matter, since the bytes are joined
    before.

    Returns:
        The kinds that were reported, each from 0 to `MAX_TOKENS`; empty when the answer reports
        none or is no JSON.
    """
    counts: dict[str, int] = {}
    end = len(tail)
    for _ in range(_MAX_OBJECTS):
        at = tail.rfind(_MARK, 0, end)
        if at < 0:
            break
        end = at
        for kind, tokens in _parse_usage(tail, at + len(_MARK)).items():
            counts.setdefault(kind, tokens)
    return counts


def read_ids(tail: bytes) -> Sequence[str]:
    """Ids in the body of an answer: the first one, and the last one if it is another.

    One of them is that of the answer. The other may be that of an item or of a tool call, which the
    client knows as well.
    """
    first, at = _ID.search(tail, 0, _ID_HEAD_BYTES), tail.rfind(_ID_KEY)
    ids = [] if first is None else [first[1].decode("utf-8", "replace")]
    if at >= 0 and (first is None or at > first.start()):
        last = _ID.match(tail, at, at + _ID_BYTES)
        if last is not None and (first is None or last[1] != first[1]):
            ids.append(last[1].decode("utf-8", "replace"))
    return ids


def cost(counts: Mapping[str, int], weights: Mapping[UsageKind, float]) -> float | None:
    """Sum of weight times tokens, and at least 0; None where nothing with a weight is reported."""
    if counts.keys().isdisjoint(weights):
        return None
    return max(0.0, sum(weight * counts.get(kind, 0) for kind, weight in weights.items()))


def _parse_usage(tail: bytes, at: int) -> Mapping[str, int]:
    """The usage object that starts after `at`; empty for null and for anything else."""
    opened = tail.find(b"{", at, at + 4)
    if opened < 0 or tail[at:opened].strip(b" :"):
        return {}
    end = _find_end(tail, opened)
    try:
        usage = _decoder.decode(tail[opened:end])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return {}
    details = usage.prompt_tokens_details or usage.input_tokens_details
    cached = details.get("cached_tokens") if type(details) is dict else None
    kinds = {
        "prompt": usage.input_tokens if usage.prompt_tokens is None else usage.prompt_tokens,
        "completion": (
            usage.output_tokens if usage.completion_tokens is None else usage.completion_tokens
        ),
        "cached": cached if details else usage.cache_read_input_tokens,
        "media": _sum_media(details),
    }
    return {
        kind: tokens
        for kind, tokens in kinds.items()
        if type(tokens) is int and 0 <= tokens <= MAX_TOKENS
    }


def _sum_media(details: Any) -> int | None:
    """Tokens of all kinds of media (`multimodal_tokens`); None where they are not reported."""
    by_kind = details.get("multimodal_tokens") if type(details) is dict else None
    if type(by_kind) is not dict or not all(type(tokens) is int for tokens in by_kind.values()):
        return None
    return sum(by_kind.values())


def _find_end(tail: bytes, opened: int) -> int:
    """Behind the brace that closes an object, as far as one is read; from brace to brace."""
    limit = min(len(tail), opened + _MAX_USAGE_BYTES)
    depth, at = 0, opened
    while (closing := tail.find(b"}", at, limit)) >= 0:
        depth += tail.count(b"{", at, closing) - 1
        at = closing + 1
        if not depth:
            return at
    return limit
