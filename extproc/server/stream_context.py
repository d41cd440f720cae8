"""Stream context: what all streams of a server share, and the observers they report to.

Observers are called on the event loop for every request: they return at once and raise nothing.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, Protocol

import msgspec

from extproc.decision import Decision, Rejection
from extproc.parsing.usage import UsageKind
from extproc.protocol.body_buffer import BufferBudget
from extproc.protocol.exchange import ExchangeSettings
from extproc.protocol.trace_context import TraceContext, TraceSampler
from extproc.request import FlowHeaders, HttpRequest, RequestBody, RequestLabels
from extproc.routing.pool_selector import PoolSelector, RoutingResult
from extproc.server.flow_control_shell import AsyncFlowController
from extproc.server.large_bodies import LargeBodies

#: How a gRPC stream ended; `cancelled` by the data plane, or because this process drains.
StreamResult = Literal["ok", "cancelled", "protocol", "error"]


#: Response to a client whose request body stopped arriving.
STALLED = Rejection(
    408, "the request body stopped arriving, or arrives too slowly", cause="body-stalled"
)

#: Stands for the response to a client that left before an endpoint was chosen; 499 is the status of
#: nginx and of access logs for that.
CLIENT_LEFT = Rejection(499, "the stream ended before an endpoint was chosen", cause="client-left")

#: Stands for the response to a client whose stream this process ended before an endpoint was chosen.
SHUTTING_DOWN = Rejection(
    503, "the picker stops before an endpoint is chosen", cause="shutting-down"
)

#: Response to a client whose request met an unexpected exception.
BUG = Rejection(500, "the picker ran into a bug; its log says where", cause="bug")


class UnrenderedRequest(msgspec.Struct, frozen=True, eq=False):
    """Request that waits for the tokens of its prompt, for a bounded time.

    Attributes:
        wait: Done when it is over.
        result: Its pool, and its outcome without the tokens.
    """

    wait: asyncio.Future[None]
    raw: HttpRequest
    result: RoutingResult


class RequestObserver(Protocol):
    """Observer of one request, from its first message to the end of its stream."""

    @property
    def decision(self) -> Decision | None:
        """The decision that was recorded; None before it.

        It loses prompt and block hashes a moment later, and most candidates once it is not among the
        latest.
        """

    def on_traced(self, trace: TraceContext, *, started_s: float) -> None:
        """The request, whose stream was opened at `started_s`, is a span of a sampled trace."""

    def on_pool_selected(self, pool: str) -> None:
        """Another pool than the default was selected."""

    def on_direct_response(self) -> None:
        """The request was answered without an endpoint."""

    def on_rejected(
        self,
        rejection: Rejection,
        *,
        request_id: str,
        labels: RequestLabels | None,
        now: float,
        started_s: float | None = None,
    ) -> None:
        """The request, whose stream was opened at `started_s`, was rejected at the monotonic time `now`.

        The id is empty and labels are None where unknown.
        """

    def on_abandoned(
        self, rejection: Rejection, *, request_id: str, labels: RequestLabels | None, now: float
    ) -> None:
        """The stream ended before the request was routed; the rejection is not sent."""

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
        body_bytes: int = 0,
    ) -> None:
        """An endpoint was chosen, `duration_s` after the monotonic time `now`.

        Args:
            trace_id: Trace of the request if it is sampled, else empty.
            body_bytes: Bytes of the body of the request; 0 where it was not shown or cut.
        """

    def on_described(self, description: str) -> None:
        """The data plane gets this description of the decision."""

    def on_model_rewritten(self, *, edited: bool) -> None:
        """The model name was rewritten; `edited` if the body could be."""

    def on_response_headers(
        self, duration_s: float, *, elapsed_s: float, status: str, is_stream: bool, is_shown: bool
    ) -> None:
        """Response headers arrived.

        Args:
            duration_s: Seconds since the choice of the endpoint.
            elapsed_s: Seconds since the stream was opened.
        """

    def on_response_chunk(self, elapsed_s: float, chunk: RequestBody) -> None:
        """A chunk of the response body arrived, so long after the stream was opened."""

    def on_finished(self, *, endpoint: str | None, status: str, duration_s: float) -> None:
        """The stream of a routed request ended.

        Args:
            endpoint: Address of the endpoint that served it; None if it left the pool.
            status: HTTP status of the response; empty without response headers.
            duration_s: Seconds since the stream was opened.
        """

    def on_usage(self, usage: Mapping[str, int], response_bytes: int | None = None) -> None:
        """The response reported tokens by kind, or none; before `on_finished`.

        Args:
            response_bytes: Bytes of its body; None where it is incomplete.
        """

    def on_answer_ids(self, ids: Sequence[str]) -> None:
        """Headers or body of the response have ids, by which the client may ask for the request."""


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


class StreamSettings(msgspec.Struct, frozen=True):
    """Reloadable settings of all streams.

    Attributes:
        max_streams: Open streams above which requests are refused.
        body_idle_s: Seconds without a further message after which a request is rejected with 408.
        stream_sample_ratio: Share of streamed responses watched for usage, 0..1.
        format_decision: Text of the response header `x-extproc-decision`; None adds no header.
        describe_decision: Text of the dynamic metadata `extproc:decision`; None sends none.
        request_cost: Weight of a token by kind, see `usage.cost`; empty emits no cost.
    """

    max_streams: int
    body_idle_s: float = 60.0
    stream_sample_ratio: float = 0.0
    format_decision: Callable[[Decision], str] | None = None
    describe_decision: Callable[[Decision], str] | None = None
    request_cost: Mapping[UsageKind, float] = {}
    flow_headers: FlowHeaders = FlowHeaders()


class StreamContext(msgspec.Struct, eq=False, kw_only=True):
    """Dependencies and state shared by all streams of a server.

    Attributes:
        flow_controllers: Flow control by name of the pool; a missing pool has none.
        large_bodies: Parses large bodies; None parses them on the event loop.
        trace_sampler: Chooses the requests that are traced; None traces none.
    """

    pool_selector: PoolSelector
    exchange_settings: ExchangeSettings
    body_budget: BufferBudget
    observer: StreamObserver
    clock: Callable[[], float]
    rng: random.Random
    settings: StreamSettings
    flow_controllers: Mapping[str, AsyncFlowController] = {}
    large_bodies: LargeBodies | None = None
    trace_sampler: TraceSampler | None = None
    on_opened: Callable[[], object] = dict
    is_draining: bool = False

    def reconfigure(self, exchange_settings: ExchangeSettings, settings: StreamSettings) -> None:
        """Apply other settings from the next stream on."""
        self.exchange_settings = exchange_settings
        self.settings = settings

    def start_draining(self) -> None:
        """End each stream as soon as its request is decided."""
        self.is_draining = True

    @property
    def parses_large_bodies(self) -> bool:
        """True if large bodies are parsed, outside of the event loop."""
        return self.large_bodies is not None and self.pool_selector.parses_bodies

    def find_abandonment(self, status: str) -> Rejection:
        """Rejection that stands for a stream that ended before an endpoint was chosen.

        Args:
            status: HTTP status of a response that came all the same; empty for none.
        """
        if len(status) == 3 and status.isdecimal():
            message = "Envoy answered before an endpoint was chosen"
            return Rejection(int(status), message, cause="answered-by-envoy")
        return SHUTTING_DOWN if self.is_draining else CLIENT_LEFT

    def attempt(self, step: Callable[[], None]) -> None:
        """Take a step of a stream whose failure is a bug, which must not keep what follows."""
        try:
            step()
        except Exception as error:  # noqa: BLE001 - counted and logged
            self.observer.on_exception(error)

    @property
    def overload_rejection(self) -> Rejection:
        """Rejection of a request when too many streams are open."""
        return Rejection(
            429,
            f"more than {self.settings.max_streams} requests are in progress",
            reason="rejected-saturated",
            retry_after_s=1,
            cause="too-many-streams",
        )
