"""Autoscaler of a process: creates, runs and removes the control loops of its pools."""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import functools
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import msgspec

from extproc.autoscaling.demand_estimator import PickerCounters
from extproc.autoscaling.runtime import scale_subresource, state_store
from extproc.autoscaling.runtime.control_loop import (
    AutoscalerContext,
    ControlLoop,
    LoopState,
    ScaledPool,
)
from extproc.autoscaling.runtime.demand_counters import DemandCounters, PeerCounterClient
from extproc.config import kubernetes_plan, pool_annotations, pools
from extproc.config.autoscaling import AutoscalingSection, ScaleTarget, ScalingSection
from extproc.config.settings import Settings
from extproc.discovery.kubernetes.settings import POOL_GROUP, KubernetesSettings
from extproc.errors import ConfigError
from extproc.server.peer_addresses import PeerAddresses
from extproc.server.pool_registry import PoolRegistry
from extproc.server.pool_runtime import PoolRuntime
from extproc.telemetry.control_plane_metrics import ScalingMetrics
from extproc.telemetry.counters import ProcessCounters

_log = logging.getLogger("extproc.server")

#: Name of the loop that keeps what was learned, for the supervisor.
_STATE_INSTANCE = "autoscaling memory"

#: Name of the loop that writes Events about found pools.
_EVENTS_INSTANCE = "autoscaling events"

#: Seconds that handing over may hold up the end of a process.
_FINAL_SAVE_S = 1.0

#: Names of pools without a scaler that are logged at most (count).
_MAX_NAMES = 5

#: Seconds between two looks for refused annotations to write Events about.
_REPORT_S = 1.0


