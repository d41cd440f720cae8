"""Pool with autoscaling: its control loop and its parts."""

from __future__ import annotations

import asyncio
import pkgutil
from collections.abc import Callable

import msgspec

from extproc.autoscaling.runtime import actuator, demand_counters, scale_subresource
from extproc.autoscaling.runtime.control_loop import ControlLoop
from extproc.autoscaling.runtime.peer_counters import PeerCounterClient
from extproc.config.autoscaling import ScalingSection, actuator_type
from extproc.server.pool_runtime import PoolRuntime
from extproc.supervision import Supervisor
from extproc.telemetry.counters import ProcessCounters


class AutoscalerContext(msgspec.Struct, frozen=True):
    """Dependencies shared by all scaled pools.

    Attributes:
        tallies: Metrics of the process.
        peers: The other pickers.
        cluster: Client of scale targets; None where no object is scaled.
        namespace: Namespace of targets that name none.
        leads: True while this replica holds the Lease.
        clock: Monotonic seconds.
        on_step: Called after every step of a loop.
    """

    tallies: ProcessCounters
    peers: PeerCounterClient
    cluster: scale_subresource.ScaleClient | None
    namespace: str
    leads: Callable[[], bool]
    clock: Callable[[], float]
    on_step: Callable[[ControlLoop], None]

    @property
    def supervisor(self) -> Supervisor:
        """Keeps loops alive."""
        return self.tallies.supervisor


class ScaledPool:
    """Scales a pool from `attach` to `detach`.

    Args:
        scaling: Policy, bounds and parameters.

    Raises:
        ConfigError: There is no such policy.

    Attributes:
        runtime: The pool.
        scaling: Policy, bounds and parameters.
        target: The object that is scaled; None where another actuator acts.
        counts: Counters of this process for the pool.
        loop: The control loop.
    """

    def __init__(
        self, runtime: PoolRuntime, scaling: ScalingSection, context: AutoscalerContext
    ) -> None:
        self.runtime = runtime
        self.scaling = scaling
        self.target = None if scaling.target is None else scaling.target.located(context.namespace)
        tallies = context.tallies.for_pool(runtime.name)
        self.counts = demand_counters.DemandCounters(runtime, tallies)
        self.loop = ControlLoop(
            runtime,
            scaling,
            acting=_build_actuator(runtime, scaling, context),
            counters=self.counts,
            peers=context.peers,
            clock=context.clock,
            on_change=context.on_step,
        )
        self._supervisor = context.supervisor

    def attach(self) -> None:
        """Subscribe to queued requests, and start the actuator."""
        if self.runtime.flow_controller is not None:
            self.runtime.flow_controller.add_arrival_listener(self.loop.arrived)
        self.loop.actuator.start()

    def detach(self) -> None:
        """Unsubscribe; replicas stay as they are."""
        if self.runtime.flow_controller is not None:
            self.runtime.flow_controller.remove_arrival_listener(self.loop.arrived)

    async def run(self) -> None:
        """Run the loop and its actuator until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            name = self.runtime.name
            keep = self._supervisor.keep
            looking = keep("autoscaling", self.loop.run, instance=name)
            tasks.create_task(looking, name=f"autoscaling {name}")
            acting = keep("autoscaling", self.loop.actuator.run, instance=f"{name}, acting")
            tasks.create_task(acting, name=f"autoscaling {name}, acting")
            # An actuator may have no background work, and a group without tasks would end.
            await asyncio.Event().wait()


def _build_actuator(
    pool: PoolRuntime, scaling: ScalingSection, context: AutoscalerContext
) -> actuator.Actuator:
    dependencies = actuator.ActuatorContext(
        pool=pool,
        cluster=context.cluster,
        namespace=context.namespace,
        leads=context.leads,
        clock=context.clock,
        supervisor=context.supervisor,
    )
    kind: type[actuator.Actuator] = pkgutil.resolve_name(actuator_type(scaling).implementation)
    return kind.from_settings(scaling, dependencies)
