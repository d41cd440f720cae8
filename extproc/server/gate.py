"""Where requests of one pool wait for capacity. A shell: futures and timers around the queue."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Mapping

import msgspec

from extproc.config.holding import Holding
from extproc.decision import Decision, Rejection
from extproc.dispatch.dispatcher import Dispatcher
from extproc.dispatch.preparing import Prepared
from extproc.holding.allowance import NO_LIMIT, Allowance
from extproc.holding.queue import Queue
from extproc.holding.waiter import Waiter
from extproc.pool.accounts import Ticket

#: Requests that go on in one turn of the event loop (count): some 20 ms, in which no other stream
#: is served.
_MOST_PER_TURN = 128

#: Shortest and longest time until capacity is looked for again without an event (seconds).
_SOONEST_S = 0.002
_LATEST_S = 1.0


class Manners(msgspec.Struct, frozen=True, kw_only=True):
    """What of a request says how it waits.

    Attributes:
        tenant_headers: Name the tenant; the first that is there counts.
        by_adapter: Whether the adapter is the tenant where no header names one.
        timeout_headers: Name the longest wait in milliseconds.
        slo_headers: Name the time to first token asked for, in milliseconds.
        empty_s: Longest wait where there is no endpoint; None for the usual one.
    """

    tenant_headers: tuple[str, ...] = (
        "x-llm-d-inference-fairness-id",
        "x-gateway-inference-fairness-id",
    )
    by_adapter: bool = False
    timeout_headers: tuple[str, ...] = ("x-extproc-hold-ms",)
    slo_headers: tuple[str, ...] = ("x-llm-d-slo-ttft-ms", "x-slo-ttft-ms")
    empty_s: float | None = None


def manners(holding: Holding) -> Manners:
    """What the configuration says of it."""
    usual = Manners()
    tenant = (holding.tenant_header.lower(),) if holding.tenant_header else ()
    return Manners(
        tenant_headers=(*tenant, *usual.tenant_headers),
        by_adapter=holding.by_adapter,
        timeout_headers=(holding.timeout_header.lower(),) if holding.timeout_header else (),
        empty_s=holding.empty_timeout_s,
    )


class Granted(msgspec.Struct, frozen=True):
    """A request may go on, and is charged to its endpoint already."""

    decision: Decision
    ticket: Ticket


class Held:
    """A request that waits, as its stream sees it.

    Attributes:
        waiter: Its place in the queue.
        prepared: What it asks for.
        answer: What comes of it.
        why: Why it could not go on when last tried.
    """

    __slots__ = ("answer", "prepared", "waiter", "why")

    def __init__(self, waiter: Waiter, prepared: Prepared, why: Rejection) -> None:
        self.waiter = waiter
        self.prepared = prepared
        self.why = why
        self.answer: asyncio.Future[Granted | Rejection] = asyncio.Future()


class Gate:
    """Holds requests of one pool until they can be served, or told that they will not.

    Args:
        dispatcher: Decides again, and charges.
        holding: How requests wait, and what tenants may take.
        clock: Monotonic seconds.

    Attributes:
        allowance: What tenants may take.
        queue: Who waits.
        outcomes: What came of requests that waited: `went`, `expired`, `displaced`, `left`,
            `refused`, `closed` (counts).
        arrivals: Called when a request begins to wait.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        holding: Holding,
        *,
        clock: Callable[[], float],
    ) -> None:
        self._dispatcher = dispatcher
        self._manners = manners(holding)
        self._clock = clock
        self._held: dict[Waiter, Held] = {}
        self._soon = False
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False
        self.queue = Queue(holding.queue)
        self.allowance = Allowance(holding.limit or NO_LIMIT, holding.limits)
        self.outcomes: Counter[str] = Counter()
        self.arrivals: Callable[[], None] = _nobody

    def adopt(self, holding: Holding) -> None:
        """Go by other settings from the next request on; those who wait keep their deadlines.

        What tenants attained is kept, what they may take begins anew where it changed.
        """
        self.queue.settings = holding.queue
        self._manners = manners(holding)
        fresh = Allowance(holding.limit or NO_LIMIT, holding.limits)
        if fresh != self.allowance:
            self.allowance = fresh

    def limited(self, prepared: Prepared, now: float) -> Rejection | None:
        """Take from the tenant's allowance; why it may not, else None."""
        if not self.allowance.limits:
            return None
        request = prepared.request
        tokens = request.prompt_tokens + (request.max_tokens or 0)
        return self.allowance.take(self.tenant(prepared), tokens, now)

    def used(self, prepared: Prepared, usage: Mapping[str, int], now: float) -> None:
        """What an answer really took: the tenant's turns and allowance follow."""
        request, tenant = prepared.request, self.tenant(prepared)
        prompt = usage.get("prompt", request.prompt_tokens)
        completion = usage.get("completion", 0)
        weight = self.queue.settings.output_weight
        extra = prompt - request.prompt_tokens + weight * completion
        self.queue.turns.charge(tenant, extra, now)
        taken = request.prompt_tokens + (request.max_tokens or 0)
        self.allowance.settle(tenant, prompt + completion - taken)

    def tenant(self, prepared: Prepared) -> str:
        """Who sent a request; empty where nobody says."""
        headers = prepared.raw.headers
        for name in self._manners.tenant_headers:
            if headers.get(name):
                return headers[name]
        return prepared.request.target if self._manners.by_adapter else ""

    def overtakes(self, prepared: Prepared) -> bool:
        """Whether a request that could go on would pass others that wait as long as it may."""
        return bool(self.queue.count and self.queue.ahead(prepared.request.priority))

    def hold(self, prepared: Prepared, why: Rejection, now: float) -> Held | Rejection:
        """Begin to wait.

        Args:
            prepared: What is asked for.
            why: Why it cannot go on.
            now: Monotonic seconds.

        Returns:
            Why not, where there is no room or no time.
        """
        timeout_s = self._timeout_s(prepared, why)
        if self._closed:
            return _shutting_down()
        if timeout_s <= 0.0:
            return self.with_estimate(why, now)
        request = prepared.request
        waiter = Waiter(
            arrived=now,
            deadline=now + timeout_s,
            tenant=self.tenant(prepared),
            priority=request.priority,
            target=(request.model, request.adapter, request.subset),
            size=len(prepared.raw.body),
            tokens=request.prompt_tokens,
            slo_s=_milliseconds(prepared, self._manners.slo_headers, default_s=math.inf),
        )
        joined = self.queue.join(waiter, now)
        if isinstance(joined, Rejection):
            return joined
        for other in joined.displaced:
            self.outcomes["displaced"] += 1
            self._answer(other, _displaced(self.queue.full(now).retry_after_s))
        held = self._held[waiter] = Held(waiter, prepared, why)
        self._wake(why.waits_s if why.waits_s is not None else math.inf, now)
        self.arrivals()
        return held

    def left(self, held: Held, now: float) -> None:
        """The client is gone, or the stream ended: nothing is kept, nothing stays charged."""
        self.queue.leave(held.waiter)
        self._held.pop(held.waiter, None)
        # A task that is cancelled while it waits has cancelled what it waits for.
        if held.answer.cancel() or held.answer.cancelled():
            self.outcomes["left"] += 1
            return
        granted = held.answer.result()
        if isinstance(granted, Granted):
            self._dispatcher.withdraw(granted.ticket, now)

    def changed(self) -> None:
        """Something happened that may be capacity."""
        if self.queue.count and not self._soon:
            self._soon = True
            asyncio.get_running_loop().call_soon(self.pump)

    def pump(self) -> None:
        """Let requests go on, and end those that waited too long."""
        self._soon = False
        now = self._clock()
        for waiter in self.queue.expired(now):
            self.outcomes["expired"] += 1
            self._answer(waiter, self._expired(self._held[waiter].why, now))
        soonest_s = math.inf
        left = _MOST_PER_TURN

        def go(waiter: Waiter) -> bool:
            nonlocal soonest_s, left
            if left <= 0:
                return False
            held = self._held[waiter]
            outcome = self._dispatcher.decide(held.prepared, now)
            if isinstance(outcome, Rejection):
                if outcome.waits_s is not None:
                    held.why = outcome
                    soonest_s = min(soonest_s, outcome.waits_s)
                    return False
                self.outcomes["refused"] += 1
                self._answer(waiter, outcome)
                return True
            left -= 1
            self.outcomes["went"] += 1
            self._answer(waiter, Granted(outcome, self._dispatcher.commit(outcome, now)))
            return True

        self.queue.pump(go, now)
        if left <= 0:
            self.changed()
        self._wake(soonest_s, now)

    def close(self) -> None:
        """Nobody waits any longer: 503, and whoever comes is told the same."""
        self._closed = True
        for waiter in list(self.queue):
            self.queue.leave(waiter)
            self.outcomes["closed"] += 1
            self._answer(waiter, _shutting_down())
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def with_estimate(self, why: Rejection, now: float) -> Rejection:
        """A refusal with the queue's own estimate of when trying again helps."""
        if why.retry_after_s is None or not self.queue.count:
            return why
        wait_s = self.queue.pace.wait_s(self.queue.count, now)
        return msgspec.structs.replace(why, retry_after_s=wait_s)

    def _answer(self, waiter: Waiter, answer: Granted | Rejection) -> None:
        self._held.pop(waiter).answer.set_result(answer)

    def _expired(self, why: Rejection, now: float) -> Rejection:
        """503 where there is no endpoint, 429 where all are busy (EPP protocol report 1.8)."""
        if why.status == 503:
            return self.with_estimate(why, now)
        told = msgspec.structs.replace(
            why, message="no endpoint was free in time", reason="rejected-ttl-expired"
        )
        return self.with_estimate(told, now)

    def _timeout_s(self, prepared: Prepared, why: Rejection) -> float:
        settings = self.queue.settings
        usual_s = settings.by_objective.get(prepared.request.objective, settings.timeout_s)
        if why.status == 503 and self._manners.empty_s is not None:
            usual_s = self._manners.empty_s
        asked_s = _milliseconds(prepared, self._manners.timeout_headers, default_s=usual_s)
        return min(asked_s, settings.most_timeout_s)

    def _wake(self, soonest_s: float, now: float) -> None:
        """Look again when the first endpoint is free, or the first deadline is over."""
        deadline = self.queue.next_deadline()
        if deadline is None:
            return
        wait_s = max(_SOONEST_S, min(soonest_s, deadline - now))
        if soonest_s < math.inf:
            wait_s = min(wait_s, _LATEST_S)
        loop = asyncio.get_running_loop()
        if self._timer is not None:
            if self._timer.when() <= loop.time() + wait_s and not self._timer.cancelled():
                return
            self._timer.cancel()
        self._timer = loop.call_later(wait_s, self._due)

    def _due(self) -> None:
        self._timer = None
        self.pump()


def _nobody() -> None:
    """Nobody wants to know."""


def _milliseconds(prepared: Prepared, names: tuple[str, ...], *, default_s: float) -> float:
    """Seconds that a header names in milliseconds; what is no number counts as absent."""
    for name in names:
        text = prepared.raw.headers.get(name, "")
        if text.isascii() and text.isdigit() and len(text) < 12:
            return int(text) / 1000.0
    return default_s


def _shutting_down() -> Rejection:
    return Rejection(
        503, "the picker is shutting down", reason="rejected-shutting-down", retry_after_s=1
    )


def _displaced(retry_after_s: int | None) -> Rejection:
    return Rejection(
        429,
        "displaced by a request of higher priority",
        reason="evicted-priority",
        retry_after_s=retry_after_s,
    )
