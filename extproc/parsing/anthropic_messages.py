"""Anthropic messages: `{model, system, messages, tools}`."""

from __future__ import annotations

from typing import Final

import msgspec

from extproc import decision
from extproc.decision import Rejection
from extproc.parsing import canonical_prompt, envelope, narrow_types
from extproc.request import HttpRequest, InferenceRequest

_WANTED: Final = "invalid messages request: must have at least one message"


class AnthropicMessage(msgspec.Struct, gc=False):
    """One message; only an object can be one."""

    role: narrow_types.Role = None
    content: narrow_types.Content = None


class MessagesBody(envelope.Envelope, gc=False):
    """Fields that are read from a messages body."""

    messages: list[AnthropicMessage] | None = None
    system: narrow_types.Content = None
    tools: msgspec.Raw = canonical_prompt.ABSENT


_DECODER = msgspec.json.Decoder(MessagesBody)


def parse(raw: HttpRequest, api: str) -> InferenceRequest | Rejection:
    """Read a messages request; 400 without a model or without at least one message."""
    body = envelope.decode(_DECODER, raw, wanted=_WANTED)
    if isinstance(body, Rejection):
        return body
    if not body.messages:
        return decision.bad_request(_WANTED)
    fields = [canonical_prompt.salt(body.cache_salt), canonical_prompt.option(b"t", body.tools)]
    if body.system is not None:
        fields.append(canonical_prompt.MESSAGE + b"system" + canonical_prompt.content(body.system))
    for message in body.messages:
        fields += (
            canonical_prompt.MESSAGE,
            canonical_prompt.as_bytes(message.role),
            canonical_prompt.content(message.content),
        )
    return envelope.request(api, raw, body, prompt=canonical_prompt.text_prompt(b"".join(fields)))
