"""Every plugin kind there is: the name in a configuration, and the class.

A literal table, so that it can be searched. A class here takes its parameters as keyword fields.
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import TypeVar

from extproc.errors import ConfigError
from extproc.scheduling.filters import lora_affinity as keep_lora_affinity
from extproc.scheduling.filters import max_waiting
from extproc.scheduling.pickers import (
    least_request,
    max_score,
    random,
    round_robin,
    weighted_random,
)
from extproc.scheduling.plugins import Cost, Filter, Picker, Scorer
from extproc.scheduling.scorers import (
    in_flight,
    kv_utilisation,
    lora_affinity,
    prefix_cache,
    queue_depth,
)

FILTERS: Mapping[str, type[Filter]] = {
    "lora-affinity": keep_lora_affinity.LoraAffinity,
    "max-waiting": max_waiting.MaxWaiting,
}

SCORERS: Mapping[str, type[Scorer]] = {
    "in-flight": in_flight.InFlight,
    "kv-utilisation": kv_utilisation.KvUtilisation,
    "lora-affinity": lora_affinity.LoraAffinity,
    "prefix-cache": prefix_cache.PrefixCache,
    "queue-depth": queue_depth.QueueDepth,
}

COSTS: Mapping[str, type[Cost]] = {}

PICKERS: Mapping[str, type[Picker]] = {
    "least-request": least_request.LeastRequest,
    "max-score": max_score.MaxScore,
    "random": random.Random,
    "round-robin": round_robin.RoundRobin,
    "weighted-random": weighted_random.WeightedRandom,
}

Found = TypeVar("Found")


def find(table: Mapping[str, type[Found]], kind: str, *, where: str) -> type[Found]:
    """Look a kind up.

    Args:
        table: One of `FILTERS`, `SCORERS`, `COSTS`, `PICKERS`, perhaps with out-of-tree kinds added.
        kind: The kind asked for.
        where: File and path the kind was read from, for the error.

    Raises:
        ConfigError: No plugin of that kind; names the nearest one.
    """
    found = table.get(kind)
    if found is None:
        near = get_close_matches(kind, table, n=1, cutoff=0.0)
        raise ConfigError(
            where,
            wanted=f"one of {', '.join(sorted(table))}",
            found=kind,
            fix=f"did you mean {near[0]}?" if near else "add the kind to the catalogue",
        )
    return found
