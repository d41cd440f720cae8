"""vLLM's own gRPC surface: `vllm.grpc.engine.VllmEngine`, methods Generate and Embed.

Field numbers are those of `vllm/grpc/vllm_engine.proto` in vLLM (commit 0cdf3ea, package
`vllm.grpc.engine`). Routers that took the file over kept them and added field 7, multimodal
inputs. Fields not in this table are skipped. The surface names no model.

| message | fields read |
|---|---|
| GenerateRequest | 2 tokenized, 3 text (one of the two), 4 sampling_params, 5 stream, 7 mm_inputs |
| EmbedRequest | 2 tokenized |
| TokenizedInput | 2 input_ids (repeated uint32, packed or not) |
| SamplingParams | 8 max_tokens |
| MultimodalInputs | 5 mm_placeholders {1 offset, 2 length}, 6 mm_hashes |
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Final

import msgspec

from extproc import decision
from extproc.decision import Rejection
from extproc.parsing import grpc_frame, inputs, opaque, tokens
from extproc.request import HttpRequest, InferenceRequest

_INVALID: Final = decision.bad_request("invalid or unsupported gRPC payload")

_TOKENIZED: Final = 2
_TEXT: Final = 3
_SAMPLING: Final = 4
_STREAM: Final = 5
_MULTIMODAL: Final = 7
_INPUT_IDS: Final = 2
_MAX_TOKENS: Final = 8
_PLACEHOLDERS: Final = 5
_HASHES: Final = 6
_OFFSET: Final = 1
_LENGTH: Final = 2

#: Longest message with the place of a multimodal item that is read (bytes): two numbers.
_LONGEST_SPAN: Final = 32


def parse_generate(raw: HttpRequest) -> InferenceRequest | Rejection:
    """Read a Generate call; 400 for a bad frame or a message without input."""
    fields = _fields(raw)
    if fields is None:
        return _INVALID
    # A later occurrence of a field replaces an earlier one, and of a oneof the last one counts;
    # only the two inputs share a oneof, and a sender that sets both is not worth telling apart.
    known = dict(fields)
    pictures = known.get(_MULTIMODAL)
    placeholders = _placeholders(pictures) if isinstance(pictures, memoryview) else ()
    prompt = _tokenized(known.get(_TOKENIZED), placeholders)
    if prompt is None:
        text = known.get(_TEXT)
        if not isinstance(text, memoryview):
            return _INVALID
        prompt = inputs.text_prompt(bytes(text))
    return msgspec.structs.replace(
        opaque.unparsed_request(raw, "grpc_generate"),
        prompt=prompt.content,
        prompt_tokens=prompt.tokens,
        prompt_bytes=prompt.text_bytes,
        stream=bool(known.get(_STREAM)),
        max_tokens=_max_tokens(known.get(_SAMPLING)),
    )


def parse_embed(raw: HttpRequest) -> InferenceRequest | Rejection:
    """Read an Embed call; 400 for a bad frame or a message without token ids."""
    fields = _fields(raw)
    prompt = None if fields is None else _tokenized(dict(fields).get(_TOKENIZED))
    if prompt is None:
        return _INVALID
    return msgspec.structs.replace(
        opaque.unparsed_request(raw, "grpc_embed"),
        prompt=prompt.content,
        prompt_tokens=prompt.tokens,
    )


def _fields(raw: HttpRequest) -> list[grpc_frame.Field] | None:
    message = grpc_frame.message_of(raw.body)
    return None if message is None else grpc_frame.fields_of(message)


def _tokenized(
    message: object, placeholders: Sequence[tuple[int, int, str]] = ()
) -> inputs.Prompt | None:
    fields = grpc_frame.fields_of(message) if isinstance(message, memoryview) else None
    values = [value for number, value in fields or () if number == _INPUT_IDS]
    rows = io.BytesIO()
    counts = (1 if isinstance(value, int) else tokens.count_varints(value) for value in values)
    tokens.reserve(rows, sum(counts))
    for value in values:
        if isinstance(value, int):
            rows.write(tokens.pack_id(value))
        elif not tokens.pack_varints(value, rows):
            return None
    tokens.stamp(rows, placeholders)
    packed = rows.getvalue()
    return inputs.Prompt(packed, len(packed) // tokens.WIDTH) if packed else None


def _max_tokens(message: object) -> int | None:
    fields = grpc_frame.fields_of(message) if isinstance(message, memoryview) else None
    value = dict(fields or ()).get(_MAX_TOKENS)
    return value & 0xFFFFFFFF if isinstance(value, int) else None


def _placeholders(message: memoryview) -> list[tuple[int, int, str]]:
    """(offset, length, hash) of each multimodal item; empty when the message is malformed."""
    spans: list[tuple[int, int]] = []
    hashes: list[str] = []
    for number, value in grpc_frame.fields_of(message) or ():
        if number == _PLACEHOLDERS and isinstance(value, memoryview):
            span = dict(grpc_frame.fields_of(value[:_LONGEST_SPAN]) or ())
            offset, length = span.get(_OFFSET, 0), span.get(_LENGTH, 0)
            if isinstance(offset, int) and isinstance(length, int):
                spans.append((offset, length))
        elif number == _HASHES and isinstance(value, memoryview):
            hashes.append(value.hex())
    return [(*span, content) for span, content in zip(spans, hashes, strict=False)]
