"""Filters of endpoint labels: role, label values, label selector, distance to a peer."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Annotated, ClassVar, Literal

import msgspec

from extproc.endpoint import Candidate
from extproc.scheduling import labels
from extproc.scheduling.framework import SchedulingContext, Signal


class RoleFilter(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Keeps candidates whose label `llm-d.ai/role` names a stage of inference; base of three kinds.

    Upstream: `filter/bylabel/roles.go`.
    """

    needs: ClassVar[frozenset[Signal]] = frozenset({Signal.LABELS})
    #: Values of the label that pass.
    roles: ClassVar[frozenset[str]]
    #: Whether candidates without the label pass.
    allows_no_label: ClassVar[bool] = False

    def filter(
        self, context: SchedulingContext, candidates: Sequence[Candidate]
    ) -> Sequence[Candidate]:
        """See the class."""
        return _with_label_value(
            candidates, "llm-d.ai/role", self.roles, allows_no_label=self.allows_no_label
        )


class DecodeFilter(RoleFilter, frozen=True):
    """Keeps engines that decode: without the label `llm-d.ai/role`, or with a role that decodes.

    Roles: `decode`, `prefill-decode`, `both` and `encode-prefill-decode`. Upstream:
    `filter/bylabel/roles.go`.
    """

    kind: ClassVar[str] = "decode-filter"
    roles: ClassVar[frozenset[str]] = frozenset(
        {"decode", "prefill-decode", "both", "encode-prefill-decode"}
    )
    allows_no_label: ClassVar[bool] = True


class PrefillFilter(RoleFilter, frozen=True):
    """Keeps engines that prefill: with a label `llm-d.ai/role` that prefills, none without it.

    Roles: `prefill`, `encode-prefill`, `prefill-decode`, `both` and `encode-prefill-decode`.
    Upstream: `filter/bylabel/roles.go`.
    """

    kind: ClassVar[str] = "prefill-filter"
    roles: ClassVar[frozenset[str]] = frozenset(
        {"prefill", "encode-prefill", "prefill-decode", "both", "encode-prefill-decode"}
    )


class EncodeFilter(RoleFilter, frozen=True):
    """Keeps engines that encode media: with a label `llm-d.ai/role` that encodes, none without it.

    Roles: `encode`, `encode-prefill` and `encode-prefill-decode`. Upstream:
    `filter/bylabel/roles.go`.
    """

    kind: ClassVar[str] = "encode-filter"
    roles: ClassVar[frozenset[str]] = frozenset(
        {"encode", "encode-prefill", "encode-prefill-decode"}
    )


class ByLabel(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, rename="camel"
):
    """Keeps a candidate when its label has a valid value, or is missing and that is allowed.

    The upstream picker deprecates it for `label-selector-filter`, which cannot say "or is
    missing"; here for files that have it. Upstream: `filter/bylabel/filter.go`.

    Attributes:
        label: The label.
        valid_values: Values that pass.
        allows_no_label: Whether candidates without the label pass.
    """

    kind: ClassVar[str] = "by-label"
    needs: ClassVar[frozenset[Signal]] = frozenset({Signal.LABELS})

    label: Annotated[str, msgspec.Meta(min_length=1)]
    valid_values: tuple[str, ...] = ()
    allows_no_label: bool = False

    def __post_init__(self) -> None:
        """Refuse a filter that keeps no candidate.

        Raises:
            ValueError: There are no valid values, and the label must be there.
        """
        if not self.valid_values and not self.allows_no_label:
            raise ValueError("expected validValues or allowsNoLabel, got neither")

    def filter(
        self, context: SchedulingContext, candidates: Sequence[Candidate]
    ) -> Sequence[Candidate]:
        """See the class."""
        return _with_label_value(
            candidates, self.label, self.valid_values, allows_no_label=self.allows_no_label
        )


