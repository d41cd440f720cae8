"""Decision tree of filters: the next filter depends on the success of the one before.

A filter that runs others stands here and not among the filters, which do not know each other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar

import msgspec

from extproc.decision import Decision, FilterTreeStep
from extproc.endpoint import Candidate, Endpoint
from extproc.scheduling.context import SchedulingContext
from extproc.scheduling.framework import (
    Filter,
    Observer,
    RequestKeyProvider,
    ResponseHeaderProvider,
    Signal,
)


class FilterTreeNode(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A filter of a tree and what follows it.

    Attributes:
        filter: A ready filter.
        on_success: Next, if it left a candidate; None for `on_either`.
        on_failure: Next, if it left none or raised; None for `on_either`.
        on_either: Next, where the one above says nothing; None ends the walk.
    """

    filter: Any
    on_success: FilterTreeNode | None = None
    on_failure: FilterTreeNode | None = None
    on_either: FilterTreeNode | None = None

    def next(self, *, left_anybody: bool) -> tuple[str, FilterTreeNode | None]:
        """Name of the branch and the node it leads to; empty and None at the end of the walk."""
        named = self.on_success if left_anybody else self.on_failure
        if named is not None:
            return ("success" if left_anybody else "failure"), named
        return ("" if self.on_either is None else "either"), self.on_either

    def __repr__(self) -> str:
        ways = (("yes", self.on_success), ("no", self.on_failure), ("then", self.on_either))
        below = ", ".join(f"{word} {node!r}" for word, node in ways if node is not None)
        return f"{self.filter.kind} ({below})" if below else f"{self.filter.kind}"


class FilterTree(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, dict=True):
    """Walks from `root` to an end of the tree (docs/spec/prior-systems.md#tree-semantics).

    A filter succeeds when it leaves at least one candidate. Then what it left goes on to the next
    node; when it fails, what came in goes on. Where there is no next node the walk ends with what
    the last filter left: none, if it failed, and the client gets 429. A filter that raises has
    failed; at the end of the walk its exception is the tree's.

    In a configuration a node is `kind`, `params`, `on_success`, `on_failure` and `on_either`, or
    in the spelling of the first gateway `name`, `filterOption`, `nextOnSuccess`, `nextOnFailure`
    and `nextOnSuccessOrFailure`.

    Attributes:
        root: Where the walk starts.
    """

    kind: ClassVar[str] = "tree"

    root: FilterTreeNode

    @cached_property
    def filters(self) -> tuple[Filter, ...]:
        """Every filter of the tree, each once."""
        return tuple({id(node.filter): node.filter for node in _nodes(self.root)}.values())

    @cached_property
    def needs(self) -> frozenset[Signal]:
        """Every signal its filters read."""
        return frozenset().union(*(plugin.needs for plugin in self.filters))

    def filter(
        self, turn: SchedulingContext, candidates: Sequence[Candidate]
    ) -> Sequence[Candidate]:
        """See the class."""
        return self.walk(turn, candidates)[0]

    def walk(
        self, turn: SchedulingContext, candidates: Sequence[Candidate]
    ) -> tuple[Sequence[Candidate], Sequence[FilterTreeStep]]:
        """See `framework.TracedFilter`."""
        node: FilterTreeNode | None = self.root
        remaining: Sequence[Candidate] = candidates
        branches: list[FilterTreeStep] = []
        while node is not None:
            error: Exception | None = None
            try:
                remaining = node.filter.filter(turn, candidates)
            except Exception as raised:  # noqa: BLE001 - an error takes the failure branch
                remaining, error = (), raised
            way, below = node.next(left_anybody=bool(remaining))
            if error is not None and below is None:
                raise error
            fault = type(error).__name__ if error is not None else ""
            branches.append(FilterTreeStep(node.filter.kind, remaining, way, fault))
            candidates = remaining or candidates
            node = below
        return remaining, branches

    def on_committed(self, decision: Decision, now: float) -> None:
        """Pass a committed decision to the filters that keep state."""
        for plugin in self.filters:
            if isinstance(plugin, Observer):
                plugin.on_committed(decision, now)

    def keys(self, turn: SchedulingContext) -> Mapping[str, str]:
        """Keys by which its filters remember the request."""
        keys: dict[str, str] = {}
        for plugin in self.filters:
            if isinstance(plugin, RequestKeyProvider):
                keys |= plugin.keys(turn)
        return keys

    def answer_headers(
        self, turn: SchedulingContext, chosen: Endpoint
    ) -> Sequence[tuple[str, str]]:
        """Response headers that its filters add."""
        return [
            header
            for plugin in self.filters
            if isinstance(plugin, ResponseHeaderProvider)
            for header in plugin.answer_headers(turn, chosen)
        ]


def _nodes(node: FilterTreeNode | None) -> Iterator[FilterTreeNode]:
    """A node and everything below it."""
    if node is not None:
        yield node
        for below in (node.on_success, node.on_failure, node.on_either):
            yield from _nodes(below)
