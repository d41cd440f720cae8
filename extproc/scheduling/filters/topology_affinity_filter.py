"""Keeps endpoints near the machine an earlier stage ran on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

import msgspec

from extproc.endpoint import Candidate
from extproc.scheduling import labels
from extproc.scheduling.context import SchedulingContext
from extproc.scheduling.framework import Signal


class TopologyAffinityFilter(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, rename="camel"
):
    """Keeps candidates that share `minAffinity` or a nearer level with the peer; else all.

    The peer is named by a request header; without one all are kept. Where an endpoint is stands in
    its labels, see the scorer `topology-affinity-scorer`. A missing label is nothing in common.

    Attributes:
        min_affinity: `host`, `rack`, `zone` or `region`.
        peer_topology_header: Header that names the peer, as `host=n12,rack=r7`. Empty, the default,
            reads `x-peer-topology`: the upstream picker then takes the decode endpoint picked in
            the same turn, which there is none of here.
    """

    kind: ClassVar[str] = "topology-affinity-filter"
    needs: ClassVar[frozenset[Signal]] = frozenset({Signal.HEADERS, Signal.LABELS})

    min_affinity: Literal["host", "rack", "zone", "region"] = "host"
    peer_topology_header: str = ""

    def filter(
        self, turn: SchedulingContext, candidates: Sequence[Candidate]
    ) -> Sequence[Candidate]:
        """See the class."""
        header = self.peer_topology_header.lower() or labels.PEER_HEADER
        peer = labels.parse_topology(turn.headers.get(header, ""))
        furthest = labels.DISTANCES[self.min_affinity]
        near = [
            c
            for c in candidates
            if labels.distance(peer, labels.location_of(c.endpoint)) <= furthest
        ]
        return near or candidates
