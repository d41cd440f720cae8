"""Where requests of one pool wait for capacity. A shell: futures and timers around the turnstile."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Mapping

import msgspec

from extproc.config.flow_control import Holding
from extproc.decision import Decision, Outcome, Rejection
from extproc.flow_control.controller import Acts, Budget, Turnstile
from extproc.flow_control.endpoint_sets import EndpointBits
from extproc.flow_control.queue import Queue
from extproc.flow_control.queued_item import Waiter
from extproc.flow_control.rate_limit import NO_LIMIT, Allowance, Charge
from extproc.flow_control.request_headers import Want
from extproc.pool.inflight import Ticket
from extproc.routing import pending_load
from extproc.routing.director import Dispatcher
from extproc.routing.request_preparer import Prepared
from extproc.server.bug_log import Bugs

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


class Granted(msgspec.Struct, frozen=True):
    """A request may go on, and is charged to its endpoint already."""

    decision: Decision
    ticket: Ticket


class Reservation(msgspec.Struct, frozen=True, gc=False):
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


class Held:
    """A request that waits, as its stream sees it.

    Attributes:
        waiter: Its place in the queue.
        prepared: What it asks for.
        answer: What comes of it.
        why: Why it had to wait.
        promise: What was promised to the endpoint it waits for.
    """

    __slots__ = ("answer", "prepared", "promise", "waiter", "why")

    def __init__(self, prepared: Prepared, why: Rejection) -> None:
        self.waiter: Waiter
        self.prepared = prepared
        self.why = why
        self.promise: pending_load.Promise | None = None
        self.answer: asyncio.Future[Granted | Rejection] = asyncio.Future()

    def take_back(self) -> None:
        """It waits no longer for the endpoint it waited for."""
        pending_load.take_back(self.promise)
        self.promise = None


class Gate:
    """Holds requests of one pool until they can be served, or told that they will not.

    Args:
        dispatcher: Decides again, and charges.
        holding: How requests wait, and what tenants may take.
        clock: Monotonic seconds.
        bugs: Where exceptions of ours go.

    Attributes:
        allowance: What tenants may take.
        arrivals: Called when a request begins to wait.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        holding: Holding,
        *,
        clock: Callable[[], float],
        bugs: Bugs,
    ) -> None:
        self._dispatcher = dispatcher
        self._manners = holding.manners
        self._clock = clock
        self._soon = False
        self._rests_until = -math.inf
        self._timer: asyncio.TimerHandle | None = None
        self._bits: EndpointBits | None = None
        self._bugs = bugs
        acts = Acts(
            decide=self._decide,
            waits=self._promise,
            go=self._grant,
            refuse=_refuse,
            fail=self._fail,
            bits=self._endpoint_bits,
        )
        budget = Budget(looks=_MOST_LOOKS, seconds=_MOST_S, clock=clock)
        self._turnstile: Turnstile[Held, Decision] = Turnstile(holding.queue, acts, budget=budget)
        self.allowance = Allowance(holding.limit or NO_LIMIT, holding.limits)
        self.arrivals: Callable[[], None] = _nobody

    @property
    def queue(self) -> Queue:
        """Who waits."""
        return self._turnstile.queue

    @property
    def outcomes(self) -> Counter[str]:
        """What came of requests that waited; see `Turnstile`."""
        return self._turnstile.outcomes

    def adopt(self, holding: Holding) -> None:
        """Go by other settings from the next request on; those who wait keep their deadlines.

        What tenants attained is kept, what they may take begins anew where it changed.
        """
        self.queue.adopt(holding.queue, self._clock())
        self._manners = holding.manners
        fresh = Allowance(holding.limit or NO_LIMIT, holding.limits)
        if fresh != self.allowance:
            self.allowance = fresh

    def reserve(self, prepared: Prepared, now: float) -> Reservation | Rejection:
        """Take what a request may use from its tenant's allowance; 429 where it is too much."""
        request, tenant = prepared.request, self.tenant(prepared)
        charge = None
        if self.allowance.limits:
            tokens = request.prompt_tokens + (request.max_tokens or 0)
            taken = self.allowance.take(tenant, tokens, now)
            if isinstance(taken, Rejection):
                return taken
            charge = taken
        return Reservation(tenant, request.prompt_tokens, charge)

    def used(self, reservation: Reservation, usage: Mapping[str, int], now: float) -> None:
        """What an answer really took: the tenant's turns and allowance follow."""
        prompt = usage.get("prompt", reservation.prompt_tokens)
        completion = usage.get("completion", 0)
        weight = self.queue.settings.output_weight
        extra = prompt - reservation.prompt_tokens + weight * completion
        self.queue.charge(reservation.tenant, extra, now)
        if reservation.charge is not None:
            reservation.charge.settle(prompt + completion)

    def tenant(self, prepared: Prepared) -> str:
        """Who sent a request; empty where nobody says."""
        return self._manners.tenant(prepared.raw.headers, prepared.request.target)

    def admit(
        self, prepared: Prepared, outcome: Outcome, now: float, *, tenant: str
    ) -> Held | Rejection | None:
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
        why = self._turnstile.why(outcome, priority=prepared.request.priority, toward=toward)
        return None if why is None else self.hold(prepared, why, now, tenant=tenant)

    def hold(
        self, prepared: Prepared, why: Rejection, now: float, *, tenant: str | None = None
    ) -> Held | Rejection:
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
        want = Want(
            tenant=self.tenant(prepared) if tenant is None else tenant,
            priority=request.priority,
            objective=request.objective,
            target=(request.model, request.adapter, request.subset),
            size=len(prepared.raw.body),
            tokens=request.prompt_tokens,
            timeout_s=self._manners.timeout_s(headers),
            slo_s=self._manners.slo_s(headers),
        )
        held = Held(prepared.resting(), why)
        waiter = self._turnstile.hold(held, want, why, now)
        if isinstance(waiter, Rejection):
            return waiter
        held.waiter = waiter
        try:
            self._wake(self._turnstile.next_s(why.waits_s or 0.0, now))
            self.arrivals()
        except Exception:
            self.left(held, now)  # its stream will not wait for it
            raise
        return held

    def left(self, held: Held, now: float) -> None:
        """The client is gone, or the stream ended: nothing is kept, nothing stays charged."""
        # A task that is cancelled while it waits has cancelled what it waits for.
        if self._turnstile.left(held.waiter):
            held.take_back()
            held.answer.cancel()
            return
        if held.answer.cancelled():
            return
        granted = held.answer.result()
        if isinstance(granted, Granted):
            self._dispatcher.withdraw(granted.ticket, now)

    def changed(self) -> None:
        """Something happened that may be capacity."""
        self._turnstile.changed()
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
            wait_s = self._turnstile.pump(begun)
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
        self._turnstile.close()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _decide(self, held: Held, patient: bool) -> Outcome:  # noqa: FBT001 - as `Acts` calls it
        held.take_back()  # nobody waits behind itself
        now = self._clock()
        try:
            return self._dispatcher.decide(held.prepared, now, patient=patient)
        except Exception as error:  # noqa: BLE001 - as for requests that do not wait
            self._bugs.note(error)
            why = type(error).__name__
            return self._dispatcher.rescue(held.prepared.raw, now, why=why)

    def _endpoint_bits(self) -> EndpointBits:
        """As `Acts` takes it; targets are those of `hold`."""
        serving = self._dispatcher.serving_bits
        if self._bits is None or self._bits.version is not serving:
            self._bits = EndpointBits(
                of=lambda target: serving.of(*target), named=serving.named, version=serving
            )
        return self._bits

    def _fail(self, held: Held, error: Exception) -> None:
        """Tell a request that waits that something went wrong with it: 500."""
        self._bugs.note(error)
        _refuse(held, Rejection(500, f"the decision failed ({type(error).__name__})"))

    def _promise(self, held: Held, address: str) -> None:
        prepared = held.prepared
        held.promise = self._dispatcher.promises.make(
            address, prepared.chain, prompt_tokens=prepared.request.prompt_tokens
        )

    def _grant(self, held: Held, decision: Decision) -> None:
        if held.answer.done():
            return  # cancelled, and its stream has not been told yet
        ticket = self._dispatcher.commit(decision, self._clock())
        held.answer.set_result(Granted(decision, ticket))

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


def _refuse(held: Held, why: Rejection) -> None:
    held.take_back()
    if not held.answer.done():
        held.answer.set_result(why)


def _nobody() -> None:
    """Nobody wants to know."""
