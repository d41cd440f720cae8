"""Queue-depth policy, after the trigger of Wallaroo."""

from __future__ import annotations

import math
from typing import Annotated, ClassVar, Literal

import msgspec

from extproc.autoscaling.interface import Demand, ReplicaBounds, ScalingDecision, ScalingReason
from extproc.autoscaling.scaling_history import TimeWindow, shift_time

_Positive = Annotated[float, msgspec.Meta(gt=0)]
_NotNegative = Annotated[float, msgspec.Meta(ge=0)]


class QueueDepthState(msgspec.Struct, frozen=True):
    """State of `QueueDepthPolicy`.

    Attributes:
        depths: Requests per replica over the window.
        spec: Replicas requested at the last step; None before the first.
        changed_at: Monotonic seconds of the last change of that number; None for never.
    """

    depths: TimeWindow = TimeWindow()
    spec: int | None = None
    changed_at: float | None = None

    def shift_time(self, by_s: float) -> QueueDepthState:
        """The same on a clock that shows so many seconds more."""
        return QueueDepthState(
            self.depths.shift_time(by_s), self.spec, shift_time(self.changed_at, by_s)
        )


class QueueDepthPolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """More replicas while `depth > up`, fewer while `depth < down`.

    Source: docs/spec/prior-systems.md#queue-depth-trigger.

    `depth = requests / max(1, available + starting)`: those that wait and those that run, over the
    window. Counting replicas that are starting keeps the queue that called for them from calling
    again. One change per window, so that the next one sees what the last one did; the last replica
    goes when the depth was 0 for the whole window. What the published pages leave open is decided
    so (docs/spec/prior-systems.md#open-points-of-the-trigger), or a parameter.

    Attributes:
        up: Depth above which replicas are added. 5, as in the published runs; there is no published
            default.
        down: Depth below which replicas are removed. 1, the published default.
        window_s: Window of the depth (seconds). 60, the smallest published value and that of the
            published runs; with the published default of 300, a burst is over before it is
            answered.
        over: `mean`: the depth is the mean over the window, as in the published formula.
            `sustained`: the threshold must have been exceeded for the complete window, as the
            published prose can be read.
        change: `step`: adds or removes `step_size` replicas, "incrementally". `proportional`: adds
            or removes as many as bring the mean depth to `up`, and at least `step_size`.
        step_size: Replicas of a change (count). 1, the smallest.
        interval_s: Seconds between two evaluations. 5: a window has a dozen.
    """

    kind: ClassVar[str] = "queue-depth"
    memory: ClassVar[type[QueueDepthState]] = QueueDepthState

    up: _Positive = 5.0
    down: _NotNegative = 1.0
    window_s: _Positive = 60.0
    over: Literal["mean", "sustained"] = "mean"
    change: Literal["step", "proportional"] = "step"
    step_size: Annotated[int, msgspec.Meta(ge=1)] = 1
    interval_s: _Positive = 5.0

    @property
    def watch_s(self) -> float:
        """Length of the window."""
        return self.window_s

    def step(
        self, state: QueueDepthState, demand: Demand, bounds: ReplicaBounds
    ) -> tuple[QueueDepthState, ScalingDecision]:
        """See `ScalingPolicy`."""
        now, spec, window_s = demand.now, demand.spec, self.window_s
        replicas = max(1, demand.available + demand.starting)
        depths = state.depths.add(now, demand.requests / replicas, span_s=window_s)
        changed_at = state.changed_at
        if state.spec is not None and spec != state.spec:
            # Changed by the last step, or by another actor since; both start a new window.
            changed_at = state.depths.samples[-1][0]
        memory = QueueDepthState(depths, spec, changed_at)
        explanation = (
            f"depth {depths.mean(now, window_s):.3g} over {window_s:g} s, "
            f"up above {self.up:g}, down below {self.down:g}"
        )
        if not spec:
            wake = ScalingDecision(bounds.clamp(1), ScalingReason.WAKE, explanation)
            return memory, wake if demand.held else ScalingDecision(
                0, ScalingReason.STEADY, explanation
            )
        young = changed_at is not None and now - changed_at < window_s
        if young or depths.watched_s(now) < window_s:
            return memory, ScalingDecision(spec, ScalingReason.STEADY, explanation)
        wanted, why = self._wanted(depths, now, spec)
        return memory, ScalingDecision(bounds.clamp(wanted), why, explanation)

    def _wanted(self, depths: TimeWindow, now: float, spec: int) -> tuple[int, ScalingReason]:
        window_s = self.window_s
        mean = depths.mean(now, window_s)
        low = high = mean
        if self.over == "sustained":
            low, high = depths.min(now, window_s), depths.max(now, window_s)
        # Replicas that bring the mean depth to `up`.
        enough = math.ceil(mean * spec / self.up) if self.change == "proportional" else spec
        if low > self.up:
            return max(spec + self.step_size, enough), ScalingReason.UP
        if not depths.max(now, window_s):
            return max(0, spec - self.step_size), ScalingReason.IDLE
        if high < self.down and spec > 1:
            return max(1, min(spec - self.step_size, enough)), ScalingReason.DOWN
        return spec, ScalingReason.STEADY
