"""KubeAI's autoscaling policy."""

from __future__ import annotations

import math
from typing import Annotated, ClassVar

import msgspec

from extproc.autoscaling.interface import Demand, ReplicaBounds, ScalingDecision, ScalingReason
from extproc.autoscaling.scaling_history import shift_time

_Positive = Annotated[float, msgspec.Meta(gt=0)]

#: Clocks and sleeps differ in the last digits (seconds).
_EARLY_S = 1e-6


class KubeAIState(msgspec.Struct, frozen=True):
    """State of `KubeAIPolicy`.

    Attributes:
        ring: Active requests of the last ticks, the oldest first; empty before the first tick.
        next_at: Monotonic seconds of the next tick; None for at once.
        lower: Ticks in a row that wanted fewer replicas.
    """

    ring: tuple[float, ...] = ()
    next_at: float | None = None
    lower: int = 0

    def shift_time(self, by_s: float) -> KubeAIState:
        """The same on a clock that shows so many seconds more."""
        return msgspec.structs.replace(self, next_at=shift_time(self.next_at, by_s))


class KubeAIPolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`ceil(average / target_requests)`; up at once, down after some ticks.

    Source: docs/spec/prior-systems.md#autoscaler.

    `average` is the plain mean of the last `ceil(window_s / interval_s)` samples of active requests,
    those before the first tick being 0. More replicas, or as many, are taken at once, which also
    resets the counter of lower ticks. Fewer are taken after `ceil(down_delay_s / interval_s)` earlier
    lower ticks in a row, all at once, and the counter stays. A sum over zeros that are replaced only
    grows, so that what the scaler asks for besides, a whole window before fewer replicas are
    believed, changes nothing for a target that starts at zero.

    Attributes:
        target_requests: Active requests per replica to aim at. 100, KubeAI's default.
        interval_s: Seconds between ticks. 10, KubeAI's default.
        window_s: Window of the average (seconds). 600, KubeAI's default.
        down_delay_s: Time for which fewer replicas must have been desired (seconds). 30, KubeAI's
            default.
    """

    kind: ClassVar[str] = "kubeai"
    memory: ClassVar[type[KubeAIState]] = KubeAIState

    target_requests: _Positive = 100.0
    interval_s: _Positive = 10.0
    window_s: _Positive = 600.0
    down_delay_s: Annotated[float, msgspec.Meta(ge=0)] = 30.0

    @property
    def watch_s(self) -> float:
        """Length of the full ring."""
        return self.window_s

    def step(
        self, state: KubeAIState, demand: Demand, bounds: ReplicaBounds
    ) -> tuple[KubeAIState, ScalingDecision]:
        """See `ScalingPolicy`; between ticks the spec stays."""
        now, spec = demand.now, demand.spec
        if state.next_at is not None and now < state.next_at - _EARLY_S:
            return state, ScalingDecision(spec, ScalingReason.STEADY)
        ring = self._ring(state, demand.requests)
        average = math.fsum(ring) / len(ring)
        wanted = bounds.clamp(math.ceil(average / self.target_requests))
        because = f"{average:.4g} requests on average, {self.target_requests:g} per replica"
        # Missed ticks are not caught up.
        due = (now if state.next_at is None else state.next_at) + self.interval_s
        next_at = due if due > now else now + self.interval_s
        if wanted >= spec:
            why = ScalingReason.UP if wanted > spec else ScalingReason.STEADY
            return KubeAIState(ring, next_at, 0), ScalingDecision(wanted, why, because)
        if state.lower < math.ceil(self.down_delay_s / self.interval_s):
            return KubeAIState(ring, next_at, state.lower + 1), ScalingDecision(
                spec, ScalingReason.STEADY, because
            )
        why = ScalingReason.DOWN if wanted else ScalingReason.IDLE
        return KubeAIState(ring, next_at, state.lower), ScalingDecision(wanted, why, because)

    def _ring(self, state: KubeAIState, requests: float) -> tuple[float, ...]:
        size = max(1, math.ceil(self.window_s / self.interval_s))
        ring = (*(0.0,) * (size - len(state.ring)), *state.ring, requests)
        return ring[-size:]
