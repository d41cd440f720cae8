"""Handler of an ext_proc stream, which carries a single HTTP exchange."""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import ClassVar, assert_never

import msgspec

from extproc.decision import Decision, Deferral, DirectResponse, Outcome, Rejection
from extproc.parsing import usage
from extproc.pool.inflight import Reservation
from extproc.protocol.body_buffer import BufferBudget
from extproc.protocol.exchange import Exchange, ExchangeSettings
from extproc.protocol.messages import MessageKind, ProcessingRequest, ProcessingResponse
from extproc.protocol.response_handling import attach_request_cost, is_last_response_message
from extproc.protocol.transitions import RequestState, ResponseState
from extproc.request import HttpRequest
from extproc.routing.director import Director
from extproc.routing.pool_selector import PoolSelector, RoutingResult
from extproc.routing.request_preparer import PreparedRequest
from extproc.server.bug_log import BugLog
from extproc.server.flow_control_shell import (
    Admission,
    AsyncFlowController,
    QueuedRequest,
    RateReservation,
)
from extproc.server.large_bodies import INLINE_BYTES, LargeBodies
from extproc.telemetry import counters, explanation
from extproc.telemetry.counters import PoolCounters, ProcessCounters
from extproc.telemetry.decision_log import DecisionLog, DecisionRecord

_RESPONSE_HEADERS = MessageKind.RESPONSE_HEADERS

#: Response to a client whose request body stopped arriving.
STALLED = Rejection(408, "the request body stopped arriving, or arrives too slowly")

#: Response to a client whose request met an unexpected exception.
_BUG = Rejection(500, "the picker ran into a bug; its log says where")


class StreamSettings(msgspec.Struct, frozen=True):
    """Reloadable settings of all streams.

    Attributes:
        max_streams: Open streams above which requests are refused.
        body_idle_s: Seconds without a further message after which a request is rejected with 408.
        stream_sample_ratio: Share of streamed answers watched for usage, 0..1.
        explain_header: Add the short form of the decision to response headers.
        request_cost: Weight of a token by kind, see `usage.cost`; empty emits no cost.
    """

    max_streams: int
    body_idle_s: float = 60.0
    stream_sample_ratio: float = 0.0
    explain_header: bool = False
    request_cost: Mapping[usage.UsageKind, float] = {}


class StreamContext:
    """Dependencies and state shared by all streams of a server.

    Args:
        switchboard: Selects the pool and routes.
        exchange_settings: Settings of all exchanges.
        budget: Limit of bytes that all exchanges buffer.
        tallies: Metrics of the process.
        clock: Monotonic seconds.
        rng: For sampling streamed answers.
        ring: Log of the last decisions.
        settings: Reloadable settings.

    Attributes:
        gates: Flow control by name of the pool; a missing pool has none.
        large_bodies: Parses large bodies; None parses them on the event loop.
        closing: True once the server drains its streams.
        on_opened: Called when a stream was opened.
        bugs: Log of unexpected exceptions.
    """

    def __init__(
        self,
        *,
        switchboard: PoolSelector,
        exchange_settings: ExchangeSettings,
        budget: BufferBudget,
        tallies: ProcessCounters,
        clock: Callable[[], float],
        rng: random.Random,
        ring: DecisionLog,
        settings: StreamSettings,
    ) -> None:
        self.switchboard = switchboard
        self.exchange_settings = exchange_settings
        self.budget = budget
        self.tallies = tallies
        self.clock = clock
        self.rng = rng
        self.ring = ring
        self.settings = settings
        self.gates: Mapping[str, AsyncFlowController] = {}
        self.large_bodies: LargeBodies | None = None
        self.closing = False
        self.on_opened: Callable[[], None] = _nothing
        self.bugs = BugLog(tallies.bugs, clock)

    @property
    def crowded(self) -> Rejection:
        """Rejection of a request when too many streams are open."""
        return Rejection(
            429,
            f"more than {self.settings.max_streams} requests are in progress",
            reason="rejected-saturated",
            retry_after_s=1,
        )


