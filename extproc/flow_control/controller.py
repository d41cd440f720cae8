"""Flow controller: queueing, dispatch and rejection of a pool's requests, over any timer.

The server runs it on the event loop, the simulator on virtual time.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, Final, Generic, Protocol, TypeVar

import msgspec

from extproc.decision import Deferral, Rejection, all_busy
from extproc.flow_control.eviction import Evictor
from extproc.flow_control.flow_queue import EndpointBits, QueuedItem
from extproc.flow_control.queue import (
    Blocked,
    DepartureCause,
    DispatchResult,
    EnqueueRequest,
    FlowControlSettings,
    Queue,
)

#: Shortest and longest time until capacity is looked for again without an event (seconds).
_SOONEST_S = 0.002
_LATEST_S = 1.0


#: After a call of `pump` others have the thread for as long as it looked at requests that stay, so that
#: such calls take half of it at most. For requests that leave, which are never looked at again, the loop
#: serves its other callbacks once. Rests below the first are not worth a timer; the second is for clocks
#: that leap (seconds).
_MIN_REST_S = 0.001
_MAX_REST_S = 0.05

#: Seconds until `pump` is tried again after an exception of its own.
_RETRY_S = 1.0

#: Answer to requests that wait for a process that stops.
SHUTTING_DOWN: Final = Rejection(
    503,
    "the picker is shutting down",
    reason="rejected-shutting-down",
    retry_after_s=1,
    cause="shutting-down",
)

#: What waits.
ItemT = TypeVar("ItemT")
#: What is decided of one that goes on.
GrantT = TypeVar("GrantT")


class TimerHandle(Protocol):
    """A scheduled callback."""

    def cancel(self) -> None:
        """Drop the callback; does nothing if it ran."""


class Timer(Protocol):
    """Clock of a driver, and its callbacks, which run one after another."""

    def now(self) -> float:
        """Monotonic seconds."""

    def call_at(self, when: float, callback: Callable[[], None]) -> TimerHandle:
        """Schedule a callback at a time (monotonic seconds)."""

    def call_soon(self, callback: Callable[[], None]) -> None:
        """Schedule a callback after those that are due."""


class FlowCallbacks(msgspec.Struct, Generic[ItemT, GrantT], frozen=True):
    """Actions of a driver on queued requests.

    Attributes:
        decide: Returns the outcome of a request, without charging it. The second argument says
            whether it may wait for its preferred endpoint while others have capacity.
        on_waiting: The request stays queued for the endpoint of this address; empty for any.
        dispatch: The request is dispatched with this decision, and charged at once.
        on_departed: The request left the queue, with its outcome (see `FlowController`), the
            seconds of its wait, and why it was rejected, if so; called before `reject` and after
            `dispatch`.
        on_item_failed: A call for the queued request raised this exception. None propagates the exception.
        on_pump_failed: A call of `pump` raised this exception, and is repeated a second later. None
            propagates the exception.
        endpoint_bits: Returns the endpoints of each target; see `EndpointBits`. None: requests of equal
            targets share their endpoints.
    """

    decide: Callable[[ItemT, bool], GrantT | Deferral | Rejection]
    on_waiting: Callable[[ItemT, str], None]
    dispatch: Callable[[ItemT, GrantT], None]
    reject: Callable[[ItemT, Rejection], None]
    on_departed: Callable[[ItemT, str, float, Rejection | None], None] | None = None
    on_item_failed: Callable[[ItemT, Exception], None] | None = None
    on_pump_failed: Callable[[Exception], None] | None = None
    endpoint_bits: Callable[[], EndpointBits] | None = None


class LookBudget(msgspec.Struct, frozen=True, kw_only=True):
    """Work that a call of `pump` may do; the next call continues from there.

    Attributes:
        seconds: Time after which no further request is examined.
    """

    looks: int
    seconds: float


class FlowController(Generic[ItemT, GrantT]):
    """Queues the requests of a pool until they are dispatched or rejected.

    Args:
        settings: Bounds, order and timeouts; `queue.reconfigure` replaces them.
        timer: Clock of the driver; no callback is scheduled while the queue is empty.
        budget: Work per call of `pump`; None for no limit.
        evictor: Requests that may be evicted for queued ones; None evicts none.

    Attributes:
        outcomes: Departures of queued requests by outcome: `dispatched`, `expired`, `displaced`,
            `cancelled`, `rejected`, `failed`, `shutdown` (counts).
        unserved_tokens: Prompt tokens of those that were not dispatched (total).
    """

    def __init__(
        self,
        settings: FlowControlSettings,
        callbacks: FlowCallbacks[ItemT, GrantT],
        timer: Timer,
        *,
        budget: LookBudget | None = None,
        evictor: Evictor[Any] | None = None,
    ) -> None:
        self._callbacks = callbacks
        self._timer = timer
        self._evictor = evictor
        #: Requests that one call of `pump` cannot dispatch, and why.
        self._blocked: list[tuple[QueuedItem, Deferral]] = []
        self._budget = budget
        self._changed = False
        self._is_pump_due = False
        self._rests_until = -math.inf
        self._alarm: TimerHandle | None = None
        self._alarm_at = math.inf
        self._soonest_s = math.inf
        self._items: dict[QueuedItem, tuple[ItemT, Deferral]] = {}
        self._closed: Rejection | None = None
        self.queue = Queue(settings)
        self.outcomes: Counter[str] = Counter()
        self.unserved_tokens = 0
        self._looks = 0

    def check(
        self, outcome: GrantT | Deferral | Rejection, *, priority: int, preferred_endpoint: str = ""
    ) -> Deferral | Rejection | None:
        """The reason for which an arriving request cannot be dispatched; None if it can.

        Args:
            outcome: The outcome with an empty queue.
            preferred_endpoint: Address of the endpoint it would go to; empty where that is not known.
        """
        if isinstance(outcome, (Deferral, Rejection)):
            return outcome
        if not self.queue.count:
            return None
        self._follow_endpoints()
        if self.queue.has_claim_on(preferred_endpoint, priority):
            # Requests that wait longer go first; the turn may be this request's all the same.
            return all_busy(0.0, preferred_endpoint=preferred_endpoint)
        return None

    def enqueue(
        self, item: ItemT, properties: EnqueueRequest, outcome: Deferral | Rejection, now: float
    ) -> QueuedItem | Rejection:
        """Add a request to the queue.

        Args:
            outcome: Its outcome without capacity.

        Returns:
            Its place, or why not, where waiting changes nothing or there is no room or no time.
        """
        if isinstance(outcome, Rejection):
            return self._with_retry_estimate(outcome, now)
        if self._closed is not None:
            return self._closed
        timeout_s = self._timeout_s(properties, outcome.rejection)
        if timeout_s <= 0.0:
            return self._with_retry_estimate(outcome.rejection, now)
        queued = QueuedItem(
            arrived=now,
            deadline=now + timeout_s,
            tenant=properties.tenant,
            priority=properties.priority,
            target=properties.target,
            size=properties.size,
            tokens=properties.tokens,
            slo_s=properties.slo_s,
        )
        self._follow_endpoints()
        result = self.queue.join(queued, now)
        if isinstance(result, Rejection):
            return _full_rejection(result, outcome.rejection)
        if result.displaced:
            retry_after_s = self.queue.wait_s(now)
            for other in result.displaced:
                is_lower = other.priority < queued.priority
                self._reject(other, "displaced", _displaced(retry_after_s, is_lower=is_lower))
        self._changed = True
        self._items[queued] = (item, outcome)
        self.queue.set_preferred_endpoint(queued, outcome.preferred_endpoint)
        self._callbacks.on_waiting(item, outcome.preferred_endpoint)
        self._wake(self.next_pump_s(outcome.retry_in_s, now), now)
        if self._can_evict_for(queued.priority):
            self._pump_soon()
        return queued

    def cancel(self, queued: QueuedItem) -> bool:
        """Remove a request whose client disconnected; returns whether it was queued."""
        if queued not in self._items:
            return False
        self.queue.leave(queued)
        self._forget(queued, "cancelled")
        return True

    def notify_capacity(self) -> None:
        """Examine every queued request again soon: capacity may have changed."""
        self._changed = True
        if self.queue.count:
            self._pump_soon()

    def pump(self) -> None:
        """Dispatch requests, reject expired ones, and schedule the next call."""
        self._is_pump_due = False
        begun = self._timer.now()
        looks, dispatched = self._looks, self.outcomes["dispatched"]
        try:
            wait_s = self.dispatch(begun)
        except Exception as error:
            if self._callbacks.on_pump_failed is None:
                raise
            self._callbacks.on_pump_failed(error)
            wait_s = _RETRY_S
        ended = self._timer.now()
        looks, dispatched = self._looks - looks, self.outcomes["dispatched"] - dispatched
        staying = 1.0 - dispatched / looks if looks else 1.0
        self._rests_until = ended + min((ended - begun) * staying, _MAX_REST_S)
        if wait_s == 0.0:
            self._pump_soon()
        else:
            self._wake(wait_s, ended)

    def _pump_soon(self) -> None:
        """Pump after other callbacks, or when the rest after the last call is over."""
        if self._is_pump_due:
            return
        self._is_pump_due = True
        if self._rests_until - self._timer.now() < _MIN_REST_S:
            self._timer.call_soon(self.pump)
        else:
            self._timer.call_at(self._rests_until, self.pump)

    def _wake(self, wait_s: float | None, now: float) -> None:
        """Schedule a call of `pump` in so many seconds, unless an earlier one is scheduled."""
        if wait_s is None or self._alarm_at <= now + wait_s:
            return
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm_at = now + wait_s
        self._alarm = self._timer.call_at(self._alarm_at, self._on_alarm)

    def _on_alarm(self) -> None:
        self._alarm, self._alarm_at = None, math.inf
        if self._is_pump_due or self._rests_until - self._timer.now() >= _MIN_REST_S:
            self._pump_soon()
        else:
            self.pump()

    def dispatch(self, now: float) -> float | None:
        """Dispatch requests and end expired requests, within the budget.

        Returns:
            Seconds after which to ask again even if nothing happens, 0 for at once; None for
            an empty queue.
        """
        enough = _build_limit_check(self._budget, self._timer.now)
        for queued in self.queue.expired(now, enough=enough):
            self._reject(
                queued, "expired", self._expired_rejection(self._items[queued][1].rejection, now)
            )
        self._follow_endpoints()
        self._blocked = []
        if not self.queue.is_sweeping:
            self._changed, self._soonest_s = False, math.inf
        is_complete = self.queue.pump(partial(self._try_dispatch, now), now, enough=enough)
        self._evict(now)
        if self.queue.count and (self._changed or not is_complete):
            return 0.0
        return self.next_pump_s(self._soonest_s, now)

    def _try_dispatch(self, now: float, queued: QueuedItem) -> DispatchResult:
        """Try to dispatch a queued request."""
        item = self._items[queued][0]
        self._looks += 1
        try:
            return self._decide(queued, item, now)
        except Exception as error:
            if self._callbacks.on_item_failed is None:
                raise
            # It must neither stop those behind it nor raise again at each change.
            if queued in self._items:
                self._forget(queued, "failed")
            self._callbacks.on_item_failed(item, error)
            return DepartureCause.REJECTED

    def _decide(self, queued: QueuedItem, item: ItemT, now: float) -> DispatchResult:
        may_defer = now < queued.preference_ends
        outcome = self._callbacks.decide(item, may_defer)
        if isinstance(outcome, Rejection):
            self._reject(queued, "rejected", outcome)
            return DepartureCause.REJECTED
        if not isinstance(outcome, Deferral):
            self._callbacks.dispatch(item, outcome)
            self._forget(queued, "dispatched")
            return DepartureCause.DISPATCHED
        self._items[queued] = (item, outcome)
        self._soonest_s = min(self._soonest_s, outcome.retry_in_s)
        if self.queue.settings.evict_after_s is not None:
            self._blocked.append((queued, outcome))
        self._callbacks.on_waiting(item, outcome.preferred_endpoint)
        # One that no longer waits for an endpoint must not be held up by those that do.
        preferred = outcome.preferred_endpoint if may_defer else ""
        busy = outcome.busy_endpoints
        self.queue.set_preferred_endpoint(queued, preferred)
        if preferred and not busy:
            return Blocked(preferred_endpoint=preferred, waits_for_slot=outcome.waits_for_slot)
        return Blocked(
            busy=self.queue.sets.for_addresses(busy),
            waits_for_slot=outcome.waits_for_slot,
            is_held=outcome.is_held,
        )

    def _can_evict_for(self, priority: int) -> bool:
        """True if requests in flight may be evicted for one of this priority."""
        if self._evictor is None or self.queue.settings.evict_after_s is None:
            return False
        return self._evictor.may_help(priority)

    def _evict(self, now: float) -> None:
        """Evict requests in flight for those that were just looked at, and wait too long.

        Not while the queue is swept: what is evicted gives tokens back to its tenant.
        """
        blocked, self._blocked = self._blocked, []
        evictor, after_s = self._evictor, self.queue.settings.evict_after_s
        if evictor is None or after_s is None:
            return
        for queued, deferral in blocked:
            if queued.is_queued and now - queued.arrived + deferral.retry_in_s > after_s:
                num_waiting = self.queue.count_from(queued.priority)
                evictor.make_room(queued.priority, deferral, num_waiting=num_waiting, now=now)

    def _follow_endpoints(self) -> None:
        """Detect that endpoints or their models changed."""
        if self._callbacks.endpoint_bits is not None:
            self.queue.replace_bits(self._callbacks.endpoint_bits())

    def next_pump_s(self, soonest_s: float, now: float) -> float | None:
        """Seconds until an endpoint becomes free, a deadline expires or a preference ends.

        Args:
            soonest_s: Estimated seconds until an endpoint is free; infinity where only an event
                brings it.

        Returns:
            Seconds; None for an empty queue.
        """
        deadline = self.queue.next_deadline()
        if deadline is None:
            return None
        event = min(deadline, self.queue.next_preference_end())
        wait_s = max(_SOONEST_S, min(soonest_s, event - now))
        return wait_s if soonest_s == math.inf else min(wait_s, _LATEST_S)

    def close(self, rejection: Rejection = SHUTTING_DOWN) -> None:
        """Reject every queued and every later request."""
        self._closed = rejection
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm, self._alarm_at = None, math.inf
        for queued in list(self.queue):
            self.queue.leave(queued)
            self._reject(queued, "shutdown", rejection)

    def _with_retry_estimate(self, rejection: Rejection, now: float) -> Rejection:
        """Add the queue's own retry estimate to a rejection."""
        if rejection.retry_after_s is None or not self.queue.count:
            return rejection
        return msgspec.structs.replace(rejection, retry_after_s=self.queue.wait_s(now))

    def _reject(self, queued: QueuedItem, cause: str, rejection: Rejection) -> None:
        self._callbacks.reject(self._forget(queued, cause, rejection), rejection)

    def _forget(self, queued: QueuedItem, cause: str, rejection: Rejection | None = None) -> ItemT:
        items = self._items
        item, _ = items.pop(queued)
        if not items:
            items.clear()  # its empty table stays as large as it was
        self.outcomes[cause] += 1
        if cause != "dispatched":
            self.unserved_tokens += queued.tokens
        if self._callbacks.on_departed is not None:
            wait_s = self._timer.now() - queued.arrived
            self._callbacks.on_departed(item, cause, wait_s, rejection)
        return item

    def _expired_rejection(self, why: Rejection, now: float) -> Rejection:
        """503 where there is no endpoint, 429 where all are busy.

        Source: docs/spec/protocol.md#error-statuses.
        """
        if why.status == 503:
            return self._with_retry_estimate(why, now)
        rejection = msgspec.structs.replace(
            why,
            message="no endpoint was free in time",
            reason="rejected-ttl-expired",
            cause="queue-timeout",
        )
        return self._with_retry_estimate(rejection, now)

    def _timeout_s(self, properties: EnqueueRequest, rejection: Rejection) -> float:
        settings = self.queue.settings
        if properties.timeout_s is not None:
            return min(properties.timeout_s, settings.max_timeout_s)
        default_s = settings.by_objective.get(properties.objective, settings.timeout_s)
        if rejection.status == 503 and settings.empty_timeout_s is not None:
            default_s = settings.empty_timeout_s
        return min(default_s, settings.max_timeout_s)


def _build_limit_check(budget: LookBudget | None, clock: Callable[[], float]) -> Callable[[], bool]:
    """Build a check that counts calls and ends the work, never before the second call."""
    if budget is None:
        return lambda: False
    looks = 0
    until = clock() + budget.seconds

    def enough() -> bool:
        nonlocal looks
        looks += 1
        return looks > budget.looks or (looks > 1 and clock() >= until)

    return enough


def _full_rejection(full: Rejection, why: Rejection) -> Rejection:
    """The rejection for a full queue, with the status 503 where there is no endpoint.

    Source: docs/spec/protocol.md#error-statuses.
    """
    if why.status != 503:
        return full
    message = "no endpoint can serve, and too many requests are waiting"
    return msgspec.structs.replace(full, status=503, message=message, reason=why.reason)


def _displaced(retry_after_s: int, *, is_lower: bool) -> Rejection:
    if is_lower:
        message, reason = "displaced by a request of higher priority", "evicted-priority"
    else:
        message = "displaced by a request of a tenant with fewer waiting requests"
        reason = "rejected-saturated"
    return Rejection(429, message, reason=reason, retry_after_s=retry_after_s, cause="displaced")
