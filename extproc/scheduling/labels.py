"""Labels of endpoints: adapters they serve, and their place in the topology.

Adapter labels are those that KubeAI sets on its pods. A peer is written as the upstream picker's coordinator writes it: `host=n12,rack=r7,zone=a`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from extproc.endpoint import Candidate, Endpoint
from extproc.scheduling.framework import SchedulingContext

#: Before the name of an adapter that is loaded (docs/spec/prior-systems.md#adapter-names).
PREFIX = "adapter.kubeai.org/"


def adapter(context: SchedulingContext, candidates: Sequence[Candidate]) -> str:
    """The adapter of a request; empty for the base model.

    A surface that names the adapter in the model field does not say whether it is one: it is, where
    the context knows it or some candidate is labelled with that name.

    Args:
        candidates: Candidates whose labels count.
    """
    if context.adapter:
        return context.adapter
    model = context.request.model
    return model if any(PREFIX + model in c.endpoint.labels for c in candidates) else ""


def capable(adapter_name: str, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
    """The candidates that serve an adapter.

    Args:
        adapter_name: Result of `adapter`.
        candidates: Endpoints in play.

    Returns:
        All for the base model, and where no candidate carries a label of that kind.
    """
    if not adapter_name:
        return candidates
    label = PREFIX + adapter_name
    labelled = [c for c in candidates if label in c.endpoint.labels]
    if labelled:
        return labelled
    labels_exist = any(name.startswith(PREFIX) for c in candidates for name in c.endpoint.labels)
    return [] if labels_exist else candidates


#: Header in which a coordinator names the machine an earlier stage ran on.
PEER_HEADER = "x-peer-topology"

#: Levels, nearest first, and their labels; the first label that an endpoint has counts.
LEVELS: Mapping[str, tuple[str, ...]] = {
    "host": ("kubernetes.io/hostname", "host"),
    "rack": ("topology.kubernetes.io/rack", "rack"),
    "zone": ("topology.kubernetes.io/zone", "zone"),
    "region": ("topology.kubernetes.io/region", "region"),
}

#: Level to how far it is; `len(LEVELS)` stands for nothing in common.
DISTANCES: Mapping[str, int] = {level: at for at, level in enumerate(LEVELS)}


def parse_topology(text: str) -> Mapping[str, str]:
    """Parse a peer from its header; unknown levels and empty values are left out."""
    pairs = (part.partition("=") for part in text.split(","))
    levels = {key.strip(): value.strip() for key, _, value in pairs}
    return {level: levels[level] for level in LEVELS if levels.get(level)}


def location_of(endpoint: Endpoint) -> Mapping[str, str]:
    """Location of an endpoint, from its labels."""
    labels = endpoint.labels
    where = {
        level: next((labels[name] for name in names if labels.get(name)), "")
        for level, names in LEVELS.items()
    }
    return {level: value for level, value in where.items() if value}


def distance(peer: Mapping[str, str], other: Mapping[str, str]) -> int:
    """Place of the nearest level two have in common; `len(LEVELS)` when there is none."""
    for level, at in DISTANCES.items():
        value = peer.get(level)
        if value is not None and value == other.get(level):
            return at
    return len(LEVELS)
