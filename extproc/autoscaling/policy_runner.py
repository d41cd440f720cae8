"""Policy table, and the runner of a target's policy within its replica bounds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from extproc.autoscaling import policies
from extproc.autoscaling.interface import (
    Demand,
    ReplicaBounds,
    ScalingDecision,
    ScalingPolicy,
    ScalingReason,
)
from extproc.errors import ConfigError

#: Time between two steps after which the time between counts as unwatched: as a share of what a
#: policy must have watched, and in its intervals; the longer one counts.
_GAP, _GAP_INTERVALS = 0.5, 3.0


class RunnerState(msgspec.Struct, frozen=True):
    """State of a `PolicyRunner`, JSON that another process can restore.

    Attributes:
        at: Time of the state, on the clock of its writer.
        since: Time since when the writer had watched without a gap; None for not at all.
    """

    kind: str
    at: float
    since: float | None
    memory: Any


class PolicyRunner:
    """Steps the policy of a target and enforces the bounds. Mutable; owned by its control loop.

    Whatever the policy: the answer is within the bounds; a request that waits where there is no
    replica gets one at once; and there are never fewer replicas than the spec says while a picker's
    counters could not be read, or before the policy has watched for `watch_s`.
    """

    def __init__(self, policy: ScalingPolicy, bounds: ReplicaBounds) -> None:
        self.policy = policy
        self.bounds = bounds
        self._memory = policy.memory()
        self._since: float | None = None
        self._at: float | None = None

    def step(self, demand: Demand) -> ScalingDecision:
        """Decide: every `policy.interval_s`, and when a request is queued at zero replicas.

        Args:
            demand: Current demand; `now` must not decrease.
        """
        now = demand.now
        gap_s = max(_GAP * self.policy.watch_s, _GAP_INTERVALS * self.policy.interval_s)
        if self._since is None or self._at is None or now - self._at > gap_s:
            self._since = now
        self._at = now
        self._memory, wanted = self.policy.step(self._memory, demand, self.bounds)
        return self._clamp(wanted, demand, watched_s=now - self._since)

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
        if replicas < unchanged:
            if not demand.complete:
                return ScalingDecision(unchanged, ScalingReason.INCOMPLETE_DATA, wanted.explanation)
            if watched_s < self.policy.watch_s:
                return ScalingDecision(unchanged, ScalingReason.STABILIZING, wanted.explanation)
        reason = wanted.reason
        if replicas != spec and (replicas != wanted.replicas or unchanged != spec):
            reason = ScalingReason.BOUNDS
        return ScalingDecision(replicas, reason, wanted.explanation)


POLICIES: Mapping[str, type[ScalingPolicy]] = {
    "adaptive": policies.AdaptivePolicy,
    "kubeai": policies.KubeAIPolicy,
    "queue-depth": policies.QueueDepthPolicy,
}

#: The policy where none is named.
DEFAULT = "adaptive"


def make_policy(kind: str, params: Mapping[str, Any], *, where: str) -> ScalingPolicy:
    """Build a policy from its name and parameters.

    Raises:
        ConfigError: There is no such policy or parameter, or a value is out of range.
    """
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
