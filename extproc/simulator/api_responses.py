"""Answer bodies of the HTTP APIs an engine speaks: whole, or as server-sent events.

A stream is an opening, any number of pieces of text, a closing. All pieces share a frame that is
encoded once per request: the text is made of letters and spaces and needs no JSON escapes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import msgspec

from extproc.simulator import api_requests

_DONE = b"data: [DONE]\n\n"
_HOLE = "\u0001"  # stands for the text while a frame is encoded; JSON spells it \u0001
_HOLE_JSON = b"\\u0001"


class GenerationAnswer(msgspec.Struct, frozen=True, gc=False):
    """Content of one answer, the same for every API.

    Attributes:
        id: Request id, without the surface's prefix.
        model: The model name as asked for.
        created: Unix time in whole seconds.
        cached_tokens: How many of them were cached; None keeps it to ourselves.
        output_tokens: Its tokens.
        finish: `stop` or `length`.
    """

    id: str
    model: str
    created: int
    prompt_tokens: int
    cached_tokens: int | None
    text: str
    output_tokens: int
    finish: str


class ResponseWriter(Protocol):
    """Writer of the answers of one API."""

    def body(self, answer: GenerationAnswer) -> bytes:
        """The body of an answer that is not streamed."""

    def opening(self, answer: GenerationAnswer) -> bytes:
        """Events before the first piece of text."""

    def frame(self, answer: GenerationAnswer) -> tuple[bytes, bytes]:
        """Bytes before and after a piece of text in the stream."""

    def closing(self, answer: GenerationAnswer, *, include_usage: bool) -> bytes:
        """Events after the last piece of text."""


class ApiSurface(msgspec.Struct, frozen=True):
    """One HTTP API: its request reader and its response writer."""

    read: Callable[[bytes], api_requests.GenerationRequest]
    writer: ResponseWriter


#: Path whose answers and errors have the form of Anthropic's API.
MESSAGES_PATH = "/v1/messages"


def failure(message: str, kind: str, code: int, param: str | None = None) -> bytes:
    """The error body of a vLLM server."""
    error = {"message": message, "type": kind, "param": param, "code": code}
    return msgspec.json.encode({"error": error})


def failure_event(message: str, kind: str, code: int, *, path: str) -> bytes:
    """An error inside a stream that began with 200, and the end of that stream."""
    body = failure(message, kind, code)
    if path == MESSAGES_PATH:
        return b"event: error\ndata: " + anthropic_failure(body) + b"\n\n"
    return b"data: " + body + b"\n\n" + _DONE


def anthropic_failure(body: bytes) -> bytes:
    """The error body of a vLLM server in the form of Anthropic's API."""
    return b'{"type":"error",' + body.removeprefix(b"{")


def _event(data: Mapping[str, Any], name: str = "") -> bytes:
    encoded = b"data: " + msgspec.json.encode(data) + b"\n\n"
    return f"event: {name}\n".encode() + encoded if name else encoded


def _typed(kind: str, **data: Any) -> bytes:
    """An event that carries its name in its data too."""
    return _event({"type": kind, **data}, kind)


def _split(framed: bytes) -> tuple[bytes, bytes]:
    head, _, tail = framed.partition(_HOLE_JSON)
    return head, tail


def _usage(answer: GenerationAnswer) -> dict[str, Any]:
    usage: dict[str, Any] = {
        "prompt_tokens": answer.prompt_tokens,
        "total_tokens": answer.prompt_tokens + answer.output_tokens,
        "completion_tokens": answer.output_tokens,
    }
    if answer.cached_tokens is not None:
        usage["prompt_tokens_details"] = {"cached_tokens": answer.cached_tokens}
    return usage


