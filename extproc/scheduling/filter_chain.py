"""The filter tree of the first llm-instance-gateway as one filter."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Annotated, ClassVar

import msgspec

from extproc.decision import FilterTreeStep
from extproc.endpoint import Candidate
from extproc.scheduling.context import SchedulingContext
from extproc.scheduling.filter_tree import FilterTree, FilterTreeNode
from extproc.scheduling.filters.adapter_active import AdapterActive
from extproc.scheduling.filters.adapter_soft_affinity import AdapterSoftAffinity
from extproc.scheduling.filters.can_accept_adapter import CanAcceptAdapter
from extproc.scheduling.filters.critical_request import CriticalRequest
from extproc.scheduling.filters.drop_request import DropRequest
from extproc.scheduling.filters.kv_range import KvRange
from extproc.scheduling.filters.low_cost_adapter import LowCostAdapter
from extproc.scheduling.filters.low_latency import LowLatency
from extproc.scheduling.filters.queue_range import QueueRange
from extproc.scheduling.filters.sheddable_capacity import SheddableCapacity
from extproc.scheduling.framework import Signal


class FilterChain(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, dict=True):
    """The tree of docs/spec/prior-systems.md#filter-tree.

    Critical requests: candidates with `waiting < below_waiting_requests`, among these the holders
    of the adapter, or else those with a slot for it, or else all; then queue range and KV range.
    When every queue is longer: queue range, then holders and those with a slot, then KV range.
    Sheddable requests: candidates with `waiting <= sheddable_waiting_requests` and
    `kv_usage <= sheddable_kv_usage`, of these queue range, holders and those with a slot, KV range;
    the request is refused with 429 when there are none. Requests for the base model are held to be of no
    adapter: they too avoid full slots.

    With `affinity_share` below 1, holders and those with a slot are chosen between by chance, in
    both critical branches (the gateway's change #423; it moved the bound of waiting to 128).

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

    below_waiting_requests: float = 50.0
    sheddable_waiting_requests: float = 5.0
    sheddable_kv_usage: float = 0.8
    affinity_share: Annotated[float, msgspec.Meta(ge=0, le=1)] = 1.0
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
        self, turn: SchedulingContext, candidates: Sequence[Candidate]
    ) -> Sequence[Candidate]:
        """See the class."""
        return self.tree.filter(turn, candidates)

    def walk(
        self, turn: SchedulingContext, candidates: Sequence[Candidate]
    ) -> tuple[Sequence[Candidate], Sequence[FilterTreeStep]]:
        """See `framework.TracedFilter`."""
        return self.tree.walk(turn, candidates)
