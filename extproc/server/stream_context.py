"""Observers of streams and requests: what a stream reports, and telemetry records.

They are called on the event loop for every request: they return at once and raise nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, Protocol

from extproc.decision import Decision, Rejection
from extproc.protocol.trace_context import TraceContext
from extproc.request import RequestLabels

#: How a gRPC stream ended; `cancelled` by the data plane, or because this process drains.
StreamResult = Literal["ok", "cancelled", "protocol", "error"]


class RequestObserver(Protocol):
    """Observer of one request, from its first message to the end of its stream."""

    def on_traced(self, trace: TraceContext, *, started_s: float) -> RequestObserver:
        """The request, whose stream was opened at `started_s`, is a span of a sampled trace.

        Returns:
            The observer of everything that follows.
        """

    def on_pool_selected(self, pool: str) -> None:
        """Another pool than the default was selected."""

    def on_direct_response(self) -> None:
        """The request was answered without an endpoint."""

    def on_rejected(
        self, rejection: Rejection, *, request_id: str, labels: RequestLabels | None, now: float
    ) -> None:
        """The request was rejected; the id is empty and labels are None where unknown."""

    def on_abandoned(
        self, rejection: Rejection, *, request_id: str, labels: RequestLabels | None, now: float
    ) -> None:
        """The stream ended before the request was routed; nobody reads the rejection."""

    def on_dequeued(self, wait_s: float, *, priority: int) -> None:
        """Flow control admitted the request after it was queued."""

    def on_routed(
        self,
        decision: Decision,
        *,
        request_id: str,
        labels: RequestLabels,
        trace_id: str,
        now: float,
        duration_s: float,
    ) -> Decision:
        """An endpoint was chosen, `duration_s` after the monotonic time `now`.

        Args:
            trace_id: Trace of the request if it is sampled, else empty.

        Returns:
            The decision without prompt and block hashes, to keep while the request runs.
        """

    def on_model_rewritten(self, *, edited: bool) -> None:
        """The model name was rewritten; `edited` if the body could be."""

    def on_response_headers(
        self, duration_s: float, *, elapsed_s: float, status: str, is_stream: bool, is_shown: bool
    ) -> None:
        """Response headers arrived.

        Args:
            duration_s: Seconds since the choice of the endpoint.
            elapsed_s: Seconds since the stream was opened.
            status: HTTP status of the response.
            is_stream: Whether the response is a stream of events.
            is_shown: Whether its chunks are to be shown.
        """

    def on_response_chunk(self, elapsed_s: float) -> None:
        """A chunk of the response body arrived, so long after the stream was opened."""

    def on_finished(self, *, endpoint: str | None, status: str, duration_s: float) -> None:
        """The stream of a routed request ended.

        Args:
            endpoint: Address of the endpoint that served it; None if it left the pool.
            status: HTTP status of the response; empty without response headers.
            duration_s: Seconds since the stream was opened.
        """

    def on_usage(self, usage: Mapping[str, int]) -> None:
        """The response reported tokens by kind; before `on_finished`."""


class StreamObserver(Protocol):
    """Observer of all streams of a server."""

    def on_stream_opened(self) -> None:
        """A stream was opened."""

    def on_stream_ended(self, result: StreamResult) -> None:
        """A stream ended."""

    def on_exception(self, error: BaseException) -> None:
        """A stream ran into an unexpected exception."""

    def observe_request(self, pool: str) -> RequestObserver:
        """Create the observer of a request to this pool."""