class _ChoicesWriter:
    """Chat and completions.

    Args:
        prefix: Prefix of ids.
        whole_kind: The `object` of a whole answer.
        chunk_kind: The `object` of a chunk.
        chat: Whether text comes in messages and deltas rather than bare.
    """

    def __init__(self, prefix: str, whole_kind: str, chunk_kind: str, *, chat: bool) -> None:
        self._prefix = prefix
        self._whole_kind = whole_kind
        self._chunk_kind = chunk_kind
        self._chat = chat

    def _envelope(
        self, answer: GenerationAnswer, kind: str, choices: list[Any], **more: Any
    ) -> dict[str, Any]:
        return {
            "id": self._prefix + answer.id,
            "object": kind,
            "created": answer.created,
            "model": answer.model,
            "choices": choices,
            **more,
        }

    def _chunk(
        self, answer: GenerationAnswer, text: dict[str, Any], finish: str | None = None
    ) -> bytes:
        body = {"delta": text} if self._chat else {"text": text.get("content", "")}
        choice = {"index": 0, **body, "logprobs": None, "finish_reason": finish}
        return _event(self._envelope(answer, self._chunk_kind, [choice]))

    def body(self, answer: GenerationAnswer) -> bytes:
        """The body of an answer that is not streamed."""
        message = {"role": "assistant", "content": answer.text, "tool_calls": []}
        text = {"message": message} if self._chat else {"text": answer.text}
        choice = {"index": 0, **text, "logprobs": None, "finish_reason": answer.finish}
        usage = _usage(answer)
        return msgspec.json.encode(self._envelope(answer, self._whole_kind, [choice], usage=usage))

    def opening(self, answer: GenerationAnswer) -> bytes:
        """For chat, the chunk that names the role."""
        return self._chunk(answer, {"role": "assistant", "content": ""}) if self._chat else b""

    def frame(self, answer: GenerationAnswer) -> tuple[bytes, bytes]:
        """Bytes before and after a piece of text in the stream."""
        return _split(self._chunk(answer, {"content": _HOLE}))

    def closing(self, answer: GenerationAnswer, *, include_usage: bool) -> bytes:
        """The finish reason, the usage in a chunk without choices, [DONE]."""
        events = self._chunk(answer, {"content": ""}, answer.finish)
        if include_usage:
            usage = _usage(answer)
            events += _event(self._envelope(answer, self._chunk_kind, [], usage=usage))
        return events + _DONE


class _EmbeddingsWriter:
    """Embeddings API: one constant vector of eight numbers per request."""

    def body(self, answer: GenerationAnswer) -> bytes:
        """The body of an answer."""
        vector = {"index": 0, "object": "embedding", "embedding": [0.125] * 8}
        tokens = answer.prompt_tokens
        return msgspec.json.encode(
            {
                "id": f"embd-{answer.id}",
                "object": "list",
                "created": answer.created,
                "model": answer.model,
                "data": [vector],
                "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
            }
        )

    def opening(self, answer: GenerationAnswer) -> bytes:
        """Embeddings do not stream: the whole answer is one event."""
        return b"data: " + self.body(answer) + b"\n\n"

    def frame(self, answer: GenerationAnswer) -> tuple[bytes, bytes]:
        """No text: pieces are SSE comments."""
        return f": {answer.id}".encode(), b"\n\n"

    def closing(self, answer: GenerationAnswer, *, include_usage: bool) -> bytes:
        """The end of the stream."""
        del answer, include_usage
        return _DONE


