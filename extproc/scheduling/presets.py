"""Presets: the scheduling profiles that a strategy names in a word.

The weights of `balanced` compare five unlike qualities. Each is a number of points; the
reasons name the trade that fixes it. Take prefix 3 as the yardstick: a fully cached prompt is worth
three points.

- in-flight 4: more than prefix, so that no cached prefix holds an endpoint for ever, even while
  nothing is scraped. A full match survives until its holder has about 24 requests more than an
  idle one (4 * (1 - 8/(8 + 24)) = 3); half a match until 5 more, a tenth until 1 more.
- kv-cache-utilization-scorer 2: a holder at 90 % gives up half a point to one at 65 %. Enough to decide between
  equals and to move short matches, not enough to scatter conversations.
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

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType

from extproc.scheduling.costs import EstimatedTime, LMetric
from extproc.scheduling.filter_tree import FilterChain
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


def profiles() -> Mapping[str, SchedulerProfile]:
    """The named profiles, made anew at each call: round robin keeps its place in its picker."""
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
