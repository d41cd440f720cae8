"""Token usage at the end of a response, and the ids by which its client may know it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal

from extproc.parsing import vllm_grpc_usage

#: Largest usage object that is read. vLLM's, with both detail objects, has under 300 bytes.
_MAX_USAGE_BYTES = 2048

#: Members `usage` looked at from the end: Anthropic splits its usage over two events.
_MAX_MEMBERS = 4

#: Marks looked at for these. A piece of text may be just that word, as in code that is written.
_MAX_MARKS = 256

#: Most tokens of one kind that one answer can have used; a report of more counts as none.
MAX_TOKENS: Final = 2**31 - 1

#: Member `usage` with an object or null. Text of an answer has none: its quotes have a backslash.
_MARK = b'"usage"'
_MEMBER: Final = re.compile(rb'"usage"\s{0,32}:\s{0,32}(?:null|(\{))')

#: What separates the lines of events. An answer in JSON cannot contain it.
_EVENT = b"\ndata:"

#: First event of Anthropic's streams. Its tokens of the answer are those before the answer, and SGLang
#: writes zeros for those of the prompt.
_MESSAGE_START: Final = re.compile(
    rb'\n?data:\s{0,32}\{\s{0,32}"type"\s{0,32}:\s{0,32}"message_start"'
)

#: The object in which SGLang's `/generate` reports, where nothing but the end follows: with several
#: prompts or samples, each reports its own tokens, and an `index` or the end of a list follows.
_META_MARK = b'"meta_info"'
_META: Final = re.compile(rb'"meta_info"\s{0,32}:\s{0,32}(\{)')
_META_END: Final = re.compile(rb"\s{0,32}\}\s{0,32}(?:data: ?\[DONE\]\s{0,32})?$")
_META_BYTES = _MAX_USAGE_BYTES + 128

_decode = json.JSONDecoder().raw_decode

#: Member `id` of an object; a quote inside of a text has a backslash before it. Longer ids are none.
_ID_KEY = b'"id"'
_ID: Final = re.compile(rb'"id"\s*:\s*"([^"\\\0]{1,256})"')

#: Where ids are looked for: bytes from the beginning, as most engines write them first, and from the
#: last mark on, as llama.cpp writes the id of an answer behind `usage`.
_ID_HEAD_BYTES = 1024
_ID_BYTES = 300

#: Kinds whose tokens are part of the prompt.
_PARTS: Final = frozenset(("cached", "media"))

#: Readers of answers that are no JSON, by surface.
_MESSAGE_READERS: Final[Mapping[str, Callable[[bytes], Mapping[str, int]]]] = {
    "grpc_generate": vllm_grpc_usage.read_generate,
    "grpc_embed": vllm_grpc_usage.read_embed,
}

#: Tokens of the prompt that `input_tokens` of Anthropic's API does not count.
_CACHE_KEYS: Final = ("cache_read_input_tokens", "cache_creation_input_tokens")

#: What `read` tells apart.
UsageKind = Literal["prompt", "completion", "cached"]


def read(tail: bytes, api: str = "") -> Mapping[str, int]:
    """Tokens the engine reported, by kind: `prompt`, `completion`, `cached`, `media`.

    `media` are those of images, videos and audio in the prompt, which vLLM reports
    (`prompt_tokens_details.multimodal_tokens`). Reads OpenAI chat, completions and responses,
    Anthropic messages and SGLang's `/generate`, whole or as SSE, and vLLM's gRPC. Chunk borders do not
    matter, since the bytes are joined before.

    Args:
        tail: The answer; of a long one the beginning and the end, with a NUL between them.
        api: Name of the surface of its request.

    Returns:
        The kinds that were reported, each from 0 to `MAX_TOKENS`; empty when the answer reports
        none or is of another form.
    """
    read_messages = _MESSAGE_READERS.get(api)
    if read_messages is None:
        counts = _read_json(tail)
    else:
        reported = read_messages(tail).items()
        counts = {kind: tokens for kind, tokens in reported if tokens <= MAX_TOKENS}
    prompt = counts.get("prompt")
    for part in _PARTS & counts.keys():
        if prompt is None:
            del counts[part]
        else:
            counts[part] = min(counts[part], prompt)
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


def _read_json(tail: bytes) -> dict[str, int]:
    """Tokens that an answer in JSON reports, by kind."""
    counts: dict[str, int] = {}
    end, members_left = len(tail), _MAX_MEMBERS
    for _ in range(_MAX_MARKS):
        at = tail.rfind(_MARK, 0, end)
        if at < 0 or not members_left:
            break
        end = at
        member = _MEMBER.match(tail, at)
        if member is None:
            continue
        members_left -= 1
        # The search for an event is a slow scan of a body of one line; that for a byte is not.
        line = tail.rfind(_EVENT, 0, at) if tail.find(b"\n", 0, at) >= 0 else -1
        reported = _count(_find_usage(tail, member, line))
        if _MESSAGE_START.match(tail, max(line, 0)):
            reported.pop("completion", None)
            if reported.get("prompt") == 0:
                del reported["prompt"]
        for kind, tokens in reported.items():
            counts.setdefault(kind, tokens)
        # Others of that name in the line are in parts of the answer that a client can choose, as
        # the input of a tool. A report of prompt and completion is whole.
        if line < 0 or ("prompt" in counts and "completion" in counts):
            break
        end = line
    return counts or _read_meta_info(tail)


def _find_usage(tail: bytes, member: re.Match[bytes], line: int) -> Mapping[str, Any]:
    """The object of a member `usage`, or of the outermost that contains it; empty for null."""
    at = end = member.start()
    usage = _parse_object(tail, member.start(1))[0]
    start = max(line, at - _MAX_USAGE_BYTES, 0)
    for _ in range(_MAX_MEMBERS):
        end = tail.rfind(_MARK, start, end)
        if end < 0:
            break
        outer = _MEMBER.match(tail, end)
        if outer is not None:
            candidate, closed = _parse_object(tail, outer.start(1))
            if closed > at:
                usage = candidate
    return usage


def _read_meta_info(tail: bytes) -> dict[str, int]:
    """Tokens that SGLang reports of the only answer of a body."""
    meta = _META.match(tail, max(0, tail.rfind(_META_MARK, max(0, len(tail) - _META_BYTES))))
    if meta is None:
        return {}
    content, end = _parse_object(tail, meta.start(1))
    if end < 0 or _META_END.match(tail, end) is None:
        return {}
    return _count({**content, "prompt_tokens_details": content})


def _parse_object(tail: bytes, opened: int) -> tuple[Mapping[str, Any], int]:
    """The object that begins at `opened`, and its end; empty and -1 where none can be read."""
    if opened < 0:
        return {}, -1
    # Bytes are characters, so that the end in one is that in the other: only numbers are read.
    text = tail[opened : opened + _MAX_USAGE_BYTES].decode("latin-1")
    try:
        content, length = _decode(text)
    except (ValueError, RecursionError):
        return {}, -1
    return content, opened + length


def _count(usage: Mapping[str, Any]) -> dict[str, int]:
    """Tokens by kind, without those that are no number in range."""
    get = usage.get
    details = get("prompt_tokens_details") or get("input_tokens_details")
    cached = details.get("cached_tokens") if type(details) is dict else None
    prompt, completion = get("prompt_tokens"), get("completion_tokens")
    kinds = {
        "prompt": _sum_input(usage) if prompt is None else prompt,
        "completion": get("output_tokens") if completion is None else completion,
        "cached": cached if details else get("cache_read_input_tokens"),
        "media": _sum_media(details),
    }
    return {
        kind: tokens
        for kind, tokens in kinds.items()
        if type(tokens) is int and 0 <= tokens <= MAX_TOKENS
    }


def _sum_input(usage: Mapping[str, Any]) -> Any:
    """Tokens of the prompt under the names of OpenAI's Responses API and of Anthropic's API.

    The `input_tokens` of Anthropic's API leave out those that were read from a cache or written to it.
    """
    tokens = usage.get("input_tokens")
    if type(tokens) is int:
        tokens += sum(
            part
            for part in map(usage.get, _CACHE_KEYS)
            if type(part) is int and 0 <= part <= MAX_TOKENS
        )
    return tokens


def _sum_media(details: Any) -> int | None:
    """Tokens of all kinds of media (`multimodal_tokens`); None where they are not reported."""
    by_kind = details.get("multimodal_tokens") if type(details) is dict else None
    if type(by_kind) is not dict or not all(type(tokens) is int for tokens in by_kind.values()):
        return None
    return sum(by_kind.values())