class _ResponsesWriter:
    """The OpenAI Responses API, text output only."""

    def _item(self, answer: GenerationAnswer, text: str, status: str) -> dict[str, Any]:
        part = {"type": "output_text", "text": text, "annotations": []}
        return {
            "type": "message",
            "id": f"msg_{answer.id}",
            "role": "assistant",
            "status": status,
            "content": [part] if text else [],
        }

    def _response(self, answer: GenerationAnswer, status: str) -> dict[str, Any]:
        done = status != "in_progress"
        usage = {
            "input_tokens": answer.prompt_tokens,
            "input_tokens_details": {"cached_tokens": answer.cached_tokens or 0},
            "output_tokens": answer.output_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": answer.prompt_tokens + answer.output_tokens,
        }
        return {
            "id": f"resp_{answer.id}",
            "object": "response",
            "created_at": answer.created,
            "status": status,
            "model": answer.model,
            "output": [self._item(answer, answer.text, "completed")] if done else [],
            "usage": usage if done else None,
        }

    def _end(self, answer: GenerationAnswer) -> str:
        return "incomplete" if answer.finish == "length" else "completed"

    def body(self, answer: GenerationAnswer) -> bytes:
        """The body of an answer that is not streamed."""
        return msgspec.json.encode(self._response(answer, self._end(answer)))

    def opening(self, answer: GenerationAnswer) -> bytes:
        """The response and its one output item."""
        item = self._item(answer, "", "in_progress")
        return _typed("response.created", response=self._response(answer, "in_progress")) + _typed(
            "response.output_item.added", output_index=0, item=item
        )

    def frame(self, answer: GenerationAnswer) -> tuple[bytes, bytes]:
        """Bytes before and after a piece of text in the stream."""
        item = f"msg_{answer.id}"
        return _split(
            _typed(
                "response.output_text.delta",
                item_id=item,
                output_index=0,
                content_index=0,
                delta=_HOLE,
            )
        )

    def closing(self, answer: GenerationAnswer, *, include_usage: bool) -> bytes:
        """The text, the item and the response, which always carries its usage."""
        del include_usage
        end = self._end(answer)
        item = self._item(answer, answer.text, "completed")
        return (
            _typed("response.output_text.done", output_index=0, content_index=0, text=answer.text)
            + _typed("response.output_item.done", output_index=0, item=item)
            + _typed(f"response.{end}", response=self._response(answer, end))
        )


class _MessagesWriter:
    """The Anthropic Messages API, text output only."""

    def _message(
        self, answer: GenerationAnswer, content: list[Any], stop: str | None
    ) -> dict[str, Any]:
        cached = answer.cached_tokens or 0
        return {
            "id": f"msg_{answer.id}",
            "type": "message",
            "role": "assistant",
            "model": answer.model,
            "content": content,
            "stop_reason": stop,
            "stop_sequence": None,
            "usage": {
                "input_tokens": answer.prompt_tokens - cached,
                "cache_read_input_tokens": cached,
                "output_tokens": answer.output_tokens if stop else 0,
            },
        }

    def _stop(self, answer: GenerationAnswer) -> str:
        return "max_tokens" if answer.finish == "length" else "end_turn"

    def body(self, answer: GenerationAnswer) -> bytes:
        """The body of an answer that is not streamed."""
        content = [{"type": "text", "text": answer.text}]
        return msgspec.json.encode(self._message(answer, content, self._stop(answer)))

    def opening(self, answer: GenerationAnswer) -> bytes:
        """The message and its one text block."""
        return _typed("message_start", message=self._message(answer, [], None)) + _typed(
            "content_block_start", index=0, content_block={"type": "text", "text": ""}
        )

    def frame(self, answer: GenerationAnswer) -> tuple[bytes, bytes]:
        """Bytes before and after a piece of text in the stream."""
        del answer
        delta = {"type": "text_delta", "text": _HOLE}
        return _split(_typed("content_block_delta", index=0, delta=delta))

    def closing(self, answer: GenerationAnswer, *, include_usage: bool) -> bytes:
        """The block's end, the stop reason with the usage, the message's end."""
        del include_usage
        delta = {"stop_reason": self._stop(answer), "stop_sequence": None}
        usage = {"output_tokens": answer.output_tokens}
        return (
            _typed("content_block_stop", index=0)
            + _typed("message_delta", delta=delta, usage=usage)
            + _typed("message_stop")
        )


#: The APIs by path.
SURFACES: Mapping[str, ApiSurface] = {
    "/v1/chat/completions": ApiSurface(
        api_requests.chat,
        _ChoicesWriter("chatcmpl-", "chat.completion", "chat.completion.chunk", chat=True),
    ),
    "/v1/completions": ApiSurface(
        api_requests.completions,
        _ChoicesWriter("cmpl-", "text_completion", "text_completion", chat=False),
    ),
    "/v1/embeddings": ApiSurface(api_requests.embeddings, _EmbeddingsWriter()),
    "/v1/responses": ApiSurface(api_requests.responses, _ResponsesWriter()),
    MESSAGES_PATH: ApiSurface(api_requests.messages, _MessagesWriter()),
}
