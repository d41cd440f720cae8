"""Registry of what a configuration names: plugin kinds with their classes, and strategies.

Literal tables, so that they can be searched. A class takes its parameters as keyword fields. Kinds
that the upstream endpoint picker has go by its name, with its formulas and parameter names, those
of llm-d-router v0.10.0, so that its configurations load as they are. Docstrings of such plugins
name the file they reproduce, below `pkg/epp/framework/plugins/scheduling` of
https://github.com/llm-d/llm-d-router at that tag.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from difflib import get_close_matches
from types import MappingProxyType
from typing import TypeVar, cast

import msgspec

from extproc.errors import ConfigError
from extproc.scheduling import (
    attributes,
    disaggregation,
    filter_tree,
    labels,
    load_bounds,
    load_scorers,
    lora_affinity,
    pickers,
    plugin_guard,
    prefix_affinity,
    session_affinity,
)
from extproc.scheduling.disaggregation import Decider
from extproc.scheduling.estimated_time import EstimatedTime
from extproc.scheduling.filter_tree import FilterChain
from extproc.scheduling.framework import CostModel, Filter, Picker, Scorer
from extproc.scheduling.lmetric import LMetric
from extproc.scheduling.load_bounds import KvRange, QueueRange, TopK
from extproc.scheduling.load_scorers import InFlight, KvCacheUtilizationScorer, QueueScorer
from extproc.scheduling.lora_affinity import AdapterCapable, LoraAffinityFilter, LoraAffinityTiers
from extproc.scheduling.pickers import (
    LeastRequest,
    MaxScorePicker,
    PrefixHash,
    RandomPicker,
    Rendezvous,
    RoundRobin,
)
from extproc.scheduling.prefix_affinity import PrefixCacheScorer
from extproc.scheduling.profile import SchedulerProfile

PluginT = TypeVar("PluginT")

#: Further kinds of a class, to the kind it has itself.
ALIASES: Mapping[str, str] = MappingProxyType(
    {
        "kv-utilization": "kv-cache-utilization-scorer",
        "max-score": "max-score-picker",
        "prefix-cache": "prefix-cache-scorer",
        "queue-depth": "queue-scorer",
        "random": "random-picker",
        "weighted-random": "weighted-random-picker",
    }
)


def aliases_of(kind: str) -> list[str]:
    """The further kinds of a class with that kind, sorted."""
    return sorted(alias for alias, own_kind in ALIASES.items() if own_kind == kind)


def _with_aliases(table: Mapping[str, type[PluginT]]) -> Mapping[str, type[PluginT]]:
    """The table, and its classes under their aliases."""
    aliases = {alias: table[kind] for alias, kind in ALIASES.items() if kind in table}
    return MappingProxyType({**table, **aliases})


FILTERS: Mapping[str, type[Filter]] = {
    "adapter-active": lora_affinity.AdapterActive,
    "adapter-capable": lora_affinity.AdapterCapable,
    "adapter-soft-affinity": lora_affinity.AdapterSoftAffinity,
    "by-label": labels.ByLabel,
    "can-accept-adapter": lora_affinity.CanAcceptAdapter,
    "concurrency-detector": load_bounds.ConcurrencyDetector,
    "context-length-aware": labels.ContextLengthAware,
    "conversation-affinity": prefix_affinity.ConversationAffinity,
    "critical-request": filter_tree.CriticalRequest,
    "decode-filter": labels.DecodeFilter,
    "drop-request": filter_tree.DropRequest,
    "encode-filter": labels.EncodeFilter,
    "endpoint-attribute-filter": attributes.EndpointAttributeFilter,
    "filter-chain": filter_tree.FilterChain,
    "header-based-testing-filter": session_affinity.HeaderBasedTestingFilter,
    "kv-range": load_bounds.KvRange,
    "label-selector-filter": labels.LabelSelectorFilter,
    "lora-affinity": lora_affinity.LoraAffinityFilter,
    "low-cost-adapter": lora_affinity.LowCostAdapter,
    "low-latency": load_bounds.LowLatency,
    "max-waiting": load_bounds.MaxWaiting,
    "prefill-filter": labels.PrefillFilter,
    "prefix-cache-affinity-filter": prefix_affinity.PrefixCacheAffinityFilter,
    "queue-range": load_bounds.QueueRange,
    "session-affinity-filter": session_affinity.SessionAffinityFilter,
    "sheddable-capacity": load_bounds.SheddableCapacity,
    "top-k": load_bounds.TopK,
    "topology-affinity-filter": labels.TopologyAffinityFilter,
    "tree": filter_tree.FilterTree,
    "utilization-detector": load_bounds.UtilizationDetector,
    "utilization-filter": load_bounds.UtilizationFilter,
}

SCORERS: Mapping[str, type[Scorer]] = _with_aliases(
    {
        "active-request-scorer": load_scorers.ActiveRequestScorer,
        "context-length-aware": labels.ContextLengthAware,
        "endpoint-attribute-scorer": attributes.EndpointAttributeScorer,
        "header-label-affinity-scorer": labels.HeaderLabelAffinityScorer,
        "in-flight": load_scorers.InFlight,
        "kv-cache-utilization-scorer": load_scorers.KvCacheUtilizationScorer,
        "latency-scorer": load_scorers.LatencyScorer,
        "load-aware-scorer": load_scorers.LoadAwareScorer,
        "lora-affinity": lora_affinity.LoraAffinityTiers,
        "lora-affinity-scorer": lora_affinity.LoraAffinityScorer,
        "mm-embeddings-cache-scorer": prefix_affinity.MmEmbeddingsCacheScorer,
        "no-hit-lru-scorer": prefix_affinity.NoHitLruScorer,
        "prefix-cache-scorer": prefix_affinity.PrefixCacheScorer,
        "queue-scorer": load_scorers.QueueScorer,
        "running-requests-size-scorer": load_scorers.RunningRequestsSizeScorer,
        "session-affinity-scorer": session_affinity.SessionAffinityScorer,
        "token-load-scorer": load_scorers.TokenLoadScorer,
        "topology-affinity-scorer": labels.TopologyAffinityScorer,
    }
)

COSTS: Mapping[str, type[CostModel]] = {
    "estimated-time": EstimatedTime,
    "lmetric": LMetric,
}

PICKERS: Mapping[str, type[Picker]] = _with_aliases(
    {
        "least-request": pickers.LeastRequest,
        "max-score-picker": pickers.MaxScorePicker,
        "prefix-hash": pickers.PrefixHash,
        "random-picker": pickers.RandomPicker,
        "rendezvous": pickers.Rendezvous,
        "round-robin": pickers.RoundRobin,
        "weighted-random-picker": pickers.WeightedRandomPicker,
    }
)

#: As upstream, each decides for any stage.
DECIDERS: Mapping[str, type[Decider]] = {
    "always-disagg-multimodal-decider": disaggregation.AlwaysMultimodal,
    "always-disagg-pd-decider": disaggregation.AlwaysPrefill,
    "estimated-time-pd-decider": disaggregation.EstimatedTimeDecider,
    "prefix-based-pd-decider": disaggregation.PrefixBased,
}

#: Without external classes.
_NO_EXTERNAL_PLUGINS: Mapping[type, str] = {}


class PluginRegistry(msgspec.Struct, frozen=True):
    """The kinds one configuration may name.

    Attributes:
        filters: Kind to class.
        scorers: Kind to class.
        costs: Kind to class.
        pickers: Kind to class.
        external: Classes of third parties, with the file or package they are from.
        guards: Clock and counters for external plugins; None leaves them unguarded, for checks
            of a profile without routing.
    """

    filters: Mapping[str, type[Filter]]
    scorers: Mapping[str, type[Scorer]]
    costs: Mapping[str, type[CostModel]]
    pickers: Mapping[str, type[Picker]]
    external: Mapping[type, str] = _NO_EXTERNAL_PLUGINS
    guards: plugin_guard.GuardFactory | None = None

    def with_guard(self, plugin: PluginT) -> PluginT:
        """The plugin, behind a guard if its class is external."""
        if self.guards is None or type(plugin) not in self.external:
            return plugin
        return cast("PluginT", plugin_guard.GuardedPlugin(plugin, self.guards))


#: The registry without external plugins.
BUILT_IN = PluginRegistry(FILTERS, SCORERS, COSTS, PICKERS)


def find(table: Mapping[str, type[PluginT]], kind: str, *, where: str) -> type[PluginT]:
    """Look a kind up.

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


