"""Routing rules of other systems and papers, as plugins of the scheduler.

They read the same estimates as `adaptive`: prefixes, queues and step times. So they are compared as
rules, without the indexers and protocols of the systems they come from. Defaults are those of the sources.
"""

from __future__ import annotations

import math
import statistics
import zlib
from collections import defaultdict, deque
from collections.abc import Sequence
from functools import cached_property
from typing import ClassVar

from extproc.decision import CostResult, Decision
from extproc.endpoint import Candidate
from extproc.scheduling.framework import PluginParameters, SchedulingContext, Signal

#: Cost of an endpoint that a rule shuts out, beyond any other.
_OUT = 1e12

_NEEDS = frozenset({Signal.QUEUED, Signal.PREFIX, Signal.IN_FLIGHT, Signal.RATES})


def _uncached(context: SchedulingContext, c: Candidate) -> int:
    """Prompt tokens that the endpoint would have to compute, at least one."""
    return max(1, context.request.prompt_tokens - c.matched_tokens)


def _match_ratio(context: SchedulingContext, c: Candidate) -> float:
    """Share of the prompt that the endpoint is expected to have cached, 0 to 1."""
    return min(1.0, c.matched_tokens / max(1, context.request.prompt_tokens))


class DynamoCost(PluginParameters, frozen=True, kw_only=True):
    """Prompt tokens to compute, times a weight, plus tokens of open requests.

    NVIDIA Dynamo, KV router (docs.nvidia.com/dynamo, "Router": cost function).
    """

    kind: ClassVar[str] = "dynamo"
    needs: ClassVar[frozenset[Signal]] = _NEEDS | {Signal.CONVERSATIONS}

    overlap_score_weight: float = 1.0

    def cost(self, context: SchedulingContext, candidates: Sequence[Candidate]) -> CostResult:
        """Tokens."""
        own = context.request.prompt_tokens
        prefill = [c.queued_tokens + _uncached(context, c) for c in candidates]
        decode = [c.active_context_tokens + own for c in candidates]
        weight = self.overlap_score_weight
        costs = [weight * p + d for p, d in zip(prefill, decode, strict=True)]
        return CostResult(self.kind, "tokens", costs)


class SoftmaxPicker(PluginParameters, frozen=True, kw_only=True):
    """Draws by the softmax of the totals, which are brought to the range 0 to 1 before.

    NVIDIA Dynamo, `--router-temperature`.
    """

    kind: ClassVar[str] = "softmax"
    needs: ClassVar[frozenset[Signal]] = frozenset()

    temperature: float = 0.3

    def pick(
        self,
        context: SchedulingContext,
        candidates: Sequence[Candidate],
        totals: Sequence[float],
        *,
        count: int,
    ) -> list[int]:
        """Positions without repetition."""
        del candidates
        low, high = min(totals), max(totals)
        span = (high - low) or 1.0
        # The largest of exponential weights with Gumbel noise is a draw by softmax.
        keys = [
            (total - low) / span / self.temperature
            - math.log(-math.log(context.rng.uniform(1e-12, 1.0 - 1e-12)))
            for total in totals
        ]
        return sorted(range(len(keys)), key=keys.__getitem__, reverse=True)[:count]


class MooncakeCost(PluginParameters, frozen=True, kw_only=True):
    """Seconds of the queue and of this prompt: the least time to the first token.

    Mooncake, algorithm 1 (arxiv.org/abs/2407.00079), without transfers between engines.
    """

    kind: ClassVar[str] = "mooncake"
    needs: ClassVar[frozenset[Signal]] = _NEEDS

    def cost(self, context: SchedulingContext, candidates: Sequence[Candidate]) -> CostResult:
        """Seconds."""
        costs = [(c.queued_tokens + _uncached(context, c)) * c.rates.prefill_s for c in candidates]
        return CostResult(self.kind, "s", costs)


class _WorkWindow:
    """Seconds of work that endpoints were given, by address, over a window of time."""

    def __init__(self) -> None:
        self.entries: defaultdict[str, deque[tuple[float, float]]] = defaultdict(deque)

    def total(self, address: str, since: float) -> float:
        entries = self.entries[address]
        while entries and entries[0][0] < since:
            entries.popleft()
        return sum(seconds for _, seconds in entries)


