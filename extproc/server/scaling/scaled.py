"""One pool that is scaled: its loop, and what the loop needs around it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from extproc.config.autoscaling import Scaling, Target
from extproc.server.scaling import counting, hands, hook, kubernetes, launch
from extproc.server.scaling.charts import Charts
from extproc.server.scaling.loop import Loop
from extproc.server.scaling.peers import Peers
from extproc.server.site import Site
from extproc.supervision import Supervisor
from extproc.telemetry.tallies import Tallies


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
    cluster: kubernetes.Cluster | None
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
        self.counts = counting.Counting(site, tallies)
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
        if isinstance(self.loop.hands, launch.Engines):
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

    def _hands(self, scaling: Scaling, around: Around) -> hands.Hands:
        if self.target is not None and around.cluster is not None:
            return kubernetes.Scale(self.target, around.cluster, around.leads, around.supervisor)
        if scaling.launch is not None:
            return launch.Engines(
                scaling.launch, self.site, clock=around.clock, supervisor=around.supervisor
            )
        if scaling.exec:
            return hook.Hook(scaling.exec, timeout_s=scaling.exec_s)
        return hands.Told()


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
