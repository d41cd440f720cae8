"""The loop of one pool: reads, asks the policy, acts."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping

import msgspec

from extproc.autoscaling.demand import Demand
from extproc.autoscaling.demand_estimator import DemandEstimator, EstimatorState, PickerCounters
from extproc.autoscaling.interface import ScalingDecision
from extproc.autoscaling.policy_runner import PolicyRunner, RunnerState
from extproc.autoscaling.runtime import actuator, demand_counters
from extproc.autoscaling.runtime.peer_counters import PeerCounterClient
from extproc.autoscaling.runtime.scaling_history import ScalingHistory
from extproc.config.autoscaling import ScalingSection
from extproc.server.pool_runtime import PoolRuntime

_log = logging.getLogger("extproc.server")

#: Seconds until the next look while a request waits and nothing is asked for: what was tried failed,
#: or whoever may act is just being elected.
_AGAIN_S = 1.0

#: Seconds until the first look of a picker whose pool is not known yet.
_UNKNOWN_S = 0.2


class LoopState(msgspec.Struct, frozen=True):
    """What a loop remembers; JSON.

    Attributes:
        scaler: Of the policy.
        learned: Of the meter.
        requested: Replicas asked for; None while nobody looked.
    """

    scaler: RunnerState
    learned: EstimatorState
    requested: int | None = None


class ControlLoop:
    """Scales one pool.

    Args:
        site: The pool.
        scaling: How many replicas, by what.
        acting: Who acts.
        counters: What this picker counts of the pool.
        peers: What others count.
        charts: What is shown of it.
        clock: Monotonic seconds.
        on_change: Called after a number was asked for, or failed to be, and after every look.

    Raises:
        ConfigError: There is no such policy.

    Attributes:
        name: Of the pool.
        desired: How many replicas there should be; None before anything is known.
        demand: What was seen last.
    """

    def __init__(
        self,
        site: PoolRuntime,
        scaling: ScalingSection,
        *,
        acting: actuator.Actuator,
        counters: demand_counters.DemandCounters,
        peers: PeerCounterClient,
        charts: ScalingHistory,
        clock: Callable[[], float],
        on_change: Callable[[ControlLoop], None],
    ) -> None:
        self.name = site.name
        self.desired: ScalingDecision | None = None
        self.demand: Demand | None = None
        self.actuator = acting
        self._site = site
        self._counters = counters
        self._peers = peers
        self._charts = charts
        self._clock = clock
        self._on_change = on_change
        self._meter = DemandEstimator(scaling.meter)
        self._scaler = PolicyRunner(
            scaling.policy_instance(f"autoscaling of {site.name or 'the pool'}"), scaling.bounds
        )
        charts.window_s = float(getattr(self._scaler.policy, "window_s", charts.window_s))
        self._woken = asyncio.Event()
        self._asleep = True
        self._waits_since: float | None = None
        self._failing = ""
        self._requested: int | None = None

    @property
    def active(self) -> bool:
        """Whether there should be a replica at all."""
        return self.desired is not None and self.desired.replicas > 0

    def arrived(self) -> None:
        """A request begins to wait. Cheap: it is called for every one of them."""
        if self._asleep and not self._woken.is_set():
            if self._waits_since is None:
                self._waits_since = self._clock()
            self._woken.set()

    def wake(self) -> None:
        """Another picker says that a request waits."""
        if self._asleep:
            self._woken.set()

    def state(self) -> LoopState:
        """What it remembers."""
        return LoopState(self._scaler.state(), self._meter.state, self._requested)

    def restore(self, state: LoopState, *, shift_s: float) -> bool:
        """Go on where another loop stopped; `shift_s` as in `PolicyRunner.restore`.

        Returns:
            Whether it could be read; another policy's is not.
        """
        if not self._scaler.restore(state.scaler, shift_s=shift_s):
            return False
        self._meter.restore(state.learned, shift_s=shift_s)
        if state.requested is not None:
            self._requested = state.requested
            self.actuator.restore(state.requested)
        return True

    async def run(self) -> None:
        """Look for ever, and at once when a request waits where there is nothing."""
        while True:
            hurry = self._woken.is_set()
            self._woken.clear()
            pause = await self.step(hurry=hurry)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._woken.wait(), pause)

    async def step(self, *, hurry: bool = False) -> float:
        """One look; returns seconds until the next.

        Args:
            hurry: Whether somebody waits for it: then others are told, not asked.
        """
        if not self._site.synced:
            return _UNKNOWN_S
        own = self._counters.read()
        looking = self.actuator.current_replicas(self._counters.available)
        if hurry:
            peer_counters, spec = self._peers.last(self.name), await looking
        else:
            peer_counters, spec = await asyncio.gather(self._peers.read(self.name), looking)
        if isinstance(spec, actuator.ActuatorError):
            self._failed(spec)
            if hurry:
                await self._peers.push()
            return _AGAIN_S if own.held else self._scaler.policy.interval_s
        self._decide(own, peer_counters, spec)
        failed = await self._act(spec)
        if hurry:
            await self._peers.push()
        elif own.held and self._asleep:
            # Whoever may act was asked, and did not: it may be another one by now.
            await self._peers.push()
        return _AGAIN_S if failed or (own.held and self._asleep) else self._scaler.policy.interval_s

    def _decide(
        self, own: PickerCounters, peer_counters: Mapping[str, PickerCounters | None], spec: int
    ) -> None:
        now = self._clock()
        observation = self._counters.observe_target(spec, now)
        pickers = {**peer_counters, self._peers.identity: own}
        demand = self._meter.read(now, pickers, observation)
        self.demand, self.desired = demand, self._scaler.step(demand)
        self._charts.record(demand, self.desired, pickers)
        self._asleep, self._requested = not spec, spec
        if spec:
            self._waits_since = None

    async def _act(self, spec: int) -> bool:
        """Ask for the number that is wanted; whether that failed."""
        desired = self.desired
        failed: actuator.ActuatorError | None = None
        acted = desired is not None and desired.replicas != spec and self.actuator.acts
        if desired is not None and acted:
            failed = await self.actuator.scale(desired, spec)
            if failed is None:
                self._asleep, self._requested = not desired.replicas, desired.replicas
                self._charts.changed(desired.reason)
                if self._waits_since is not None:
                    self._charts.wake_s = self._clock() - self._waits_since
                    self._waits_since = None
                self._tell(desired, spec)
        if failed is not None:
            self._failed(failed)
        elif self._failing:
            self._failing = ""
            _log.info("%s: scaling works again", self._named)
        self._on_change(self)
        return failed is not None

    def _tell(self, desired: ScalingDecision, spec: int) -> None:
        change = f"from {spec} to {desired.replicas} replicas"
        if not self.actuator.scales:
            change = (
                f"nothing is scaled, as there is no target; the number for others on /metrics goes "
                f"{change}"
            )
        because = f": {desired.explanation}" if desired.explanation else ""
        _log.info("%s: %s, %s%s", self._named, change, desired.reason, because)

    def _failed(self, failed: actuator.ActuatorError) -> None:
        self._charts.failures += 1
        if failed.message != self._failing:
            self._failing = failed.message
            _log.warning("%s: %s", self._named, failed.message)

    @property
    def _named(self) -> str:
        return f"autoscaling of pool {self.name}" if self.name else "autoscaling"
