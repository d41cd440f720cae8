"""Token usage in the gRPC responses of `vllm.grpc.engine.VllmEngine`, methods Generate and Embed.

Field numbers are those of `vllm_engine.proto` in llm-d-router 0.10
(`pkg/epp/framework/plugins/requesthandling/parsers/vllmgrpc/api/proto`).

| message | fields read |
|---|---|
| GenerateResponse | 1 chunk, 2 complete (one of the two) |
| GenerateStreamChunk | 1 token_ids, 2 prompt_tokens, 3 completion_tokens, 4 cached_tokens |
| GenerateComplete | 3 prompt_tokens, 4 completion_tokens, 5 cached_tokens |
| EmbedResponse | 2 prompt_tokens |

As upstream, the last message with a number counts. Since vLLM's last messages count the tokens of the last
chunk alone, while `token_ids` are those of each chunk, a stream has at least as many as its chunks show.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping, Sequence
from typing import Final

from extproc.parsing import vllm_grpc
from extproc.protocol.response_handling import TAIL_BYTES

_CHUNK: Final = 1
_COMPLETE: Final = 2
#: Fields of the two messages with numbers of tokens, by kind.
_FIELDS_BY_RESPONSE: Final = {
    _CHUNK: {"prompt": 2, "completion": 3, "cached": 4},
    _COMPLETE: {"prompt": 3, "completion": 4, "cached": 5},
}
_EMBED_PROMPT_TOKENS: Final = 2

#: Flag byte and length of a frame.
_FRAME_HEADER: Final = struct.Struct(">BI")

#: Header of a frame below 64 KiB with a GenerateResponse: where a body is cut, the first frame behind the
#: gap is found by it.
_FRAME_START: Final = re.compile(rb"\0\0\0..[\x0a\x12]", re.DOTALL)

#: Key of a field 1 with a length: a chunk in a GenerateResponse, and the packed token ids in a chunk.
_KEY: Final = 1 << 3 | 2
#: Bytes of varints that another one follows.
_HIGH_BYTES: Final = bytes(range(0x80, 0x100))

#: Frames of a body that are read (count). The 64 KiB of a long body that are kept hold 3,000 chunks of one
#: token. A body with more reports nothing.
MAX_FRAMES: Final = 8192

#: Frames at the end of a body that are searched for numbers of tokens (count).
_MAX_LAST_FRAMES: Final = 2

#: Place of a frame's message: its first byte, and the one behind it.
_Span = tuple[int, int]


def read_generate(tail: bytes) -> Mapping[str, int]:
    """Tokens that a body of GenerateResponse messages reports, by kind.

    Args:
        tail: As of `usage.read`.

    Returns:
        `prompt`, `completion` and `cached`, each below 2^32; empty when none is reported. Without
        `prompt` where it is 0, and without `completion` where a cut body shows more tokens than it
        reports.
    """
    spans, is_whole = _find_messages(tail)
    view = memoryview(tail)
    for start, stop in reversed(spans[-_MAX_LAST_FRAMES:]):
        counts = _read_response(view[start:stop])
        if counts:
            break
    else:
        return {}
    num_shown = sum([_count_ids(tail, start, stop) for start, stop in spans])
    if is_whole:
        counts["completion"] = max(counts["completion"], num_shown)
    elif num_shown > counts["completion"]:
        del counts["completion"]
    if not counts["prompt"]:
        del counts["prompt"]
    return counts


def read_embed(tail: bytes) -> Mapping[str, int]:
    """Tokens that a body with an EmbedResponse reports: `prompt`, or empty when there are none."""
    message = vllm_grpc.message_of(tail)
    fields = None if message is None else vllm_grpc.fields_of(message)
    prompt = _number(dict(fields or ()), _EMBED_PROMPT_TOKENS)
    return {"prompt": prompt} if prompt else {}


def _read_response(message: memoryview) -> dict[str, int]:
    """Tokens of one GenerateResponse; empty unless it has those of the prompt or the completion."""
    # Of a oneof the last member counts.
    for response, value in reversed(vllm_grpc.fields_of(message) or ()):
        numbers = _FIELDS_BY_RESPONSE.get(response)
        if numbers is not None and isinstance(value, memoryview):
            fields = dict(vllm_grpc.fields_of(value) or ())
            counts = {kind: _number(fields, number) for kind, number in numbers.items()}
            return counts if counts["prompt"] or counts["completion"] else {}
    return {}


def _number(fields: Mapping[int, int | memoryview], number: int) -> int:
    """The value of a uint32 field; 0, which is not written, where it is absent."""
    value = fields.get(number, 0)
    return value & 0xFFFFFFFF if isinstance(value, int) else 0


def _count_ids(tail: bytes, start: int, stop: int) -> int:
    """Tokens of a message that is a chunk and begins with them, packed; 0 for others (count).

    Read in place, as a stream has thousands of these messages.
    """
    if start >= stop or tail[start] != _KEY:
        return 0
    at = start + 1
    while at < stop and tail[at] > 0x7F:
        at += 1
    if at + 3 > stop or tail[at + 1] != _KEY:
        return 0
    size, at = tail[at + 2], at + 3
    if size > 0x7F and at < stop:
        size, at = size & 0x7F | tail[at] << 7, at + 1
    return len(tail[at : min(at + size, stop)].translate(None, _HIGH_BYTES))


def _find_messages(tail: bytes) -> tuple[Sequence[_Span], bool]:
    """Messages of the complete frames, and whether these are all of the body; none beyond `MAX_FRAMES`.

    Frames of equal size may seem to go on across the gap of a cut body, so that only a short one is known
    to be whole.
    """
    spans, end = _walk(tail, 0, MAX_FRAMES)
    if end == len(tail):
        return spans, len(tail) <= TAIL_BYTES
    num_left = MAX_FRAMES - len(spans)
    for match in _FRAME_START.finditer(tail, end + 1):
        more, end = _walk(tail, match.start(), num_left)
        if end == len(tail):
            return spans + more, False
        num_left -= len(more) + 1
        if num_left <= 0:
            break
    return (spans, False) if num_left > 0 else ((), False)


def _walk(tail: bytes, at: int, limit: int) -> tuple[list[_Span], int]:
    """Messages of up to `limit` complete frames without compression from a place on, and their end."""
    spans: list[_Span] = []
    size, unpack, header_bytes = len(tail), _FRAME_HEADER.unpack_from, vllm_grpc.HEADER_BYTES
    for _ in range(limit):
        start = at + header_bytes
        if start > size:
            break
        flag, length = unpack(tail, at)
        if flag or start + length > size:
            break
        at = start + length
        spans.append((start, at))
    return spans, at
