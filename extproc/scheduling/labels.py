"""Labels of endpoints, and the filters and scorers that read them.

Adapter labels are those that KubeAI sets on its pods. A peer is written as the upstream picker's
coordinator writes it: `host=n12,rack=r7,zone=a`. Endpoints declare ranges of prompt lengths in a label.
"""

from __future__ import annotations

import re
from collections.abc import Container, Mapping, Sequence
from typing import Annotated, ClassVar, Literal

import msgspec

from extproc.endpoint import Candidate, Endpoint, LabelExpression
from extproc.scheduling.framework import (
    PluginParameters,
    SchedulingContext,
    Signal,
    UpstreamParameters,
    check_response_header,
)

#: Before the name of an adapter that is loaded (docs/spec/prior-systems.md#adapter-names).
PREFIX = "adapter.kubeai.org/"


def adapter(context: SchedulingContext, candidates: Sequence[Candidate]) -> str:
    """The adapter of a request; empty for the base model.

    A surface that names the adapter in the model field does not say whether it is one: it is, where
    the context knows it or some candidate is labelled with that name.
    """
    if context.adapter:
        return context.adapter
    model = context.request.model
    return model if any(PREFIX + model in c.endpoint.labels for c in candidates) else ""


def capable(adapter_name: str, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
    """The candidates that serve an adapter.

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


#: Header in which a coordinator names the machine an earlier stage ran on; read without a peer.
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


Level = Literal["host", "rack", "zone", "region"]
LabelName = Annotated[str, msgspec.Meta(min_length=1)]


def _levels_with(labels: Mapping[Level, LabelName]) -> Mapping[str, tuple[str, ...]]:
    """`LEVELS`, with other labels for some."""
    return {**LEVELS, **{level: (label,) for level, label in labels.items()}} if labels else LEVELS


def location_of(
    endpoint: Endpoint, levels: Mapping[str, tuple[str, ...]] = LEVELS
) -> Mapping[str, str]:
    """Location of an endpoint, from its labels."""
    labels = endpoint.labels
    where = {
        level: next((labels[name] for name in names if labels.get(name)), "")
        for level, names in levels.items()
    }
    return {level: value for level, value in where.items() if value}


def _find_peer(
    context: SchedulingContext, levels: Mapping[str, tuple[str, ...]], header: str = ""
) -> Mapping[str, str]:
    """Location of the peer: of the header, if one is named; else of the endpoint chosen for decode."""
    if context.peer is not None and not header:
        return location_of(context.peer, levels)
    return parse_topology(context.headers.get(header.lower() or PEER_HEADER, ""))


def distance(peer: Mapping[str, str], other: Mapping[str, str]) -> int:
    """Place of the nearest level two have in common; `len(LEVELS)` when there is none."""
    for level, at in DISTANCES.items():
        value = peer.get(level)
        if value is not None and value == other.get(level):
            return at
    return len(LEVELS)


class HeaderLabelAffinityScorer(UpstreamParameters, frozen=True, kw_only=True):
    """1 where the label equals the header's value, 0 elsewhere; 0 everywhere without the header.

    A missing label counts as unequal. Upstream: `scorer/headerlabelaffinity/plugin.go`.

    Attributes:
        header_name: Request header with the wanted value.
        label_key: Label of endpoints it is compared with.
        stamp_response_header: Send the client the label of the endpoint that was chosen, in a header
            of the same name. True, the upstream default, lets a caller carry it to the next request.
    """

    kind: ClassVar[str] = "header-label-affinity-scorer"
    needs: ClassVar[frozenset[Signal]] = frozenset({Signal.HEADERS, Signal.LABELS})

    header_name: Annotated[str, msgspec.Meta(min_length=1)]
    label_key: Annotated[str, msgspec.Meta(min_length=1)]
    stamp_response_header: bool = True

    def __post_init__(self) -> None:
        """Refuse a header that no response can have, where it is sent.

        Raises:
            ValueError: It is no name of a header, or of one for the framing of a response.
        """
        if self.stamp_response_header:
            check_response_header(self.header_name)

    def score(self, context: SchedulingContext, candidates: Sequence[Candidate]) -> list[float]:
        header_value = context.headers.get(self.header_name.lower(), "")
        return [
            float(bool(header_value) and c.endpoint.labels.get(self.label_key) == header_value)
            for c in candidates
        ]

    def answer_headers(
        self, context: SchedulingContext, chosen: Endpoint
    ) -> Sequence[tuple[str, str]]:
        """The label of the endpoint that was chosen."""
        label = chosen.labels.get(self.label_key, "")
        return ((self.header_name.lower(), label),) if label and self.stamp_response_header else ()


#: Scores by nearest level in common, after the speed at which KV blocks move: one machine, one
#: switch, one zone, one region, nothing.
SCORES = (1.0, 0.20, 0.05, 0.02, 0.0)


class TopologyAffinityScorer(PluginParameters, frozen=True, kw_only=True):
    """Same host 1, same rack 0.20, same zone 0.05, same region 0.02, otherwise 0.

    In a profile that chooses an endpoint for prefill or encode, the other machine is the endpoint
    chosen for decode; elsewhere the request header `x-peer-topology` names it, and without it all
    score 0. The location of an endpoint stands in its labels: `kubernetes.io/hostname`,
    `topology.kubernetes.io/rack`, `.../zone` and `.../region`, or `host`, `rack`, `zone` and
    `region`. A missing label is nothing in common. Upstream: `scorer/topologyaffinity/scorer.go`.

    Attributes:
        labels: Label of a level, by `host`, `rack`, `zone` or `region`, in place of the usual ones. Those
            of a `topology-extractor` stand here.
    """

    kind: ClassVar[str] = "topology-affinity-scorer"
    needs: ClassVar[frozenset[Signal]] = frozenset({Signal.HEADERS, Signal.LABELS})

    labels: Mapping[Level, LabelName] = {}

    def score(self, context: SchedulingContext, candidates: Sequence[Candidate]) -> list[float]:
        levels = _levels_with(self.labels)
        peer = _find_peer(context, levels)
        if not peer:
            return [0.0] * len(candidates)
        return [SCORES[distance(peer, location_of(c.endpoint, levels))] for c in candidates]


class RoleFilter(PluginParameters, frozen=True, kw_only=True):
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


class ByLabel(UpstreamParameters, frozen=True, kw_only=True):
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
        return _with_label_value(
            candidates, self.label, self.valid_values, allows_no_label=self.allows_no_label
        )


class Requirement(LabelExpression, frozen=True):
    """One condition on one label; null is an absent key, as Kubernetes reads it."""

    NULL_IS_ABSENT: ClassVar[bool] = True


class LabelSelectorFilter(UpstreamParameters, frozen=True, kw_only=True):
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
        pairs = self.match_labels.items()
        return [
            c
            for c in candidates
            if all(c.endpoint.labels.get(key) == value for key, value in pairs)
            and all(requirement.is_met(c.endpoint.labels) for requirement in self.match_expressions)
        ]


class TopologyAffinityFilter(UpstreamParameters, frozen=True, kw_only=True):
    """Keeps candidates that share `minAffinity` or a nearer level with the peer; else all.

    In a profile that chooses an endpoint for prefill or encode, the peer is the endpoint chosen for
    decode; elsewhere a request header names it, and without it all are kept. The location of an
    endpoint stands in its labels, see the scorer `topology-affinity-scorer`. A missing label is
    nothing in common. Upstream: `filter/topologyaffinity/filter.go`.

    Attributes:
        min_affinity: `host`, `rack`, `zone` or `region`.
        peer_topology_header: Header that names the peer in every profile, as `host=n12,rack=r7`.
            Empty, the default, takes the endpoint chosen for decode, and reads `x-peer-topology`
            where none was chosen before.
        labels: Label of a level, in place of the usual ones, as in `topology-affinity-scorer`.
    """

    kind: ClassVar[str] = "topology-affinity-filter"
    needs: ClassVar[frozenset[Signal]] = frozenset({Signal.HEADERS, Signal.LABELS})

    min_affinity: Literal["host", "rack", "zone", "region"] = "host"
    peer_topology_header: str = ""
    labels: Mapping[Level, LabelName] = {}

    def filter(
        self, context: SchedulingContext, candidates: Sequence[Candidate]
    ) -> Sequence[Candidate]:
        levels = _levels_with(self.labels)
        peer = _find_peer(context, levels, self.peer_topology_header)
        furthest = DISTANCES[self.min_affinity]
        near = [
            c for c in candidates if distance(peer, location_of(c.endpoint, levels)) <= furthest
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


#: Label of endpoints with a range of prompt tokens, such as `0-2048`.
LABEL = "llm-d.ai/context-length-range"

_RANGE = re.compile(r"\s*(\d+)\s*-\s*(\d+)\s*", re.ASCII)


class ContextRange(msgspec.Struct, frozen=True):
    """Prompt lengths in tokens, both ends included.

    Attributes:
        low: Shortest context (tokens, inclusive).
        high: Longest context (tokens, inclusive).
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


def parse_context_range(text: str) -> ContextRange | None:
    """Parse a range from its label; None when the label is no range."""
    match = _RANGE.fullmatch(text)
    if match is None:
        return None
    low, high = int(match[1]), int(match[2])
    return ContextRange(low, high) if low <= high else None


class ContextLengthAware(UpstreamParameters, frozen=True, kw_only=True):
    """Scores or filters endpoints by the range of prompt lengths that their label names.

    As a scorer, inside the range `0.3 + 0.7 * (0.7 / (1 + width/10000) + 0.3 * headroom / width)`:
    width is the length of the range and headroom the tokens up to its end; a range of a single
    length scores 1. Outside `0.3 / (1 + distance/1000)`, distance to the nearer end, so any match
    beats any miss. Without the label 0.5; a label that is no range scores 0.

    As a filter it keeps candidates whose range holds the prompt's tokens, and those without the
    label, but only with `enableFiltering`; otherwise all. A label that is no range is dropped.
    Upstream: `scorer/contextlengthaware/context_length_aware.go`.

    Attributes:
        label: Label of endpoints with the range, `min-max` in tokens.
        enable_filtering: Whether the filter drops any candidate; no effect on scores. False is the
            upstream default.
    """

    kind: ClassVar[str] = "context-length-aware"
    needs: ClassVar[frozenset[Signal]] = frozenset({Signal.LABELS})

    label: str = LABEL
    enable_filtering: bool = False

    def score(self, context: SchedulingContext, candidates: Sequence[Candidate]) -> list[float]:
        length = context.request.prompt_tokens
        return [_fit(length, c.endpoint.labels.get(self.label)) for c in candidates]

    def filter(
        self, context: SchedulingContext, candidates: Sequence[Candidate]
    ) -> Sequence[Candidate]:
        if not self.enable_filtering:
            return candidates
        length = context.request.prompt_tokens
        return [c for c in candidates if _is_for(length, c.endpoint.labels.get(self.label))]


def _fit(length: int, label: str | None) -> float:
    """The score of one label."""
    if label is None:
        return 0.5
    lengths = parse_context_range(label)
    if lengths is None:
        return 0.0
    if length not in lengths:
        return 0.3 / (1.0 + lengths.distance(length) / 1000.0)
    if not lengths.width:
        return 1.0
    narrow = 0.7 / (1.0 + lengths.width / 10_000.0)
    return 0.3 + 0.7 * (narrow + 0.3 * (lengths.high - length) / lengths.width)


def _is_for(length: int, label: str | None) -> bool:
    """True if an endpoint with that label takes such a prompt."""
    if label is None:
        return True
    lengths = parse_context_range(label)
    return lengths is not None and length in lengths