def profiles() -> Mapping[str, SchedulerProfile]:
    """The named profiles, made anew at each call: round robin keeps its place in its picker.

    The weights of `balanced` compare five unlike qualities. Each is a number of points; the
    reasons name the trade that fixes it. Take prefix 3 as the yardstick: a fully cached prompt is worth
    three points.

    - in-flight 4: more than prefix, so that no cached prefix holds an endpoint for ever, even while
      nothing is scraped. A full match survives until its holder has about 24 requests more than an
      idle one (4 * (1 - 8/(8 + 24)) = 3); half a match until 5 more, a tenth until 1 more.
    - kv-cache-utilization-scorer 2: a holder at 90 % gives up half a point to one at 65 %. Enough to
      decide between equals and to move short matches, not enough to scatter conversations.
    - queue-scorer 1, over a span of at least 8 requests: dead-reckoned requests count the queue already;
      this adds that waiting is worse than running. With a span of 1, one waiting request would cost as
      much as a third of the prompt.
    - lora-affinity 6: where the adapter is loaded beats where there is room by 1.2 points, about the
      load of 4 requests on an idle endpoint, and beats full slots by 6, so an adapter is forced into a
      full endpoint only when its holders drown. It must outweigh a KV difference of one half
      (docs/reference/protocol-conformance.md#point-118). It is the same for all candidates when the base
      model is requested.

    The weights of `weighted` are those the upstream picker takes without a configuration: queue 2, KV 2
    and prefix 3, since with 1 each two load signals outvote a cached prompt.
    """
    balanced = SchedulerProfile(
        name="balanced",
        filters=(),
        scorers=(
            (InFlight(), 4.0),
            (QueueScorer(min_span_requests=8.0), 1.0),
            (KvCacheUtilizationScorer(), 2.0),
            (PrefixCacheScorer(), 3.0),
            (LoraAffinityTiers(), 6.0),
        ),
        picker=MaxScorePicker(),
    )
    weighted = SchedulerProfile(
        name="weighted",
        filters=(),
        scorers=(
            (QueueScorer(), 2.0),
            (KvCacheUtilizationScorer(), 2.0),
            (PrefixCacheScorer(), 3.0),
        ),
        picker=MaxScorePicker(),
    )
    plain = (
        SchedulerProfile("least-request", (), (), LeastRequest()),
        SchedulerProfile("round-robin", (), (), RoundRobin()),
        SchedulerProfile("random", (), (), RandomPicker()),
        SchedulerProfile("lmetric", (), (), MaxScorePicker(), LMetric()),
        SchedulerProfile("adaptive", (), (), Rendezvous(), EstimatedTime()),
    )
    named = (balanced, weighted, *plain, *_gateway(), *_kubeai())
    return MappingProxyType({profile.name: profile for profile in named})


