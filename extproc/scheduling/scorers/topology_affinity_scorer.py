"""Prefers endpoints near the machine an earlier stage ran on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import msgspec

from extproc.endpoint import Candidate
from extproc.scheduling import labels
from extproc.scheduling.context import SchedulingContext
from extproc.scheduling.framework import Signal

#: Scores by nearest level in common, after the speed at which KV blocks move: one machine, one
#: switch, one zone, one region, nothing.
SCORES = (1.0, 0.20, 0.05, 0.02, 0.0)


class TopologyAffinityScorer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Same host 1, same rack 0.20, same zone 0.05, same region 0.02, otherwise 0.

    The other machine is named by the request header `x-peer-topology`; without it all score
    0. The upstream picker knows it from having picked the decode endpoint in the same turn, which
    this one does not do. Where an endpoint is stands in its labels: `kubernetes.io/hostname`,
    `topology.kubernetes.io/rack`, `.../zone` and `.../region`, or `host`, `rack`, `zone` and
    `region`. A missing label is nothing in common.
    """

    kind: ClassVar[str] = "topology-affinity-scorer"
    needs: ClassVar[frozenset[Signal]] = frozenset({Signal.HEADERS, Signal.LABELS})

    def score(self, turn: SchedulingContext, candidates: Sequence[Candidate]) -> list[float]:
        """See the class."""
        peer = labels.parse_topology(turn.headers.get(labels.PEER_HEADER, ""))
        if not peer:
            return [0.0] * len(candidates)
        return [SCORES[labels.distance(peer, labels.location_of(c.endpoint))] for c in candidates]
