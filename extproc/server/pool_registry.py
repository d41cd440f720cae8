"""Registry of all pools: configured pools and pools discovered in Kubernetes."""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from extproc.config import pool_annotations, pools, profile_builder
from extproc.config.settings import Settings
from extproc.discovery.endpoint_list import DiscoveredPool
from extproc.errors import ConfigError
from extproc.pool.snapshot import Pool
from extproc.routing import pool_match
from extproc.routing.pool_selector import PoolSelector
from extproc.scheduling.shadow import ShadowScheduler
from extproc.server.flow_control_shell import AsyncFlowController
from extproc.server.health import H2C, SUPPORTED_APP_PROTOCOLS
from extproc.server.pool_runtime import PoolRuntime, RuntimeContext
from extproc.supervision import Supervisor
from extproc.telemetry.pool_state import PoolView

#: Comparisons of conditions when pools are connected (count), a few tens of milliseconds of the event
#: loop: a hundred pools with a host each need half of it, and with 64 hosts each a thousand times
#: more.
_MAX_COMPARISONS: Final = 20_000

_log = logging.getLogger("extproc.server")


class PoolRegistry:
    """All pools, and the pool selector over them.

    Args:
        configured: Names of configured pools by their keys in Kubernetes discovery.
        is_discovery_synced: Returns True once Kubernetes discovery is complete, or is not used.

    Raises:
        ConfigError: A profile cannot be built.

    Attributes:
        flow_controllers: Flow control by name of the pool; none where it is disabled.
    """

    def __init__(
        self,
        settings: Settings,
        shared: RuntimeContext,
        *,
        configured: Mapping[str, str],
        is_discovery_synced: Callable[[], bool],
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self._settings = settings
        self._shared = shared
        self._configured = configured
        self._is_discovery_synced = is_discovery_synced
        self._changed = asyncio.Event()
        self.by_name = {plan.name: PoolRuntime(plan, shared) for plan in pools.pool_plans(settings)}
        #: Of these, the ones that are no longer there when Kubernetes says so.
        self._discovered: set[str] = set()
        self.pool_selector = PoolSelector()
        self.flow_controllers: dict[str, AsyncFlowController] = {}
        self._change_listeners = [on_change]
        self._rebuild_selector()

    @property
    def supervisor(self) -> Supervisor:
        """Keeps loops alive."""
        return self._shared.supervisor

    @property
    def synced(self) -> bool:
        """True once all pools are discovered, and a pool exists if any is configured."""
        runtimes = self.by_name.values()
        return (
            self._is_discovery_synced()
            and all(runtime.parts.store.synced for runtime in runtimes)
            and (not runtimes or any(runtime.exists for runtime in runtimes))
        )

    def add_change_listener(self, on_change: Callable[[], None]) -> None:
        """Call a function after every change from Kubernetes discovery."""
        self._change_listeners.append(on_change)

    @property
    def is_discovery_synced(self) -> bool:
        """True once Kubernetes discovery is complete, or is not used."""
        return self._is_discovery_synced()

    @property
    def discovered(self) -> Mapping[str, PoolRuntime]:
        """Runtimes of pools from Kubernetes discovery, by name."""
        return {name: self.by_name[name] for name in self._discovered}

    @property
    def protocols_supported(self) -> bool:
        """True if the protocol of any pool is supported; an unsupported pool blocks no other."""
        runtimes = self.by_name.values()
        return not runtimes or any(
            runtime.app_protocol in SUPPORTED_APP_PROTOCOLS for runtime in runtimes
        )

    @property
    def h2c(self) -> frozenset[str]:
        """Names of the pools whose engines speak HTTP/2 without TLS."""
        return frozenset(
            name for name, runtime in self.by_name.items() if runtime.app_protocol == H2C
        )

    @property
    def profile(self) -> str:
        """Names of the scheduling profiles in force, each once."""
        return ",".join(dict.fromkeys(runtime.profile for runtime in self.by_name.values()))

    def labels(self) -> dict[str, str]:
        """Labels of the process: the name of a single pool, and the profiles."""
        return {"pool": self._settings.pool.name, "profile": self.profile}

    @property
    def max_prompt_bytes(self) -> int:
        """Longest part of a prompt that any pool hashes."""
        schedules = [runtime.parts.settings.prefix.schedule for runtime in self.by_name.values()]
        return max((schedule.limit_bytes for schedule in schedules), default=0)

    def pools(self) -> Mapping[str, Pool]:
        """Current pool snapshots by name."""
        return {name: runtime.parts.store.pool for name, runtime in self.by_name.items()}

    def views(self) -> Mapping[str, PoolView]:
        """Views of all pools for the metrics page."""
        return {name: runtime.view for name, runtime in self.by_name.items()}

    def gauges(self) -> Mapping[str, Callable[[], float]]:
        """Gauges of all pools together, by name."""
        return {
            "extproc_prefix_index_blocks": lambda: sum(
                runtime.parts.index.blocks_total for runtime in self.by_name.values()
            ),
            "extproc_prefix_index_bytes": lambda: sum(
                runtime.parts.index.bytes_estimate() for runtime in self.by_name.values()
            ),
        }

    def shadows(self) -> Mapping[str, ShadowScheduler]:
        """Shadows by name of their pool; pools without one are left out."""
        return {
            name: shadow
            for name, runtime in self.by_name.items()
            if (shadow := runtime.parts.director.routing.shadow) is not None
        }

    async def sync(self) -> None:
        """Load the endpoints of configured pools.

        Raises:
            ConfigError: An endpoints file cannot be read.
        """
        for runtime in self.by_name.values():
            await runtime.sync()

    async def run(self) -> None:
        """Run all pools, as they come and go, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            running: dict[str, tuple[PoolRuntime, asyncio.Task[None]]] = {}
            while True:
                self._changed.clear()
                self._update_tasks(tasks, running)
                await self._changed.wait()

    def _update_tasks(
        self,
        tasks: asyncio.TaskGroup,
        running: dict[str, tuple[PoolRuntime, asyncio.Task[None]]],
    ) -> None:
        """Stop the tasks of removed pools, and start those of new ones.

        Not in `run`, whose variables would hold the last removed pool until the next change.
        """
        for name, (runtime, task) in list(running.items()):
            if self.by_name.get(name) is not runtime:
                task.cancel()
                del running[name]
        for name, runtime in self.by_name.items():
            if name not in running:
                supervised = self._shared.supervisor.keep("pools", runtime.run, instance=name)
                running[name] = runtime, tasks.create_task(supervised, name=f"pool {name}")

    def on_pools_changed(
        self, changed: Mapping[str, DiscoveredPool], removed: Iterable[str]
    ) -> None:
        """Apply changes from Kubernetes discovery.

        Args:
            changed: Pools that are new or other than before, by its keys.
            removed: Keys of pools that are no longer followed.
        """
        call = self._shared.supervisor.call
        before = self._match_order_inputs()
        for key, discovered in changed.items():
            # A failure of a pool must not affect the other pools.
            call("pools", functools.partial(self._apply_discovered, key, discovered), instance=key)
        for key in removed:
            if key in self._discovered:
                self._discovered.discard(key)
                call("pools", self.by_name.pop(key).close, instance=key)
                _log.info("pool %s is no longer served", key)
        if before != self._match_order_inputs():
            self._rebuild_selector()
            self._changed.set()
        for on_change in self._change_listeners:
            call("pools", on_change)

    def prepare_reload(self, settings: Settings) -> Callable[[], None]:
        """Validate and build other settings; the returned function applies them.

        Pools that are written out keep their sources; which pools there are changes with a restart.

        Raises:
            ConfigError: A profile cannot be built; nothing was changed.
        """
        if settings.cluster.discover_pools != "none":
            # A pool that is discovered later is built with these rules, and none may be there yet.
            profile_builder.build_profile(settings, where="the configuration")
        plans = {plan.name: plan for plan in pools.pool_plans(settings)}
        grants: dict[str, pool_annotations.MatchGrant] = {}
        for name in self._discovered:
            rules, annotations = settings.cluster.match_rules, self.by_name[name].annotations
            grant = grants[name] = pool_annotations.grant_match(rules, name, annotations)
            plans[name] = pools.discovered_pool_plan(settings, name, grant.match)
        steps = [
            runtime.prepare_reload(plans[name])
            for name, runtime in self.by_name.items()
            if name in plans
        ]

        def adopt() -> None:
            self._settings = settings
            for step in steps:
                step()
            for name, grant in grants.items():
                self.by_name[name].grant_match(grant)
            self._rebuild_selector()

        return adopt

    def _apply_discovered(self, key: str, discovered: DiscoveredPool) -> None:
        name = self._configured.get(key)
        runtime = self._find_or_create(key, discovered) if name is None else self.by_name[name]
        if runtime is not None:
            runtime.on_discovered(discovered)

    def _find_or_create(self, key: str, discovered: DiscoveredPool) -> PoolRuntime | None:
        rules = self._settings.cluster.match_rules
        grant = pool_annotations.grant_match(rules, key, discovered.annotations)
        runtime = self.by_name.get(key)
        if runtime is not None:
            runtime.grant_match(grant)
            return runtime
        try:
            runtime = PoolRuntime(
                pools.discovered_pool_plan(self._settings, key, grant.match), self._shared
            )
        except ConfigError as error:  # the same settings were built at start
            _log.error("pool %s cannot be served: %s", key, error)
            return None
        self.by_name[key] = runtime
        self._discovered.add(key)
        _log.info("pool %s is served", key)
        runtime.grant_match(grant)
        return runtime

    def _match_order_inputs(self) -> Mapping[str, object]:
        """Inputs of the order of pools, by name."""
        return {name: (runtime.match, runtime.created) for name, runtime in self.by_name.items()}

    def _find_overlaps(self, ordered: Sequence[str]) -> None:
        """Record for each discovered pool an earlier pool with an overlapping match.

        Beyond `_MAX_COMPARISONS` the youngest pools are not compared: which pool takes a request
        does not depend on it.
        """
        matching = [self.by_name[name] for name in ordered if not self.by_name[name].match.is_empty]
        comparisons_left = _MAX_COMPARISONS
        for position, runtime in enumerate(matching):
            if runtime.name not in self._discovered:
                continue
            overlapping = ""
            for earlier in itertools.islice(matching, position):
                comparisons_left -= pool_match.num_comparisons(earlier.match, runtime.match)
                if comparisons_left < 0:
                    break
                if pool_match.overlaps(earlier.match, runtime.match):
                    overlapping = earlier.name
                    break
            runtime.note_overlap(overlapping)

    def _rebuild_selector(self) -> None:
        """Order configured pools first, then discovered pools by age, and select by that.

        The creator of a pool chooses its name, but not its time of creation.
        """
        flow_controllers = {
            name: runtime.flow_controller
            for name, runtime in self.by_name.items()
            if runtime.flow_controller is not None
        }
        self.flow_controllers.clear()
        self.flow_controllers.update(flow_controllers)
        # An object of unknown age is taken for the youngest.
        by_age = sorted(
            self._discovered, key=lambda name: (self.by_name[name].created or "~", name)
        )
        ordered = [name for name in self.by_name if name not in self._discovered] + by_age
        self._find_overlaps(ordered)
        self.pool_selector.reconfigure(
            [self.by_name[name].pool_route for name in ordered],
            list_models=self._settings.responses.list_models,
            parse_bodies=self._settings.parse_bodies,
        )
