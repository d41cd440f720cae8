"""One pool that is scaled: its loop, and what the loop needs around it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from extproc.autoscaling.runtime import (
    actuator,
    demand_counters,
    exec_actuator,
    process_actuator,
    scale_subresource,
)
from extproc.autoscaling.runtime.control_loop import Loop
from extproc.autoscaling.runtime.peer_counters import Peers
from extproc.autoscaling.runtime.scaling_history import Charts
from extproc.config.autoscaling import Scaling, Target
from extproc.server.pool_runtime import Site
from extproc.supervision import Supervisor
from extproc.telemetry.counters import Tallies


class Around(msgspec.Struct, frozen=True):
    """What all scaled pools have in common.

    Attributes:
        tallies: Where facts go.
        peers: The other pickers.
        cluster: How objects are reached; None where none is scaled.
        here: Namespace of targets that name none.
        leads: Whether this replica holds the Lease.
        clock: Monotonic seconds.
        looked: Called when a loop has looked.
    """

    tallies: Tallies
    peers: Peers
    cluster: scale_subresource.Cluster | None
    here: str
    leads: Callable[[], bool]
    clock: Callable[[], float]
    looked: Callable[[Loop], None]

    @property
    def supervisor(self) -> Supervisor:
        """Keeps loops alive."""
        return self.tallies.supervisor


class Scaled:
    """Scales one pool from `attach` to `detach`.

    Args:
        site: The pool.
        scaling: How many replicas, by what.
        around: What all have in common.

    Raises:
        ConfigError: There is no such policy.

    Attributes:
        site: The pool.
        scaling: How many replicas, by what.
        target: The object that is scaled; None where none is.
        counts: What this picker counts of the pool.
        charts: What is shown of it.
        loop: Looks, decides, acts.
    """

    def __init__(self, site: Site, scaling: Scaling, around: Around) -> None:
        self.site = site
        self.scaling = scaling
        self.target = _placed(scaling.target, around.here)
        tallies = around.tallies.of(site.name)
        self.counts = demand_counters.Counting(site, tallies)
        self.charts = Charts()
        self.loop = Loop(
            site,
            scaling,
            acting=self._hands(scaling, around),
            counters=self.counts,
            peers=around.peers,
            charts=self.charts,
            clock=around.clock,
            on_change=around.looked,
        )
        self._supervisor = around.supervisor
        self._before: Callable[[], None] | None = None

    def attach(self) -> None:
        """Hear of requests that begin to wait; whoever was told of them still is."""
        gate = self.site.gate
        if gate is not None:
            self._before = gate.arrivals
            gate.arrivals = _both(gate.arrivals, self.loop.arrived)
        if isinstance(self.loop.hands, process_actuator.Engines):
            self.loop.hands.begin()

    def detach(self) -> None:
        """Hear of nothing any longer; replicas stay as they are."""
        if self.site.gate is not None and self._before is not None:
            self.site.gate.arrivals = self._before

    async def run(self) -> None:
        """Look and act until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            name = self.site.name
            keep = self._supervisor.keep
            looking = keep("autoscaling", self.loop.run, of=name)
            tasks.create_task(looking, name=f"autoscaling {name}")
            acting = keep("autoscaling", self.loop.hands.run, of=f"{name}, acting")
            tasks.create_task(acting, name=f"autoscaling {name}, acting")
            # Hands may have nothing to do beside, and a group without tasks would end.
            await asyncio.Event().wait()

    def _hands(self, scaling: Scaling, around: Around) -> actuator.Hands:
        if self.target is not None and around.cluster is not None:
            return scale_subresource.Scale(
                self.target, around.cluster, around.leads, around.supervisor
            )
        if scaling.launch is not None:
            return process_actuator.Engines(
                scaling.launch, self.site, clock=around.clock, supervisor=around.supervisor
            )
        if scaling.exec:
            return exec_actuator.Hook(scaling.exec, timeout_s=scaling.exec_s)
        return actuator.Told()


def _placed(target: Target | None, here: str) -> Target | None:
    if target is None:
        return None
    filled = target.filled
    return filled if filled.namespace else msgspec.structs.replace(filled, namespace=here)


def _both(one: Callable[[], None], other: Callable[[], None]) -> Callable[[], None]:
    def both() -> None:
        one()
        other()

    return both
