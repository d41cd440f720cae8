"""Where requests of one pool wait for capacity. A shell: futures and timers around the turnstile."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Mapping

import msgspec

from extproc.config.flow_control import FlowControlSection
from extproc.decision import Decision, Outcome, Rejection
from extproc.flow_control.controller import FlowCallbacks, FlowController, LookBudget
from extproc.flow_control.endpoint_sets import EndpointBits
from extproc.flow_control.queue import Queue
from extproc.flow_control.queued_item import QueuedItem
from extproc.flow_control.rate_limit import NO_LIMIT, Charge, TenantRateLimiter
from extproc.flow_control.request_headers import EnqueueRequest
from extproc.pool.inflight import Reservation
from extproc.routing import pending_load
from extproc.routing.director import Director
from extproc.routing.request_preparer import PreparedRequest
from extproc.server.bug_log import BugLog

#: Requests that are looked at in one turn of the event loop (count), and how long that may take
#: (seconds): no other stream is served meanwhile.
_MOST_LOOKS = 128
_MOST_S = 0.005

#: After a pump others have the loop for as long as it took, so that pumps that follow each other take
#: half of it at most. Rests below the first are not worth a timer, as other streams are served in
#: each turn; the second is for clocks that leap (seconds).
_LEAST_REST_S = 0.001
_MOST_REST_S = 0.05

#: Seconds until the pump is tried again after an exception of its own.
_RETRY_S = 1.0


class Admission(msgspec.Struct, frozen=True):
    """A request may go on, and is charged to its endpoint already."""

    decision: Decision
    ticket: Reservation


class RateReservation(msgspec.Struct, frozen=True, gc=False):
    """What a request takes from its tenant, and nothing else of it: it outlives the prompt.

    Attributes:
        tenant: Who sent it; empty where nobody says.
        prompt_tokens: Of its prompt, as estimated.
        charge: What it took from the tenant's allowance; None where nothing is limited.
    """

    tenant: str
    prompt_tokens: int
    charge: Charge | None = None

    def refund(self) -> None:
        """Give back what a request took that was not served; again changes nothing."""
        if self.charge is not None:
            self.charge.refund()


class QueuedRequest:
    """A request that waits, as its stream sees it.

    Attributes:
        waiter: Its place in the queue.
        prepared: What it asks for.
        answer: What comes of it.
        rejection: Why it had to wait.
        pending_share: What was promised to the endpoint it waits for.
    """

    __slots__ = ("answer", "pending_share", "prepared", "rejection", "waiter")

    def __init__(self, prepared: PreparedRequest, why: Rejection) -> None:
        self.waiter: QueuedItem
        self.prepared = prepared
        self.rejection = why
        self.pending_share: pending_load.PendingShare | None = None
        self.answer: asyncio.Future[Admission | Rejection] = asyncio.Future()

    def take_back(self) -> None:
        """It waits no longer for the endpoint it waited for."""
        pending_load.remove(self.pending_share)
        self.pending_share = None


class AsyncFlowController:
    """Holds requests of one pool until they can be served, or told that they will not.

    Args:
        dispatcher: Decides again, and charges.
        holding: How requests wait, and what tenants may take.
        clock: Monotonic seconds.
        bugs: Where exceptions of ours go.

    Attributes:
        rate_limiter: What tenants may take.
        arrivals: Called when a request begins to wait.
    """

    def __init__(
        self,
        dispatcher: Director,
        holding: FlowControlSection,
        *,
        clock: Callable[[], float],
        bugs: BugLog,
    ) -> None:
        self._dispatcher = dispatcher
        self._flow_headers = holding.manners
        self._clock = clock
        self._soon = False
        self._rests_until = -math.inf
        self._timer: asyncio.TimerHandle | None = None
        self._bits: EndpointBits | None = None
        self._bugs = bugs
        acts = FlowCallbacks(
            decide=self._decide,
            waits=self._add_pending,
            go=self._grant,
            refuse=_refuse,
            fail=self._fail,
            bits=self._endpoint_bits,
        )
        budget = LookBudget(looks=_MOST_LOOKS, seconds=_MOST_S, clock=clock)
        self._controller: FlowController[QueuedRequest, Decision] = FlowController(
            holding.queue, acts, budget=budget
        )
        self.rate_limiter = TenantRateLimiter(holding.limit or NO_LIMIT, holding.limits)
        self.arrivals: Callable[[], None] = _ignore

    @property
    def queue(self) -> Queue:
        """Who waits."""
        return self._controller.queue

    @property
    def outcomes(self) -> Counter[str]:
        """What came of requests that waited; see `FlowController`."""
        return self._controller.outcomes

    def adopt(self, holding: FlowControlSection) -> None:
        """Go by other settings from the next request on; those who wait keep their deadlines.

        What tenants attained is kept, what they may take begins anew where it changed.
        """
        self.queue.adopt(holding.queue, self._clock())
        self._flow_headers = holding.manners
        fresh = TenantRateLimiter(holding.limit or NO_LIMIT, holding.limits)
        if fresh != self.rate_limiter:
            self.rate_limiter = fresh

    def reserve(self, prepared: PreparedRequest, now: float) -> RateReservation | Rejection:
        """Take what a request may use from its tenant's allowance; 429 where it is too much."""
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
        """What an answer really took: the tenant's turns and allowance follow."""
        prompt = usage.get("prompt", reservation.prompt_tokens)
        completion = usage.get("completion", 0)
        weight = self.queue.settings.output_weight
        extra = prompt - reservation.prompt_tokens + weight * completion
        self.queue.charge(reservation.tenant, extra, now)
        if reservation.charge is not None:
            reservation.charge.reconcile(prompt + completion)

    def tenant(self, prepared: PreparedRequest) -> str:
        """Who sent a request; empty where nobody says."""
        return self._flow_headers.tenant(prepared.raw.headers, prepared.request.target)

    def admit(
        self, prepared: PreparedRequest, outcome: Outcome, now: float, *, tenant: str
    ) -> QueuedRequest | Rejection | None:
        """Let a request that has just come go on, wait, or be refused.

        Args:
            prepared: What is asked for.
            outcome: What would come of it if nobody else waited.
            now: Monotonic seconds.
            tenant: Who sent it, as of its reservation.

        Returns:
            None where it may go where `outcome` says.
        """
        toward = "" if isinstance(outcome, Rejection) else outcome.endpoints[0].address
        why = self._controller.check(outcome, priority=prepared.request.priority, toward=toward)
        return None if why is None else self.enqueue(prepared, why, now, tenant=tenant)

    def enqueue(
        self, prepared: PreparedRequest, why: Rejection, now: float, *, tenant: str | None = None
    ) -> QueuedRequest | Rejection:
        """Begin to wait.

        Args:
            prepared: What is asked for.
            why: Why it cannot go on.
            now: Monotonic seconds.
            tenant: Who sent it; None to read that from the request.

        Returns:
            Why not, where that changes nothing, or there is no room or no time.
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
        held = QueuedRequest(prepared.without_prompt(), why)
        waiter = self._controller.enqueue(held, want, why, now)
        if isinstance(waiter, Rejection):
            return waiter
        held.waiter = waiter
        try:
            self._wake(self._controller.next_s(why.waits_s or 0.0, now))
            self.arrivals()
        except Exception:
            self.cancel(held, now)  # its stream will not wait for it
            raise
        return held

    def cancel(self, held: QueuedRequest, now: float) -> None:
        """The client is gone, or the stream ended: nothing is kept, nothing stays charged."""
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
        """Something happened that may be capacity."""
        self._controller.changed()
        self._pump_soon()

    def _pump_soon(self) -> None:
        """Pump in the next turn of the loop, or when the rest after the last pump is over."""
        if not self.queue.count or self._soon:
            return
        self._soon = True
        loop = asyncio.get_running_loop()
        rest_s = self._rests_until - self._clock()
        if rest_s < _LEAST_REST_S:
            loop.call_soon(self.pump)
        else:
            loop.call_later(rest_s, self.pump)

    def pump(self) -> None:
        """Let requests go on, and end those that waited too long; never raises."""
        self._soon = False
        begun = self._clock()
        try:
            wait_s = self._controller.dispatch(begun)
        except Exception as error:  # noqa: BLE001 - those who wait must not wait for ever
            self._bugs.note(error)
            wait_s = _RETRY_S
        ended = self._clock()
        self._rests_until = ended + min(ended - begun, _MOST_REST_S)
        if wait_s == 0.0:
            self._pump_soon()
        else:
            self._wake(wait_s)

    def close(self) -> None:
        """Nobody waits any longer: 503, and whoever comes is told the same."""
        self._controller.close()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _decide(self, held: QueuedRequest, patient: bool) -> Outcome:  # noqa: FBT001 - as `FlowCallbacks` calls it
        held.take_back()  # nobody waits behind itself
        now = self._clock()
        try:
            return self._dispatcher.decide(held.prepared, now, patient=patient)
        except Exception as error:  # noqa: BLE001 - as for requests that do not wait
            self._bugs.note(error)
            why = type(error).__name__
            return self._dispatcher.route_fallback(held.prepared.raw, now, why=why)

    def _endpoint_bits(self) -> EndpointBits:
        """As `FlowCallbacks` takes it; targets are those of `enqueue`."""
        serving = self._dispatcher.serving_bits
        if self._bits is None or self._bits.version is not serving:
            self._bits = EndpointBits(
                for_target=lambda target: serving.bits_for(*target),
                named=serving.bits_of_addresses,
                version=serving,
            )
        return self._bits

    def _fail(self, held: QueuedRequest, error: Exception) -> None:
        """Tell a request that waits that something went wrong with it: 500."""
        self._bugs.note(error)
        _refuse(held, Rejection(500, f"the decision failed ({type(error).__name__})"))

    def _add_pending(self, held: QueuedRequest, address: str) -> None:
        prepared = held.prepared
        held.pending_share = self._dispatcher.pending_load.add(
            address, prepared.chain, prompt_tokens=prepared.request.prompt_tokens
        )

    def _grant(self, held: QueuedRequest, decision: Decision) -> None:
        if held.answer.done():
            return  # cancelled, and its stream has not been told yet
        ticket = self._dispatcher.reserve(decision, self._clock())
        held.answer.set_result(Admission(decision, ticket))

    def _wake(self, wait_s: float | None) -> None:
        """Look again after so many seconds, unless that happens sooner anyway."""
        if wait_s is None:
            return
        loop = asyncio.get_running_loop()
        if self._timer is not None:
            if self._timer.when() <= loop.time() + wait_s and not self._timer.cancelled():
                return
            self._timer.cancel()
        self._timer = loop.call_later(wait_s, self._due)

    def _due(self) -> None:
        self._timer = None
        self._pump_soon()


def _refuse(held: QueuedRequest, why: Rejection) -> None:
    held.take_back()
    if not held.answer.done():
        held.answer.set_result(why)


def _ignore() -> None:
    """Nobody wants to know."""
