"""Scaling policies: adaptive, KubeAI, queue depth, each a pure step over frozen parameters.

The adaptive one, our own, wants the smallest number of replicas that keeps waits short. The others are
KubeAI's autoscaler, and the trigger of Wallaroo. A policy sees neither its caller nor other policies.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import msgspec

from extproc.autoscaling.interface import (
    Demand,
    ReplicaBounds,
    ScalingDecision,
    ScalingPolicy,
    ScalingReason,
)
from extproc.autoscaling.scaling_history import TimeWindow, shift_time
from extproc.errors import ConfigError

_Positive = Annotated[float, msgspec.Meta(gt=0)]
_NotNegative = Annotated[float, msgspec.Meta(ge=0)]

#: Replicas that one step may add to any fleet; a larger fleet at most doubles. As HPA has it: what is
#: measured of a small fleet says little about a large one.
_ALWAYS_MORE = 4


class AdaptiveState(msgspec.Struct, frozen=True):
    """State of `AdaptivePolicy`.

    Attributes:
        arriving: Work that arrived (token seconds per second).
        enough: Replicas that would have been enough.
        busy_at: Monotonic seconds of the last request; None for never.
        starting: Replicas that were starting at the last step.
        raised_at: Monotonic seconds at which the last of them were requested; None for never.
    """

    arriving: TimeWindow = TimeWindow()
    enough: TimeWindow = TimeWindow()
    busy_at: float | None = None
    starting: int = 0
    raised_at: float | None = None

    def shift_time(self, by_s: float) -> AdaptiveState:
        """The same on a clock that shows so many seconds more."""
        return AdaptiveState(
            self.arriving.shift_time(by_s),
            self.enough.shift_time(by_s),
            shift_time(self.busy_at, by_s),
            self.starting,
            shift_time(self.raised_at, by_s),
        )


class AdaptivePolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """As many replicas as the work needs until a new replica could be available.

    With work in token seconds (see `demand`):

        rate     L = max(mean over window_s, m - sqrt(m request_work / rise_s))
        backlog  B = request_work max(0, requests - concurrency (a + s))
        ability  X = throughput, c = cold_start_s, w = wait_s, u = utilization
        short    S = B + L c - X (a c + s (c - r))
        up       max(floor(L / (u X)), ceil(S / (X w)))
        enough   max(floor(L / (u X)), ceil(L c / (X (c + w))), ceil(requests / concurrency))

    L: work that arrives per second; unwatched time counts as without arrivals. m is the mean over
    `rise_s`, which sees a step at once; of it counts what chance does not explain, a Poisson
    stream's standard deviation. B: work that no replica runs, nor will once starting replicas are
    available. S: what is left of both after the time a new replica takes, when the `a` replicas that
    answer and the `s` that start, in r seconds, have done their part. `up` are the replicas that do
    S within w; with what starts already counted, a backlog that is taken care of calls for nothing.
    `floor(L / (u X))` is what the rate alone fills: large fleets have their headroom from it, and
    in a small one the last replica is a matter of the backlog. `enough` are replicas that have a
    place for every request there is, and with which no wait beyond w comes up in the time it would
    take to have another one back.

    More than the spec is taken at once, several steps at a time, at most doubled or 4 more. Fewer:
    the most that was `enough` within `down_s`, but one at least; none once there was no request for
    `idle_s`, and then none is started before the next request.

    Attributes:
        wait_s: Wait of a request above which another replica is started (seconds). 30: half of a
            usual cold start; with 20, Wallaroo's profile C has 1.50 replicas instead of 1.39, and
            responses are 2 s faster.
        utilization: Share of the throughput of the replicas that is planned with (0..1]. 0.8:
            queues grow without bound towards 1, and a fleet of ten has two replicas of headroom.
        rise_s: Window in which a step of the load is detected (seconds). 15: three intervals.
        window_s: Window of the arrival rate (seconds). 60: a usual cold start, the time that the
            rate must predict.
        down_s: Time for which fewer replicas must have sufficed (seconds). 30: `enough` includes a
            cold start already; with 15, profile C has 10 cold starts instead of 7.
        idle_s: Time without a request until the last replica is removed (seconds). 300: five cold
            starts, so that single requests within an hour do not cause one each; also the cool-down
            of KEDA.
        interval_s: Seconds between two evaluations. 5: a twelfth of a usual cold start.
    """

    kind: ClassVar[str] = "adaptive"
    memory: ClassVar[type[AdaptiveState]] = AdaptiveState

    wait_s: _Positive = 30.0
    utilization: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.8
    rise_s: _Positive = 15.0
    window_s: _Positive = 60.0
    down_s: _NotNegative = 30.0
    idle_s: _NotNegative = 300.0
    interval_s: _Positive = 5.0

    @property
    def watch_s(self) -> float:
        """As long as the longer of what fewer replicas are derived from."""
        return max(self.window_s, self.down_s)

    def step(
        self, state: AdaptiveState, demand: Demand, bounds: ReplicaBounds
    ) -> tuple[AdaptiveState, ScalingDecision]:
        """See `ScalingPolicy`."""
        now, spec = demand.now, demand.spec
        arriving = state.arriving.add(now, demand.arriving, span_s=self.window_s)
        # Short requests may begin and end between two looks.
        is_busy = demand.requests or demand.arriving > 0
        busy_at = now if is_busy or state.busy_at is None else state.busy_at
        grew = demand.starting > state.starting
        raised_at = now if grew else state.raised_at
        due_s = demand.cold_start_s - (now - raised_at if raised_at is not None else 0.0)
        rate = self._rate(arriving, demand)
        floor = math.floor(_replicas_for(rate, self.utilization * demand.throughput))
        backlog = demand.request_work * max(
            0.0, demand.requests - demand.concurrency * max(spec, 1)
        )
        up = max(floor, self._up(backlog, rate, demand, due_s=max(0.0, due_s)))
        enough = max(1 if spec else 0, floor, self._enough(rate, demand))
        # Where more are wanted, the spec at least was needed.
        needed = max(up, spec) if up > spec else min(enough, spec)
        wants = state.enough.add(now, float(needed), span_s=self.down_s)
        memory = AdaptiveState(arriving, wants, busy_at, demand.starting, raised_at)
        explanation = (
            f"{rate:.3g} token seconds arrive per second, {backlog:.3g} wait, "
            f"a replica does {demand.throughput:.3g}"
        )
        # At zero only requests start a replica: the rate still counts earlier ones.
        if (up > spec and (spec or is_busy)) or (demand.held and not spec):
            most = max(2 * spec, spec + _ALWAYS_MORE)
            wanted = bounds.clamp(min(max(1, up), most))
            return memory, ScalingDecision(
                wanted, ScalingReason.UP if spec else ScalingReason.WAKE, explanation
            )
        if spec and not demand.requests and now - busy_at >= self.idle_s:
            return memory, ScalingDecision(
                0, ScalingReason.IDLE, f"no request for {now - busy_at:.0f} s"
            )
        fewer = int(max(wants.max(now, self.down_s), needed))
        if fewer < spec:
            return memory, ScalingDecision(fewer, ScalingReason.DOWN, explanation)
        return memory, ScalingDecision(spec, ScalingReason.STEADY, explanation)

    def _rate(self, arriving: TimeWindow, demand: Demand) -> float:
        """L: arriving work (token seconds per second)."""
        now, window_s = demand.now, self.window_s
        watched_s = arriving.watched_s(now)
        steady = arriving.mean(now, window_s) * min(1.0, watched_s / window_s)
        lately = arriving.mean(now, self.rise_s) * min(1.0, watched_s / self.rise_s)
        return max(steady, lately - math.sqrt(lately * demand.request_work / self.rise_s))

    def _up(self, backlog: float, rate: float, demand: Demand, *, due_s: float) -> int:
        """Replicas that do within `wait_s` what is left after a cold start."""
        cold_s = demand.cold_start_s
        there = min(demand.available, demand.spec)
        replica_s = there * cold_s + demand.starting * (cold_s - min(due_s, cold_s))
        short = backlog + rate * cold_s - demand.throughput * replica_s
        return math.ceil(_replicas_for(max(0.0, short), demand.throughput * self.wait_s))

    def _enough(self, rate: float, demand: Demand) -> int:
        """Replicas with a place for every request, and no long wait within a cold start."""
        cold_s = demand.cold_start_s
        per_replica = demand.throughput * (cold_s + self.wait_s)
        places = _replicas_for(demand.requests, demand.concurrency)
        return math.ceil(max(places, _replicas_for(rate * cold_s, per_replica)))


def _replicas_for(work: float, per_replica: float) -> float:
    """Replicas that share the work; 0 where the capacity of a replica is unknown."""
    return min(work / per_replica, 1e6) if per_replica > 0 else 0.0


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
    grows, so that the further condition of the scaler, a complete window before fewer replicas are
    accepted, changes nothing for a target that starts at zero.

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


class QueueDepthState(msgspec.Struct, frozen=True):
    """State of `QueueDepthPolicy`.

    Attributes:
        depths: Requests per replica over the window.
        spec: Replicas requested at the last step; None before the first.
        changed_at: Monotonic seconds of the last change of that number; None for never.
        busy_at: Monotonic seconds of the last request; None before the first step.
    """

    depths: TimeWindow = TimeWindow()
    spec: int | None = None
    changed_at: float | None = None
    busy_at: float | None = None

    def __post_init__(self) -> None:
        """Refuse saved state of a step that left no sample; raises ValueError."""
        if self.spec is not None and not self.depths.samples:
            raise ValueError("expected the sample of the last step, got none")

    def shift_time(self, by_s: float) -> QueueDepthState:
        """The same on a clock that shows so many seconds more."""
        return QueueDepthState(
            self.depths.shift_time(by_s),
            self.spec,
            shift_time(self.changed_at, by_s),
            shift_time(self.busy_at, by_s),
        )


class QueueDepthPolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """More replicas while `depth > up`, fewer while `depth < down`.

    Source: docs/spec/prior-systems.md#queue-depth-trigger.

    `depth = requests / max(1, available + starting)`: those that wait and those that run, over the
    window. Counting replicas that are starting keeps the queue that called for them from calling
    again. One change per window, so that the next one sees what the last one did; the last replica
    goes when there was no request in the whole window. What the published pages leave open is decided
    so (docs/spec/prior-systems.md#open-points-of-the-trigger), or a parameter.

    Attributes:
        up: Depth above which replicas are added. 5, as in the published runs; there is no published
            default.
        down: Depth below which replicas are removed, at most `up`. 1, the published default.
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

    def __post_init__(self) -> None:
        """Check that no depth asks for both more and fewer replicas; raises ValueError."""
        if self.down > self.up:
            raise ValueError(f"expected down of at most up ({self.up:g}), got {self.down:g}")

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
        # Short requests may begin and end between two looks.
        is_busy = demand.requests or demand.arriving > 0
        busy_at = now if is_busy or state.busy_at is None else state.busy_at
        memory = QueueDepthState(depths, spec, changed_at, busy_at)
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
        is_idle = not depths.max(now, window_s) and now - busy_at >= window_s
        wanted, why = self._wanted(depths, now, spec, is_idle=is_idle)
        return memory, ScalingDecision(bounds.clamp(wanted), why, explanation)

    def _wanted(
        self, depths: TimeWindow, now: float, spec: int, *, is_idle: bool
    ) -> tuple[int, ScalingReason]:
        window_s = self.window_s
        mean = depths.mean(now, window_s)
        low = high = mean
        if self.over == "sustained":
            low, high = depths.min(now, window_s), depths.max(now, window_s)
        # Replicas that bring the mean depth to `up`.
        enough = math.ceil(mean * spec / self.up) if self.change == "proportional" else spec
        if low > self.up:
            return max(spec + self.step_size, enough), ScalingReason.UP
        if is_idle:
            return max(0, spec - self.step_size), ScalingReason.IDLE
        if high < self.down and spec > 1:
            return max(1, min(spec - self.step_size, enough)), ScalingReason.DOWN
        return spec, ScalingReason.STEADY


POLICIES: Mapping[str, type[ScalingPolicy]] = {
    policy.kind: policy for policy in (AdaptivePolicy, KubeAIPolicy, QueueDepthPolicy)
}

#: The policy where none is named.
DEFAULT = "adaptive"


def make_policy(kind: str, params: Mapping[str, Any], *, where: str) -> ScalingPolicy:
    """Build a policy; raises `ConfigError` for an unknown name or a wrong parameter."""
    if kind not in POLICIES:
        raise ConfigError(
            f"{where}.policy",
            wanted=f"one of {', '.join(POLICIES)}",
            got=repr(kind),
            fix="name a listed policy",
        )
    cls = POLICIES[kind]
    try:
        return msgspec.convert(params, cls)
    except msgspec.ValidationError as error:
        fields = [field.name for field in msgspec.structs.fields(cls)]  # type: ignore[arg-type]
        raise ConfigError(
            f"{where}.params",
            wanted=f"parameters of {kind}: {', '.join(fields)}",
            got=str(error),
            fix="correct the parameter",
        ) from None