class PrebleCost(PluginParameters, frozen=True, dict=True, kw_only=True):
    """The least loaded holder of most of the prompt; without one, the least load and prefill.

    E2 of Preble (arxiv.org/abs/2407.00023), without its term for evictions: a cached part that is longer
    than the rest keeps the request, unless the holder has more than `imbalance` times the least load.
    The load of an endpoint is the work that it was given in the last `window_s` seconds.
    """

    kind: ClassVar[str] = "preble"
    needs: ClassVar[frozenset[Signal]] = _NEEDS

    window_s: float = 180.0
    imbalance: float = 2.0

    @cached_property
    def _window(self) -> _WorkWindow:
        return _WorkWindow()

    def cost(self, context: SchedulingContext, candidates: Sequence[Candidate]) -> CostResult:
        """Seconds."""
        since = context.now - self.window_s
        load = [self._window.total(c.endpoint.address, since) for c in candidates]
        longest = max(c.matched_tokens for c in candidates)
        if 2 * longest > context.request.prompt_tokens:
            costs = [
                seconds if c.matched_tokens == longest else _OUT
                for c, seconds in zip(candidates, load, strict=True)
            ]
            if min(costs) <= self.imbalance * max(min(load), 1e-9):
                return CostResult(self.kind, "s", costs)
        costs = [
            seconds + _uncached(context, c) * c.rates.prefill_s
            for c, seconds in zip(candidates, load, strict=True)
        ]
        return CostResult(self.kind, "s", costs)

    def on_committed(self, decision: Decision, now: float) -> None:
        """Charge the work of the request to its endpoint."""
        address = decision.endpoints[0].address
        for c in decision.scored_candidates:
            if c.endpoint.address == address:
                uncached = max(0, decision.request.prompt_tokens - c.matched_tokens)
                seconds = uncached * c.rates.prefill_s + c.rates.output_tokens * c.rates.decode_s
                self._window.entries[address].append((now, seconds))


class CacheAwareCost(PluginParameters, frozen=True, kw_only=True):
    """The longest match from a threshold on, else the fewest requests; these also where loads differ.

    `cache_aware` of the SGLang router (`policies/cache_aware.rs` of lightseekorg/smg).
    """

    kind: ClassVar[str] = "cache-aware"
    needs: ClassVar[frozenset[Signal]] = _NEEDS

    cache_threshold: float = 0.3
    balance_abs_threshold: int = 64
    balance_rel_threshold: float = 1.5

    def cost(self, context: SchedulingContext, candidates: Sequence[Candidate]) -> CostResult:
        """Requests, or negated share of the prompt."""
        loads = [c.in_flight for c in candidates]
        low, high = min(loads), max(loads)
        uneven = high - low > self.balance_abs_threshold and high > self.balance_rel_threshold * low
        matches = [_match_ratio(context, c) for c in candidates]
        if not uneven and max(matches) > self.cache_threshold:
            return CostResult(self.kind, "", [-match for match in matches])
        return CostResult(self.kind, "", [float(load) for load in loads])


class AibrixPrefixCost(PluginParameters, frozen=True, kw_only=True):
    """The longest match among endpoints that are not above the mean load by a standard deviation.

    `prefix-cache` of AIBrix (`plugins/gateway/algorithms/prefix_cache.go`).
    """

    kind: ClassVar[str] = "aibrix-prefix"
    needs: ClassVar[frozenset[Signal]] = _NEEDS

    imbalance: int = 8
    deviations: float = 1.0

    def cost(self, context: SchedulingContext, candidates: Sequence[Candidate]) -> CostResult:
        """Negated share of the prompt; equal ones by requests."""
        loads = [float(c.in_flight) for c in candidates]
        limit = statistics.fmean(loads) + self.deviations * statistics.pstdev(loads)
        if max(loads) - min(loads) > self.imbalance:
            limit = min(loads)
        costs = [
            load - 1e6 * _match_ratio(context, c) if load <= limit else _OUT + load
            for c, load in zip(candidates, loads, strict=True)
        ]
        return CostResult(self.kind, "", costs)


class IdleQueueCost(PluginParameters, frozen=True, kw_only=True):
    """An endpoint without requests, the one with the longest match; any where none is idle.

    Join-idle-queue (Lu et al., Performance Evaluation 68, 2011), with the match for a tie.
    """

    kind: ClassVar[str] = "join-idle-queue"
    needs: ClassVar[frozenset[Signal]] = _NEEDS

    def cost(self, context: SchedulingContext, candidates: Sequence[Candidate]) -> CostResult:
        """Negated share of the prompt, 1 for a busy endpoint."""
        costs = [
            1.0 if c.estimated_requests >= 1.0 else -_match_ratio(context, c) for c in candidates
        ]
        return CostResult(self.kind, "", costs)


class PowerOfKPicker(PluginParameters, frozen=True, kw_only=True):
    """Of some random endpoints and the one with the longest match, the fewest tokens to compute.

    Power of k choices (Mitzenmacher, IEEE TPDS 12, 2001), the cached prefix as one more choice.
    """

    kind: ClassVar[str] = "power-of-k"
    needs: ClassVar[frozenset[Signal]] = _NEEDS

    choices: int = 2

    def pick(
        self,
        context: SchedulingContext,
        candidates: Sequence[Candidate],
        totals: Sequence[float],
        *,
        count: int,
    ) -> list[int]:
        """Positions without repetition, those drawn before the others."""
        del totals
        positions = range(len(candidates))
        drawn = set(context.rng.sample(positions, min(self.choices, len(candidates))))
        drawn.add(max(positions, key=lambda at: candidates[at].matched_tokens))

        def order(at: int) -> tuple[bool, float]:
            return at not in drawn, candidates[at].queued_tokens + _uncached(
                context, candidates[at]
            )

        return sorted(positions, key=order)[:count]


