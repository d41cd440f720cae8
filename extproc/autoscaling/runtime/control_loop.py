"""Control loop of a pool, which observes, decides and acts, and the pool that it scales."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import pkgutil
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Annotated

import msgspec

from extproc.autoscaling.demand_estimator import DemandEstimator, EstimatorState, PickerCounters
from extproc.autoscaling.interface import (
    Demand,
    Moment,
    PolicyRunner,
    RunnerState,
    ScalingDecision,
)
from extproc.autoscaling.runtime import actuator, demand_counters
from extproc.autoscaling.runtime.demand_counters import PeerCounterClient
from extproc.autoscaling.scaling_history import ScalingHistory
from extproc.config.autoscaling import ScalingSection, actuator_type
from extproc.server.pool_runtime import PoolRuntime
from extproc.supervision import run_forever
from extproc.telemetry.control_plane_metrics import ScalingMetrics

_log = logging.getLogger("extproc.server")

#: Seconds until the next step while a request waits: the last attempt failed, or there are zero
#: replicas and the election of the replica that may act is still running.
_RETRY_S = 1.0

#: Intervals of the policy after which the time between two readings says nothing of engines: a single
#: failed reading is no gap.
_GAP_INTERVALS = 3.0

#: Seconds until the first look of a picker whose pool is not known yet.
_SYNC_POLL_S = 0.2


class LoopState(msgspec.Struct, frozen=True):
    """State of a `ControlLoop`; JSON.

    Attributes:
        requested: Replicas requested last; None before the first step.
        shift_s: Seconds to add to its times where they are on the clock of an earlier process, because
            its pool was not discovered since.
    """

    scaler: RunnerState
    learned: EstimatorState
    requested: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)] | None = None
    shift_s: Moment = 0.0


class LoopMetrics:
    """Demand, decisions and changes of a pool. Mutable; owned by its loop.

    Args:
        window_s: Seconds the queue depth is averaged over.

    Attributes:
        demand: Demand of the last step; None before it.
        desired: Last decision; None before the first.
        changes: Changes of the requested replicas by reason (count).
        failures: Failed reads and changes of the target (count).
        wake_s: Seconds from the last request that waited at zero replicas until a replica was
            requested; None before the first.
    """

    def __init__(self, window_s: float) -> None:
        self.demand: Demand | None = None
        self.desired: ScalingDecision | None = None
        self.changes: Counter[str] = Counter()
        self.failures = 0
        self.wake_s: float | None = None
        self._history = ScalingHistory(window_s)

    def record(
        self, demand: Demand, desired: ScalingDecision, pickers: Mapping[str, PickerCounters | None]
    ) -> None:
        """Record a step, with the counters by picker; None where they cannot be read."""
        self._history.record(
            demand.now,
            requests=demand.requests,
            available=demand.available,
            spec=demand.spec,
            arrived={name: read.arrived for name, read in pickers.items() if read is not None},
        )
        self.demand, self.desired = demand, desired

    def snapshot(self) -> ScalingMetrics:
        """Return the current metrics."""
        demand, row = self.demand, self._history.latest
        if demand is None or self.desired is None or row is None:
            return ScalingMetrics(failures=self.failures)
        gauges = {
            "desired_replicas": float(self.desired.replicas),
            "queue_depth": row.depth,
            "queue_depth_mean": row.depth_mean,
            "requests_per_second": row.queries_per_s,
            "work_per_second": demand.arriving,
            "replica_work_per_second": demand.throughput,
            "cold_start_seconds": demand.cold_start_s,
            "counters_complete": float(demand.complete),
        }
        if self.wake_s is not None:
            gauges["from_zero_seconds"] = self.wake_s
        replicas = {
            "spec": demand.spec,
            "available": demand.available,
            "starting": demand.starting,
        }
        return ScalingMetrics(gauges, replicas, self.changes, self.failures)


class ControlLoop:
    """Scales a pool. Mutable; owned by its `ScaledPool`.

    Args:
        on_change: Called after every step, successful or not.

    Raises:
        ConfigError: There is no such policy.

    Attributes:
        desired: Last decision; None before the first step.
        demand: Demand of the last step; None before it.
        metrics: Demand, decisions and changes for /metrics.
    """

    def __init__(
        self,
        runtime: PoolRuntime,
        scaling: ScalingSection,
        *,
        actuator: actuator.Actuator,
        counters: demand_counters.DemandCounters,
        peers: PeerCounterClient,
        clock: Callable[[], float],
        on_change: Callable[[ControlLoop], None],
    ) -> None:
        self.name = runtime.name
        self.desired: ScalingDecision | None = None
        self.demand: Demand | None = None
        self.actuator = actuator
        self._runtime = runtime
        self._counters = counters
        self._peers = peers
        self._clock = clock
        self._on_change = on_change
        self.scaler = PolicyRunner(
            scaling.policy_instance(f"autoscaling of {runtime.name or 'the pool'}"), scaling.bounds
        )
        gap_s = _GAP_INTERVALS * self.scaler.policy.interval_s
        self._estimator = DemandEstimator(scaling.meter, gap_s=gap_s)
        self.metrics = LoopMetrics(self.scaler.policy.window_s)
        self._woken = asyncio.Event()
        self._is_waiting = True
        self._is_retrying = False
        self._waits_since: float | None = None
        self._reported_error = ""
        self._requested: int | None = None

    @property
    def active(self) -> bool:
        """True if at least a single replica is desired."""
        return self.desired is not None and self.desired.replicas > 0

    @property
    def is_woken(self) -> bool:
        """True if the next step is due at once."""
        return self._woken.is_set()

    def on_arrival(self) -> None:
        """Handle a request that is queued. Cheap: it is called for every queued request."""
        if self._is_wakeable and not self._woken.is_set():
            if self._waits_since is None:
                self._waits_since = self._clock()
            self._woken.set()

    def wake(self) -> None:
        """Handle the report of a peer that a request is queued."""
        if self._is_wakeable:
            self._woken.set()

    @property
    def _is_wakeable(self) -> bool:
        """True where a queued request makes a step due at once: not where it only awaits a retry."""
        return self._is_waiting and not self._is_retrying

    def state(self) -> LoopState:
        """Current state, for `restore` in another process."""
        return LoopState(self.scaler.state(), self._estimator.state, self._requested)

    def restore(self, state: LoopState, *, shift_s: float) -> None:
        """Continue as `PolicyRunner.restore`; state of another policy leaves the policy as it is."""
        if not self.scaler.restore(state.scaler, shift_s=shift_s):
            kind = self.scaler.policy.kind
            _log.log(
                # Only another policy in the configuration is a reason to expect it.
                logging.WARNING if state.scaler.kind == kind else logging.INFO,
                "%s: expected state of policy %s, got state of %s that it cannot read; the policy "
                "starts without state, and the requested replicas and all else are kept",
                self._title,
                kind,
                repr(state.scaler.kind)[:80],
            )
        self._estimator.restore(state.learned, shift_s=shift_s)
        if state.requested is not None:
            self._requested = state.requested
            self.actuator.restore(state.requested)

    async def run(self) -> None:
        """Step until cancelled, and at once when a request is queued at zero replicas."""
        while True:
            immediate = self._woken.is_set()
            self._woken.clear()
            pause = await self.step(immediate=immediate)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._woken.wait()

    async def step(self, *, immediate: bool = False) -> float:
        """Observe, decide and act once; returns seconds until the next step.

        Args:
            immediate: True if a request waits for it: the counters of peers are not read.
        """
        self._is_retrying = False
        if not self._runtime.synced:
            return _SYNC_POLL_S
        own = self._counters.read()
        looking = self.actuator.current_replicas(self._counters.available)
        if immediate:
            peer_counters, spec = self._peers.last(self.name), await looking
        else:
            peer_counters, spec = await asyncio.gather(self._peers.read(self.name), looking)
        if isinstance(spec, actuator.ActuatorError):
            self._report_error(spec)
            failed = True
        else:
            self._decide(own, peer_counters, spec)
            failed = await self._act(spec)
        # At a retry again: the replica that may act was notified and did not, and another may lead.
        if own.held and (immediate or self._is_waiting):
            await self._peers.push()
        self._is_retrying = bool(own.held) and (failed or self._is_waiting)
        if not self._is_retrying:
            return self.scaler.policy.interval_s
        # The retry comes after its pause, however many requests and reports of peers come before.
        self._woken.clear()
        return _RETRY_S

    def _decide(
        self, own: PickerCounters, peer_counters: Mapping[str, PickerCounters | None], spec: int
    ) -> None:
        now = self._clock()
        observation = self._counters.observe_target(spec, now)
        pickers = {**peer_counters, self._peers.identity: own}
        demand = self._estimator.read(now, pickers, observation)
        self.demand, self.desired = demand, self.scaler.step(demand)
        self.metrics.record(demand, self.desired, pickers)
        self._is_waiting, self._requested = not spec, spec
        if spec or not (own.held or self._woken.is_set()):
            self._waits_since = None

    async def _act(self, spec: int) -> bool:
        """Apply the decision; returns True if that failed."""
        desired = self.desired
        failed: actuator.ActuatorError | None = None
        acted = desired is not None and desired.replicas != spec and self.actuator.can_scale
        if desired is not None and acted:
            failed = await self.actuator.scale(desired, spec)
            if failed is None:
                self._is_waiting, self._requested = not desired.replicas, desired.replicas
                self.metrics.changes[str(desired.reason)] += 1
                if self._waits_since is not None:
                    self.metrics.wake_s = self._clock() - self._waits_since
                    self._waits_since = None
                self._log_change(desired, spec)
        if failed is not None:
            self._report_error(failed)
        elif self._reported_error:
            self._reported_error = ""
            _log.info("%s: scaling works again", self._title)
        self._on_change(self)
        return failed is not None

    def _log_change(self, desired: ScalingDecision, spec: int) -> None:
        change = f"from {spec} to {desired.replicas} replicas"
        if not self.actuator.scales:
            change = (
                f"nothing is scaled, as there is no target; the number for others on /metrics goes "
                f"{change}"
            )
        because = f": {desired.explanation}" if desired.explanation else ""
        _log.info("%s: %s, %s%s", self._title, change, desired.reason, because)

    def _report_error(self, error: actuator.ActuatorError) -> None:
        self.metrics.failures += 1
        if error.message != self._reported_error:
            self._reported_error = error.message
            _log.warning("%s: %s", self._title, error.message)

    @property
    def _title(self) -> str:
        return f"autoscaling of pool {self.name}" if self.name else "autoscaling"


class AutoscalerContext(actuator.ActuatorContext, frozen=True, kw_only=True):
    """Dependencies shared by all scaled pools."""

    peers: PeerCounterClient
    on_step: Callable[[ControlLoop], None]


class ScaledPool:
    """Scales a pool from `attach` to `detach`.

    Raises:
        ConfigError: There is no such policy.

    Attributes:
        target: The object that is scaled; None where another actuator acts.
    """

    def __init__(
        self,
        counts: demand_counters.DemandCounters,
        scaling: ScalingSection,
        context: AutoscalerContext,
    ) -> None:
        self.counts = counts
        self.runtime = runtime = counts.runtime
        self.scaling = scaling
        self.target = None if scaling.target is None else scaling.target.located(context.namespace)
        kind: type[actuator.Actuator] = pkgutil.resolve_name(actuator_type(scaling).implementation)
        self.loop = ControlLoop(
            runtime,
            scaling,
            actuator=kind.from_settings(scaling, runtime, context),
            counters=counts,
            peers=context.peers,
            clock=context.clock,
            on_change=context.on_step,
        )
        self._supervisor = context.supervisor

    def attach(self) -> None:
        """Subscribe to queued requests, and start the actuator."""
        if self.runtime.flow_controller is not None:
            self.runtime.flow_controller.add_arrival_listener(self.loop.on_arrival)
        self.loop.actuator.start()

    def detach(self) -> None:
        """Unsubscribe; replicas stay as they are."""
        if self.runtime.flow_controller is not None:
            self.runtime.flow_controller.remove_arrival_listener(self.loop.on_arrival)

    async def run(self) -> None:
        """Run the loop and its actuator until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            name = self.runtime.name
            keep = self._supervisor.keep
            looking = keep("autoscaling", self.loop.run, instance=name)
            tasks.create_task(looking, name=f"autoscaling {name}")
            acting = keep("autoscaling", self.loop.actuator.run, instance=f"{name}, acting")
            tasks.create_task(acting, name=f"autoscaling {name}, acting")
            await run_forever()
