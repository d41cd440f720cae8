"""Plugin kinds under the names the upstream endpoint picker gives them.

Formulas and parameter names are those of llm-d-router 0.10, so that its configurations load as
they are. Part of the catalogue, which is where to look things up.
"""

from __future__ import annotations

from collections.abc import Mapping

from extproc.scheduling.filters import (
    by_label,
    concurrency_detector,
    decode_filter,
    encode_filter,
    endpoint_attribute_filter,
    header_based_testing_filter,
    label_selector_filter,
    prefill_filter,
    prefix_cache_affinity_filter,
    session_affinity_filter,
    topology_affinity_filter,
    utilization_detector,
    utilization_filter,
)
from extproc.scheduling.filters.context_length_aware import ContextLengthAwareFilter
from extproc.scheduling.framework import Filter, Picker, Scorer
from extproc.scheduling.pickers import max_score_picker, random_picker, weighted_random_picker
from extproc.scheduling.scorers import (
    active_request_scorer,
    context_length_aware,
    endpoint_attribute_scorer,
    header_label_affinity_scorer,
    kv_cache_utilization_scorer,
    latency_scorer,
    load_aware_scorer,
    lora_affinity_scorer,
    no_hit_lru_scorer,
    prefix_cache_scorer,
    queue_scorer,
    running_requests_size_scorer,
    session_affinity_scorer,
    token_load_scorer,
    topology_affinity_scorer,
)

FILTERS: Mapping[str, type[Filter]] = {
    "by-label": by_label.ByLabel,
    "concurrency-detector": concurrency_detector.ConcurrencyDetector,
    "context-length-aware": ContextLengthAwareFilter,
    "decode-filter": decode_filter.DecodeFilter,
    "encode-filter": encode_filter.EncodeFilter,
    "endpoint-attribute-filter": endpoint_attribute_filter.EndpointAttributeFilter,
    "header-based-testing-filter": header_based_testing_filter.HeaderBasedTestingFilter,
    "label-selector-filter": label_selector_filter.LabelSelectorFilter,
    "prefill-filter": prefill_filter.PrefillFilter,
    "prefix-cache-affinity-filter": prefix_cache_affinity_filter.PrefixCacheAffinityFilter,
    "session-affinity-filter": session_affinity_filter.SessionAffinityFilter,
    "topology-affinity-filter": topology_affinity_filter.TopologyAffinityFilter,
    "utilization-detector": utilization_detector.UtilizationDetector,
    "utilization-filter": utilization_filter.UtilizationFilter,
}

SCORERS: Mapping[str, type[Scorer]] = {
    "active-request-scorer": active_request_scorer.ActiveRequestScorer,
    "context-length-aware": context_length_aware.ContextLengthAwareScorer,
    "endpoint-attribute-scorer": endpoint_attribute_scorer.EndpointAttributeScorer,
    "header-label-affinity-scorer": header_label_affinity_scorer.HeaderLabelAffinityScorer,
    "kv-cache-utilization-scorer": kv_cache_utilization_scorer.KvCacheUtilizationScorer,
    "latency-scorer": latency_scorer.LatencyScorer,
    "load-aware-scorer": load_aware_scorer.LoadAwareScorer,
    "lora-affinity-scorer": lora_affinity_scorer.LoraAffinityScorer,
    "no-hit-lru-scorer": no_hit_lru_scorer.NoHitLruScorer,
    "prefix-cache-scorer": prefix_cache_scorer.PrefixCacheScorer,
    "queue-scorer": queue_scorer.QueueScorer,
    "running-requests-size-scorer": running_requests_size_scorer.RunningRequestsSizeScorer,
    "session-affinity-scorer": session_affinity_scorer.SessionAffinityScorer,
    "token-load-scorer": token_load_scorer.TokenLoadScorer,
    "topology-affinity-scorer": topology_affinity_scorer.TopologyAffinityScorer,
}

PICKERS: Mapping[str, type[Picker]] = {
    "max-score-picker": max_score_picker.MaxScorePicker,
    "random-picker": random_picker.RandomPicker,
    "weighted-random-picker": weighted_random_picker.WeightedRandomPicker,
}