class ExpectedDelayCost(PluginParameters, frozen=True, kw_only=True):
    """Requests there and this one, times the seconds of this one alone.

    Shortest expected delay, the index rule for servers of unlike speed (Winston, Journal of Applied
    Probability 14, 1977, for equal ones; Banawan and Zahorjan, INFOCOM 1989).
    """

    kind: ClassVar[str] = "shortest-expected-delay"
    needs: ClassVar[frozenset[Signal]] = _NEEDS

    def cost(self, context: SchedulingContext, candidates: Sequence[Candidate]) -> CostResult:
        """Seconds."""
        costs = [
            (c.estimated_requests + 1.0)
            * (
                _uncached(context, c) * c.rates.prefill_s
                + c.rates.output_tokens * (c.rates.step_s + c.rates.decode_s)
            )
            for c in candidates
        ]
        return CostResult(self.kind, "s", costs)


class SessionGateCost(PluginParameters, frozen=True, kw_only=True):
    """LMetric's product, but a further turn stays with its prefix unless its first token would be late.

    LMetric (arxiv.org/abs/2603.15202); late is later than `slack` times 1 s and 62.5 ms for each 1,000
    tokens of the prompt.
    """

    kind: ClassVar[str] = "session-gate"
    needs: ClassVar[frozenset[Signal]] = _NEEDS | {Signal.CONVERSATIONS}

    slack: float = 1.0

    def cost(self, context: SchedulingContext, candidates: Sequence[Candidate]) -> CostResult:
        """Tokens times requests."""
        costs = [
            (c.queued_tokens + _uncached(context, c)) * (c.estimated_requests + 1.0)
            for c in candidates
        ]
        limit_s = self.slack * (1.0 + 62.5e-6 * context.request.prompt_tokens)
        for at, c in enumerate(candidates):
            wait_s = (c.queued_tokens + _uncached(context, c)) * c.rates.prefill_s
            if c.conversation_local and wait_s <= limit_s:
                costs[at] = -1.0
        return CostResult(self.kind, "", costs)


class DualMapCost(PluginParameters, frozen=True, kw_only=True):
    """Of two endpoints by hashes of the beginning of the prompt, the longer match unless its queue is late.

    DualMap (arxiv.org/abs/2602.06502): beyond `budget_s` of queue the one with the shorter queue.
    """

    kind: ClassVar[str] = "dual-map"
    needs: ClassVar[frozenset[Signal]] = _NEEDS

    prefix_blocks: int = 8
    budget_s: float = 1.0

    def cost(self, context: SchedulingContext, candidates: Sequence[Candidate]) -> CostResult:
        """Negated tokens of the match, or seconds of the queue."""
        beginning = context.blocks[: self.prefix_blocks]
        key = f"{context.adapter} {beginning[-1] if beginning else 0}"
        pair = [
            max(
                range(len(candidates)),
                key=lambda at: zlib.crc32(
                    f"{salt} {key} {candidates[at].endpoint.address}".encode()
                ),
            )
            for salt in "ab"
        ]
        queues_s = {
            at: candidates[at].queued_tokens * candidates[at].rates.prefill_s for at in pair
        }
        first = max(pair, key=lambda at: candidates[at].matched_tokens)
        is_late = queues_s[first] > self.budget_s
        costs = [_OUT] * len(candidates)
        for at in pair:
            costs[at] = queues_s[at] if is_late else -float(candidates[at].matched_tokens)
        return CostResult(self.kind, "", costs)


class TimeToDrainCost(PluginParameters, frozen=True, kw_only=True):
    """Seconds of queued tokens and this prompt, and a barrier at a full KV cache.

    `least_load` of SMG (lightseekorg/smg), with the uncached tokens of the request besides.
    """

    kind: ClassVar[str] = "time-to-drain"
    needs: ClassVar[frozenset[Signal]] = _NEEDS | {Signal.KV_USAGE}

    barrier_s: float = 0.15

    def cost(self, context: SchedulingContext, candidates: Sequence[Candidate]) -> CostResult:
        """Seconds."""
        costs = []
        for c in candidates:
            usage = min(0.999, c.load.kv_usage or 0.0)
            queue_s = (c.queued_tokens + _uncached(context, c)) * c.rates.prefill_s
            costs.append(queue_s + self.barrier_s * usage / (1.0 - usage))
        return CostResult(self.kind, "s", costs)


class LoadAwareCost(PluginParameters, frozen=True, kw_only=True):
    """Share of the prompt that is cached, less how far the load is above the mean.

    `loadaware` of vLLM's production-stack (vllm-project/production-stack, pull request 1035).
    """

    kind: ClassVar[str] = "load-aware"
    needs: ClassVar[frozenset[Signal]] = _NEEDS

    beta: float = 1.0

    def cost(self, context: SchedulingContext, candidates: Sequence[Candidate]) -> CostResult:
        """Negated score."""
        loads = [float(c.in_flight) for c in candidates]
        mean = statistics.fmean(loads)
        costs = [
            self.beta * (load - mean) / max(1.0, mean) - _match_ratio(context, c)
            for c, load in zip(candidates, loads, strict=True)
        ]
        return CostResult(self.kind, "", costs)
