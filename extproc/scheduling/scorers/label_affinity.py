"""Scorers of endpoint labels: equality with a header, distance to a peer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar

import msgspec

from extproc.endpoint import Candidate, Endpoint
from extproc.scheduling import labels
from extproc.scheduling.framework import SchedulingContext, Signal


class HeaderLabelAffinityScorer(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, rename="camel"
):
    """1 where the label equals the header's value, 0 elsewhere; 0 everywhere without the header.

    A missing label counts as unequal. Upstream: `scorer/headerlabelaffinity/plugin.go`.

    Attributes:
        header_name: Request header with the wanted value.
        label_key: Label of endpoints it is compared with.
        stamp_response_header: Send the client the label of the endpoint that served, in a header of
            the same name. True, the upstream default, lets a caller carry it to the next request.
    """

    kind: ClassVar[str] = "header-label-affinity-scorer"
    needs: ClassVar[frozenset[Signal]] = frozenset({Signal.HEADERS, Signal.LABELS})

    header_name: Annotated[str, msgspec.Meta(min_length=1)]
    label_key: Annotated[str, msgspec.Meta(min_length=1)]
    stamp_response_header: bool = True

    def score(self, context: SchedulingContext, candidates: Sequence[Candidate]) -> list[float]:
        """See the class."""
        header_value = context.headers.get(self.header_name.lower(), "")
        return [
            float(bool(header_value) and c.endpoint.labels.get(self.label_key) == header_value)
            for c in candidates
        ]

    def answer_headers(
        self, context: SchedulingContext, chosen: Endpoint
    ) -> Sequence[tuple[str, str]]:
        """The label of the endpoint that serves."""
        label = chosen.labels.get(self.label_key, "")
        return ((self.header_name.lower(), label),) if label and self.stamp_response_header else ()


#: Scores by nearest level in common, after the speed at which KV blocks move: one machine, one
#: switch, one zone, one region, nothing.
SCORES = (1.0, 0.20, 0.05, 0.02, 0.0)


class TopologyAffinityScorer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Same host 1, same rack 0.20, same zone 0.05, same region 0.02, otherwise 0.

    The other machine is named by the request header `x-peer-topology`; without it all score
    0. The upstream picker knows it from having picked the decode endpoint in the same context, which
    this picker does not do. The location of an endpoint stands in its labels: `kubernetes.io/hostname`,
    `topology.kubernetes.io/rack`, `.../zone` and `.../region`, or `host`, `rack`, `zone` and
    `region`. A missing label is nothing in common. Upstream: `scorer/topologyaffinity/scorer.go`.
    """

    kind: ClassVar[str] = "topology-affinity-scorer"
    needs: ClassVar[frozenset[Signal]] = frozenset({Signal.HEADERS, Signal.LABELS})

    def score(self, context: SchedulingContext, candidates: Sequence[Candidate]) -> list[float]:
        """See the class."""
        peer = labels.parse_topology(context.headers.get(labels.PEER_HEADER, ""))
        if not peer:
            return [0.0] * len(candidates)
        return [SCORES[labels.distance(peer, labels.location_of(c.endpoint))] for c in candidates]
