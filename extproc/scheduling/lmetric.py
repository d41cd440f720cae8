"""LMetric (OSDI '26), a cost model: new work times batch size, with a detector of hot prefixes."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Sequence
from functools import cached_property
from typing import ClassVar

from extproc.decision import CostResult, Decision
from extproc.endpoint import Candidate
from extproc.scheduling.framework import PluginParameters, SchedulingContext, Signal


class _HotPrefixes:
    """State of the hot-prefix detector: recent traffic, and endpoints shut out, by class."""

    def __init__(self) -> None:
        self.recent: deque[int] = deque()
        self.counts: Counter[int] = Counter()
        self.streaks: OrderedDict[int, int] = OrderedDict()
        self.shut: dict[int, frozenset[str]] = {}


class LMetric(PluginParameters, frozen=True, dict=True, kw_only=True):
    """`cost = (Q + u) (n + 1)`: queued and own uncached tokens times the batch it joins.

    Q are queued tokens, u = max(L - m, 1) uncached ones of this request, n requests on the engine.
    The product stands for TTFT times TPOT and has no unit and no weight.

    The detector: the requests that share a beginning of `class_blocks` blocks are a class x, its
    holders are the set M, the other endpoints M'. When its share of recent traffic x / x' exceeds
    |M| / |M'| and then 2 |M| requests in a row still go to M, M is shut out of the class until one
    goes elsewhere and so makes a new copy.

    Attributes:
        class_blocks: Blocks that make a class. 8 are 512 tokens with the default schedule: a
            shared system prompt, not a whole conversation.
        window_requests: Requests that count as recent traffic.
    """

    kind: ClassVar[str] = "lmetric"
    needs: ClassVar[frozenset[Signal]] = frozenset({Signal.QUEUED, Signal.PREFIX, Signal.IN_FLIGHT})

    class_blocks: int = 8
    window_requests: int = 1000

    def __post_init__(self) -> None:
        """Refuse a class or a window of nothing.

        Raises:
            ValueError: A field is below one.
        """
        for name in ("class_blocks", "window_requests"):
            if getattr(self, name) < 1:
                raise ValueError(f"expected {name} of at least 1, got {getattr(self, name)}")

    @cached_property
    def _heat(self) -> _HotPrefixes:
        return _HotPrefixes()

    def cost(self, context: SchedulingContext, candidates: Sequence[Candidate]) -> CostResult:
        tokens = context.request.prompt_tokens
        # A call to `max` for every candidate would double the time this takes.
        work = [
            c.queued_tokens + (tokens - c.matched_tokens if c.matched_tokens < tokens else 1)
            for c in candidates
        ]
        batch = [c.estimated_requests + 1.0 for c in candidates]
        costs = [w * b for w, b in zip(work, batch, strict=True)]
        shut = self._heat.shut.get(self._class_of(context.blocks))
        if shut and not shut.issuperset(c.endpoint.address for c in candidates):
            worst = max(costs)
            costs = [
                cost + worst if c.endpoint.address in shut else cost
                for c, cost in zip(candidates, costs, strict=True)
            ]
        return CostResult(self.kind, "", costs, (("work tokens", work), ("batch", batch)))

    def on_committed(self, decision: Decision, now: float) -> None:
        """Watch the traffic of the class."""
        del now
        group = self._class_of(decision.block_hashes)
        if not group:
            return
        heat = self._heat
        self._count(heat, group)
        holders = {c.endpoint.address for c in decision.scored_candidates if c.matched_tokens}
        others = len(decision.scored_candidates) - len(holders)
        rest = len(heat.recent) - heat.counts[group]
        hot = others and heat.counts[group] * others > len(holders) * rest
        if not hot or decision.endpoints[0].address not in holders:
            heat.streaks.pop(group, None)
            heat.shut.pop(group, None)
            return
        streak = heat.streaks.pop(group, 0) + 1
        heat.streaks[group] = streak
        if streak >= 2 * len(holders):
            heat.shut[group] = frozenset(holders)
        if len(heat.streaks) > self.window_requests:
            gone, _ = heat.streaks.popitem(last=False)
            heat.shut.pop(gone, None)

    def _class_of(self, blocks: Sequence[int]) -> int:
        """The class of a prompt; 0 for one too short to have a class."""
        return blocks[self.class_blocks - 1] if len(blocks) >= self.class_blocks else 0

    def _count(self, heat: _HotPrefixes, group: int) -> None:
        heat.recent.append(group)
        heat.counts[group] += 1
        if len(heat.recent) > self.window_requests:
            old = heat.recent.popleft()
            heat.counts[old] -= 1
            if not heat.counts[old]:
                del heat.counts[old]
