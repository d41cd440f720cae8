"""Scaling policies: demand in, desired replicas and a reason out, state between; and their runner."""

from __future__ import annotations

import math
from enum import StrEnum
from typing import Annotated, Any, ClassVar, Protocol

import msgspec

#: Time between two steps after which the time between counts as unwatched: as a share of what a
#: policy must have watched, and in its intervals; the longer one counts.
_GAP, _GAP_INTERVALS = 0.5, 3.0


#: Seconds on a clock, as far as saved states may name them: up to the year 9999.
Moment = Annotated[float, msgspec.Meta(ge=-1e12, le=1e12)]


class ScalingReason(StrEnum):
    """Reason of a scaling decision; the values are metric labels."""

    STEADY = "steady"  #: Nothing calls for a change.
    WAKE = "wake"  #: A request waits, and there is no replica.
    UP = "up"  #: More demand than replicas for it.
    DOWN = "down"  #: Fewer replicas do.
    IDLE = "idle"  #: No request for long enough.
    BOUNDS = "bounds"  #: The bounds say so.
    INCOMPLETE_DATA = "unread"  #: Fewer might do, but the counters of some picker are missing.
    STABILIZING = "watching"  #: Fewer might do, but it was not watched long enough.


class ScalingDecision(msgspec.Struct, frozen=True):
    """Desired number of replicas, with the reason.

    Attributes:
        explanation: Figures behind the decision, as text; empty where the reason suffices.
    """

    replicas: int
    reason: ScalingReason
    explanation: str = ""


class Demand(msgspec.Struct, frozen=True, kw_only=True):
    """Demand of a scale target at one step. Counts are sums over all endpoint pickers.

    Work is in token seconds: what the tokens of a request take of an engine's time while it has as
    many requests as it should (`concurrency`), under learned rates; see `demand_estimator`.

    Attributes:
        spec: Replicas the target asks for.
        available: Replicas that answer: ready endpoints.
        held: Requests queued in endpoint pickers.
        in_flight: Requests pickers sent to endpoints and that have not ended.
        waiting: Requests that wait in engines, as scraped.
        running: Requests in batches of engines, as scraped.
        arriving: Work that arrives, token seconds per second since the last tick.
        request_work: Mean work of a request (token seconds).
        throughput: Work one replica does while it has enough of it (token seconds per second); 1
            where the rates are right.
        concurrency: Requests one replica should have at once.
        cold_start_s: Seconds from a raised spec to an answer of the new replica.
        complete: False while counters of some picker could not be read. Then the counts are too
            low, which is no reason to take a replica away.
        is_missing_counts: True while the counts of a picker are left out: it cannot be read, and its
            last counters are too old to stand for it.
    """

    now: float
    spec: int
    available: int
    held: int = 0
    in_flight: int = 0
    waiting: float = 0.0
    running: float = 0.0
    arriving: float = 0.0
    request_work: float = 1.0
    throughput: float = 1.0
    concurrency: float = 1.0
    cold_start_s: float = 60.0
    complete: bool = True
    is_missing_counts: bool = False

    @property
    def starting(self) -> int:
        """Replicas that are requested but not yet available."""
        return max(0, self.spec - self.available)

    @property
    def requests(self) -> float:
        """Requests that wait or run, including those that bypassed the endpoint pickers."""
        return self.held + max(float(self.in_flight), self.waiting + self.running)


