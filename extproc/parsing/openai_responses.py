"""The Responses API: `{model, instructions, input, tools}`, and the items of a conversation."""

from __future__ import annotations

from typing import Final

import msgspec

from extproc import decision
from extproc.decision import Rejection
from extproc.parsing import canonical_prompt, envelope, narrow_types
from extproc.request import HttpRequest, InferenceRequest

_NO_INPUT: Final = "invalid responses request: must have input field"
_NO_ITEMS: Final = "invalid conversations request: must have items field"


class ResponsesBody(envelope.Envelope, gc=False):
    """Fields that are read from a responses body. `prompt` names a stored template."""

    input: narrow_types.Messages = None
    instructions: narrow_types.Content = None
    tools: msgspec.Raw = canonical_prompt.ABSENT
    reasoning: msgspec.Raw = canonical_prompt.ABSENT
    prompt: msgspec.Raw = canonical_prompt.ABSENT


class ConversationItemsBody(envelope.Envelope, gc=False):
    """Fields that are read from a body that opens a conversation."""

    items: narrow_types.Messages = None


#: A list, or one of too many items.
_LISTS = frozenset({list, msgspec.Raw})

_DECODER = msgspec.json.Decoder(ResponsesBody)
_ITEMS_DECODER = msgspec.json.Decoder(ConversationItemsBody)


def parse(raw: HttpRequest, api: str) -> InferenceRequest | Rejection:
    """Read a responses request; 400 without a model or without input."""
    body = envelope.decode(_DECODER, raw, wanted=_NO_INPUT)
    if isinstance(body, Rejection):
        return body
    history = _history(body.input)
    if history is None:
        return decision.bad_request(_NO_INPUT)
    fields = [
        canonical_prompt.salt(body.cache_salt),
        canonical_prompt.option(b"p", body.prompt),
        canonical_prompt.option(b"e", body.reasoning),
        canonical_prompt.option(b"t", body.tools),
    ]
    if body.instructions is not None:
        fields.append(
            canonical_prompt.MESSAGE + b"system" + canonical_prompt.content(body.instructions)
        )
    prompt = canonical_prompt.text_prompt(b"".join([*fields, history]))
    return envelope.request(api, raw, body, prompt=prompt)


def parse_conversation(raw: HttpRequest, api: str) -> InferenceRequest | Rejection:
    """Read a conversation's first items; 400 without a model or without items."""
    body = envelope.decode(_ITEMS_DECODER, raw, wanted=_NO_ITEMS)
    if isinstance(body, Rejection):
        return body
    history = _history(body.items) if type(body.items) in _LISTS else None
    if history is None:
        return decision.bad_request(_NO_ITEMS)
    return envelope.request(api, raw, body, prompt=canonical_prompt.text_prompt(history))


def _history(value: object) -> bytes | None:
    """A string is one user message; of a list each member is a message or another item."""
    if type(value) is str:
        return canonical_prompt.MESSAGE + b"user" + canonical_prompt.TEXT + value.encode()
    if type(value) is bytes:
        return canonical_prompt.MESSAGE + b"user" + canonical_prompt.TEXT + value
    if type(value) is msgspec.Raw:
        return canonical_prompt.MESSAGE + canonical_prompt.item(value)
    if type(value) is not list:
        return None
    return b"".join([_item(entry) for entry in value])


def _item(entry: object) -> bytes:
    if type(entry) is canonical_prompt.TextMessage:
        head = canonical_prompt.MESSAGE + entry.role.encode()
        return head + canonical_prompt.content(entry.content)
    if type(entry) is dict:
        return canonical_prompt.loose_message(entry)
    return canonical_prompt.MESSAGE + canonical_prompt.content(entry)
