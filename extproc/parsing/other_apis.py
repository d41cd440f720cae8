"""JSON APIs other than OpenAI's: Anthropic messages, ranking, and generation without a template.

Rerank and score are one query against many documents. The engine makes one prompt per pair. The query
comes first in each of them, so it is the shared prefix. Which fields make a valid request differs
between engine versions: the engine judges.

Generation without a chat template is vLLM's tokens-in surface and SGLang's native one.
"""

from __future__ import annotations

import io
from typing import Any, Final

import msgspec

from extproc import decision
from extproc.decision import Rejection
from extproc.parsing import canonical_prompt, envelope, narrow_types
from extproc.request import HttpRequest, InferenceRequest

_WANTED_MESSAGES: Final = "invalid messages request: must have at least one message"


class AnthropicMessage(msgspec.Struct, gc=False):
    """One message; only an object can be one."""

    role: narrow_types.Role = None
    content: narrow_types.Content = None


class MessagesBody(envelope.Envelope, gc=False):
    """Fields that are read from a messages body."""

    messages: list[AnthropicMessage] | None = None
    system: narrow_types.Content = None
    tools: msgspec.Raw = canonical_prompt.ABSENT


_MESSAGES_DECODER = msgspec.json.Decoder(MessagesBody)


def parse_messages(raw: HttpRequest, api: str) -> InferenceRequest | Rejection:
    """Read a messages request; 400 without a model or without at least one message."""
    body = envelope.decode(_MESSAGES_DECODER, raw, wanted=_WANTED_MESSAGES)
    if isinstance(body, Rejection):
        return body
    if not body.messages:
        return decision.bad_request(_WANTED_MESSAGES)
    fields = [canonical_prompt.salt(body.cache_salt), canonical_prompt.option(b"t", body.tools)]
    if body.system is not None:
        fields.append(canonical_prompt.MESSAGE + b"system" + canonical_prompt.content(body.system))
    message = None
    for message in body.messages:
        fields += (
            canonical_prompt.MESSAGE,
            canonical_prompt.as_bytes(message.role),
            canonical_prompt.content(message.content),
        )
        del message
    body.messages = None
    return envelope.request(api, raw, body, prompt=canonical_prompt.joined_prompt(fields))


_WANTED_RANKING: Final = "invalid ranking request: must be a JSON object"


class RankingBody(envelope.Envelope, gc=False):
    """Query and documents under the names rerank (Jina, Cohere) and score (vLLM) give them."""

    query: Any = None
    queries: Any = None
    text_1: Any = None
    data_1: Any = None
    documents: Any = None
    items: Any = None
    text_2: Any = None
    data_2: Any = None


_RANKING_DECODER = msgspec.json.Decoder(RankingBody)


def parse_ranking(raw: HttpRequest, api: str) -> InferenceRequest | Rejection:
    """Read a rerank or score request; 400 without a model."""
    body = envelope.decode(_RANKING_DECODER, raw, wanted=_WANTED_RANKING)
    if isinstance(body, Rejection):
        return body
    sides = (
        (body.query, body.queries, body.text_1, body.data_1),
        (body.documents, body.items, body.text_2, body.data_2),
    )
    content = b"".join(
        [canonical_prompt.MESSAGE + b"".join(map(canonical_prompt.content, side)) for side in sides]
    )
    return envelope.request(api, raw, body, prompt=canonical_prompt.text_prompt(content))


_NO_TOKENS: Final = "invalid generate request: must have token_ids field"
_NOT_AN_OBJECT: Final = "invalid generate request: must be a JSON object"


class GenerateBody(envelope.Envelope, gc=False):
    """Fields that are read from a body for vLLM `/inference/v1/generate`.

    `features` holds `mm_hashes` and `mm_placeholders`, each a list per modality.
    """

    token_ids: narrow_types.TextOrIds = None
    features: Any = None


class NativeGenerateBody(envelope.Envelope, gc=False):
    """Fields that are read from a `/generate` body: SGLang's names, then vLLM's and TGI's."""

    input_ids: narrow_types.TextOrIds = None
    text: Any = None
    prompt: narrow_types.TextOrIds = None
    inputs: Any = None


_TOKENS_DECODER = msgspec.json.Decoder(GenerateBody)
_NATIVE_DECODER = msgspec.json.Decoder(NativeGenerateBody)


def parse_generate(raw: HttpRequest, api: str) -> InferenceRequest | Rejection:
    """Read a tokens-in request; 400 without token ids. The model is optional there."""
    body = envelope.decode_loose(_TOKENS_DECODER, raw, wanted=_NO_TOKENS)
    if isinstance(body, Rejection):
        return body
    ids = body.token_ids
    if type(ids) is canonical_prompt.Packed:
        packed: bytes | None = ids.ids
    else:
        packed = canonical_prompt.pack(ids) if type(ids) is list and ids else None
    if packed is None:
        return decision.bad_request(_NO_TOKENS)
    placeholders = canonical_prompt.read_placeholders(body.features)
    if placeholders:
        rows = io.BytesIO(packed)
        canonical_prompt.stamp(rows, placeholders)
        packed = rows.getvalue()
    prompt = canonical_prompt.with_cache_salt(
        canonical_prompt.Prompt(packed, len(packed) // canonical_prompt.WIDTH), body.cache_salt
    )
    return envelope.request(api, raw, body, prompt=prompt)


def parse_native_generate(raw: HttpRequest, api: str) -> InferenceRequest | Rejection:
    """Read a `/generate` request: 400 only for what is not a JSON object.

    Several engines use this path with bodies of their own; none of them names a model.
    """
    body = envelope.decode_loose(_NATIVE_DECODER, raw, wanted=_NOT_AN_OBJECT)
    if isinstance(body, Rejection):
        return body
    prompt = canonical_prompt.NOTHING
    for value in (body.input_ids, body.text, body.prompt, body.inputs):
        candidate = canonical_prompt.prompt_of(value)
        if candidate is not None:
            prompt = candidate
            break
    salted = canonical_prompt.with_cache_salt(prompt, body.cache_salt)
    return envelope.request(api, raw, body, prompt=salted)
