"""Chat completions: `{model, messages, tools, ...}` (OpenAI, vLLM, SGLang)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import msgspec

from extproc import decision
from extproc.decision import Rejection
from extproc.parsing import canonical_prompt, envelope, narrow_types
from extproc.request import HttpRequest, InferenceRequest

_WANTED: Final = "invalid chat completions request: must have valid messages field"


class ChatMessage(msgspec.Struct, gc=False):
    """One message of the history; only an object can be one."""

    role: narrow_types.Role = None
    content: narrow_types.Content = None
    name: Any = None
    reasoning_content: Any = None
    reasoning: Any = None
    tool_call_id: Any = None
    tool_calls: msgspec.Raw = canonical_prompt.ABSENT
    function_call: msgspec.Raw = canonical_prompt.ABSENT


class ChatBody(envelope.Envelope, gc=False):
    """Fields that are read from a chat body."""

    messages: list[ChatMessage] | None = None
    tools: msgspec.Raw = canonical_prompt.ABSENT
    functions: msgspec.Raw = canonical_prompt.ABSENT
    documents: msgspec.Raw = canonical_prompt.ABSENT
    chat_template: msgspec.Raw = canonical_prompt.ABSENT
    chat_template_kwargs: msgspec.Raw = canonical_prompt.ABSENT
    reasoning_effort: msgspec.Raw = canonical_prompt.ABSENT


_ABSENT = canonical_prompt.ABSENT
_TEXT = canonical_prompt.TEXT
_DECODER = msgspec.json.Decoder(ChatBody)

#: How messages of the usual roles start.
_HEADS = {
    role: canonical_prompt.MESSAGE + role.encode()
    for role in ("system", "developer", "user", "assistant", "tool", "function")
}


def parse(raw: HttpRequest, api: str) -> InferenceRequest | Rejection:
    """Read a chat request; 400 without a model or without at least one message."""
    body = envelope.decode(_DECODER, raw, wanted=_WANTED)
    if isinstance(body, Rejection):
        return body
    if not body.messages:
        return decision.bad_request(_WANTED)
    fields = _options(body)
    _add_messages(fields, body.messages)
    return envelope.request(api, raw, body, prompt=canonical_prompt.text_prompt(b"".join(fields)))


def _options(body: ChatBody) -> list[bytes]:
    """Fields that precede the messages, or change their layout in the template.

    Hardly a request has any of it: a look at each field costs less than a walk over a table.
    """
    fields = [] if body.cache_salt is None else [canonical_prompt.salt(body.cache_salt)]
    if body.chat_template is not _ABSENT:
        fields.append(canonical_prompt.option(b"m", body.chat_template))
    if body.chat_template_kwargs is not _ABSENT:
        fields.append(canonical_prompt.option(b"k", body.chat_template_kwargs))
    if body.reasoning_effort is not _ABSENT:
        fields.append(canonical_prompt.option(b"e", body.reasoning_effort))
    if body.documents is not _ABSENT:
        fields.append(canonical_prompt.option(b"d", body.documents))
    if body.functions is not _ABSENT:
        fields.append(canonical_prompt.option(b"f", body.functions))
    if body.tools is not _ABSENT:
        fields.append(canonical_prompt.option(b"t", body.tools))
    return fields


def _add_messages(fields: list[bytes], messages: Iterable[ChatMessage]) -> None:
    """Append messages field by field: pieces are joined, and so copied, only once."""
    for message in messages:
        role, content = message.role, message.content
        head = _HEADS.get(role) if type(role) is str else None
        fields.append(head or canonical_prompt.MESSAGE + canonical_prompt.as_bytes(role))
        if message.name is not None or message.tool_call_id is not None:
            fields += (canonical_prompt.NAME, canonical_prompt.as_bytes(message.name))
            fields += (canonical_prompt.NAME, canonical_prompt.as_bytes(message.tool_call_id))
        reasoning = message.reasoning_content or message.reasoning
        if reasoning:
            fields += (canonical_prompt.REASONING, canonical_prompt.as_bytes(reasoning))
        if type(content) is str:
            fields += (_TEXT, content.encode())
        else:
            fields.append(canonical_prompt.content(content))
        if message.tool_calls is not _ABSENT or message.function_call is not _ABSENT:
            fields += (
                canonical_prompt.calls(message.tool_calls),
                canonical_prompt.calls(message.function_call),
            )


def loose_prompt(messages: object) -> canonical_prompt.Prompt | None:
    """A conversation that was decoded without a type; None when it is not one."""
    if type(messages) is msgspec.Raw:
        return canonical_prompt.text_prompt(
            canonical_prompt.MESSAGE + canonical_prompt.item(messages)
        )
    if type(messages) is not list or not messages:
        return None
    entries = [message for message in messages if type(message) is dict]
    if len(entries) != len(messages):
        return None
    return canonical_prompt.text_prompt(
        b"".join([canonical_prompt.loose_message(message) for message in entries])
    )
