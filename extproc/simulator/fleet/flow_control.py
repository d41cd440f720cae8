"""Flow control of one picker in virtual time, on the queue that the server uses."""

from __future__ import annotations

import math
from collections import Counter
from typing import Generic

import msgspec

from extproc.config.flow_control import FlowControlSection
from extproc.decision import Deferral, Rejection
from extproc.flow_control.controller import FlowCallbacks, FlowController, GrantT
from extproc.flow_control.flow_queue import QueuedItem
from extproc.flow_control.queue import Queue
from extproc.flow_control.request_headers import EnqueueRequest
from extproc.simulator.fleet.event_queue import EventQueue
from extproc.simulator.fleet.sim_request import SimRequest


class SimFlowController(Generic[GrantT]):
    """Queues requests until capacity or rejection. Mutable; one owner.

    Args:
        holding: How requests wait; what tenants may take is not simulated.
        timeline: The clock.
        acts: What is done to requests.
    """

    def __init__(
        self,
        holding: FlowControlSection,
        *,
        timeline: EventQueue,
        acts: FlowCallbacks[SimRequest, GrantT],
    ) -> None:
        self._manners = holding.headers
        self._timeline = timeline
        self._acts = acts
        own = msgspec.structs.replace(acts, go=self._go, refuse=self._refuse)
        self._turnstile = FlowController(holding.queue, own)
        self._waiters: dict[str, QueuedItem] = {}
        self._soon = False
        self._due_at = math.inf

    @property
    def queue(self) -> Queue:
        """Queue of waiting requests."""
        return self._turnstile.queue

    @property
    def outcomes(self) -> Counter[str]:
        """Counters of requests that left the queue; see `FlowController`."""
        return self._turnstile.outcomes

    def admit(
        self, sim_request: SimRequest, outcome: GrantT | Deferral | Rejection, *, toward: str = ""
    ) -> Rejection | None:
        """Dispatch, queue or reject a new request.

        Args:
            sim_request: The request.
            outcome: What would come of it if nobody else waited.
            toward: Address of the endpoint it would go to; empty where that is not known.

        Returns:
            Why it is refused. None where it waits, or may go where `outcome` says.
        """
        why = self._turnstile.check(outcome, priority=sim_request.work.priority, toward=toward)
        return None if why is None else self.enqueue(sim_request, why)

    def is_queued(self, sim_request: SimRequest) -> bool:
        """True while a request is queued."""
        return sim_request.id in self._waiters

    def enqueue(self, sim_request: SimRequest, why: Deferral | Rejection) -> Rejection | None:
        """Begin to wait.

        Args:
            sim_request: The request.
            why: Its outcome without capacity.

        Returns:
            Why not, where that changes nothing, or there is no room or no time.
        """
        now, work = self._timeline.now, sim_request.work
        want = EnqueueRequest(
            tenant=self._tenant(sim_request),
            priority=work.priority,
            target=work.adapter,
            tokens=work.prompt_tokens,
        )
        waiter = self._turnstile.enqueue(sim_request, want, why, now)
        if isinstance(waiter, Rejection):
            return waiter
        self._waiters[sim_request.id] = waiter
        retry_in_s = why.retry_in_s if isinstance(why, Deferral) else 0.0
        self._wake(self._turnstile.next_s(retry_in_s, now))
        return None

    def cancel(self, sim_request: SimRequest) -> bool:
        """Handle the disconnect of a client; returns True if its request was still queued."""
        waiter = self._waiters.pop(sim_request.id, None)
        return waiter is not None and self._turnstile.cancel(waiter)

    def notify_capacity(self) -> None:
        """Handle a change that may be capacity."""
        self._turnstile.changed()
        if self.queue.count and not self._soon:
            self._soon = True
            self._timeline.after(0.0, self.pump)

    def charge(self, sim_request: SimRequest) -> None:
        """Charge a completed request to its tenant."""
        tokens = self.queue.settings.output_weight * sim_request.work.output_tokens
        self.queue.charge(self._tenant(sim_request), tokens, self._timeline.now)

    def pump(self) -> None:
        """Dispatch queued requests and reject expired ones."""
        self._soon = False
        wait_s = self._turnstile.dispatch(self._timeline.now)
        if wait_s == 0.0:
            self.notify_capacity()
        else:
            self._wake(wait_s)

    def _go(self, sim_request: SimRequest, way: GrantT) -> None:
        del self._waiters[sim_request.id]
        self._acts.go(sim_request, way)

    def _refuse(self, sim_request: SimRequest, why: Rejection) -> None:
        del self._waiters[sim_request.id]
        self._acts.refuse(sim_request, why)

    def _tenant(self, sim_request: SimRequest) -> str:
        work = sim_request.work
        return work.tenant or self._manners.tenant({}, work.adapter)

    def _wake(self, wait_s: float | None) -> None:
        """Look again after so many seconds, unless that happens sooner anyway."""
        if wait_s is None:
            return
        when = self._timeline.now + wait_s
        if when < self._due_at:
            self._due_at = when
            self._timeline.at(when, lambda: self._due(when))

    def _due(self, when: float) -> None:
        if when != self._due_at:
            return  # one that is sooner took its place
        self._due_at = math.inf
        self.pump()
