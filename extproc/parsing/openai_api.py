"""OpenAI's API: chat completions, completions, embeddings, images and responses.

vLLM and SGLang serve it too, and pooling beside it, with fields of their own.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import msgspec

from extproc import decision
from extproc.decision import Rejection
from extproc.parsing import canonical_prompt, envelope, narrow_types
from extproc.request import HttpRequest, InferenceRequest

_NO_MESSAGES: Final = "invalid chat completions request: must have valid messages field"
_NO_PROMPT: Final = "invalid completions request: must have prompt field"
_NO_IMAGE_PROMPT: Final = "invalid images generations request: must have prompt field"
_NO_EMBEDDINGS_INPUT: Final = "invalid embeddings request: must have input field"
_NO_RESPONSES_INPUT: Final = "invalid responses request: must have input field"
_NO_ITEMS: Final = "invalid conversations request: must have items field"


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
_CHAT_DECODER = msgspec.json.Decoder(ChatBody)

#: How messages of the usual roles start.
_HEADS = {
    role: canonical_prompt.MESSAGE + role.encode()
    for role in ("system", "developer", "user", "assistant", "tool", "function")
}


def parse_chat(raw: HttpRequest, api: str) -> InferenceRequest | Rejection:
    """Read a chat request; 400 without a model or without at least one message."""
    body = envelope.decode(_CHAT_DECODER, raw, wanted=_NO_MESSAGES)
    if isinstance(body, Rejection):
        return body
    if not body.messages:
        return decision.bad_request(_NO_MESSAGES)
    fields = _chat_options(body)
    has_parts = _add_messages(fields, body.messages)
    body.messages = None
    prompt = canonical_prompt.joined_prompt(fields)
    return envelope.request(api, raw, body, prompt=prompt, may_have_media=has_parts)


def _chat_options(body: ChatBody) -> list[bytes]:
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


def _add_messages(fields: list[bytes], messages: Iterable[ChatMessage]) -> bool:
    """Append messages field by field: pieces are joined, and so copied, only once.

    Returns:
        Whether any of them has content that is no plain text.
    """
    has_parts = False
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
        elif content is not None:
            has_parts = True
            fields.append(canonical_prompt.content(content))
        if message.tool_calls is not _ABSENT or message.function_call is not _ABSENT:
            fields += (
                canonical_prompt.calls(message.tool_calls),
                canonical_prompt.calls(message.function_call),
            )
    return has_parts


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


class CompletionBody(envelope.Envelope, gc=False):
    """Fields that are read from a body with a `prompt`.

    `prompt_embeds` is vLLM's alternative to a prompt: base64 of a tensor.
    """

    prompt: narrow_types.TextOrIds = None
    prompt_embeds: Any = None


class EmbeddingInputBody(envelope.Envelope, gc=False):
    """Fields that are read from a body with an `input`; vLLM also embeds a conversation."""

    input: narrow_types.TextOrIds = None
    messages: Any = None


_COMPLETION_DECODER = msgspec.json.Decoder(CompletionBody)
_INPUT_DECODER = msgspec.json.Decoder(EmbeddingInputBody)


def parse_completion(raw: HttpRequest, api: str) -> InferenceRequest | Rejection:
    """Read a request for completions or images; 400 without a model or a prompt."""
    wanted = _NO_IMAGE_PROMPT if api == "images" else _NO_PROMPT
    body = envelope.decode(_COMPLETION_DECODER, raw, wanted=wanted)
    if isinstance(body, Rejection):
        return body
    prompt = canonical_prompt.prompt_of(body.prompt)
    if prompt is None and body.prompt_embeds is not None:
        prompt = canonical_prompt.text_prompt(canonical_prompt.item({"data": body.prompt_embeds}))
    if prompt is None:
        return decision.bad_request(wanted)
    if body.cache_salt:
        prompt = canonical_prompt.with_cache_salt(prompt, body.cache_salt)
    return envelope.request(api, raw, body, prompt=prompt)


def parse_embeddings(raw: HttpRequest, api: str) -> InferenceRequest | Rejection:
    """Read an embeddings request; 400 without a model, or with neither input nor messages."""
    return _parse_input(raw, api, is_required=True)


def parse_pooling(raw: HttpRequest, api: str) -> InferenceRequest | Rejection:
    """Read a pooling request: 400 without a model. The engine judges its input."""
    return _parse_input(raw, api, is_required=False)


def _parse_input(raw: HttpRequest, api: str, *, is_required: bool) -> InferenceRequest | Rejection:
    body = envelope.decode(_INPUT_DECODER, raw, wanted=_NO_EMBEDDINGS_INPUT)
    if isinstance(body, Rejection):
        return body
    prompt = canonical_prompt.prompt_of(body.input) or loose_prompt(body.messages)
    if prompt is None:
        if is_required:
            return decision.bad_request(_NO_EMBEDDINGS_INPUT)
        prompt = canonical_prompt.NOTHING
    return envelope.request(
        api, raw, body, prompt=canonical_prompt.with_cache_salt(prompt, body.cache_salt)
    )


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

_RESPONSES_DECODER = msgspec.json.Decoder(ResponsesBody)
_ITEMS_DECODER = msgspec.json.Decoder(ConversationItemsBody)


def parse_responses(raw: HttpRequest, api: str) -> InferenceRequest | Rejection:
    """Read a responses request; 400 without a model or without input."""
    body = envelope.decode(_RESPONSES_DECODER, raw, wanted=_NO_RESPONSES_INPUT)
    if isinstance(body, Rejection):
        return body
    history = _history(body.input)
    if history is None:
        return decision.bad_request(_NO_RESPONSES_INPUT)
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
    fields.append(history)
    del history
    body.input = None
    return envelope.request(api, raw, body, prompt=canonical_prompt.joined_prompt(fields))


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