class Requirement(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, rename="camel"
):
    """One condition on one label, as Kubernetes reads it.

    Attributes:
        key: The label.
        operator: `In`: it has one of the values. `NotIn`: it has none of them, or is not there.
            `Exists` and `DoesNotExist`: whether it is there.
        values: For the first two at least one, for the others none.
    """

    key: Annotated[str, msgspec.Meta(min_length=1)]
    operator: Literal["In", "NotIn", "Exists", "DoesNotExist"]
    values: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Refuse values where there can be none, and none where there must be some.

        Raises:
            ValueError: The number of values does not fit the operator.
        """
        needs_values = self.operator in {"In", "NotIn"}
        if needs_values != bool(self.values):
            raise ValueError(
                f"expected {'values' if needs_values else 'no values'} with operator {self.operator}, "
                f"got {len(self.values)}"
            )

    def met(self, labels: Mapping[str, str]) -> bool:
        """True if the labels meet the requirement."""
        match self.operator:
            case "In":
                return labels.get(self.key) in self.values
            case "NotIn":
                return labels.get(self.key) not in self.values
            case "Exists":
                return self.key in labels
            case "DoesNotExist":
                return self.key not in labels


class LabelSelectorFilter(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, rename="camel"
):
    """Keeps a candidate when every label and every expression matches.

    An empty selector matches every endpoint. Labels are those of discovery. Upstream:
    `filter/bylabel/selector.go`.

    Attributes:
        match_labels: Labels and the values they must have.
        match_expressions: Further conditions.
    """

    kind: ClassVar[str] = "label-selector-filter"
    needs: ClassVar[frozenset[Signal]] = frozenset({Signal.LABELS})

    match_labels: Mapping[str, str] = {}
    match_expressions: tuple[Requirement, ...] = ()

    def filter(
        self, context: SchedulingContext, candidates: Sequence[Candidate]
    ) -> Sequence[Candidate]:
        """See the class."""
        pairs = self.match_labels.items()
        return [
            c
            for c in candidates
            if all(c.endpoint.labels.get(key) == value for key, value in pairs)
            and all(requirement.met(c.endpoint.labels) for requirement in self.match_expressions)
        ]


class TopologyAffinityFilter(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, rename="camel"
):
    """Keeps candidates that share `minAffinity` or a nearer level with the peer; else all.

    The peer is named by a request header; without it all are kept. The location of an endpoint
    stands in its labels, see the scorer `topology-affinity-scorer`. A missing label is nothing in
    common. Upstream: `filter/topologyaffinity/filter.go`.

    Attributes:
        min_affinity: `host`, `rack`, `zone` or `region`.
        peer_topology_header: Header that names the peer, as `host=n12,rack=r7`. Empty, the default,
            reads `x-peer-topology`: the upstream picker then takes the decode endpoint picked in
            the same context, which there is none of here.
    """

    kind: ClassVar[str] = "topology-affinity-filter"
    needs: ClassVar[frozenset[Signal]] = frozenset({Signal.HEADERS, Signal.LABELS})

    min_affinity: Literal["host", "rack", "zone", "region"] = "host"
    peer_topology_header: str = ""

    def filter(
        self, context: SchedulingContext, candidates: Sequence[Candidate]
    ) -> Sequence[Candidate]:
        """See the class."""
        header = self.peer_topology_header.lower() or labels.PEER_HEADER
        peer = labels.parse_topology(context.headers.get(header, ""))
        furthest = labels.DISTANCES[self.min_affinity]
        near = [
            c
            for c in candidates
            if labels.distance(peer, labels.location_of(c.endpoint)) <= furthest
        ]
        return near or candidates


def _with_label_value(
    candidates: Sequence[Candidate], label: str, values: Container[str], *, allows_no_label: bool
) -> list[Candidate]:
    """Candidates whose label has one of the values, or is missing where that is allowed."""
    return [
        c
        for c in candidates
        if (allows_no_label if (value := c.endpoint.labels.get(label)) is None else value in values)
    ]
