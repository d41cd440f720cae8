"""Labels that say which adapters an endpoint serves, as KubeAI sets them on its pods.

Context length label: the range of prompt tokens an endpoint is for, such as `0-2048`.

Topology distance between machines, by the labels of endpoints.

A peer is written as the upstream picker's coordinator writes it: `host=n12,rack=r7,zone=a`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import msgspec

from extproc.endpoint import Candidate, Endpoint
from extproc.scheduling.context import SchedulingContext

#: Before the name of an adapter that is loaded (docs/spec/prior-systems.md#adapter-names).
PREFIX = "adapter.kubeai.org/"


def adapter(turn: SchedulingContext, candidates: Sequence[Candidate]) -> str:
    """The adapter of a request; empty for the base model.

    A surface that names the adapter in the model field does not say whether it is one: it is, where
    the turn knows it or some candidate is labelled with that name.

    Args:
        turn: The turn.
        candidates: Whose labels count.
    """
    if turn.adapter:
        return turn.adapter
    model = turn.request.model
    return model if any(PREFIX + model in c.endpoint.labels for c in candidates) else ""


def capable(wanted: str, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
    """The candidates that serve an adapter.

    Args:
        wanted: From `adapter`.
        candidates: Endpoints in play.

    Returns:
        All for the base model, and where no candidate carries a label of that kind.
    """
    if not wanted:
        return candidates
    label = PREFIX + wanted
    labelled = [c for c in candidates if label in c.endpoint.labels]
    if labelled:
        return labelled
    spoken = any(name.startswith(PREFIX) for c in candidates for name in c.endpoint.labels)
    return [] if spoken else candidates


LABEL = "llm-d.ai/context-length-range"

_RANGE = re.compile(r"\s*(\d+)\s*-\s*(\d+)\s*", re.ASCII)


class Range(msgspec.Struct, frozen=True):
    """Prompt lengths in tokens, both ends included.

    Attributes:
        low: Shortest.
        high: Longest.
    """

    low: int
    high: int

    def __contains__(self, length: int) -> bool:
        """True if the range includes a prompt length."""
        return self.low <= length <= self.high

    @property
    def width(self) -> int:
        """Tokens between the ends."""
        return self.high - self.low

    def distance(self, length: int) -> int:
        """Tokens from a length to the nearer end; 0 inside."""
        return max(self.low - length, length - self.high, 0)


def parse_context_range(text: str) -> Range | None:
    """Parse a range from its label; None when the label is no range."""
    match = _RANGE.fullmatch(text)
    if match is None:
        return None
    low, high = int(match[1]), int(match[2])
    return Range(low, high) if low <= high else None


#: Header in which a coordinator names the machine an earlier stage ran on.
PEER_HEADER = "x-peer-topology"

#: Levels, nearest first, and the labels that tell them; the first label there is counts.
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
