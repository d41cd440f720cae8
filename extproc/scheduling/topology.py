"""Topology distance between machines, by the labels of endpoints.

A peer is written as the upstream picker's coordinator writes it: `host=n12,rack=r7,zone=a`.
"""

from __future__ import annotations

from collections.abc import Mapping

from extproc.endpoint import Endpoint

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


def parse(text: str) -> Mapping[str, str]:
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
