"""Asynchronous flow control of a pool: futures and timers around `FlowController`."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping

import msgspec

from extproc.config.settings import FlowControlSection
from extproc.decision import NO_ENDPOINTS, Decision, Deferral, Outcome, Rejection
from extproc.flow_control.controller import (
    SHUTTING_DOWN,
    FlowCallbacks,
    FlowController,
    LookBudget,
)
from extproc.flow_control.eviction import (
    EVICTED,
    EvictableRequest,
    EvictionCallbacks,
    Evictor,
)
from extproc.flow_control.flow_queue import EndpointBits, QueuedItem
from extproc.flow_control.queue import EnqueueRequest, Queue
from extproc.flow_control.rate_limit import NO_LIMIT, Charge, TenantRateLimiter
from extproc.pool import conversations
from extproc.pool.inflight import Reservation
from extproc.request import RequestLabels
from extproc.routing import admission
from extproc.routing.director import Director
from extproc.routing.request_preparer import PreparedRequest
from extproc.telemetry.counters import PoolCounters
from extproc.telemetry.queue_counters import QueueCounters

#: Requests that are looked at in one turn of the event loop (count), and how long that may take
#: (seconds): no other stream is served meanwhile.
_MAX_LOOKS = 128
_MAX_PUMP_S = 0.005

#: Bound of `max_tokens` in rate limits where engines list no length of their context (tokens): the
#: longest context of common models. What a client sends must not block its tenant for days.
_MAX_ANSWER_TOKENS = 1 << 20


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


class Admission(msgspec.Struct, frozen=True, gc=False):
    """Admission of a queued request, with its reservation on the endpoint."""

    decision: Decision
    reservation: Reservation


class RateReservation(msgspec.Struct, frozen=True, gc=False):
    """Reservation of a request in the rate limit of its tenant; it outlives the prompt.

    Attributes:
        tenant: Tenant of the request; empty where it names none.
        charge: Tokens taken from the allowance of the tenant; None without a limit.
    """

    tenant: str
    prompt_tokens: int
    charge: Charge | None = None

    def refund(self) -> None:
        """Return the tokens of a request that was not served; idempotent."""
        if self.charge is not None:
            self.charge.refund()

    def refund_tokens(self) -> None:
        """Return the tokens of a request that an engine refused, which counts as a request."""
        if self.charge is not None:
            self.charge.reconcile(0.0)


class QueuedRequest:
    """Queued request, as its stream sees it.

    Attributes:
        prepared: The request without its prompt.
        pending_share: Its pending load on the endpoint it waits for; None without one.
        labels: Labels it is counted under while it waits; None where it is not.
    """

    __slots__ = ("admission", "item", "labels", "pending_share", "prepared")

    def __init__(self, prepared: PreparedRequest) -> None:
        self.item: QueuedItem
        self.prepared = prepared
        self.labels: RequestLabels | None = None
        self.pending_share: conversations.PendingShare | None = None
        self.admission: asyncio.Future[Admission | Rejection] = asyncio.Future()

    def record_queued(self, counters: QueueCounters, tenant: str) -> None:
        """Count it as waiting."""
        self.labels = counters.record_queued(_label(self.prepared, tenant), self.item.bytes)

    def remove_pending(self) -> None:
        """Remove its pending load from the endpoint it waited for."""
        if self.pending_share is not None:
            conversations.remove_pending(self.pending_share)
            self.pending_share = None


class EvictableStream:
    """Request in flight that may be evicted, as its stream sees it.

    Attributes:
        request: The request among those of its pool.
    """

    __slots__ = ("_evict", "request", "reservation")

    def __init__(self, reservation: Reservation) -> None:
        self.reservation = reservation
        self.request: EvictableRequest[EvictableStream] | None = None
        self._evict: Callable[[], bool] | None = None

    def allow(self, evict: Callable[[], bool]) -> None:
        """Let the transport end the request by `evict`, which returns whether it can do that now."""
        self._evict = evict

    def forbid(self) -> None:
        """Let nothing end the request any longer."""
        self._evict = None

    def evict(self) -> bool:
        """End the request, for one that waits; returns whether that was possible."""
        return self._evict is not None and self._evict()


class AsyncFlowController:
    """Queues requests of a pool until they are admitted or rejected.

    Args:
        rate_limiter: Limits of tenants, which pools share; None for one of its own.
    """

    def __init__(
        self,
        director: Director,
        section: FlowControlSection,
        *,
        clock: Callable[[], float],
        on_exception: Callable[[BaseException], None],
        pool: str = "",
        counters: QueueCounters | None = None,
        rate_limiter: TenantRateLimiter | None = None,
    ) -> None:
        self._director = director
        self._pool = pool
        self._counters = PoolCounters().queue if counters is None else counters
        self._flow_headers = section.headers
        self._clock = clock
        self._bits: EndpointBits | None = None
        self._on_exception = on_exception
        callbacks = FlowCallbacks(
            decide=self._decide,
            on_waiting=self._add_pending,
            dispatch=self._dispatch,
            reject=_reject,
            on_departed=self._on_departed,
            on_item_failed=self._reject_failed,
            on_pump_failed=on_exception,
            endpoint_bits=self._endpoint_bits,
        )
        self.evictor = Evictor(
            EvictionCallbacks(
                evict=EvictableStream.evict,
                shortens_wait=self._shortens_wait,
                has_shown=lambda address, ended_at: admission.has_shown(
                    director.pool, address, ended_at
                ),
            )
        )
        budget = LookBudget(looks=_MAX_LOOKS, seconds=_MAX_PUMP_S)
        self._controller: FlowController[QueuedRequest, Decision] = FlowController(
            section.queue, callbacks, LoopTimer(clock), budget=budget, evictor=self.evictor
        )
        self.rate_limiter = TenantRateLimiter() if rate_limiter is None else rate_limiter
        self.rate_limiter.reconfigure(section.limit or NO_LIMIT, section.limits)
        self._arrival_listeners: list[Callable[[], None]] = []

    @property
    def queue(self) -> Queue:
        """Queue of waiting requests."""
        return self._controller.queue

    @property
    def outcomes(self) -> Counter[str]:
        """Results of queued requests (count); see `FlowController`."""
        return self._controller.outcomes

    @property
    def unserved_tokens(self) -> int:
        """Prompt tokens of queued requests that were not dispatched; see `FlowController`."""
        return self._controller.unserved_tokens

    def add_arrival_listener(self, listener: Callable[[], None]) -> None:
        """Call `listener` whenever a request is queued."""
        self._arrival_listeners.append(listener)

    def remove_arrival_listener(self, listener: Callable[[], None]) -> None:
        """Undo `add_arrival_listener`."""
        self._arrival_listeners.remove(listener)

    def reconfigure(self, section: FlowControlSection) -> None:
        """Apply other settings from the next request on; queued requests keep their deadlines.

        Fair shares of tenants stay; tenants whose rate limit changes start anew.
        """
        self.queue.reconfigure(section.queue, self._clock())
        self._flow_headers = section.headers
        self.rate_limiter.reconfigure(section.limit or NO_LIMIT, section.limits)

    def reserve(self, prepared: PreparedRequest, now: float) -> RateReservation | Rejection:
        """Take a request's tokens from its tenant's allowance; 429 where they exceed it."""
        request, tenant = prepared.request, self.tenant(prepared)
        charge = None
        if self.rate_limiter.is_limiting:
            most = self._director.pool.serving.max_model_len or _MAX_ANSWER_TOKENS
            tokens = request.prompt_tokens + min(request.max_tokens or 0, most)
            result = self.rate_limiter.take(tenant, tokens, now)
            if isinstance(result, Rejection):
                return result
            charge = result
        return RateReservation(tenant, request.prompt_tokens, charge)

    def record_usage(
        self, reservation: RateReservation, usage: Mapping[str, int], now: float
    ) -> None:
        """Correct the tenant's fair share and allowance by the real usage of an answer.

        The allowance stays as it was where `max_tokens` were charged and no output tokens are reported.
        """
        prompt = usage.get("prompt", reservation.prompt_tokens)
        completion = usage.get("completion", 0)
        weight = self.queue.settings.output_weight
        extra = prompt - reservation.prompt_tokens + weight * completion
        self.queue.charge(reservation.tenant, extra, now)
        charge = reservation.charge
        is_known = "completion" in usage or (
            charge is not None and charge.tokens <= reservation.prompt_tokens
        )
        if charge is not None and is_known:
            charge.reconcile(prompt + completion)

    def tenant(self, prepared: PreparedRequest) -> str:
        """Tenant of a request; empty where it names none."""
        return self._flow_headers.tenant(prepared.raw.headers, prepared.request.target)

    def admit(
        self, prepared: PreparedRequest, outcome: Outcome, now: float, *, tenant: str
    ) -> QueuedRequest | Rejection | None:
        """Admit, queue or reject a new request.

        Args:
            outcome: Result of routing it with an empty queue.

        Returns:
            None if admitted: it may go to the endpoint of `outcome`.
        """
        preferred = outcome.endpoints[0].address if isinstance(outcome, Decision) else ""
        blocked = self._controller.check(
            outcome, priority=prepared.request.priority, preferred_endpoint=preferred
        )
        if blocked is not None:
            return self.enqueue(prepared, blocked, now, tenant=tenant)
        self.queue.charge(tenant, prepared.request.prompt_tokens, now)
        return None

    def enqueue(
        self,
        prepared: PreparedRequest,
        outcome: Deferral | Rejection,
        now: float,
        *,
        tenant: str | None = None,
    ) -> QueuedRequest | Rejection:
        """Add a request to the queue.

        Args:
            outcome: Its outcome without capacity.
            tenant: Its tenant; None to read that from the request.

        Returns:
            A rejection where waiting does not help, the queue is full or no time is left.
        """
        request, headers = prepared.request, prepared.raw.headers
        tenant = self.tenant(prepared) if tenant is None else tenant
        properties = EnqueueRequest(
            tenant=tenant,
            priority=request.priority,
            objective=request.objective,
            target=(
                request.model,
                request.adapter,
                request.subset,
                self._director.routing.find_profile_name(headers),
            ),
            size=len(prepared.raw.body),
            tokens=request.prompt_tokens,
            timeout_s=self._flow_headers.timeout_s(headers),
            slo_s=self._flow_headers.slo_s(headers),
        )
        queued = QueuedRequest(prepared.without_prompt())
        item = self._controller.enqueue(queued, properties, outcome, now)
        if isinstance(item, Rejection):
            if isinstance(outcome, Deferral):
                name = _name_refusal(item, outcome.rejection)
                self._counters.record_refused(_label(prepared, tenant), name)
            return item
        queued.item = item
        queued.record_queued(self._counters, tenant)
        try:
            for listener in self._arrival_listeners:
                listener()
        except Exception:
            self.cancel(queued, now)  # its stream will not wait for it
            raise
        return queued

    def cancel(self, queued: QueuedRequest, now: float) -> None:
        """Remove a request whose stream ended, and release its reservation."""
        # A task that is cancelled while it waits has cancelled what it waits for.
        if self._controller.cancel(queued.item):
            queued.remove_pending()
            queued.admission.cancel()
            return
        if queued.admission.cancelled():
            return
        admission = queued.admission.result()
        if isinstance(admission, Admission):
            self._director.unreserve(admission.reservation, now)
            self.notify_capacity()

    def track(self, reservation: Reservation, decision: Decision) -> EvictableStream | None:
        """Track a request that was sent to its endpoint; None where it is never evicted."""
        priority = decision.request.priority
        if priority >= 0 or self.queue.settings.evict_after_s is None:
            return None
        stream = EvictableStream(reservation)
        address = reservation.endpoint.address
        stream.request = self.evictor.track(stream, priority=priority, address=address)
        return stream

    def note_served(self, stream: EvictableStream) -> None:
        """Note the endpoint that serves a request, which may be another one than was chosen."""
        if stream.request is not None:
            self.evictor.move(stream.request, stream.reservation.endpoint.address)

    def on_ended(self, stream: EvictableStream | None) -> None:
        """Forget a request that ended, if it was tracked, and look for capacity."""
        if stream is not None:
            stream.forbid()
            if stream.request is not None:
                self.evictor.untrack(stream.request, self._clock())
        self.notify_capacity()

    def reject_evicted(self, refunded: RateReservation | None, now: float) -> Rejection:
        """Rejection of an evicted request, with the queue's own retry estimate.

        Args:
            refunded: What its tenant gets back, as there was no response; None where one began.
        """
        if refunded is not None:
            refunded.refund()
            self.queue.charge(refunded.tenant, -refunded.prompt_tokens, now)
        return msgspec.structs.replace(EVICTED, retry_after_s=self.queue.wait_s(now))

    def notify_capacity(self) -> None:
        """Look at the queue again soon: capacity may be free."""
        self._controller.notify_capacity()

    def pump(self) -> None:
        """Admit requests, and reject those that waited too long; never raises."""
        self._controller.pump()

    def close(self, rejection: Rejection = SHUTTING_DOWN) -> None:
        """Reject all queued and later requests."""
        self._controller.close(rejection)

    def _decide(self, queued: QueuedRequest, may_defer: bool) -> Outcome:  # noqa: FBT001 - as `FlowCallbacks` calls it
        if queued.pending_share is not None:
            queued.remove_pending()  # a request does not queue behind itself
        now = self._clock()
        try:
            return self._director.decide(queued.prepared, now, may_defer=may_defer)
        except Exception as error:  # noqa: BLE001 - as for requests that do not wait
            self._on_exception(error)
            error_type = type(error).__name__
            return self._director.route_fallback(queued.prepared.raw, why=error_type)

    def _endpoint_bits(self) -> EndpointBits:
        """Endpoint bits for `FlowCallbacks`; targets are those of `enqueue`."""
        serving = self._director.serving_bits
        if self._bits is None or self._bits.version is not serving:
            self._bits = EndpointBits(
                for_target=lambda target: serving.bits_for(*target[:3]),
                for_addresses=serving.bits_of_addresses,
                version=serving,
                adapter_of=lambda target: self._director.pool.adapter_of(*target[:2]),
                profile_of=lambda target: target[3],
            )
        return self._bits

    def _shortens_wait(self, stream: EvictableStream, priority: int) -> bool:
        pool, now = self._director.pool, self._clock()
        return admission.shortens_wait(pool, stream.reservation, priority=priority, now=now)

    def _reject_failed(self, queued: QueuedRequest, error: Exception) -> None:
        """Reject a queued request with 500 after an unexpected exception."""
        self._on_exception(error)
        message = f"the decision failed ({type(error).__name__})"
        _reject(queued, Rejection(500, message, cause="bug"))

    def _on_departed(
        self, queued: QueuedRequest, outcome: str, wait_s: float, rejection: Rejection | None
    ) -> None:
        if queued.labels is not None:
            if outcome == "expired" and rejection is not None and _is_unserved(rejection):
                outcome = "expired-unserved"
            self._counters.record_departed(
                queued.labels, queued.item.bytes, outcome=outcome, wait_s=wait_s
            )

    def _add_pending(self, queued: QueuedRequest, address: str) -> None:
        if address:
            prepared = queued.prepared
            queued.pending_share = self._director.pending_load.add(
                address, prepared.chain, prompt_tokens=prepared.request.prompt_tokens
            )

    def _dispatch(self, queued: QueuedRequest, decision: Decision) -> None:
        if queued.admission.done():
            return  # cancelled, and its stream does not know yet
        if self._pool:
            decision = msgspec.structs.replace(decision, pool=self._pool)
        reservation = self._director.reserve(decision, self._clock())
        queued.admission.set_result(Admission(decision, reservation))


def _label(prepared: PreparedRequest, tenant: str) -> RequestLabels:
    """Labels of a request that waits."""
    return RequestLabels.from_request(
        prepared.request, tenant=tenant, client_model=prepared.client_model
    )


def _is_unserved(rejection: Rejection) -> bool:
    """True if a request had no endpoint, rather than a busy one."""
    return rejection.cause == NO_ENDPOINTS.cause


def _name_refusal(refusal: Rejection, why: Rejection) -> str:
    """Outcome for `QueueCounters` of a request that did not join the queue.

    Args:
        why: Why it could not be dispatched.
    """
    if refusal.cause != "queue-full":
        return "refused"
    return "full-unserved" if _is_unserved(why) else "full"


def _reject(queued: QueuedRequest, rejection: Rejection) -> None:
    queued.remove_pending()
    if not queued.admission.done():
        queued.admission.set_result(rejection)
