"""Flow control of one picker in virtual time, on the queue that the server uses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Generic

import msgspec

from extproc.config.settings import FlowControlSection
from extproc.decision import Deferral, Rejection
from extproc.flow_control.controller import FlowCallbacks, FlowController, GrantT
from extproc.flow_control.eviction import Evictor
from extproc.flow_control.flow_queue import QueuedItem
from extproc.flow_control.queue import EnqueueRequest, Queue
from extproc.simulator.fleet.event_queue import EventQueue
from extproc.simulator.fleet.sim_request import SimRequest


class ScheduledCallback:
    """A callback on the timeline that can be dropped."""

    def __init__(self, callback: Callable[[], None]) -> None:
        self._callback: Callable[[], None] | None = callback

    def run(self) -> None:
        """Run the callback, unless it was dropped."""
        if self._callback is not None:
            self._callback()

    def cancel(self) -> None:
        """Drop the callback."""
        self._callback = None


class VirtualTimer:
    """Timer of flow control on virtual time."""

    def __init__(self, timeline: EventQueue) -> None:
        self._timeline = timeline

    def now(self) -> float:
        """Virtual seconds."""
        return self._timeline.now

    def call_at(self, when: float, callback: Callable[[], None]) -> ScheduledCallback:
        """Schedule a callback."""
        scheduled = ScheduledCallback(callback)
        self._timeline.at(when, scheduled.run)
        return scheduled

    def call_soon(self, callback: Callable[[], None]) -> None:
        """Schedule a callback after the others of this moment."""
        self._timeline.after(0.0, callback)


class SimFlowController(Generic[GrantT]):
    """Queues requests until capacity or rejection. Mutable; one owner.

    Args:
        section: Settings of flow control; rate limits of tenants are not simulated.
        evictor: Requests that may be evicted for queued ones; None evicts none.
    """

    def __init__(
        self,
        section: FlowControlSection,
        *,
        timeline: EventQueue,
        callbacks: FlowCallbacks[SimRequest, GrantT],
        evictor: Evictor[SimRequest] | None = None,
    ) -> None:
        self._headers = section.headers
        self._timeline = timeline
        self._callbacks = callbacks
        own = msgspec.structs.replace(callbacks, dispatch=self._dispatch, reject=self._reject)
        self._controller = FlowController(
            section.queue, own, VirtualTimer(timeline), evictor=evictor
        )
        self._items: dict[str, QueuedItem] = {}

    @property
    def queue(self) -> Queue:
        """Queue of waiting requests."""
        return self._controller.queue

    @property
    def outcomes(self) -> Counter[str]:
        """Counters of requests that left the queue; see `FlowController`."""
        return self._controller.outcomes

    def admit(
        self,
        sim_request: SimRequest,
        outcome: GrantT | Deferral | Rejection,
        *,
        preferred_endpoint: str = "",
    ) -> Rejection | None:
        """Dispatch, queue or reject a new request.

        Args:
            outcome: Outcome if no other request waited.
            preferred_endpoint: Address of the endpoint it would go to; empty where that is not known.

        Returns:
            Its rejection. None where it waits, or may go where `outcome` says.
        """
        blocked = self._controller.check(
            outcome, priority=sim_request.work.priority, preferred_endpoint=preferred_endpoint
        )
        if blocked is not None:
            return self.enqueue(sim_request, blocked)
        tenant, tokens = self._tenant(sim_request), sim_request.work.prompt_tokens
        self.queue.charge(tenant, tokens, self._timeline.now)
        return None

    def is_queued(self, sim_request: SimRequest) -> bool:
        """True while a request is queued."""
        return sim_request.id in self._items

    def enqueue(self, sim_request: SimRequest, outcome: Deferral | Rejection) -> Rejection | None:
        """Add a request to the queue.

        Args:
            outcome: Its outcome without capacity.

        Returns:
            Its rejection, where it may not wait, or there is no room or no time.
        """
        now, work = self._timeline.now, sim_request.work
        request = EnqueueRequest(
            tenant=self._tenant(sim_request),
            priority=work.priority,
            target=(work.model, work.adapter, work.profile),
            tokens=work.prompt_tokens,
        )
        item = self._controller.enqueue(sim_request, request, outcome, now)
        if isinstance(item, Rejection):
            return item
        self._items[sim_request.id] = item
        return None

    def cancel(self, sim_request: SimRequest) -> bool:
        """Handle the disconnect of a client; returns True if its request was still queued."""
        item = self._items.pop(sim_request.id, None)
        return item is not None and self._controller.cancel(item)

    def notify_capacity(self) -> None:
        """Handle a change that may be capacity."""
        self._controller.notify_capacity()

    def charge(self, sim_request: SimRequest) -> None:
        """Charge a completed request to its tenant."""
        tokens = self.queue.settings.output_weight * sim_request.work.output_tokens
        self.queue.charge(self._tenant(sim_request), tokens, self._timeline.now)

    def pump(self) -> None:
        """Dispatch queued requests and reject expired ones."""
        self._controller.pump()

    def _dispatch(self, sim_request: SimRequest, grant: GrantT) -> None:
        del self._items[sim_request.id]
        self._callbacks.dispatch(sim_request, grant)

    def _reject(self, sim_request: SimRequest, rejection: Rejection) -> None:
        del self._items[sim_request.id]
        self._callbacks.reject(sim_request, rejection)

    def _tenant(self, sim_request: SimRequest) -> str:
        work = sim_request.work
        return work.tenant or self._headers.tenant({}, work.adapter or work.model)
