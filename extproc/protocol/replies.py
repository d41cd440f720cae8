"""What we say: one frozen value per ext_proc answer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import msgspec

from extproc.protocol.messages import BodyMode, Kind

Headers = tuple[tuple[str, str], ...]

#: Largest body piece in one message. Envoy advises at most 64 KiB; the reference picker uses this
#: number (docs/spec/protocol.md#full-duplex-rules).
CHUNK_BYTES = 62000


class Route(msgspec.Struct, frozen=True, gc=False):
    """The pick, in answer to the request headers or, in the buffered modes, the request body.

    Attributes:
        answers: REQUEST_HEADERS or REQUEST_BODY.
        destination: Value of both the header and the dynamic metadata (EPP protocol 004:
            they must agree).
        set_headers: Further request headers to set.
        remove_headers: Control headers of the client that must not reach the engine.
        body: What the body becomes, in answer to it in the buffered modes; None leaves it as it is.
        scores: What endpoints were compared by, as dynamic metadata; empty tells nothing.
    """

    answers: Kind
    destination: str
    set_headers: Headers = ()
    remove_headers: tuple[str, ...] = ()
    body: bytes | None = None
    scores: tuple[tuple[str, float], ...] = ()


class Chunk(msgspec.Struct, frozen=True, gc=False):
    """Body bytes handed on, FULL_DUPLEX_STREAMED only.

    Attributes:
        answers: REQUEST_BODY or RESPONSE_BODY.
        body: At most `CHUNK_BYTES` bytes.
        end_of_stream: The direction ends here.
        destination: The pick, as dynamic metadata only, where no headers message was seen.
    """

    answers: Kind
    body: bytes | memoryview
    end_of_stream: bool
    destination: str = ""


class Continue(msgspec.Struct, frozen=True, gc=False):
    """Go on unchanged.

    Attributes:
        answers: Any kind but UNKNOWN.
        destination: The pick, as dynamic metadata only, where no headers can be set any more.
    """

    answers: Kind
    destination: str = ""


class Replaced(msgspec.Struct, frozen=True, gc=False):
    """A body message that goes on as another, in every mode but FULL_DUPLEX_STREAMED.

    Attributes:
        answers: RESPONSE_BODY.
        body: What it becomes; may be empty.
        set_headers: Headers to set, which Envoy allows while it buffers.
    """

    answers: Kind
    body: bytes
    set_headers: Headers = ()


class Answered(msgspec.Struct, frozen=True, gc=False):
    """The reply to the response headers.

    Attributes:
        set_headers: Response headers to set.
        response_body: Body mode to switch to (`mode_override`); None keeps the configured one.
        remove_headers: Response headers to remove.
    """

    set_headers: Headers = ()
    response_body: BodyMode | None = None
    remove_headers: tuple[str, ...] = ()


class Refuse(msgspec.Struct, frozen=True, gc=False):
    """An immediate response: the client gets this, and the stream is over.

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


class Costed(msgspec.Struct, frozen=True, gc=False):
    """The reply to the last body message of an answer, with what it cost as dynamic metadata.

    Attributes:
        reply: The reply itself.
        cost: For the rate limiter of the data plane.
    """

    reply: Reply
    cost: float


Reply = Route | Chunk | Continue | Replaced | Answered | Refuse | Costed


def chunks(
    answers: Kind, body: bytes, *, end_of_stream: bool, destination: str = ""
) -> Iterator[Chunk]:
    """Hand a body on in pieces of `CHUNK_BYTES`; an empty body is one empty piece.

    Args:
        answers: REQUEST_BODY or RESPONSE_BODY.
        body: All bytes of this message or direction.
        end_of_stream: Whether the last piece ends the direction.
        destination: Put on the first piece, see `Chunk`.
    """
    size = len(body)
    if size <= CHUNK_BYTES:
        yield Chunk(answers, body, end_of_stream, destination)
        return
    view = memoryview(body)
    for at in range(0, size, CHUNK_BYTES):
        last = at + CHUNK_BYTES >= size
        yield Chunk(answers, view[at : at + CHUNK_BYTES], end_of_stream and last, destination)
        destination = ""


def then(replies: Iterable[Reply], release: Callable[[], None]) -> Iterator[Reply]:
    """The replies, and `release` after the last or when nobody takes the rest."""
    try:
        yield from replies
    finally:
        release()
