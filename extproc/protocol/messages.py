"""Messages of ext_proc as frozen values: ProcessingRequests of Envoy, and the responses to them."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final

import msgspec

from extproc.decision import Rejection
from extproc.request import RequestBody, path_of, split_path


class MessageKind(enum.IntEnum):
    """Kind of a message of an exchange.

    UNKNOWN is one this version does not know and ignores; GARBAGE is none at all.
    """

    # Enum hashes by name, in Python; these are keys on every message.
    __hash__ = int.__hash__

    UNKNOWN = 0
    REQUEST_HEADERS = 1
    REQUEST_BODY = 2
    REQUEST_TRAILERS = 3
    RESPONSE_HEADERS = 4
    RESPONSE_BODY = 5
    RESPONSE_TRAILERS = 6
    GARBAGE = 7


#: Kinds of the messages of a response.
RESPONSE_KINDS: Final = frozenset(
    {MessageKind.RESPONSE_HEADERS, MessageKind.RESPONSE_BODY, MessageKind.RESPONSE_TRAILERS}
)


class BodyMode(enum.IntEnum):
    """Mode in which Envoy sends a body (ext_proc ProcessingMode.BodySendMode)."""

    __hash__ = int.__hash__

    NONE = 0
    STREAMED = 1
    BUFFERED = 2
    BUFFERED_PARTIAL = 3
    FULL_DUPLEX_STREAMED = 4


class BodyModeTraits(msgspec.Struct, frozen=True, gc=False):
    """Behavior of a body mode; all that tells the modes apart.

    Attributes:
        awaits_body: Whether the reply to the request headers can wait for the body. If so, the body
            can be edited: its length has not gone on yet.
        is_buffered: Whether Envoy buffers the body and shows it in a single message, once the
            headers are answered. Only then may the mode of the response be changed
            (`mode_override`), and headers be set with a body.
        is_streamed: Whether the body is shown in pieces as they arrive.
        is_returned: Whether Envoy keeps nothing of the body and goes on with the chunks that are
            sent to it (`StreamedBodyResponse`); else each message is acknowledged on its own.
        is_cut: Whether a body without end of stream, and without trailers, was not shown to its end.
    """

    awaits_body: bool = False
    is_buffered: bool = False
    is_streamed: bool = False
    is_returned: bool = False
    is_cut: bool = False


#: Every mode that is understood; others are treated as `DEFAULT_BODY_MODES`.
BODY_MODE_TRAITS: Mapping[BodyMode, BodyModeTraits] = {
    BodyMode.NONE: BodyModeTraits(is_cut=True),
    BodyMode.STREAMED: BodyModeTraits(is_streamed=True, is_cut=True),
    BodyMode.BUFFERED: BodyModeTraits(awaits_body=True, is_buffered=True),
    BodyMode.BUFFERED_PARTIAL: BodyModeTraits(awaits_body=True, is_buffered=True, is_cut=True),
    BodyMode.FULL_DUPLEX_STREAMED: BodyModeTraits(
        awaits_body=True, is_streamed=True, is_returned=True
    ),
}


class BodyModes(msgspec.Struct, frozen=True, gc=False):
    """The body modes of both directions (`protocol_config` of the first message)."""

    request: BodyMode
    response: BodyMode


#: What a data plane that sends no `protocol_config` means. Envoy sends it since 1.33; gateways
#: and test clients that do not are written for the endpoint picker protocol, which demands
#: FULL_DUPLEX_STREAMED (EPP protocol 004).
DEFAULT_BODY_MODES = BodyModes(BodyMode.FULL_DUPLEX_STREAMED, BodyMode.FULL_DUPLEX_STREAMED)


class LbMetadata(msgspec.Struct, frozen=True, gc=False):
    """Metadata of a message (EPP protocol 004).

    Attributes:
        subset: Tokens of `envoy.lb.subset_hint`; None when the key is absent.
        balancer: Whether the `envoy.lb` namespace is there at all.
        served: The endpoint that served, from `envoy.lb`; empty when absent.
    """

    subset: tuple[str, ...] | None = None
    balancer: bool = False
    served: str = ""


NO_HEADERS: Mapping[str, str] = {}


class ProcessingRequest(msgspec.Struct, frozen=True, gc=False):
    """One message from the data plane.

    Attributes:
        headers: Headers of a headers or trailers message, names in lower case; of duplicates the
            last.
        end_of_stream: Nothing more comes in this direction, trailers included.
        modes: Body modes, on the message that declares them.
        hints: Metadata, if the message carries any.
    """

    kind: MessageKind
    headers: Mapping[str, str] = NO_HEADERS
    body: RequestBody = b""
    end_of_stream: bool = False
    modes: BodyModes | None = None
    hints: LbMetadata | None = None


Headers = tuple[tuple[str, str], ...]

#: Largest body piece in one message. Envoy advises at most 64 KiB; the reference picker uses this
#: number (docs/spec/protocol.md#full-duplex-rules).
CHUNK_BYTES = 62000


class RouteResponse(msgspec.Struct, frozen=True, gc=False):
    """The decision, as reply to the request headers or, if buffered, to the request body.

    Attributes:
        answers: REQUEST_HEADERS or REQUEST_BODY.
        destination: Value of both the header and the dynamic metadata (EPP protocol 004:
            they must agree).
        remove_headers: Control headers of the client that must not reach the engine.
        body: Replacement of the body, in the buffered modes; None leaves it unchanged.
        scores: Scores of endpoints, as dynamic metadata; empty for none.
    """

    answers: MessageKind
    destination: str
    set_headers: Headers = ()
    remove_headers: tuple[str, ...] = ()
    body: bytes | None = None
    scores: tuple[tuple[str, float], ...] = ()


class StreamedBodyResponse(msgspec.Struct, frozen=True, gc=False):
    """Body bytes sent on, FULL_DUPLEX_STREAMED only.

    Attributes:
        answers: REQUEST_BODY or RESPONSE_BODY.
        body: Chunk of at most `CHUNK_BYTES` bytes.
        end_of_stream: The direction ends here.
        destination: The chosen endpoint, as dynamic metadata only, where no headers message was seen.
    """

    answers: MessageKind
    body: bytes | memoryview
    end_of_stream: bool
    destination: str = ""


class ContinueResponse(msgspec.Struct, frozen=True, gc=False, cache_hash=True):
    """Continue unchanged.

    Attributes:
        answers: Kind of the answered message; any but UNKNOWN.
        destination: The chosen endpoint, as dynamic metadata only, where no headers can be set any more.
    """

    answers: MessageKind
    destination: str = ""


class BodyMutation(msgspec.Struct, frozen=True, gc=False):
    """Replacement of a body message, in every mode but FULL_DUPLEX_STREAMED.

    Attributes:
        answers: RESPONSE_BODY.
        body: The replacement; may be empty.
        set_headers: Headers to set, which Envoy allows while it buffers.
    """

    answers: MessageKind
    body: bytes
    set_headers: Headers = ()


class ResponseHeadersMutation(msgspec.Struct, frozen=True, gc=False, cache_hash=True):
    """The reply to the response headers.

    Attributes:
        response_body: Body mode to switch to (`mode_override`); None keeps the configured one.
    """

    set_headers: Headers = ()
    response_body: BodyMode | None = None
    remove_headers: tuple[str, ...] = ()


class ImmediateResponse(msgspec.Struct, frozen=True, gc=False):
    """An immediate response: Envoy sends it to the client and ends the stream.

    Attributes:
        body: JSON in the OpenAI error shape.
        grpc_status: Status for gRPC clients; None for others.
    """

    status: int
    headers: Headers
    body: bytes
    grpc_status: int | None = None


class WithRequestCost(msgspec.Struct, frozen=True, gc=False):
    """The last reply of a response, with the request cost as dynamic metadata.

    Attributes:
        cost: Weighted tokens of the response (`usage.cost`), for rate limiters of the data plane.
    """

    reply: ProcessingResponse
    cost: float


class WithDecision(msgspec.Struct, frozen=True, gc=False):
    """A reply with the decision as dynamic metadata `extproc:decision`, for access logs.

    Attributes:
        text: The decision in one line.
    """

    reply: ProcessingResponse
    text: str


ProcessingResponse = (
    RouteResponse
    | StreamedBodyResponse
    | ContinueResponse
    | BodyMutation
    | ResponseHeadersMutation
    | ImmediateResponse
    | WithRequestCost
    | WithDecision
)


def chunks(
    answers: MessageKind, body: RequestBody, *, end_of_stream: bool, destination: str = ""
) -> Iterable[StreamedBodyResponse]:
    """Split a body into chunks of `CHUNK_BYTES`; an empty body is one empty chunk.

    Chunks of a larger body are built as they are consumed.

    Args:
        answers: REQUEST_BODY or RESPONSE_BODY.
        body: All bytes of this message or direction.
        destination: Put on the first piece, see `StreamedBodyResponse`.
    """
    if len(body) <= CHUNK_BYTES:
        return (StreamedBodyResponse(answers, bytes(body), end_of_stream, destination),)
    return _split(answers, body, end_of_stream=end_of_stream, destination=destination)


def _split(
    answers: MessageKind, body: RequestBody, *, end_of_stream: bool, destination: str
) -> Iterator[StreamedBodyResponse]:
    size = len(body)
    view = memoryview(body)
    for at in range(0, size, CHUNK_BYTES):
        last = at + CHUNK_BYTES >= size
        chunk: bytes | memoryview = view[at : at + CHUNK_BYTES]
        if last and len(chunk) < CHUNK_BYTES // 2:
            chunk = bytes(chunk)  # it may wait to be written, and the body not with it
        yield StreamedBodyResponse(answers, chunk, end_of_stream and last, destination)
        destination = ""


def attach_decision(
    replies: Iterable[ProcessingResponse], text: str
) -> Iterable[ProcessingResponse]:
    """Attach the text of a decision to the first reply; a tuple stays one."""
    if isinstance(replies, tuple):
        return (WithDecision(replies[0], text), *replies[1:]) if replies else replies
    return _attach_decision(iter(replies), text)


def _attach_decision(
    replies: Iterator[ProcessingResponse], text: str
) -> Iterator[ProcessingResponse]:
    for reply in replies:
        yield WithDecision(reply, text)
        break
    yield from replies


def run_after(
    replies: Iterable[ProcessingResponse], release: Callable[[], None]
) -> Iterator[ProcessingResponse]:
    """The replies, and `release` after the last or when the iteration is closed."""
    try:
        yield from replies
    finally:
        release()


REASON_HEADER = "x-llm-d-request-dropped-reason"

#: HTTP status to the OpenAI error type.
_TYPES: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}

#: HTTP status to the name of its code in the upstream error vocabulary
#: (docs/spec/protocol.md#error-statuses), and to its gRPC status (codes.proto), for gRPC clients.
CANONICAL_CODES: Mapping[int, tuple[str, int]] = {
    400: ("BadRequest", 3),  # INVALID_ARGUMENT
    401: ("Unauthorized", 16),  # UNAUTHENTICATED
    403: ("Forbidden", 7),  # PERMISSION_DENIED
    404: ("NotFound", 5),  # NOT_FOUND
    408: ("RequestTimeout", 4),  # DEADLINE_EXCEEDED
    412: ("PreconditionFailed", 9),  # FAILED_PRECONDITION
    413: ("PayloadTooLarge", 8),  # RESOURCE_EXHAUSTED
    415: ("UnsupportedMediaType", 12),  # UNIMPLEMENTED
    429: ("ResourceExhausted", 8),  # RESOURCE_EXHAUSTED
    500: ("Internal", 13),  # INTERNAL
    503: ("ServiceUnavailable", 14),  # UNAVAILABLE
}

#: Codes of every other status.
UNKNOWN_CODE: Final = ("Unknown", 2)


#: Last segments of paths of Anthropic's API.
_ANTHROPIC_PATHS = (["messages"], ["messages", "count_tokens"])


def immediate_response(
    rejection: Rejection, request_headers: Mapping[str, str]
) -> ImmediateResponse:
    """Build the immediate response of a rejection in the form of the API that a request is for.

    The body of a response for gRPC is the text alone: Envoy makes `grpc-message` of it.
    """
    grpc = request_headers.get("content-type", "").startswith("application/grpc")
    if grpc:
        body = _error_message(rejection).encode()
    elif _is_anthropic(path_of(request_headers)):
        body = _anthropic_error_body(rejection, request_headers.get("x-request-id", ""))
    else:
        body = error_body(rejection)
    headers: Headers = () if grpc else (("content-type", "application/json"),)
    if rejection.reason:
        headers = (*headers, (REASON_HEADER, rejection.reason))
    if rejection.retry_after_s is not None:
        headers = (*headers, ("retry-after", str(rejection.retry_after_s)))
    return ImmediateResponse(
        status=rejection.status,
        headers=headers,
        body=body,
        grpc_status=CANONICAL_CODES.get(rejection.status, UNKNOWN_CODE)[1] if grpc else None,
    )


def _is_anthropic(path: str) -> bool:
    segments = split_path(path)
    return any(segments[-len(last) :] == last for last in _ANTHROPIC_PATHS)


def error_body(rejection: Rejection) -> bytes:
    """The JSON error body of a rejection in OpenAI's form."""
    return msgspec.json.encode({"error": _error_object(rejection)})


def _anthropic_error_body(rejection: Rejection, request_id: str) -> bytes:
    body: dict[str, object] = {"type": "error", "error": _error_object(rejection)}
    if request_id:
        body["request_id"] = request_id
    return msgspec.json.encode(body)


def _error_object(rejection: Rejection) -> Mapping[str, str | int]:
    fallback = "server_error" if rejection.status >= 500 else "invalid_request_error"
    error: dict[str, str | int] = {
        "message": _error_message(rejection),
        "type": _TYPES.get(rejection.status, fallback),
        "code": rejection.status,
    }
    if rejection.code:
        # OpenAI's own way: the kind of error in `type`, which one it is in `code`.
        error |= {"type": "invalid_request_error", "code": rejection.code}
    return error


def _error_message(rejection: Rejection) -> str:
    code, _ = CANONICAL_CODES.get(rejection.status, UNKNOWN_CODE)
    return f"inference error: {code} - {rejection.message}"
