"""Replies to Envoy: one frozen value per ext_proc ProcessingResponse."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import msgspec

from extproc.protocol.messages import BodyMode, MessageKind

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
        set_headers: Further request headers to set.
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
        body: At most `CHUNK_BYTES` bytes.
        end_of_stream: The direction ends here.
        destination: The pick, as dynamic metadata only, where no headers message was seen.
    """

    answers: MessageKind
    body: bytes | memoryview
    end_of_stream: bool
    destination: str = ""


class ContinueResponse(msgspec.Struct, frozen=True, gc=False):
    """Continue unchanged.

    Attributes:
        answers: Any kind but UNKNOWN.
        destination: The pick, as dynamic metadata only, where no headers can be set any more.
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


class ResponseHeadersMutation(msgspec.Struct, frozen=True, gc=False):
    """The reply to the response headers.

    Attributes:
        set_headers: Response headers to set.
        response_body: Body mode to switch to (`mode_override`); None keeps the configured one.
        remove_headers: Response headers to remove.
    """

    set_headers: Headers = ()
    response_body: BodyMode | None = None
    remove_headers: tuple[str, ...] = ()


class ImmediateResponse(msgspec.Struct, frozen=True, gc=False):
    """An immediate response: Envoy sends it to the client and ends the stream.

    Attributes:
        status: HTTP status.
        headers: Response headers.
        body: JSON in the OpenAI error shape.
        grpc_status: For gRPC clients; None for the others.
    """

    status: int
    headers: Headers
    body: bytes
    grpc_status: int | None = None


class WithRequestCost(msgspec.Struct, frozen=True, gc=False):
    """The last reply of a response, with the request cost as dynamic metadata.

    Attributes:
        reply: The reply itself.
        cost: For the rate limiter of the data plane.
    """

    reply: ProcessingResponse
    cost: float


ProcessingResponse = (
    RouteResponse
    | StreamedBodyResponse
    | ContinueResponse
    | BodyMutation
    | ResponseHeadersMutation
    | ImmediateResponse
    | WithRequestCost
)


def chunks(
    answers: MessageKind, body: bytes, *, end_of_stream: bool, destination: str = ""
) -> Iterator[StreamedBodyResponse]:
    """Split a body into chunks of `CHUNK_BYTES`; an empty body is one empty chunk.

    Args:
        answers: REQUEST_BODY or RESPONSE_BODY.
        body: All bytes of this message or direction.
        end_of_stream: Whether the last piece ends the direction.
        destination: Put on the first piece, see `StreamedBodyResponse`.
    """
    size = len(body)
    if size <= CHUNK_BYTES:
        yield StreamedBodyResponse(answers, body, end_of_stream, destination)
        return
    view = memoryview(body)
    for at in range(0, size, CHUNK_BYTES):
        last = at + CHUNK_BYTES >= size
        yield StreamedBodyResponse(
            answers, view[at : at + CHUNK_BYTES], end_of_stream and last, destination
        )
        destination = ""


def run_after(
    replies: Iterable[ProcessingResponse], release: Callable[[], None]
) -> Iterator[ProcessingResponse]:
    """The replies, and `release` after the last or when the iteration is closed."""
    try:
        yield from replies
    finally:
        release()
