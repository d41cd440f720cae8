"""Request bodies of the HTTP APIs an engine speaks, read into one shape.

Unknown fields are ignored. Every reader raises `msgspec.DecodeError` for what is not such a body.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from extproc.simulator import prompt


class GenerationRequest(msgspec.Struct, frozen=True, gc=False):
    """Inference request read from a body, the same for every API.

    Attributes:
        model: Base model or adapter; None when the body names none.
        max_tokens: Tokens wanted; None when the body does not say.
        stream: Whether the answer is to be streamed.
        include_usage: Whether a stream is to end with the usage.
        salt: `cache_salt`: keeps equal prompts apart in the prefix cache.
    """

    model: str | None
    prompt: bytes
    max_tokens: int | None = None
    stream: bool = False
    include_usage: bool = False
    salt: str = ""


class _StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool | None = None


class _Body(msgspec.Struct, frozen=True, kw_only=True):
    """Fields that the bodies of all APIs share."""

    model: str | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    max_tokens: int | None = None
    cache_salt: str | None = None

    def ask(self, text: bytes, limit: int | None) -> GenerationRequest:
        """Build the request from a rendered prompt and an output length."""
        options = self.stream_options or _StreamOptions()
        salt, usage = self.cache_salt or "", bool(options.include_usage)
        return GenerationRequest(self.model, text, limit, bool(self.stream), usage, salt)


class _Turn(msgspec.Struct, frozen=True):
    role: str
    content: Any = None
    tool_calls: Any = None


class _ChatBody(_Body, frozen=True, kw_only=True):
    messages: list[_Turn]
    max_completion_tokens: int | None = None
    tools: Any = None


class _CompletionsBody(_Body, frozen=True, kw_only=True):
    prompt: str | list[str | int | list[int]]


class _EmbeddingsBody(_Body, frozen=True, kw_only=True):
    input: str | list[str | int | list[int]]


class _ResponsesBody(_Body, frozen=True, kw_only=True):
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: int | None = None
    tools: Any = None


class _MessagesBody(_Body, frozen=True, kw_only=True):
    messages: list[_Turn]
    system: Any = None
    tools: Any = None


class _TokenizeBody(_Body, frozen=True, kw_only=True):
    prompt: str | None = None
    messages: list[_Turn] | None = None
    tools: Any = None


def _turns(messages: list[_Turn]) -> Iterator[tuple[str, Any]]:
    for turn in messages:
        yield (
            turn.role,
            turn.content if turn.tool_calls is None else [turn.content, turn.tool_calls],
        )


def _plain(text: str | int | Sequence[str | int | list[int]]) -> bytes:
    match text:
        case str():
            return text.encode()
        case int():
            return prompt.token_id(text)
        case _:
            return b"".join(map(_plain, text))


def chat(body: bytes) -> GenerationRequest:
    """`/v1/chat/completions`."""
    read = msgspec.json.decode(body, type=_ChatBody)
    text = prompt.chat(_turns(read.messages), tools=read.tools)
    limit = read.max_completion_tokens
    return read.ask(text, read.max_tokens if limit is None else limit)


def completions(body: bytes) -> GenerationRequest:
    """`/v1/completions`. A list of prompts is one prompt: the simulation answers it once."""
    read = msgspec.json.decode(body, type=_CompletionsBody)
    return read.ask(_plain(read.prompt), 16 if read.max_tokens is None else read.max_tokens)


def embeddings(body: bytes) -> GenerationRequest:
    """`/v1/embeddings`: one step that ends with the prefill. A list of inputs is one input."""
    read = msgspec.json.decode(body, type=_EmbeddingsBody)
    return read.ask(_plain(read.input), 1)


def responses(body: bytes) -> GenerationRequest:
    """`/v1/responses`."""
    read = msgspec.json.decode(body, type=_ResponsesBody)
    turns: list[tuple[str, Any]] = []
    if read.instructions:
        turns.append(("system", read.instructions))
    if isinstance(read.input, str):
        turns.append(("user", read.input))
    else:
        turns += [(str(item.get("role", "item")), item.get("content", item)) for item in read.input]
    return read.ask(prompt.chat(turns, tools=read.tools), read.max_output_tokens)


def messages(body: bytes) -> GenerationRequest:
    """`/v1/messages` (Anthropic)."""
    read = msgspec.json.decode(body, type=_MessagesBody)
    turns = [("system", read.system)] if read.system else []
    return read.ask(
        prompt.chat([*turns, *_turns(read.messages)], tools=read.tools), read.max_tokens
    )


def tokenize(body: bytes) -> GenerationRequest:
    """`/tokenize`: a prompt or messages."""
    read = msgspec.json.decode(body, type=_TokenizeBody)
    if read.messages is not None:
        return read.ask(prompt.chat(_turns(read.messages), tools=read.tools), 1)
    return read.ask((read.prompt or "").encode(), 1)