class ReplicaBounds(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Smallest and largest number of replicas that a policy may ask for.

    Attributes:
        min: Replicas at least. 0: a model without requests costs nothing.
        max: Replicas at most. 1: more replicas cost money, so the operator has to allow them.
    """

    min: int = 0
    max: int = 1

    def clamp(self, replicas: float) -> int:
        """Round up to an integer and limit it to the bounds."""
        return max(self.min, min(self.max, math.ceil(min(replicas, float(self.max)))))


class ScalingPolicy(Protocol):
    """Computes desired replicas from demand. Frozen: the caller keeps its state.

    Attributes:
        kind: Its name in `policies.POLICIES`.
        memory: Class of its state; without arguments the state of a policy that saw nothing. A frozen
            value that msgspec encodes to and decodes from JSON; `shift_time(by_s)` returns it with all
            times moved, for another clock.
        interval_s: Seconds between two steps. It is also stepped at once when a request waits and
            there is no replica.
        watch_s: Seconds it must have watched before it may decide on fewer replicas.
        window_s: Seconds over which it averages demand.
    """

    kind: ClassVar[str]
    memory: ClassVar[type[Any]]

    @property
    def interval_s(self) -> float:
        """See the class."""

    @property
    def watch_s(self) -> float:
        """See the class."""

    @property
    def window_s(self) -> float:
        """See the class."""

    def step(
        self, state: Any, demand: Demand, bounds: ReplicaBounds
    ) -> tuple[Any, ScalingDecision]:
        """Decide once.

        Args:
            state: State returned by the last step; of the class `memory`.
            bounds: Limits that the caller will apply.

        Returns:
            The next state and the desired replicas, which need not be within the bounds:
            `PolicyRunner` enforces them.
        """


class RunnerState(msgspec.Struct, frozen=True):
    """State of a `PolicyRunner`, JSON that another process can restore.

    Attributes:
        at: Time of the state, on the clock of its writer.
        since: Time since when the writer had watched without a gap; None for not at all.
    """

    kind: str
    at: Moment
    since: Moment | None
    memory: Any


class PolicyRunner:
    """Steps the policy of a target and enforces the bounds. Mutable; owned by its control loop.

    Whatever the policy: the answer is within the bounds; a request that waits where there is no
    replica gets one at once; and there are never fewer replicas than the spec says while a picker's
    counters could not be read, or before the policy has watched for `watch_s` since all counts were
    there.
    """

    def __init__(self, policy: ScalingPolicy, bounds: ReplicaBounds) -> None:
        self.policy = policy
        self.bounds = bounds
        self._memory = policy.memory()
        self._since: float | None = None
        self._at: float | None = None

    def step(self, demand: Demand) -> ScalingDecision:
        """Decide: every `policy.interval_s`, and when a request is queued at zero replicas."""
        now = demand.now
        gap_s = max(_GAP * self.policy.watch_s, _GAP_INTERVALS * self.policy.interval_s)
        if self._since is None or self._at is None or now - self._at > gap_s:
            self._since = now
        self._at = now
        self._memory, wanted = self.policy.step(self._memory, demand, self.bounds)
        watched_s = now - self._since
        if demand.is_missing_counts:
            # The policy averages over counts that are too low: it watches a full window after them.
            self._since = None
        return self._clamp(wanted, demand, watched_s=watched_s)

    def state(self) -> RunnerState:
        """Current state, for `restore` in another process."""
        return RunnerState(
            self.policy.kind,
            0.0 if self._at is None else self._at,
            self._since,
            msgspec.to_builtins(self._memory),
        )

    def restore(self, saved: RunnerState, *, shift_s: float = 0.0) -> bool:
        """Continue from the state of another process.

        Args:
            shift_s: Seconds to add to its times: the difference between the monotonic clocks of the
                two processes, known from the time of day.

        Returns:
            Whether it could be read. If not, nothing changes.
        """
        if saved.kind != self.policy.kind:
            return False
        try:
            memory = msgspec.convert(saved.memory, self.policy.memory)
        except msgspec.ValidationError:
            return False
        self._memory = memory.shift_time(shift_s)
        self._at = saved.at + shift_s
        self._since = None if saved.since is None else saved.since + shift_s
        return True

    def _clamp(
        self, wanted: ScalingDecision, demand: Demand, *, watched_s: float
    ) -> ScalingDecision:
        bounds, spec = self.bounds, demand.spec
        replicas, unchanged = bounds.clamp(wanted.replicas), bounds.clamp(spec)
        if not replicas and demand.held:
            replicas = bounds.clamp(max(1, spec))
            wanted = ScalingDecision(
                replicas, ScalingReason.WAKE if not spec else ScalingReason.STEADY
            )
        reason = wanted.reason
        if replicas < unchanged and (not demand.complete or watched_s < self.policy.watch_s):
            replicas = unchanged
            reason = ScalingReason.STABILIZING if demand.complete else ScalingReason.INCOMPLETE_DATA
        if replicas != spec and (replicas != wanted.replicas or unchanged != spec):
            reason = ScalingReason.BOUNDS
        return ScalingDecision(replicas, reason, wanted.explanation)