class StreamHandler(msgspec.Struct, eq=False):
    """State of a stream: the HTTP exchange, its reservation and its times.

    Created by `open_stream`.

    Attributes:
        exchange: State of the ext_proc protocol.
        held: The queued request; None while it is not queued.
        unread: The request while its large body is parsed in the worker; None otherwise.
        address: The endpoint it was sent to, `ip:port`; empty before that.
        is_over: True once no further response follows.
    """

    _shared: StreamContext
    exchange: Exchange
    _started_s: float
    _tallies: PoolCounters
    held: QueuedRequest | None = None
    unread: HttpRequest | None = None
    address: str = ""
    is_over: bool = False
    _picked_s: float = 0.0
    _dispatcher: Director | None = None
    _gate: AsyncFlowController | None = None
    _reservation: RateReservation | None = None
    _ticket: Reservation | None = None
    _recorded: DecisionRecord | None = None
    _used: Mapping[str, int] | None = None
    _failed: bool = False

    @property
    def on_routed(self) -> bool:
        """True once Envoy has the endpoint, and can go on without this process."""
        return self._ticket is not None

    def handle(self, event: ProcessingRequest) -> Iterable[ProcessingResponse]:
        """Handle an event and return the responses. Synchronous: a single pool snapshot."""
        exchange = self.exchange
        replies = exchange.receive(event)
        pending = exchange.pending
        if pending is not None:
            if len(pending.body) > INLINE_BYTES and self._shared.large_bodies is not None:
                self.unread = pending
                return ()
            return self._decide(pending)
        if event.kind is _RESPONSE_HEADERS:
            if self._ticket is not None:
                shared = self._shared
                now = shared.clock()
                shared.tallies.headers_s.add(now - self._picked_s)
                try:
                    self._on_response_headers(event, now)
                except Exception as error:  # noqa: BLE001 - what is learned must not cost the answer
                    shared.bugs.note(error)
        elif exchange.rejection is not None and not self.is_over:
            self._tallies.rejected(exchange.rejection)
            self.is_over = True
        elif (
            self._shared.settings.request_cost and exchange.tail and is_last_response_message(event)
        ):
            weights = self._shared.settings.request_cost
            cost = usage.cost(usage.read(exchange.tail.joined()), weights)
            return replies if cost is None else attach_request_cost(replies, cost)
        return replies

    def stall(self) -> Iterable[ProcessingResponse]:
        """Reject the request, because its body stopped arriving."""
        return (self._reject(STALLED),)

    def fail(self) -> Iterable[ProcessingResponse]:
        """Answer an unexpected exception: 500 before the response begins, nothing later."""
        self.is_over = self._failed = True
        exchange = self.exchange
        if (
            exchange.request_state is RequestState.REFUSED
            or exchange.response_state is not ResponseState.IDLE
        ):
            return ()
        return (self._reject(_BUG),)

    def reject_overload(self, _: ProcessingRequest) -> Iterable[ProcessingResponse]:
        """Reject the request, because too many streams are open."""
        return (self._reject(self._shared.crowded),)

    def _reject(self, rejection: Rejection) -> ProcessingResponse:
        self._refund()
        self._tallies.rejected(rejection)
        self.is_over = True
        return self.exchange.reject(rejection)

    def _refund(self) -> None:
        """Return the tokens of a rejected request to its tenant's allowance."""
        if self._reservation is not None:
            self._reservation.refund()

    def take_read(self, read: HttpRequest | Rejection) -> Iterable[ProcessingResponse]:
        """Answer a request after its large body was parsed or refused. Synchronous."""
        self.unread = None
        return (self._reject(read),) if isinstance(read, Rejection) else self._decide(read)

    def take_unread(self, error: Exception) -> Iterable[ProcessingResponse]:
        """Route a request to a fallback endpoint after parsing its large body failed."""
        raw, self.unread = self.unread, None
        if raw is None:
            raise RuntimeError("no body is read elsewhere; call once after `unread` was set")
        return self._rescue(raw, self._shared.clock(), error)

    def _decide(self, raw: HttpRequest) -> Iterable[ProcessingResponse]:
        shared = self._shared
        now = shared.clock()
        try:
            routed = shared.switchboard.route(raw, now)
        except Exception as error:  # noqa: BLE001 - see `_rescue`
            return self._rescue(raw, now, error)
        return self._take(routed, raw, now)

    def _rescue(
        self, raw: HttpRequest, now: float, error: Exception
    ) -> Iterable[ProcessingResponse]:
        """Log an unexpected exception, and route the request to a fallback endpoint."""
        shared = self._shared
        shared.bugs.note(error)
        routed = shared.switchboard.route_fallback(raw, now, why=type(error).__name__)
        return self._take(routed, raw, now)

    def _take(
        self, routed: RoutingResult, raw: HttpRequest, now: float
    ) -> Iterable[ProcessingResponse]:
        shared, exchange = self._shared, self.exchange
        outcome = routed.outcome
        if isinstance(outcome, DirectResponse):
            shared.tallies.answers += 1
            self.is_over = True
            return (exchange.answer(outcome),)
        if routed.pool:
            self._tallies = shared.tallies.for_pool(routed.pool)
        self._dispatcher = routed.director
        gate = shared.gates.get(routed.pool)
        if gate is not None and routed.prepared is not None:
            refused = self._wait(gate, routed.prepared, outcome, now)
            if self.held is not None:
                return ()
            outcome = refused or outcome
        match outcome:
            case Decision():
                return self._send_route(outcome, raw, now, ticket=None)
            case Deferral():
                return (self._reject(outcome.rejection),)
            case Rejection():
                return (self._reject(outcome),)
            case _:
                assert_never(outcome)

    def _wait(
        self, gate: AsyncFlowController, prepared: PreparedRequest, outcome: Outcome, now: float
    ) -> Rejection | None:
        """Queue the request if necessary; returns its rejection, or None."""
        reserved = gate.reserve(prepared, now)
        if isinstance(reserved, Rejection):
            return reserved
        # No more of the request: it would stay until the end of the answer, outside of any budget.
        self._gate, self._reservation = gate, reserved
        held = gate.admit(prepared, outcome, now, tenant=reserved.tenant)
        if isinstance(held, QueuedRequest):
            self.held = held
            return None
        return held

    def resume(self, answer: Admission | Rejection) -> Iterable[ProcessingResponse]:
        """Answer a queued request after its admission or rejection. Synchronous."""
        held, self.held = self.held, None
        if held is None:
            raise RuntimeError("nothing is held; resume once after a wait")
        if isinstance(answer, Admission):
            self._ticket = answer.ticket
        if isinstance(answer, Rejection):
            return (self._reject(answer),)
        now = self._shared.clock()
        self._shared.tallies.held_s.add(now - held.waiter.arrived)
        return self._send_route(answer.decision, held.prepared.raw, now, ticket=answer.ticket)

    def _send_route(
        self, outcome: Decision, raw: HttpRequest, now: float, *, ticket: Reservation | None
    ) -> Iterable[ProcessingResponse]:
        """Send the endpoint to Envoy; a queued request has its reservation already."""
        shared, exchange = self._shared, self.exchange
        named = raw.headers.get("x-request-id", "")
        new = "" if named else str(uuid.uuid4())
        if shared.settings.explain_header:
            header = ("x-extproc-decision", explanation.short(outcome))
            outcome = msgspec.structs.replace(
                outcome, answer_headers=(*outcome.answer_headers, header)
            )
        self._commit(outcome, now, named or new, ticket=ticket)
        replies = exchange.apply_outcome(outcome, request_id=new)
        if outcome.model_rewrite:
            self._tallies.rewritten(edited=exchange.edited)
        return replies

    def _commit(
        self, decision: Decision, now: float, request_id: str, *, ticket: Reservation | None
    ) -> None:
        shared, dispatcher = self._shared, self._dispatcher
        if dispatcher is None:
            raise RuntimeError("a decision without the dispatcher that took it")
        self._recorded = shared.ring.add(
            request_id, decision, now, pool=shared.switchboard.default_pool
        )
        self._ticket = ticket or dispatcher.reserve(decision, now)
        self.address = decision.endpoints[0].address
        self._picked_s = shared.clock()
        shared.tallies.route_s.add(self._picked_s - now)
        self._tallies.routed(decision)
        # Nothing of the answer is needed: the stream ends and Envoy goes on without us.
        self.is_over = shared.closing or dispatcher.response_unwatched(decision)

    def _on_response_headers(self, event: ProcessingRequest, now: float) -> None:
        """Report the response headers to the director."""
        if self._ticket is not None and self._dispatcher is not None:
            served = "" if event.hints is None else event.hints.served
            self._dispatcher.on_response_headers(
                self._ticket, self.exchange.status, now, served=served
            )
            self.address = self._ticket.endpoint.address

    def finish(self) -> None:
        """Release all resources at the end of the stream. Called once.

        A step that raises is a bug, which must not keep what the others give back.
        """
        for step in self.last_steps if self.exchange.tail is None else self.last_usage_steps:
            try:
                step(self)
            except Exception as error:  # noqa: BLE001 - counted and logged
                self._shared.bugs.note(error)

    def _close(self) -> None:
        """Release the buffered body, and the place in the queue."""
        self.exchange.close()
        gate = self._gate
        if gate is not None and self.held is not None:
            gate.cancel(self.held, self._shared.clock())
            self.held = None

    def _settle(self) -> None:
        """Release the reservation; a request that failed before its response is not counted."""
        ticket, dispatcher = self._ticket, self._dispatcher
        if ticket is None or dispatcher is None:
            self._refund()
            return
        now, status = self._shared.clock(), self.exchange.status
        try:
            if self._failed and not status:
                dispatcher.unreserve(ticket, now)
            else:
                dispatcher.release(ticket, now, answered=bool(status))
        finally:
            if self._gate is not None:
                self._gate.notify_capacity()

    def _count(self) -> None:
        """Count how the request ended."""
        if self._ticket is None:
            return
        shared, status = self._shared, self.exchange.status
        took_s = shared.clock() - self._started_s
        dispatcher, address = self._dispatcher, self.address
        here = dispatcher is not None and dispatcher.pool.find(address) is not None
        self._tallies.finished(address if here else counters.LEFT, status)
        shared.tallies.exchange_s.add(took_s)
        recorded = self._recorded
        if recorded is not None:
            recorded.status, recorded.seconds = status, took_s

    def _read_usage(self) -> None:
        """Read the usage of the response, where its end was received."""
        tail = self.exchange.tail
        if self._ticket is None or tail is None:
            return
        used = self._used = usage.read(tail.joined())
        self._tallies.used(used)
        if self._recorded is not None:
            self._recorded.usage = used

    def _learn(self) -> None:
        """Report the usage of the response to the director."""
        dispatcher, recorded, ticket = self._dispatcher, self._recorded, self._ticket
        if dispatcher is None or recorded is None or ticket is None or self._used is None:
            return
        dispatcher.on_usage(recorded.decision, self._used, served=ticket.endpoint)

    def _charge(self) -> None:
        """Charge the usage of the response to the tenant."""
        if self._used is not None and self._gate is not None and self._reservation is not None:
            self._gate.record_usage(self._reservation, self._used, self._shared.clock())

    #: Steps at the end of a stream, in order; those that free capacity come first.
    last_steps: ClassVar[Sequence[Callable[[StreamHandler], None]]] = (
        _close,
        _settle,
        _count,
    )
    #: The same where the end of the response was received, which has the usage.
    last_usage_steps: ClassVar[Sequence[Callable[[StreamHandler], None]]] = (
        *last_steps,
        _read_usage,
        _learn,
        _charge,
    )


def open_stream(shared: StreamContext) -> StreamHandler:
    """Create the handler of a new stream."""
    share = shared.settings.stream_sample_ratio
    watched = share > 0.0 and shared.rng.random() < share
    return StreamHandler(
        shared,
        Exchange(shared.exchange_settings, shared.budget, watch_stream=watched),
        shared.clock(),
        shared.tallies.for_pool(shared.switchboard.default_pool),
    )


def _nothing() -> None:
    """Default callback that does nothing."""
