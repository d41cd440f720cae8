"""Response handling: replies to response messages, tail of the body, and request cost.

Usage stands at the end of an answer, whole or streamed, so the tail is kept. Some engines write it at
the beginning, before what may be long, so a few bytes of that are kept as well.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Final

from extproc.protocol.headers import (
    RESPONSE_MARKER,
    SERVED_HEADER,
    changed_length,
    is_length,
)
from extproc.protocol.messages import (
    BODY_MODE_TRAITS,
    BodyMode,
    BodyModes,
    BodyModeTraits,
    BodyMutation,
    ContinueResponse,
    Headers,
    MessageKind,
    ProcessingRequest,
    ProcessingResponse,
    ResponseHeadersMutation,
    StreamedBodyResponse,
    WithRequestCost,
    chunks,
)
from extproc.protocol.model_name_restorer import ModelNameRestorer

#: Bytes of the answer's end that are kept. vLLM writes `usage` after `choices`; this leaves room
#: for prompt log-probabilities and tool calls after it.
TAIL_BYTES = 65536

#: Bytes of the beginning that are kept of an answer with a longer body. vLLM writes the `usage` of
#: reranked documents before them, and Anthropic that of the prompt in the first event.
HEAD_BYTES = 2048

#: Largest answer that is asked for in one message. It must stay below Envoy's buffer limit
#: (1 MiB), above which a buffered answer becomes a 500.
MAX_RESPONSE_BYTES = 262144

#: gRPC status to HTTP status (google/rpc/code.proto); others are as UNKNOWN.
_HTTP_STATUSES: Final[Mapping[str, str]] = {
    "0": "200",  # OK
    "1": "499",  # CANCELLED
    "3": "400",  # INVALID_ARGUMENT
    "4": "504",  # DEADLINE_EXCEEDED
    "5": "404",  # NOT_FOUND
    "6": "409",  # ALREADY_EXISTS
    "7": "403",  # PERMISSION_DENIED
    "8": "429",  # RESOURCE_EXHAUSTED
    "9": "400",  # FAILED_PRECONDITION
    "10": "409",  # ABORTED
    "11": "400",  # OUT_OF_RANGE
    "12": "501",  # UNIMPLEMENTED
    "14": "503",  # UNAVAILABLE
    "16": "401",  # UNAUTHENTICATED
}


class TailBuffer:
    """Buffer of the last bytes of a body, and of the first where the last are not all."""

    __slots__ = ("_chunks", "_dropped_bytes", "_head", "_size_bytes")

    def __init__(self) -> None:
        self._chunks: deque[bytes] = deque()
        self._size_bytes = self._dropped_bytes = 0
        self._head = b""

    @property
    def total_bytes(self) -> int:
        """Bytes that were added."""
        return self._size_bytes + self._dropped_bytes

    def add(self, chunk: bytes) -> None:
        """Add the next chunk."""
        if not chunk:
            return
        self._chunks.append(chunk)
        self._size_bytes += len(chunk)
        while self._size_bytes - len(self._chunks[0]) >= TAIL_BYTES:
            dropped = self._chunks.popleft()
            self._size_bytes -= len(dropped)
            self._dropped_bytes += len(dropped)
            if len(self._head) < HEAD_BYTES:
                self._head += dropped[: HEAD_BYTES - len(self._head)]

    def joined(self) -> bytes:
        """The complete body, or its first `HEAD_BYTES` bytes, a NUL, and at least its last `TAIL_BYTES`.

        JSON has no NUL, so that nothing is read which begins before the gap and ends behind it.
        """
        gap = b"\0" if len(self._head) == HEAD_BYTES else b""
        return b"".join((self._head, gap, *self._chunks))


_NONE = BodyMode.NONE

#: The replies there are where the headers depend on nothing, by the mode to switch to.
_MARKED = {mode: (ResponseHeadersMutation((RESPONSE_MARKER,), mode),) for mode in (None, *BodyMode)}
_PLAIN = {mode: (ResponseHeadersMutation((), mode),) for mode in (None, *BodyMode)}


def response_status(headers: Mapping[str, str]) -> str:
    """HTTP status of a response; empty without one.

    A gRPC call that fails before its first message has HTTP status 200 and its gRPC status among the
    headers, also where Envoy cannot reach the engine: it gets the HTTP status of the same meaning.
    """
    status = headers.get(":status", "")
    if status == "200" and "grpc-status" in headers:
        return _HTTP_STATUSES.get(headers["grpc-status"], "500")
    return status


def response_headers_reply(
    event: ProcessingRequest,
    mode: BodyMode | None,
    *,
    marker: bool,
    conformance: bool,
    headers: Headers,
    drops_length: bool,
) -> tuple[ResponseHeadersMutation]:
    """The reply to the response headers.

    Args:
        mode: Body mode to switch to; None keeps the configured one.
        conformance: Whether to report the served endpoint.
        drops_length: Whether to remove `content-length`, because the length of the body changes by
            an amount that is not known yet.
    """
    if not conformance and not headers and not drops_length:
        return (_MARKED if marker else _PLAIN)[mode]
    marks: Headers = (RESPONSE_MARKER,) if marker else ()
    if conformance:
        marks = (*marks, (SERVED_HEADER, served_endpoint_marker(event)))
    removed = ("content-length",) if drops_length else ()
    return (ResponseHeadersMutation((*marks, *headers), mode, removed),)


def served_endpoint_marker(event: ProcessingRequest) -> str:
    """The served endpoint to report, in conformance mode."""
    hints = event.hints
    if hints is None or not hints.balancer:
        return "fail: missing envoy lb metadata"
    return hints.served or "fail: missing destination endpoint served metadata"


def response_body_mode_override(
    modes: BodyModes,
    headers: Mapping[str, str],
    *,
    is_stream: bool,
    is_read: bool,
    watch_stream: bool,
) -> BodyMode | None:
    """The response body mode to switch to, or None to leave it.

    Envoy honors `mode_override` only where the request was buffered (it ignores it in
    FULL_DUPLEX_STREAMED). A whole answer costs one message; it is asked for only when its size is
    declared and safe to buffer. A streamed answer must not be buffered, as that would hold its
    first token back to the end. Where the data plane buffers every answer, those that are read are
    shown in pieces, and others not at all: Envoy answers 500 for what exceeds its buffer.

    Args:
        is_read: Whether bodies of responses are read at all.
    """
    if not BODY_MODE_TRAITS[modes.request].is_buffered:
        return None
    if BODY_MODE_TRAITS[modes.response].is_buffered:
        is_shown = watch_stream if is_stream else is_read
        return BodyMode.STREAMED if is_shown else _NONE
    if modes.response is not _NONE or not is_read:
        return None
    if is_stream:
        return BodyMode.STREAMED if watch_stream else None
    length = headers.get("content-length", "")
    if is_length(length) and int(length) <= MAX_RESPONSE_BYTES:
        return BodyMode.BUFFERED
    return BodyMode.STREAMED if watch_stream else None


def is_last_response_message(event: ProcessingRequest) -> bool:
    """True if a message is the last of a response body."""
    kind = event.kind
    return (
        kind is MessageKind.RESPONSE_BODY and event.end_of_stream
    ) or kind is MessageKind.RESPONSE_TRAILERS


def attach_request_cost(
    replies: Iterable[ProcessingResponse], cost: float
) -> Iterable[ProcessingResponse]:
    """Attach the cost of a request to the last reply (docs/spec/protocol.md#header-names).

    Args:
        replies: To the last message of the response.
        cost: Cost of the tokens of request and response, 0 or more.
    """
    messages = tuple(replies)
    return (*messages[:-1], WithRequestCost(messages[-1], cost)) if messages else messages


class ModelNameResponseRewriter:
    """Replies that restore the client's model name in a response.

    Args:
        length: The `content-length` of the answer; empty when it has none.
    """

    __slots__ = ("_length", "_mode", "_restorer")

    def __init__(self, restorer: ModelNameRestorer, mode: BodyModeTraits, *, length: str) -> None:
        self._restorer = restorer
        self._mode = mode
        self._length = length

    def body(self, event: ProcessingRequest) -> Iterable[ProcessingResponse]:
        """The replies to a body message."""
        mode = self._mode
        # What is buffered is one message, and trailers may end it.
        shown = bytes(event.body)
        body = self._restorer.pass_on(shown, last=event.end_of_stream or mode.is_buffered)
        if mode.is_returned:
            if not body and not event.end_of_stream:
                return ()
            return chunks(MessageKind.RESPONSE_BODY, body, end_of_stream=event.end_of_stream)
        if body == shown:
            return (ContinueResponse(MessageKind.RESPONSE_BODY),)
        growth_bytes = len(body) - len(shown)
        return (
            BodyMutation(
                MessageKind.RESPONSE_BODY,
                body,
                changed_length(self._length, growth_bytes) if mode.is_buffered else (),
            ),
        )

    def trailers(self) -> Iterable[ProcessingResponse]:
        """Replies before the reply to trailers that end the body.

        Only a body that is returned can get more bytes then. Something is held back then only where the
        body was cut inside of a name.
        """
        rest = self._restorer.rest()
        if not rest or not self._mode.is_returned:
            return ()
        return (StreamedBodyResponse(MessageKind.RESPONSE_BODY, rest, end_of_stream=False),)
