"""Every plugin kind there is: the name in a configuration, and the class.

A literal table, so that it can be searched. A class here takes its parameters as keyword fields.
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import TypeVar, cast

import msgspec

from extproc.errors import ConfigError
from extproc.scheduling import filter_chain, filter_tree, plugin_guard, upstream
from extproc.scheduling.costs import estimated_time, lmetric
from extproc.scheduling.filters import (
    adapter_active,
    adapter_capable,
    adapter_soft_affinity,
    can_accept_adapter,
    conversation_affinity,
    critical_request,
    drop_request,
    kv_range,
    low_cost_adapter,
    low_latency,
    max_waiting,
    queue_range,
    sheddable_capacity,
    top_k,
)
from extproc.scheduling.filters.lora_affinity import LoraAffinityFilter
from extproc.scheduling.framework import CostModel, Filter, Picker, Scorer
from extproc.scheduling.pickers import (
    least_request,
    max_score,
    prefix_hash,
    random,
    rendezvous,
    round_robin,
    weighted_random,
)
from extproc.scheduling.scorers import (
    in_flight,
    kv_cache_utilization,
    lora_affinity,
    prefix_cache,
    queue_depth,
)

FILTERS: Mapping[str, type[Filter]] = {
    "adapter-active": adapter_active.AdapterActive,
    "adapter-capable": adapter_capable.AdapterCapable,
    "adapter-soft-affinity": adapter_soft_affinity.AdapterSoftAffinity,
    "can-accept-adapter": can_accept_adapter.CanAcceptAdapter,
    "critical-request": critical_request.CriticalRequest,
    "drop-request": drop_request.DropRequest,
    "filter-chain": filter_chain.FilterChain,
    "kv-range": kv_range.KvRange,
    "lora-affinity": LoraAffinityFilter,
    "low-cost-adapter": low_cost_adapter.LowCostAdapter,
    "low-latency": low_latency.LowLatency,
    "max-waiting": max_waiting.MaxWaiting,
    "conversation-affinity": conversation_affinity.ConversationAffinity,
    "queue-range": queue_range.QueueRange,
    "sheddable-capacity": sheddable_capacity.SheddableCapacity,
    "top-k": top_k.TopK,
    "tree": filter_tree.FilterTree,
    **upstream.FILTERS,
}

SCORERS: Mapping[str, type[Scorer]] = {
    "in-flight": in_flight.InFlight,
    "kv-utilization": kv_cache_utilization.KvCacheUtilization,
    "lora-affinity": lora_affinity.LoraAffinityTiers,
    "prefix-cache": prefix_cache.PrefixCache,
    "queue-depth": queue_depth.QueueDepth,
    **upstream.SCORERS,
}

COSTS: Mapping[str, type[CostModel]] = {
    "estimated-time": estimated_time.EstimatedTime,
    "lmetric": lmetric.LMetric,
}

PICKERS: Mapping[str, type[Picker]] = {
    "least-request": least_request.LeastRequest,
    "max-score": max_score.MaxScore,
    "prefix-hash": prefix_hash.PrefixHash,
    "random": random.Random,
    "rendezvous": rendezvous.Rendezvous,
    "round-robin": round_robin.RoundRobin,
    "weighted-random": weighted_random.WeightedRandom,
    **upstream.PICKERS,
}

PluginT = TypeVar("PluginT")

#: No class comes from outside.
_NO_EXTERNAL_PLUGINS: Mapping[type, str] = {}


class PluginRegistry(msgspec.Struct, frozen=True):
    """The kinds one configuration may name.

    Attributes:
        filters: Kind to class.
        scorers: Kind to class.
        costs: Kind to class.
        pickers: Kind to class.
        external: Classes of third parties, with the file or package they are from.
        guards: What outsiders are guarded with; None leaves them bare, which is for looking at
            them and not for routing.
    """

    filters: Mapping[str, type[Filter]]
    scorers: Mapping[str, type[Scorer]]
    costs: Mapping[str, type[CostModel]]
    pickers: Mapping[str, type[Picker]]
    external: Mapping[type, str] = _NO_EXTERNAL_PLUGINS
    guards: plugin_guard.GuardFactory | None = None

    def with_guard(self, plugin: PluginT) -> PluginT:
        """A plugin as a profile takes it: behind a guard if others wrote it."""
        if self.guards is None or type(plugin) not in self.external:
            return plugin
        return cast("PluginT", plugin_guard.GuardedPlugin(plugin, self.guards))


#: What there is without any plugin of others.
BUILT_IN = PluginRegistry(FILTERS, SCORERS, COSTS, PICKERS)


def find(table: Mapping[str, type[PluginT]], kind: str, *, where: str) -> type[PluginT]:
    """Look a kind up.

    Args:
        table: One of the tables of `PluginRegistry`.
        kind: The kind to look up.
        where: File and path the kind was read from, for the error.

    Raises:
        ConfigError: No plugin of that kind; names the nearest one.
    """
    plugin_type = table.get(kind)
    if plugin_type is None:
        near = get_close_matches(kind, table, n=1, cutoff=0.75) or [
            name for name in sorted(table) if kind and name.startswith(kind)
        ]
        raise ConfigError(
            where,
            wanted=f"one of {', '.join(sorted(table))}",
            got=kind,
            fix=f"did you mean {near[0]}?"
            if near
            else "`extproc check --plugins` lists them; a file of your own is named in plugin_files",
        )
    return plugin_type
