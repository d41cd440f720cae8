"""Handler of an ext_proc stream, which carries a single HTTP exchange."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Iterable, Mapping
from functools import partial

import msgspec

from extproc.decision import Decision, Deferral, DirectResponse, Outcome, Rejection
from extproc.parsing import surfaces, usage
from extproc.pool.inflight import Reservation
from extproc.protocol import messages
from extproc.protocol.exchange import Exchange
from extproc.protocol.messages import MessageKind, ProcessingRequest, ProcessingResponse
from extproc.protocol.response_handling import attach_request_cost, is_last_response_message
from extproc.protocol.trace_context import TraceSampler, sampled_trace_id
from extproc.protocol.transitions import RequestState, ResponseState
from extproc.request import MAX_ID_BYTES, HttpRequest, InferenceRequest, RequestLabels
from extproc.routing.director import Director
from extproc.routing.pool_selector import RoutingResult
from extproc.routing.request_preparer import PreparedRequest
from extproc.server.flow_control_shell import (
    Admission,
    AsyncFlowController,
    EvictableStream,
    QueuedRequest,
    RateReservation,
)
from extproc.server.large_bodies import INLINE_BYTES
from extproc.server.stream_context import (
    BUG,
    STALLED,
    RequestObserver,
    StreamContext,
    StreamResult,
    UnrenderedRequest,
)

_RESPONSE_HEADERS = MessageKind.RESPONSE_HEADERS
_RESPONSE_BODY = MessageKind.RESPONSE_BODY

#: Ends of a stream for which the picker is not to blame.
_WITHOUT_ERROR: frozenset[StreamResult] = frozenset({"ok", "cancelled"})


class StreamHandler(msgspec.Struct, eq=False):
    """State of a stream, which `open_stream` creates: HTTP exchange, reservation and times.

    Attributes:
        queued: The queued request; None while it is not queued.
        unparsed: The request while its large body is parsed in the worker; None otherwise.
        unrendered: The request while it waits for the tokens of its prompt; None otherwise.
        evictable: The routed request while it may be evicted; None otherwise.
        address: The endpoint it was sent to, `ip:port`; empty before that.
        is_over: True once no further response follows.
    """

    _context: StreamContext
    exchange: Exchange
    _observer: RequestObserver
    _started_s: float
    _read_call_traceparent: Callable[[], str] = str
    queued: QueuedRequest | None = None
    unparsed: HttpRequest | None = None
    unrendered: UnrenderedRequest | None = None
    evictable: EvictableStream | None = None
    address: str = ""
    is_over: bool = False
    _routed_s: float = 0.0
    _director: Director | None = None
    _flow_controller: AsyncFlowController | None = None
    _rate_reservation: RateReservation | None = None
    _reservation: Reservation | None = None
    _failed: bool = False
    _is_abandoned: bool = False
    _evicted: bool = False
    #: Header for the engine; empty leaves the one that came, and None is before the trace began.
    _traceparent: str | None = None

    @property
    def is_routed(self) -> bool:
        """True once Envoy has the endpoint, and can go on without this process."""
        return self._reservation is not None

    @property
    def is_waiting(self) -> bool:
        """True while its request waits for a parse, for tokens or for admission."""
        return (self.unparsed, self.unrendered, self.queued) != (None, None, None)

    @property
    def can_evict(self) -> bool:
        """True while `evict` can end the response: it is still to come, or under way."""
        state = self.exchange.response_state
        return not (self.evictable is None or self.is_over or state is ResponseState.ENDED)

    def end(self) -> None:
        """Send no further response."""
        self.is_over = True

    def handle(self, event: ProcessingRequest) -> Iterable[ProcessingResponse]:
        """Handle an event and return the responses. Synchronous: a single pool snapshot."""
        exchange = self.exchange
        replies = exchange.receive(event)
        if (pending := exchange.pending) is not None:
            if len(pending.body) > INLINE_BYTES and self._context.parses_large_bodies:
                self.unparsed = pending
                return ()
            return self._route(pending)
        if event.kind is _RESPONSE_BODY and exchange.is_stream and (chunk := event.body):
            self._observer.on_response_chunk(self._context.clock() - self._started_s, chunk)
        if event.kind is _RESPONSE_HEADERS:
            if self._reservation is not None:
                context = self._context
                now = context.clock()
                self._observer.on_response_headers(
                    now - self._routed_s,
                    elapsed_s=now - self._started_s,
                    status=exchange.status,
                    is_stream=exchange.is_stream,
                    is_shown=exchange.is_response_streamed,
                )
                context.attempt(partial(self._on_response_headers, event, now))
        elif exchange.rejection is not None and not self.is_over:
            self._report_rejection(exchange.rejection)
            self.is_over = True
        elif (
            (weights := self._context.settings.request_cost)
            and exchange.tail
            and is_last_response_message(event)
        ):
            cost = usage.cost(self._read_usage(exchange.tail.joined()), weights)
            return replies if cost is None else attach_request_cost(replies, cost)
        return replies

    def abandon_request(self, event: ProcessingRequest) -> Iterable[ProcessingResponse]:
        """Answer a message of a response that came while the request waits: Envoy made it itself."""
        context, flow_controller, queued = self._context, self._flow_controller, self.queued
        replies = self.exchange.receive(event)
        self._context.attempt(self._report_abandoned)
        if flow_controller is not None and queued is not None:
            flow_controller.cancel(queued, context.clock())
        self.queued = self.unparsed = self.unrendered = None
        self._is_abandoned = True
        return replies

    def stall(self) -> Iterable[ProcessingResponse]:
        """Reject the request, because its body stopped arriving."""
        return (self._reject(STALLED),)

    def evict(self) -> Iterable[ProcessingResponse]:
        """End the routed request for another one: with 429, or by a cut where its response began."""
        flow_controller, exchange = self._flow_controller, self.exchange
        if flow_controller is None:
            raise RuntimeError("only flow control evicts requests")
        self.is_over = self._evicted = True
        refunded = None if exchange.status else self._rate_reservation
        rejection = flow_controller.reject_evicted(refunded, self._context.clock())
        self._report_rejection(rejection)
        return (exchange.reject(rejection),)

    def fail(self) -> Iterable[ProcessingResponse]:
        """Answer an unexpected exception: 500 before the response begins, nothing later."""
        self.is_over = self._failed = True
        request, response = self.exchange.request_state, self.exchange.response_state
        if request is RequestState.REFUSED or response is not ResponseState.IDLE:
            return ()
        return (self._reject(BUG),)

    def reject_overload(self, event: ProcessingRequest) -> Iterable[ProcessingResponse]:
        """Reject the request at its first message, because too many streams are open."""
        self.exchange.receive(event)  # the form of the answer depends on its headers
        return (self._reject(self._context.overload_rejection),)

    def _reject(
        self, rejection: Rejection, *, labels: RequestLabels | None = None
    ) -> ProcessingResponse:
        self._refund()
        self._report_rejection(rejection, labels=labels)
        self.is_over = True
        return self.exchange.reject(rejection)

    def _report_rejection(
        self, rejection: Rejection, *, labels: RequestLabels | None = None
    ) -> None:
        self._start_trace()
        request_id, now = self.exchange.request_id, self._context.clock()
        self._observer.on_rejected(
            rejection, request_id=request_id, labels=labels, now=now, started_s=self._started_s
        )

    def _label(
        self, request: InferenceRequest, headers: Mapping[str, str], *, client_model: str = ""
    ) -> RequestLabels:
        """Labels of a parsed request."""
        reservation, flow_headers = self._rate_reservation, self._context.settings.flow_headers
        tenant = reservation.tenant if reservation else flow_headers.tenant(headers, request.target)
        return RequestLabels.from_request(request, tenant=tenant, client_model=client_model)

    def _label_refused(self, prepared: PreparedRequest) -> RequestLabels:
        """Labels of a request that was prepared and not routed."""
        headers, client_model = prepared.raw.headers, prepared.client_model
        return self._label(prepared.request, headers, client_model=client_model)

    def _start_trace(self) -> None:
        """Observe the request as part of a trace, where it is sampled and no step did so before."""
        sampler = self._context.trace_sampler
        if sampler is not None and self._traceparent is None:
            self._traceparent = ""
            self._context.attempt(partial(self._sample, sampler))

    def _sample(self, sampler: TraceSampler) -> None:
        trace = sampler.start(self.exchange.headers, self._read_call_traceparent)
        if trace is not None:
            self._traceparent = trace.traceparent
            self._observer.on_traced(trace, started_s=self._started_s)

    def _refund(self) -> None:
        """Return the tokens of a rejected request to its tenant's allowance."""
        if self._rate_reservation is not None:
            self._rate_reservation.refund()

    def resume_parsed(self, parsed: HttpRequest | Rejection) -> Iterable[ProcessingResponse]:
        """Answer a request after its large body was parsed or refused. Synchronous."""
        self.unparsed = None
        return (self._reject(parsed),) if isinstance(parsed, Rejection) else self._route(parsed)

    def resume_unparsed(self, error: Exception) -> Iterable[ProcessingResponse]:
        """Route a request to a fallback endpoint after parsing its large body failed."""
        raw, self.unparsed = self.unparsed, None
        if raw is None:
            raise RuntimeError("no body is parsed elsewhere; call once after `unparsed` was set")
        return self._route_fallback(raw, self._context.clock(), error)

    def _route(self, raw: HttpRequest) -> Iterable[ProcessingResponse]:
        context, now = self._context, self._context.clock()
        try:
            result = context.pool_selector.route(raw, now)
        except Exception as error:  # noqa: BLE001 - see `_route_fallback`
            return self._route_fallback(raw, now, error)
        return () if self._waits_for_tokens(result, raw) else self._apply(result, raw, now)

    def _waits_for_tokens(self, result: RoutingResult, raw: HttpRequest) -> bool:
        """True if the request is to wait until its prompt is rendered; see `unrendered`."""
        try:
            wait = result.render_ahead(raw)
        except Exception as error:  # noqa: BLE001 - a bug there must not cost the request
            self._context.observer.on_exception(error)
            return False
        if wait is None:
            return False
        self.unrendered = UnrenderedRequest(asyncio.ensure_future(wait), raw, result)
        return True

    def resume_rendered(self, _: object = None) -> Iterable[ProcessingResponse]:
        """Answer a request whose wait for tokens is over. Synchronous."""
        waiting, self.unrendered = self.unrendered, None
        if waiting is None:
            raise RuntimeError("the request waits for no tokens; resume once after it did")
        context = self._context
        now = context.clock()
        try:
            result = context.pool_selector.route_again(waiting.result, waiting.raw, now)
        except Exception as error:  # noqa: BLE001 - see `_route_fallback`
            return self._route_fallback(waiting.raw, now, error)
        return self._apply(result, waiting.raw, now)

    def _route_fallback(
        self, raw: HttpRequest, now: float, error: Exception
    ) -> Iterable[ProcessingResponse]:
        """Log an unexpected exception, and route the request to a fallback endpoint."""
        self._context.observer.on_exception(error)
        result = self._context.pool_selector.route_fallback(raw, why=type(error).__name__)
        return self._apply(result, raw, now)

    def _apply(
        self, result: RoutingResult, raw: HttpRequest, now: float
    ) -> Iterable[ProcessingResponse]:
        """Answer the request, queue it or send it to its endpoint."""
        outcome = result.outcome
        if isinstance(outcome, DirectResponse):
            self._observer.on_direct_response()
            self.is_over = True
            return (self.exchange.answer(outcome),)
        if self._context.trace_sampler is not None:
            self._start_trace()
        if result.pool:
            self._observer.on_pool_selected(result.pool)
        self._director = result.director
        flow_controller = self._context.flow_controllers.get(result.pool)
        if flow_controller is not None and result.prepared is not None:
            rejection = self._admit(flow_controller, result.prepared, outcome, now)
            if self.queued is not None:
                return ()
            outcome = rejection or outcome
        if isinstance(outcome, Decision):
            return self._send_route(outcome, raw, now)
        prepared = result.prepared
        labels = None if prepared is None else self._label_refused(prepared)
        rejection = outcome.rejection if isinstance(outcome, Deferral) else outcome
        return (self._reject(rejection, labels=labels),)

    def _admit(
        self,
        flow_controller: AsyncFlowController,
        prepared: PreparedRequest,
        outcome: Outcome,
        now: float,
    ) -> Rejection | None:
        """Queue the request if necessary; returns its rejection, or None."""
        reserved = flow_controller.reserve(prepared, now)
        if isinstance(reserved, Rejection):
            return reserved
        # No more of the request: it would stay until the end of the response, outside of any budget.
        self._flow_controller, self._rate_reservation = flow_controller, reserved
        admitted = flow_controller.admit(prepared, outcome, now, tenant=reserved.tenant)
        if isinstance(admitted, QueuedRequest):
            self.queued = admitted
            return None
        return admitted

    def resume(self, answer: Admission | Rejection) -> Iterable[ProcessingResponse]:
        """Answer a queued request after its admission or rejection. Synchronous."""
        queued, self.queued = self.queued, None
        if queued is None:
            raise RuntimeError("the request is not queued; resume once after it was")
        prepared = queued.prepared
        if isinstance(answer, Rejection):
            return (self._reject(answer, labels=self._label_refused(prepared)),)
        self._reservation = answer.reservation
        now = self._context.clock()
        self._observer.on_dequeued(now - queued.item.arrived, priority=prepared.request.priority)
        return self._send_route(answer.decision, prepared.raw, now)

    def _send_route(
        self, decision: Decision, raw: HttpRequest, now: float
    ) -> Iterable[ProcessingResponse]:
        """Charge the endpoint and send it to Envoy; a queued request has its reservation already."""
        context, director, exchange = self._context, self._director, self.exchange
        if director is None:
            raise RuntimeError("a decision without the director that took it")
        request_id = raw.headers.get("x-request-id", "")
        new_id = "" if request_id else str(uuid.uuid4())
        format_decision = context.settings.format_decision
        if format_decision is not None:
            headers = *decision.answer_headers, ("x-extproc-decision", format_decision(decision))
            decision = msgspec.structs.replace(decision, answer_headers=headers)
        self._reservation = self._reservation or director.reserve(decision, now)
        self.address = decision.endpoints[0].address
        self._routed_s = context.clock()
        trace_id = self._traceparent[3:35] if self._traceparent else sampled_trace_id(raw.headers)
        self._observer.on_routed(
            decision,
            request_id=request_id or new_id,
            labels=self._label(decision.request, raw.headers, client_model=decision.client_model),
            trace_id=trace_id,
            now=now,
            duration_s=self._routed_s - now,
            body_bytes=0 if raw.truncated else len(raw.body),
        )
        # Nothing of the response is needed: the stream ends and Envoy goes on without us.
        self.is_over = context.is_draining or decision.request.api in surfaces.UNOBSERVED
        if self._flow_controller is not None and not self.is_over:
            self.evictable = self._flow_controller.track(self._reservation, decision)
        if director.prompt_listener is not None:
            self._context.attempt(partial(director.prompt_listener.note, decision, raw))
        replies = exchange.apply_outcome(
            decision, request_id=new_id, traceparent=self._traceparent or ""
        )
        if decision.model_rewrite:
            self._observer.on_model_rewritten(edited=exchange.edited)
        describe = context.settings.describe_decision
        if describe is not None:
            description = describe(decision)
            self._observer.on_described(description)
            replies = messages.attach_decision(replies, description)
        return replies

    def _on_response_headers(self, event: ProcessingRequest, now: float) -> None:
        """Report the response headers to the director, and an id of the engine's to the observer."""
        reservation, director = self._reservation, self._director
        if reservation is not None and director is not None:
            served = "" if event.hints is None else event.hints.served
            status, decision = self.exchange.status, self._observer.decision
            director.on_response_headers(reservation, status, now, served=served, decision=decision)
            self.address = reservation.endpoint.address
            if self._flow_controller is not None and self.evictable is not None:
                self._flow_controller.note_served(self.evictable)
            if reservation.refused and self._rate_reservation is not None:
                self._rate_reservation.refund_tokens()
        engine_id = event.headers.get("x-request-id", "")
        if engine_id and len(engine_id) <= MAX_ID_BYTES:
            self._observer.on_answer_ids((engine_id,))

    def finish(self, result: StreamResult = "ok") -> None:
        """Release all resources at the end of the stream. Called once.

        A step that raises is a bug, which must not keep what the others give back; those that free
        capacity come first.
        """
        context, exchange, flow_controller = self._context, self.exchange, self._flow_controller
        reservation, director = self._reservation, self._director
        # Without calls of its own methods: a stream ends as often as one begins.
        try:
            exchange.close()
            if flow_controller is not None and self.queued is not None:
                flow_controller.cancel(self.queued, context.clock())
        except Exception as error:  # noqa: BLE001 - counted and logged
            context.observer.on_exception(error)
        if reservation is None or director is None:
            self._end_unrouted(result)
            return
        now, status = context.clock(), exchange.status
        try:
            if self._failed and not status:
                # One that failed before its response is not counted.
                director.unreserve(reservation, now)
            else:
                director.release(reservation, now, answered=bool(status), evicted=self._evicted)
        except Exception as error:  # noqa: BLE001 - counted and logged
            context.observer.on_exception(error)
        if flow_controller is not None:
            context.attempt(partial(flow_controller.on_ended, self.evictable))
        if exchange.tail is not None:
            tail = exchange.tail.joined()
            self._context.attempt(partial(self._record_usage, tail, director, reservation))
        try:
            self._observer.on_finished(
                endpoint=self.address if director.has_endpoint(self.address) else None,
                status=status,
                duration_s=now - self._started_s,
            )
        except Exception as error:  # noqa: BLE001 - counted and logged
            context.observer.on_exception(error)

    def _end_unrouted(self, result: StreamResult) -> None:
        """Refund a request that was not routed, and report it unless it was answered."""
        self._context.attempt(self._refund)
        if not (self.is_over or self._is_abandoned) and result in _WITHOUT_ERROR:
            self._context.attempt(self._report_abandoned)
        self.queued = self.unrendered = None

    def _report_abandoned(self) -> None:
        """Report a request whose stream ended before it was answered."""
        exchange, prepared, labels = self.exchange, None, None
        if exchange.request_state is RequestState.IDLE:
            return
        rejection = self._context.find_abandonment(exchange.status)
        if self.queued is not None:
            prepared = self.queued.prepared
        elif self.unrendered is not None:
            prepared = self.unrendered.result.prepared
        if prepared is not None:
            labels = self._label_refused(prepared)
        self._start_trace()
        self._observer.on_abandoned(
            rejection, request_id=exchange.request_id, labels=labels, now=self._context.clock()
        )

    def _read_usage(self, tail: bytes) -> Mapping[str, int]:
        """Tokens that the end of the response reports, by kind."""
        # Without a reservation there is no decision to ask for.
        decision = None if self._reservation is None else self._observer.decision
        return usage.read(tail, "" if decision is None else decision.request.api)

    def _record_usage(self, tail: bytes, director: Director, reservation: Reservation) -> None:
        """Record the usage that the end of the response reports, and charge it to the tenant."""
        tokens = self._read_usage(tail)
        self._context.attempt(lambda: self._observer.on_usage(tokens, self.exchange.response_bytes))
        ids = usage.read_ids(tail)
        if ids:
            self._context.attempt(lambda: self._observer.on_answer_ids(ids))
        decision, flow_controller = self._observer.decision, self._flow_controller
        rate_reservation = self._rate_reservation
        if decision is not None:
            self._context.attempt(
                lambda: director.on_usage(decision, tokens, served=reservation.endpoint)
            )
        if flow_controller is not None and rate_reservation is not None and not reservation.refused:
            now = self._context.clock()
            self._context.attempt(
                lambda: flow_controller.record_usage(rate_reservation, tokens, now)
            )


def open_stream(
    context: StreamContext, read_call_traceparent: Callable[[], str] = str
) -> StreamHandler:
    """Create the handler of a new stream; see `TraceSampler.start`."""
    ratio = context.settings.stream_sample_ratio
    sampled = ratio > 0.0 and context.rng.random() < ratio
    return StreamHandler(
        context,
        Exchange(context.exchange_settings, context.body_budget, watch_stream=sampled),
        context.observer.observe_request(context.pool_selector.default_pool),
        context.clock(),
        read_call_traceparent,
    )
