"""All loops of a process, and what they share."""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import os
import secrets
import socket
from collections.abc import Callable, Iterable, Mapping

import msgspec

from extproc.autoscaling.meter import Counters
from extproc.config import cluster as clusters
from extproc.config import pooling
from extproc.config.autoscaling import Scaling
from extproc.config.settings import Settings
from extproc.discovery.kubernetes import settings as watching
from extproc.server.gate import Gate
from extproc.server.scaling import counting, hands, hook, kubernetes, launch
from extproc.server.scaling.charts import Charts
from extproc.server.scaling.loop import Loop
from extproc.server.scaling.memory import Memory
from extproc.server.scaling.peers import Peers
from extproc.server.site import Site
from extproc.server.sites import Sites
from extproc.telemetry.scaling_series import Figures
from extproc.telemetry.tallies import Tallies

#: Seconds that handing over may hold up the end of a process.
_LAST_S = 1.0


class Autoscaler:
    """Scales every pool that asks for it.

    Args:
        settings: The whole configuration.
        sites: The pools.
        tallies: Where facts go.
        leads: Whether this replica holds the Lease.
        clock: Monotonic seconds.

    Raises:
        ConfigError: A policy or an address of a peer cannot be read.

    Attributes:
        loops: By name of the pool.
        peers: The other pickers.
        on_change: Called when a loop has looked.
    """

    def __init__(
        self,
        settings: Settings,
        sites: Sites,
        tallies: Tallies,
        *,
        leads: Callable[[], bool],
        clock: Callable[[], float],
    ) -> None:
        shared = settings.autoscaling
        self._leads = leads
        self._save_s = shared.save_s
        self._changed = asyncio.Event()
        self._numbers: dict[str, int] = {}
        self.on_change: Callable[[Loop], None] = lambda _: None
        identity = f"{os.environ.get('POD_NAME') or socket.gethostname()}_{secrets.token_hex(4)}"
        self.peers = Peers(identity, shared.peers, timeout_s=shared.peer_timeout_s, own=self._own)
        self.peers.woken = self._woken
        self._counts: dict[str, counting.Counting] = {}
        self._charts: dict[str, Charts] = {}
        self.loops: dict[str, Loop] = {}
        self._sites = sites
        wanted = {
            one.name: one.settings.pool.autoscaling
            for one in pooling.planned(settings)
            if one.settings.pool.autoscaling is not None
        }
        here = clusters.namespace(os.environ)
        self._cluster: kubernetes.Cluster | None = None
        if any(one.target is not None for one in wanted.values()):
            reached = settings.cluster
            reaching = watching.Settings(
                sources=(), kubeconfig=reached.kubeconfig, context=reached.context
            )
            self._cluster = kubernetes.Cluster(reaching, identity)
        for name, scaling in wanted.items():
            site = sites.by_name[name]
            count = counting.Counting(
                site, tallies.of(name), stale_after_s=settings.scrape.stale_after_s
            )
            self._counts[name], self._charts[name] = count, Charts()
            self.loops[name] = Loop(
                site,
                scaling,
                acting=self._hands(site, scaling, here, clock),
                counters=count,
                peers=self.peers,
                charts=self._charts[name],
                clock=clock,
                on_change=self._looked,
            )
        self._memory: Memory | None = None
        if self._cluster is not None and shared.state:
            place = settings.cluster.lease.namespace or here
            self._memory = Memory(
                self._cluster, namespace=place, name=shared.state, clock=clock, time=_time
            )
        tallies.scaling = self.figures

    def figures(self) -> Mapping[str, Figures]:
        """What is shown, by pool."""
        return {name: charts.figures() for name, charts in self._charts.items()}

    async def start(self) -> None:
        """Go on where another replica stopped.

        Raises:
            ConfigError: The API server's address or credentials are missing or broken.
        """
        for name, loop in self.loops.items():
            gate = self._sites.by_name[name].gate
            if gate is not None:
                gate.arrivals = _also(gate, loop.arrived)
            if isinstance(loop.hands, launch.Engines):
                loop.hands.begin()
        if self._cluster is not None:
            await self._cluster.open()
        if self._memory is not None:
            found = await self._memory.load()
            states, shift_s = found or ({}, 0.0)
            for name, state in states.items():
                if name in self.loops:
                    self.loops[name].restore(state, shift_s=shift_s)

    async def run(self) -> None:
        """All loops, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for name, loop in self.loops.items():
                tasks.create_task(loop.run(), name=f"autoscaling {name}")
                tasks.create_task(loop.hands.run(), name=f"autoscaling {name}, acting")
            if self._memory is not None:
                tasks.create_task(self._keep(self._memory), name="autoscaling memory")
            # A group without tasks would end, and with it what runs beside it.
            await asyncio.Event().wait()

    async def hand_over(self) -> None:
        """Leave what was learnt to whoever leads next, while this one still does."""
        if self._memory is not None and self._leads():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._save(self._memory), _LAST_S)

    async def close(self) -> None:
        """End what was started."""
        self.peers.close()
        if self._cluster is not None:
            await self._cluster.close()

    def _hands(
        self, site: Site, scaling: Scaling, here: str, clock: Callable[[], float]
    ) -> hands.Hands:
        if scaling.target is not None and self._cluster is not None:
            target = scaling.target.filled
            if not target.namespace:
                target = msgspec.structs.replace(target, namespace=here)
            return kubernetes.Scale(target, self._cluster, self._leads)
        if scaling.launch is not None:
            return launch.Engines(scaling.launch, site, clock=clock)
        if scaling.exec:
            return hook.Hook(scaling.exec, timeout_s=scaling.exec_s)
        return hands.Told()

    async def _keep(self, memory: Memory) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), self._save_s)
            self._changed.clear()
            if self._leads():
                await self._save(memory)

    async def _save(self, memory: Memory) -> None:
        await memory.save({name: loop.state() for name, loop in self.loops.items()})

    def _looked(self, loop: Loop) -> None:
        if loop.desired is not None and self._numbers.get(loop.name) != loop.desired.replicas:
            self._numbers[loop.name] = loop.desired.replicas
            self._changed.set()
        self.on_change(loop)

    def _own(self) -> dict[str, Counters]:
        return {name: count.read() for name, count in self._counts.items()}

    def _woken(self, pools: Iterable[str]) -> None:
        for name in pools:
            if name in self.loops:
                self.loops[name].wake()


def _also(gate: Gate, told: Callable[[], None]) -> Callable[[], None]:
    """Whoever was told of arrivals still is."""
    before = gate.arrivals

    def both() -> None:
        before()
        told()

    return both


def _time() -> float:
    """Seconds since 1970."""
    return dt.datetime.now(dt.UTC).timestamp()
