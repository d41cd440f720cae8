"""Asynchronous flow control of a pool: futures and timers around `FlowController`."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping

import msgspec

from extproc.config.flow_control import FlowControlSection
from extproc.decision import Decision, Deferral, Outcome, Rejection
from extproc.flow_control.controller import FlowCallbacks, FlowController, LookBudget
from extproc.flow_control.flow_queue import EndpointBits, QueuedItem
from extproc.flow_control.queue import Queue
from extproc.flow_control.rate_limit import NO_LIMIT, Charge, TenantRateLimiter
from extproc.flow_control.request_headers import EnqueueRequest
from extproc.pool import conversations
from extproc.pool.inflight import Reservation
from extproc.routing.director import Director
from extproc.routing.request_preparer import PreparedRequest

#: Requests that are looked at in one turn of the event loop (count), and how long that may take
#: (seconds): no other stream is served meanwhile.
_MOST_LOOKS = 128
_MOST_S = 0.005


class LoopTimer:
    """Timer of flow control on the running event loop."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.now = clock

    def call_at(self, when: float, callback: Callable[[], None]) -> asyncio.TimerHandle:
        """Schedule a callback at a time of the clock."""
        return asyncio.get_running_loop().call_later(when - self.now(), callback)

    def call_soon(self, callback: Callable[[], None]) -> None:
        """Schedule a callback for the next turn of the loop."""
        asyncio.get_running_loop().call_soon(callback)


class Admission(msgspec.Struct, frozen=True):
    """Admission of a queued request, with its reservation on the endpoint."""

    decision: Decision
    ticket: Reservation


class RateReservation(msgspec.Struct, frozen=True, gc=False):
    """Reservation of a request in the rate limit of its tenant; it outlives the prompt.

    Attributes:
        tenant: Tenant of the request; empty where it names none.
        prompt_tokens: Estimated prompt tokens.
        charge: Tokens taken from the allowance of the tenant; None without a limit.
    """

    tenant: str
    prompt_tokens: int
    charge: Charge | None = None

    def refund(self) -> None:
        """Return the tokens of a request that was not served; idempotent."""
        if self.charge is not None:
            self.charge.refund()


class QueuedRequest:
    """Queued request, as its stream sees it.

    Attributes:
        waiter: Its place in the queue.
        prepared: The request without its prompt.
        answer: Future of its admission or rejection.
        pending_share: Its pending load on the endpoint it waits for; None without one.
    """

    __slots__ = ("answer", "pending_share", "prepared", "waiter")

    def __init__(self, prepared: PreparedRequest) -> None:
        self.waiter: QueuedItem
        self.prepared = prepared
        self.pending_share: conversations.PendingShare | None = None
        self.answer: asyncio.Future[Admission | Rejection] = asyncio.Future()

    def take_back(self) -> None:
        """Remove its pending load from the endpoint it waited for."""
        conversations.remove(self.pending_share)
        self.pending_share = None


