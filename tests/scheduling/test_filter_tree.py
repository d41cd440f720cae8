"""Behavior of trees beyond the case files: exceptions, state, needs."""

from typing import ClassVar

import msgspec
import pytest

from extproc.decision import Decision
from extproc.scheduling.filter_tree import DropRequest, FilterChain, FilterTree, FilterTreeNode
from extproc.scheduling.framework import Signal
from extproc.scheduling.load_bounds import KvRange, LowLatency, QueueRange
from extproc.scheduling.lora_affinity import AdapterActive
from tests.scheduling import builders


class BrokenFilter(msgspec.Struct, frozen=True):
    kind: ClassVar[str] = "broken"
    needs: ClassVar[frozenset[Signal]] = frozenset()

    def filter(self, context, candidates):
        raise ValueError("broken")


class Memory(msgspec.Struct, frozen=True):
    kind: ClassVar[str] = "memory"
    needs: ClassVar[frozenset[Signal]] = frozenset({Signal.HEADERS})

    endpoints: list

    def filter(self, context, candidates):
        return candidates

    def on_committed(self, decision, now):
        self.endpoints.append(decision.endpoints[0].name)

    def keys(self, context):
        return {"memory": "m"}

    def answer_headers(self, context, chosen):
        return [("x-memory", chosen.name)]


POD = {"waiting": 1, "kv_usage": 0.5}


def test_an_exception_is_a_failure():
    """The walk goes on with what came in, along the failure branch."""
    candidates = builders.candidates({"a": POD, "b": {**POD, "waiting": 9}})
    drop, queue = FilterTreeNode(filter=DropRequest()), FilterTreeNode(filter=QueueRange())
    tree = FilterTree(root=FilterTreeNode(filter=BrokenFilter(), on_success=drop, on_failure=queue))
    assert builders.names(tree.filter(builders.context(), candidates)) == ["a"]


def test_an_exception_without_a_successor_is_raised_by_the_tree():
    """The profile then notes it and lets everybody pass, as with any filter."""
    tree = FilterTree(
        root=FilterTreeNode(filter=LowLatency(), on_success=FilterTreeNode(filter=BrokenFilter()))
    )
    with pytest.raises(ValueError, match="broken"):
        tree.filter(builders.context(), builders.candidates({"a": POD}))


def test_the_walk_is_recorded():
    """Each filter on the way, who it left, which branch followed and what it raised."""
    candidates = builders.candidates({"a": POD, "b": {**POD, "waiting": 60}})
    kv = FilterTreeNode(filter=KvRange())
    low = FilterTreeNode(
        filter=LowLatency(), on_success=FilterTreeNode(filter=BrokenFilter(), on_failure=kv)
    )
    passing, branches = FilterTree(root=FilterTreeNode(filter=DropRequest(), on_either=low)).walk(
        builders.context(), candidates
    )
    assert builders.names(passing) == ["a"]
    steps = [
        (step.name, builders.names(step.survivors), step.branch, step.error_type)
        for step in branches
    ]
    assert steps == [
        ("drop-request", [], "either", ""),
        ("low-latency", ["a"], "success", ""),
        ("broken", [], "failure", "ValueError"),
        ("kv-range", ["a"], "", ""),
    ]


def test_stateful_filters_of_a_tree_are_notified():
    """A tree passes on decisions, keys and headers for the answer."""
    observed = []
    memory = Memory(observed)
    tree = FilterTree(
        root=FilterTreeNode(filter=KvRange(), on_either=FilterTreeNode(filter=memory))
    )
    context, pod = builders.context(), builders.candidate("a", **POD)
    tree.on_committed(Decision(context.request, [pod.endpoint]), 1.0)
    assert observed == ["a"]
    assert tree.keys(context) == {"memory": "m"}
    assert tree.answer_headers(context, pod.endpoint) == [("x-memory", "a")]


def test_a_tree_needs_what_its_filters_need():
    """Signals of every branch count, whichever is walked."""
    kv = FilterTreeNode(filter=KvRange())
    tree = FilterTree(root=FilterTreeNode(filter=AdapterActive(), on_success=kv, on_failure=kv))
    assert tree.needs == {Signal.ADAPTERS, Signal.KV_USAGE}
    assert len(tree.filters) == 2


@pytest.mark.parametrize("share", [1.0, 0.999])
def test_the_chain_needs_what_its_tree_needs(share):
    """The signals of the filter chain are those of its tree, hard affinity or soft."""
    chain = FilterChain(affinity_share=share)
    assert chain.tree.needs == chain.needs


def test_soft_affinity_explores_at_its_rate():
    """Of 20,000 turns, 20 on average go where the adapter has room; three deviations are 13."""
    chain = FilterChain(affinity_share=0.999)
    candidates = builders.candidates(
        {
            "holder": {**POD, "adapters": ["lora"], "adapter_slots": 2},
            "roomy": {**POD, "adapters": [], "adapter_slots": 2},
        }
    )
    context = builders.context(model="lora")
    went = sum(
        builders.names(chain.filter(context, candidates)) == ["roomy"] for _ in range(20_000)
    )
    assert 7 <= went <= 33
