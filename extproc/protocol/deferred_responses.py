"""Deferred responses: replies that are withheld until the endpoint is chosen."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import msgspec

from extproc.protocol.body_buffer import BodyBuffer
from extproc.protocol.messages import (
    CHUNK_BYTES,
    ContinueResponse,
    Headers,
    MessageKind,
    ProcessingResponse,
    RouteResponse,
    StreamedBodyResponse,
    chunks,
    run_after,
)

_REQUEST_HEADERS = MessageKind.REQUEST_HEADERS
_REQUEST_BODY = MessageKind.REQUEST_BODY
_REQUEST_TRAILERS = MessageKind.REQUEST_TRAILERS


class DeferredResponses(msgspec.Struct):
    """Replies that a request waits for.

    Attributes:
        headers: The reply to its headers.
        trailers: The reply to the trailers that ended its body.
        others: Replies to messages that arrived while it was queued.
        scores: Of the endpoints, sent with the decision.
    """

    headers: bool = False
    trailers: bool = False
    others: tuple[ProcessingResponse, ...] = ()
    scores: tuple[tuple[str, float], ...] = ()

    def release_buffered(
        self,
        destination: str,
        set_headers: Headers,
        *,
        remove_headers: tuple[str, ...],
        body_shown: bool,
        body: bytes | None = None,
    ) -> tuple[ProcessingResponse, ...]:
        """All withheld replies, if Envoy sends the body on itself.

        Args:
            destination: The pick.
            set_headers: Further request headers to set.
            remove_headers: Request headers to remove.
            body_shown: Whether a body message waits for its answer.
            body: The replacement of the body; None leaves it unchanged.
        """
        if self.headers:
            kind = _REQUEST_HEADERS
        elif body_shown:
            kind = _REQUEST_BODY
        else:
            return self._last(destination)
        return (
            RouteResponse(kind, destination, set_headers, remove_headers, body, self.scores),
            *self._last(""),
        )

    def release_streamed(
        self,
        gathering: BodyBuffer,
        destination: str,
        set_headers: Headers,
        *,
        remove_headers: tuple[str, ...],
    ) -> Iterable[ProcessingResponse]:
        """All withheld replies and the body, which is held until its chunks are written.

        Args:
            gathering: The body.
            destination: The pick.
            set_headers: Further request headers to set.
            remove_headers: Request headers to remove.
        """
        first: tuple[ProcessingResponse, ...] = ()
        if self.headers:
            first = (
                RouteResponse(
                    _REQUEST_HEADERS, destination, set_headers, remove_headers, None, self.scores
                ),
            )
            destination = ""
        body = gathering.joined()
        ends = not self.trailers
        if len(body) <= CHUNK_BYTES:
            gathering.release()
            return (
                *first,
                StreamedBodyResponse(_REQUEST_BODY, body, ends, destination),
                *self._last(""),
            )
        pieces = chunks(_REQUEST_BODY, body, end_of_stream=ends, destination=destination)
        return run_after(itertools.chain(first, pieces, self._last("")), gathering.release)

    def _last(self, destination: str) -> tuple[ProcessingResponse, ...]:
        """The trailing replies; they name the destination if no other reply could."""
        if not self.trailers:
            return self.others
        return (ContinueResponse(_REQUEST_TRAILERS, destination), *self.others)