class Autoscaler:
    """Scales all pools with autoscaling: configured pools, and discovered pools as they change.

    Args:
        addresses: The other replicas of extproc.

    Raises:
        ConfigError: A policy cannot be read, or two pools name one object, the namespace of this
            process being written out for one of them.
    """

    def __init__(
        self,
        settings: Settings,
        registry: PoolRegistry,
        counters: ProcessCounters,
        *,
        is_leader: Callable[[], bool],
        clock: Callable[[], float],
        addresses: PeerAddresses,
        on_step: Callable[[ControlLoop], None] = lambda _: None,
        on_removed: Callable[[ControlLoop], None] = lambda _: None,
    ) -> None:
        shared = settings.autoscaling
        self._rules = shared.discovered_pools if settings.cluster.discover_pools != "none" else ()
        self._save_s = shared.save_s
        self._supervisor = counters.supervisor
        self._changed = asyncio.Event()
        self._pools_by_target = asyncio.Event()
        self._numbers: dict[str, int] = {}
        self._step_listener = on_step
        self._on_removed = on_removed
        identity = kubernetes_plan.process_identity(os.environ)
        self.peers = PeerCounterClient(
            identity,
            addresses,
            timeout_s=shared.peer_timeout_s,
            own_counters=self._own_counters,
            clock=clock,
            on_waiting=self._wake,
        )
        self._scaled: dict[str, ScaledPool] = {}
        self._counters = counters
        self._counts: dict[str, DemandCounters] = {}
        #: Pools that are about to take a target, and states of pools that are not scaled at present.
        self._joining: dict[str, ScaledPool] = {}
        self._last_states: dict[str, LoopState] = {}
        #: Annotations of discovered pools at the last look; None to look again.
        self._logged: dict[str, tuple[PoolRuntime, Mapping[str, str] | None]] = {}
        self._faults: dict[str, str] = {}
        #: Annotations of found pools that were refused (count), and why until an Event says it.
        self._refusals: Counter[str] = Counter()
        self._unreported: dict[str, str] = {}
        #: Saved states of pools that are not scaled since the start.
        self._saved_states: dict[str, LoopState] = {}
        self._is_state_loaded = False
        self._registry = registry
        here = kubernetes_plan.namespace(os.environ)
        self._cluster = _build_cluster(settings, identity)
        self._context = AutoscalerContext(
            cluster=self._cluster,
            namespace=here,
            is_leader=is_leader,
            clock=clock,
            supervisor=counters.supervisor,
            peers=self.peers,
            on_step=self._on_step,
        )
        for plan in pools.pool_plans(settings):
            wanted = plan.settings.pool.autoscaling
            if wanted is not None:
                runtime = registry.by_name[plan.name]
                pool = self._build_pool(runtime, wanted)
                other = self._find_pool_with_target(pool)
                if other is not None:
                    raise ConfigError(
                        f"autoscaling of pool {plan.name}",
                        wanted="another scale target than that of every other pool",
                        got=f"that of pool {other}",
                        fix="scale it for a single pool",
                    )
                self._scaled[plan.name] = pool
        # A file is this replica's own.
        self._writes: Callable[[], bool] = _always if shared.state_file else is_leader
        self._state_store = _build_state_store(
            shared, self._cluster, settings.cluster.lease.namespace or here, clock
        )

    @property
    def loops(self) -> Mapping[str, ControlLoop]:
        """Control loops by name of the pool."""
        return {name: pool.loop for name, pool in self._scaled.items()}

    def metrics(self) -> Mapping[str, ScalingMetrics]:
        """Metrics by name of the pool."""
        shown = {name: pool.loop.metrics.snapshot() for name, pool in self._scaled.items()}
        for name, count in self._refusals.items():
            shown[name] = msgspec.structs.replace(shown.get(name, ScalingMetrics()), refusals=count)
        return shown

    async def start(self) -> None:
        """Restore saved state and attach all loops; raises as `ScaleClient.open`."""
        for pool in self._scaled.values():
            pool.attach()
        if self._cluster is not None:
            await self._cluster.open()
        # Saved state comes from other processes: it must not stop this replica from starting.
        await self._supervisor.attempt(
            "autoscaling", self._restore_states(), instance=_STATE_INSTANCE
        )

    def sync_pools(self) -> None:
        """Reconcile the control loops with the pools that Kubernetes discovery reports."""
        if not self._rules:
            return
        brought = self._registry.discovered
        for name in [known for known in self._logged if known not in brought]:
            self._forget(name)
        for name, runtime in sorted(brought.items()):
            if self._logged.get(name) != (runtime, runtime.annotations):
                rescale = functools.partial(self._update_pool, name, runtime)
                self._supervisor.call("autoscaling", rescale, instance=name)
        # Only then is free what any of them gave up.
        for name, pool in self._joining.items():
            join = functools.partial(self._join, name, pool)
            self._supervisor.call("autoscaling", join, instance=name)
        self._joining.clear()
        self._pools_by_target.set()

    async def run(self) -> None:
        """Run the loops of all pools, as pools come and go, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            keep = self._supervisor.keep
            if self._state_store is not None:
                saving = functools.partial(self._save_repeatedly, self._state_store)
                tasks.create_task(
                    keep("autoscaling", saving, instance=_STATE_INSTANCE), name=_STATE_INSTANCE
                )
            if self._cluster is not None and self._rules:
                reporting = functools.partial(self._report, self._cluster)
                tasks.create_task(
                    keep("autoscaling", reporting, instance=_EVENTS_INSTANCE), name=_EVENTS_INSTANCE
                )
            running: dict[ScaledPool, asyncio.Task[None]] = {}
            while True:
                self._pools_by_target.clear()
                for pool in [pool for pool in running if pool not in self._scaled.values()]:
                    running.pop(pool).cancel()
                for name, pool in self._scaled.items():
                    if pool not in running:
                        supervised = keep("autoscaling", pool.run, instance=f"pool {name}")
                        running[pool] = tasks.create_task(supervised, name=f"autoscaling {name}")
                await self._pools_by_target.wait()

    async def hand_over(self) -> None:
        """Save the state for the next leader, while this replica still leads."""
        if self._state_store is not None and self._writes():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_FINAL_SAVE_S):
                    await self._save(self._state_store)

    async def close(self) -> None:
        """Close connections."""
        self.peers.close()
        if self._cluster is not None:
            await self._cluster.close()

    async def _restore_states(self) -> None:
        if self._state_store is None:
            return
        loaded = await self._state_store.load()
        if loaded is None:
            return
        states, lead_s = loaded
        self._saved_states = {
            name: msgspec.structs.replace(state, shift_s=state.shift_s + lead_s)
            for name, state in states.items()
        }
        self._is_state_loaded = True
        restored = self._saved_states.keys() & self._scaled.keys()
        for pool in self._scaled.values():
            remind = functools.partial(self._restore_loop, pool.loop)
            self._supervisor.call("autoscaling", remind, instance=pool.runtime.name)
        if restored:
            _log.info("autoscaling: going on with what was kept of %d pools", len(restored))
        if self._saved_states and not self._registry.is_discovery_synced:
            others = len(self._saved_states)
            _log.info("autoscaling: what was kept of %d pools waits for their discovery", others)

    def _update_pool(self, name: str, runtime: PoolRuntime) -> None:
        """Apply the current annotations of a discovered pool; one that takes a target joins later."""
        try:
            wanted = pool_annotations.resolve_scaling(self._rules, name, runtime.annotations)
            self._logged[name] = runtime, runtime.annotations
        except ConfigError as error:
            self._logged[name] = runtime, runtime.annotations
            self._remove_pool(name)
            self._report_fault(name, str(error))
            self._refusals[name] += 1
            self._unreported[name] = str(error)
            return
        self._unreported.pop(name, None)
        now = self._scaled.get(name)
        if now is not None and now.runtime is runtime and now.scaling == wanted:
            return
        pool = None if wanted is None else self._build_pool(runtime, wanted)
        self._remove_pool(name)
        if pool is None:
            return
        if now is not None and now.target == pool.target:
            self._join(name, pool)
        else:
            self._joining[name] = pool

    def _build_pool(self, runtime: PoolRuntime, scaling: ScalingSection) -> ScaledPool:
        """Build what scales a pool; its counters go on from those of before."""
        counts = self._counts.get(runtime.name)
        if counts is None or counts.runtime is not runtime:
            counts = DemandCounters(runtime, self._counters.for_pool(runtime.name))
            self._counts[runtime.name] = counts
        return ScaledPool(counts, scaling, self._context)

    def _join(self, name: str, pool: ScaledPool) -> None:
        """Scale a discovered pool, unless its target is scaled for another one."""
        other = self._find_pool_with_target(pool)
        if other is not None:
            self._logged[name] = pool.runtime, None  # it is looked at again: the other one may go
            self._report_fault(
                name, f"what it names is scaled for pool {other or 'of the configuration'}"
            )
            return
        self._faults.pop(name, None)
        self._scaled[name] = pool
        pool.attach()
        state = self._last_states.pop(name, None)
        if state is not None:
            pool.loop.restore(state, shift_s=0.0)
        else:
            self._restore_loop(pool.loop)

    def _find_pool_with_target(self, pool: ScaledPool) -> str | None:
        """Name of the pool that scales the same object already; None where there is none."""
        if pool.target is None:
            return None
        place = pool.target.path
        taken = (
            name
            for name, other in self._scaled.items()
            if other.target is not None and other.target.path == place
        )
        return next(taken, None)

    def _remove_pool(self, name: str) -> None:
        """Stop scaling a pool, but keep its state until it is gone."""
        pool = self._scaled.pop(name, None)
        if pool is None:
            return
        pool.detach()
        self._on_removed(pool.loop)
        self._last_states[name] = pool.loop.state()

    def _forget(self, name: str) -> None:
        """Drop everything about a removed pool: a later pool of its name is a new pool."""
        self._remove_pool(name)
        del self._logged[name]
        self._last_states.pop(name, None)
        self._saved_states.pop(name, None)
        self._counts.pop(name, None)
        self._numbers.pop(name, None)
        self._faults.pop(name, None)
        self._refusals.pop(name, None)
        self._unreported.pop(name, None)
        self._changed.set()

    def _restore_loop(self, loop: ControlLoop) -> None:
        state = self._saved_states.pop(loop.name, None)
        if state is not None:
            if loop.desired is not None:  # the number that it requested itself is newer
                state = msgspec.structs.replace(state, requested=None)
            loop.restore(state, shift_s=state.shift_s)

    def _report_fault(self, name: str, reason: str) -> None:
        if self._faults.get(name) != reason:
            self._faults[name] = reason
            _log.error("pool %s is not scaled: %s", name, reason)

    async def _report(self, cluster: scale_subresource.ScaleClient) -> None:
        """Write Events about refused annotations of pools, while this replica leads."""
        while True:
            await asyncio.sleep(_REPORT_S)
            await self.report(cluster)
            self._supervisor.record_success("autoscaling", _EVENTS_INSTANCE)

    async def report(self, cluster: scale_subresource.ScaleClient) -> None:
        """Write the Events that are not written yet."""
        while self._unreported and self._context.is_leader():
            name, reason = self._unreported.popitem()
            namespace, _, pool = name.rpartition("/")
            about = ScaleTarget(
                kind="InferencePool",
                name=pool,
                namespace=namespace,
                group=POOL_GROUP,
                version="v1",
            )
            note = f"extproc does not scale it: {reason}"
            await cluster.write_event(about, "InvalidAnnotation", note, warning=True)

    async def _save_repeatedly(self, store: state_store.StateStore) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._save_s):
                    await self._changed.wait()
            self._changed.clear()
            await self._save(store)
            self._supervisor.record_success("autoscaling", _STATE_INSTANCE)

    async def _save(self, store: state_store.StateStore) -> None:
        """Save the state, where this replica writes it; drop that of pools that are gone anywhere."""
        if not self._is_state_loaded:
            # A read that failed at the start must not cost what was saved.
            await self._restore_states()
            if not self._is_state_loaded:
                return
        if self._registry.is_discovery_synced:
            self._drop_saved_states(store)
        if self._writes():
            states = {name: loop.state() for name, loop in self.loops.items()}
            await store.save(self._saved_states | self._last_states | states)

    def _drop_saved_states(self, store: state_store.StateStore) -> None:
        """Drop saved states of pools that no annotation can scale again: discovery is complete."""
        gone = sorted(self._saved_states.keys() - self._logged.keys())
        if gone:
            names = ", ".join(repr(name)[:80] for name in gone[:_MAX_NAMES])
            message = (
                f"autoscaling: expected saved state of scaled pools, got also that of "
                f"{len(gone)} others ({names}); it is dropped; where a pool was renamed, "
                "rename its saved state as well"
            )
            _log.warning("%s%s", message, store.keep_copy())
            for name in gone:
                del self._saved_states[name]

    def _on_step(self, loop: ControlLoop) -> None:
        if loop.desired is not None and self._numbers.get(loop.name) != loop.desired.replicas:
            self._numbers[loop.name] = loop.desired.replicas
            self._changed.set()
        self._supervisor.record_success("autoscaling", loop.name)
        self._supervisor.call(
            "autoscaling", functools.partial(self._step_listener, loop), instance=loop.name
        )

    def _own_counters(self) -> dict[str, PickerCounters]:
        return {name: pool.counts.read() for name, pool in self._scaled.items()}

    def _wake(self, pools: Iterable[str]) -> None:
        for name in pools:
            if name in self._scaled:
                self._scaled[name].loop.wake()


def _always() -> bool:
    return True


def _build_cluster(settings: Settings, identity: str) -> scale_subresource.ScaleClient | None:
    """Build the client of scale targets; None where no Kubernetes object is scaled."""
    if not pools.scales_kubernetes_objects(settings):
        return None
    cluster = settings.cluster
    reaching = KubernetesSettings(
        sources=(), kubeconfig=cluster.kubeconfig, context=cluster.context
    )
    handover_s = cluster.lease.duration_s - cluster.lease.renew_s
    return scale_subresource.ScaleClient(reaching, identity, handover_s)


def _build_state_store(
    shared: AutoscalingSection,
    cluster: scale_subresource.ScaleClient | None,
    namespace: str,
    clock: Callable[[], float],
) -> state_store.StateStore | None:
    """Build the store of the state of all loops; None where state is not saved."""
    if shared.state_file:
        return state_store.FileStateStore(Path(shared.state_file), clock=clock, time=_time)
    if cluster is not None and shared.state:
        return state_store.ConfigMapStateStore(
            cluster, namespace=namespace, name=shared.state, clock=clock, time=_time
        )
    return None


def _time() -> float:
    """Seconds since 1970."""
    return dt.datetime.now(dt.UTC).timestamp()