def _gateway() -> tuple[SchedulerProfile, ...]:
    """The strategies of the first llm-instance-gateway (docs/spec/prior-systems.md#filter-tree)."""
    queue, kv = TopK(by="waiting", k=1), TopK(by="kv_usage", k=1)
    affinity = LoraAffinityFilter(max_waiting_requests=math.inf)
    return (
        SchedulerProfile("least-queue", (queue,), (), RandomPicker()),
        SchedulerProfile("least-kv-cache", (kv,), (), RandomPicker()),
        SchedulerProfile("queue-kv", (QueueRange(), KvRange()), (), RandomPicker()),
        SchedulerProfile("lora-queue", (affinity, queue), (), RandomPicker()),
        SchedulerProfile("lora-kv", (affinity, kv), (), RandomPicker()),
        *(
            SchedulerProfile(name, (FilterChain(),), (), RandomPicker())
            for name in ("filter-chain", "maximum")
        ),
    )


def _kubeai() -> tuple[SchedulerProfile, ...]:
    """The strategies of KubeAI (docs/spec/prior-systems.md#kubeai)."""
    return (
        SchedulerProfile("least-load", (AdapterCapable(),), (), LeastRequest(full_scan=True)),
        SchedulerProfile("prefix-hash", (), (), PrefixHash()),
    )