class AsyncFlowController:
    """Queues requests of a pool until they are admitted or rejected.

    Args:
        dispatcher: Routes again, and reserves.
        holding: Queue and rate limits.
        on_exception: Called with unexpected exceptions.

    Attributes:
        rate_limiter: Rate limits of tenants.
    """

    def __init__(
        self,
        dispatcher: Director,
        holding: FlowControlSection,
        *,
        clock: Callable[[], float],
        on_exception: Callable[[BaseException], None],
    ) -> None:
        self._dispatcher = dispatcher
        self._flow_headers = holding.headers
        self._clock = clock
        self._bits: EndpointBits | None = None
        self._on_exception = on_exception
        acts = FlowCallbacks(
            decide=self._decide,
            waits=self._add_pending,
            go=self._grant,
            refuse=_refuse,
            fail=self._fail,
            pump_failed=on_exception,
            bits=self._endpoint_bits,
        )
        budget = LookBudget(looks=_MOST_LOOKS, seconds=_MOST_S)
        self._controller: FlowController[QueuedRequest, Decision] = FlowController(
            holding.queue, acts, LoopTimer(clock), budget=budget
        )
        self.rate_limiter = TenantRateLimiter(holding.limit or NO_LIMIT, holding.limits)
        self._arrival_listeners: list[Callable[[], None]] = []

    @property
    def queue(self) -> Queue:
        """Queue of waiting requests."""
        return self._controller.queue

    @property
    def outcomes(self) -> Counter[str]:
        """Results of queued requests (count); see `FlowController`."""
        return self._controller.outcomes

    def add_arrival_listener(self, listener: Callable[[], None]) -> None:
        """Call `listener` whenever a request is queued."""
        self._arrival_listeners.append(listener)

    def remove_arrival_listener(self, listener: Callable[[], None]) -> None:
        """Undo `add_arrival_listener`."""
        self._arrival_listeners.remove(listener)

    def reconfigure(self, holding: FlowControlSection) -> None:
        """Apply other settings from the next request on; queued requests keep their deadlines.

        Fair shares of tenants stay; changed rate limits start anew.
        """
        self.queue.reconfigure(holding.queue, self._clock())
        self._flow_headers = holding.headers
        fresh = TenantRateLimiter(holding.limit or NO_LIMIT, holding.limits)
        if fresh != self.rate_limiter:
            self.rate_limiter = fresh

    def reserve(self, prepared: PreparedRequest, now: float) -> RateReservation | Rejection:
        """Take a request's tokens from its tenant's allowance; 429 where they exceed it."""
        request, tenant = prepared.request, self.tenant(prepared)
        charge = None
        if self.rate_limiter.limits:
            tokens = request.prompt_tokens + (request.max_tokens or 0)
            taken = self.rate_limiter.take(tenant, tokens, now)
            if isinstance(taken, Rejection):
                return taken
            charge = taken
        return RateReservation(tenant, request.prompt_tokens, charge)

    def record_usage(
        self, reservation: RateReservation, usage: Mapping[str, int], now: float
    ) -> None:
        """Correct the tenant's fair share and allowance by the real usage of an answer."""
        prompt = usage.get("prompt", reservation.prompt_tokens)
        completion = usage.get("completion", 0)
        weight = self.queue.settings.output_weight
        extra = prompt - reservation.prompt_tokens + weight * completion
        self.queue.charge(reservation.tenant, extra, now)
        if reservation.charge is not None:
            reservation.charge.reconcile(prompt + completion)

    def tenant(self, prepared: PreparedRequest) -> str:
        """Tenant of a request; empty where it names none."""
        return self._flow_headers.tenant(prepared.raw.headers, prepared.request.target)

    def admit(
        self, prepared: PreparedRequest, outcome: Outcome, now: float, *, tenant: str
    ) -> QueuedRequest | Rejection | None:
        """Admit, queue or reject a new request.

        Args:
            outcome: Result of routing it with an empty queue.
            tenant: Tenant of its reservation.

        Returns:
            None if admitted: it may go to the endpoint of `outcome`.
        """
        toward = outcome.endpoints[0].address if isinstance(outcome, Decision) else ""
        why = self._controller.check(outcome, priority=prepared.request.priority, toward=toward)
        return None if why is None else self.enqueue(prepared, why, now, tenant=tenant)

    def enqueue(
        self,
        prepared: PreparedRequest,
        why: Deferral | Rejection,
        now: float,
        *,
        tenant: str | None = None,
    ) -> QueuedRequest | Rejection:
        """Add a request to the queue.

        Args:
            why: Its outcome without capacity.
            tenant: Its tenant; None to read that from the request.

        Returns:
            A rejection where waiting does not help, the queue is full or no time is left.
        """
        request, headers = prepared.request, prepared.raw.headers
        want = EnqueueRequest(
            tenant=self.tenant(prepared) if tenant is None else tenant,
            priority=request.priority,
            objective=request.objective,
            target=(request.model, request.adapter, request.subset),
            size=len(prepared.raw.body),
            tokens=request.prompt_tokens,
            timeout_s=self._flow_headers.timeout_s(headers),
            slo_s=self._flow_headers.slo_s(headers),
        )
        held = QueuedRequest(prepared.without_prompt())
        waiter = self._controller.enqueue(held, want, why, now)
        if isinstance(waiter, Rejection):
            return waiter
        held.waiter = waiter
        try:
            for listener in self._arrival_listeners:
                listener()
        except Exception:
            self.cancel(held, now)  # its stream will not wait for it
            raise
        return held

    def cancel(self, held: QueuedRequest, now: float) -> None:
        """Remove a request whose stream ended, and release its reservation."""
        # A task that is cancelled while it waits has cancelled what it waits for.
        if self._controller.cancel(held.waiter):
            held.take_back()
            held.answer.cancel()
            return
        if held.answer.cancelled():
            return
        granted = held.answer.result()
        if isinstance(granted, Admission):
            self._dispatcher.unreserve(granted.ticket, now)

    def notify_capacity(self) -> None:
        """Look at the queue again soon: capacity may be free."""
        self._controller.notify_capacity()

    def pump(self) -> None:
        """Admit requests, and reject those that waited too long; never raises."""
        self._controller.pump()

    def close(self) -> None:
        """Reject all queued and later requests with 503."""
        self._controller.close()

    def _decide(self, held: QueuedRequest, may_defer: bool) -> Outcome:  # noqa: FBT001 - as `FlowCallbacks` calls it
        held.take_back()  # a request does not queue behind itself
        now = self._clock()
        try:
            return self._dispatcher.decide(held.prepared, now, may_defer=may_defer)
        except Exception as error:  # noqa: BLE001 - as for requests that do not wait
            self._on_exception(error)
            why = type(error).__name__
            return self._dispatcher.route_fallback(held.prepared.raw, now, why=why)

    def _endpoint_bits(self) -> EndpointBits:
        """Endpoint bits for `FlowCallbacks`; targets are those of `enqueue`."""
        serving = self._dispatcher.serving_bits
        if self._bits is None or self._bits.version is not serving:
            self._bits = EndpointBits(
                for_target=lambda target: serving.bits_for(*target),
                named=serving.bits_of_addresses,
                version=serving,
            )
        return self._bits

    def _fail(self, held: QueuedRequest, error: Exception) -> None:
        """Reject a queued request with 500 after an unexpected exception."""
        self._on_exception(error)
        _refuse(held, Rejection(500, f"the decision failed ({type(error).__name__})"))

    def _add_pending(self, held: QueuedRequest, address: str) -> None:
        prepared = held.prepared
        held.pending_share = self._dispatcher.pending_load.add(
            address, prepared.chain, prompt_tokens=prepared.request.prompt_tokens
        )

    def _grant(self, held: QueuedRequest, decision: Decision) -> None:
        if held.answer.done():
            return  # cancelled, and its stream does not know yet
        ticket = self._dispatcher.reserve(decision, self._clock())
        held.answer.set_result(Admission(decision, ticket))


def _refuse(held: QueuedRequest, why: Rejection) -> None:
    held.take_back()
    if not held.answer.done():
        held.answer.set_result(why)
