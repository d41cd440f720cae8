"""Decision trees of filters: the next filter depends on the success of the filter before it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar

from extproc.decision import Decision, FilterTreeStep
from extproc.endpoint import Candidate, Endpoint
from extproc.scheduling.framework import (
    ExtraMetricReader,
    Filter,
    MoveObserver,
    NonNegative,
    Observer,
    PluginParameters,
    RequestKeyProvider,
    ResponseHeaderProvider,
    SchedulingContext,
    Share,
    Signal,
)
from extproc.scheduling.load_bounds import (
    KvRange,
    LowLatency,
    QueueRange,
    SheddableCapacity,
)
from extproc.scheduling.lora_affinity import (
    AdapterActive,
    AdapterSoftAffinity,
    CanAcceptAdapter,
    LowCostAdapter,
)


class CriticalRequest(PluginParameters, frozen=True, kw_only=True):
    """Keeps all candidates of a critical request and none of a sheddable one.

    A question for the root of a tree. A request that names an objective of the pool is sheddable
    when its priority is below 0. Another one is sheddable when it says so in a header; without the
    header it is critical, because a request is refused only if its client allows that.

    Attributes:
        header: The header, in lower case. The default is the one by which clients of the upstream
            picker name their objective.
        sheddable: Its value on sheddable requests, in any case of letters.
    """

    kind: ClassVar[str] = "critical-request"
    needs: ClassVar[frozenset[Signal]] = frozenset({Signal.HEADERS})

    header: str = "x-llm-d-inference-objective"
    sheddable: str = "sheddable"

    def filter(
        self, context: SchedulingContext, candidates: Sequence[Candidate]
    ) -> Sequence[Candidate]:
        if context.request.objective:
            return () if context.request.priority < 0 else candidates
        value = context.headers.get(self.header.lower(), "").strip()
        return () if value.lower() == self.sheddable.lower() else candidates


class DropRequest(PluginParameters, frozen=True, kw_only=True):
    """Keeps no candidate, so that the client gets 429: the end of a tree's branch.

    In the middle of a branch it is a failure like any other, and the walk goes on.
    """

    kind: ClassVar[str] = "drop-request"
    needs: ClassVar[frozenset[Signal]] = frozenset()

    def filter(
        self, context: SchedulingContext, candidates: Sequence[Candidate]
    ) -> Sequence[Candidate]:
        return ()


class FilterTreeNode(PluginParameters, frozen=True, kw_only=True):
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

    def next(self, *, is_success: bool) -> tuple[str, FilterTreeNode | None]:
        """Name of the branch and the node it leads to; empty and None at the end of the walk."""
        named = self.on_success if is_success else self.on_failure
        if named is not None:
            return ("success" if is_success else "failure"), named
        return ("" if self.on_either is None else "either"), self.on_either

    def __repr__(self) -> str:
        successors = (("yes", self.on_success), ("no", self.on_failure), ("then", self.on_either))
        below = ", ".join(f"{word} {node!r}" for word, node in successors if node is not None)
        return f"{self.filter.kind} ({below})" if below else f"{self.filter.kind}"


class FilterTree(PluginParameters, frozen=True, kw_only=True, dict=True):
    """Walks from `root` to an end of the tree (docs/spec/prior-systems.md#tree-semantics).

    A filter succeeds when it leaves at least one candidate. Then what it left goes on to the next
    node; when it fails, what came in goes on. Where there is no next node the walk ends with what
    the last filter left: none, if it failed, and the client gets 429. A filter that raises has
    failed; at the end of the walk its exception is the tree's.

    In a configuration a node is `kind`, `params`, `on_success`, `on_failure` and `on_either`.

    Attributes:
        root: First node of the walk.
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

    @property
    def extra_metrics(self) -> frozenset[str]:
        """See `framework.ExtraMetricReader`."""
        return frozenset().union(
            *(
                plugin.extra_metrics
                for plugin in self.filters
                if isinstance(plugin, ExtraMetricReader)
            )
        )

    def filter(
        self, context: SchedulingContext, candidates: Sequence[Candidate]
    ) -> Sequence[Candidate]:
        return self.walk(context, candidates)[0]

    def walk(
        self, context: SchedulingContext, candidates: Sequence[Candidate]
    ) -> tuple[Sequence[Candidate], Sequence[FilterTreeStep]]:
        """See `framework.TracedFilter`."""
        node: FilterTreeNode | None = self.root
        remaining: Sequence[Candidate] = candidates
        branches: list[FilterTreeStep] = []
        while node is not None:
            error: Exception | None = None
            try:
                remaining = node.filter.filter(context, candidates)
            except Exception as raised:  # noqa: BLE001 - an error takes the failure branch
                remaining, error = (), raised
            branch, below = node.next(is_success=bool(remaining))
            if error is not None and below is None:
                raise error
            error_type = type(error).__name__ if error is not None else ""
            branches.append(FilterTreeStep(node.filter.kind, remaining, branch, error_type))
            candidates = remaining or candidates
            node = below
        return remaining, branches

    def on_committed(self, decision: Decision, now: float) -> None:
        """Pass a committed decision to the filters that keep state."""
        for plugin in self.filters:
            if isinstance(plugin, Observer):
                plugin.on_committed(decision, now)

    def on_moved(self, decision: Decision, served: Endpoint, now: float) -> None:
        """Pass a decision that another endpoint answered to the filters that keep state."""
        for plugin in self.filters:
            if isinstance(plugin, MoveObserver):
                plugin.on_moved(decision, served, now)

    def keys(self, context: SchedulingContext) -> Mapping[str, str]:
        """Keys by which its filters remember the request."""
        keys: dict[str, str] = {}
        for plugin in self.filters:
            if isinstance(plugin, RequestKeyProvider):
                keys |= plugin.keys(context)
        return keys

    def answer_headers(
        self, context: SchedulingContext, chosen: Endpoint
    ) -> Sequence[tuple[str, str]]:
        """Response headers that its filters add."""
        return [
            header
            for plugin in self.filters
            if isinstance(plugin, ResponseHeaderProvider)
            for header in plugin.answer_headers(context, chosen)
        ]


class FilterChain(PluginParameters, frozen=True, kw_only=True, dict=True):
    """The tree of docs/spec/prior-systems.md#filter-tree.

    Critical requests: candidates with `waiting < below_waiting_requests`, among these the holders
    of the adapter, or else those with a slot for it, or else all; then queue range and KV range.
    When every queue is longer: queue range, then holders and those with a slot, then KV range.
    Sheddable requests: candidates with `waiting <= sheddable_waiting_requests` and
    `kv_usage <= sheddable_kv_usage`, of these queue range, holders and those with a slot, KV range;
    the request is refused with 429 when there are none. Requests for the base model are held to be of no
    adapter: they too avoid full slots.

    With `affinity_share` below 1, holders and those with a slot are chosen between by chance, in
    both critical branches (kubernetes-sigs/gateway-api-inference-extension#423; it moved the bound of waiting to 128).

    Attributes:
        below_waiting_requests: See `low-latency`. 50, as there.
        sheddable_waiting_requests: See `sheddable-capacity`. 5, as there.
        sheddable_kv_usage: See `sheddable-capacity`. 0.8, as there.
        affinity_share: Probability of the holders. 1 keeps the affinity hard, as it was first.
        header: See `critical-request`.
        sheddable: See `critical-request`.
    """

    kind: ClassVar[str] = "filter-chain"
    needs: ClassVar[frozenset[Signal]] = frozenset(
        {Signal.WAITING, Signal.KV_USAGE, Signal.ADAPTERS, Signal.HEADERS}
    )

    below_waiting_requests: NonNegative = 50.0
    sheddable_waiting_requests: NonNegative = 5.0
    sheddable_kv_usage: Share = 0.8
    affinity_share: Share = 1.0
    header: str = "x-llm-d-inference-objective"
    sheddable: str = "sheddable"

    @cached_property
    def tree(self) -> FilterTree:
        """The tree that these parameters mean."""
        kv = FilterTreeNode(filter=KvRange())
        queue_kv = FilterTreeNode(filter=QueueRange(), on_either=kv)
        low_cost = FilterTreeNode(
            filter=QueueRange(), on_either=FilterTreeNode(filter=LowCostAdapter(), on_either=kv)
        )
        if self.affinity_share < 1:
            soft = AdapterSoftAffinity(share=self.affinity_share)
            short = FilterTreeNode(filter=soft, on_either=queue_kv)
            long = FilterTreeNode(
                filter=QueueRange(), on_either=FilterTreeNode(filter=soft, on_either=kv)
            )
        else:
            room = FilterTreeNode(filter=CanAcceptAdapter(), on_either=queue_kv)
            short = FilterTreeNode(filter=AdapterActive(), on_success=queue_kv, on_failure=room)
            long = low_cost
        critical = FilterTreeNode(
            filter=LowLatency(below_waiting_requests=self.below_waiting_requests),
            on_success=short,
            on_failure=long,
        )
        capacity = SheddableCapacity(
            max_waiting_requests=self.sheddable_waiting_requests,
            max_kv_usage=self.sheddable_kv_usage,
        )
        return FilterTree(
            root=FilterTreeNode(
                filter=CriticalRequest(header=self.header, sheddable=self.sheddable),
                on_success=critical,
                on_failure=FilterTreeNode(
                    filter=capacity,
                    on_success=low_cost,
                    on_failure=FilterTreeNode(filter=DropRequest()),
                ),
            )
        )

    def filter(
        self, context: SchedulingContext, candidates: Sequence[Candidate]
    ) -> Sequence[Candidate]:
        return self.tree.filter(context, candidates)

    def walk(
        self, context: SchedulingContext, candidates: Sequence[Candidate]
    ) -> tuple[Sequence[Candidate], Sequence[FilterTreeStep]]:
        """See `framework.TracedFilter`."""
        return self.tree.walk(context, candidates)


def _nodes(node: FilterTreeNode | None) -> Iterator[FilterTreeNode]:
    """A node and everything below it."""
    if node is not None:
        yield node
        for below in (node.on_success, node.on_failure, node.on_either):
            yield from _nodes(below)
