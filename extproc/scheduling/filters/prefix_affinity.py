"""Filters that keep a prompt where its prefix is cached, within a bound of time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

import msgspec

from extproc.endpoint import Candidate
from extproc.scheduling.framework import SchedulingContext, Signal

ShareT = Annotated[float, msgspec.Meta(ge=0, le=1)]


class PrefixCacheAffinityFilter(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, rename="camel"
):
    """Keeps sticky candidates, those with `m / t >= affinityThreshold`; all if there are none.

    m is the candidate's matched tokens, t the prompt's. All are kept, too, when the best sticky one
    would take `maxTTFTPenaltyMs` longer than the best other one, where the time is
    `1000 * q / peakPrefillThroughput` ms and q the uncached prompt tokens sent to the candidate and
    not yet computed; and with probability `explorationProbability`, so that others learn prompts.
    Upstream: `filter/prefixcacheaffinity/plugin.go`.

    Attributes:
        affinity_threshold: Share of the prompt that makes a candidate sticky.
        exploration_probability: Chance of keeping all; 0 draws nothing.
        max_ttft_penalty_ms: Milliseconds a cached prompt may cost; 0 for any.
        peak_prefill_throughput: Prompt tokens an idle engine computes in a second. 15928, the
            upstream default, is a Qwen3-32B on two H100; it has to be measured for others.
        ttft_source: Without effect: there is no latency predictor, so either word estimates by
            throughput.
    """

    kind: ClassVar[str] = "prefix-cache-affinity-filter"
    needs: ClassVar[frozenset[Signal]] = frozenset({Signal.PREFIX, Signal.QUEUED})

    affinity_threshold: ShareT = 0.80
    exploration_probability: ShareT = 0.0
    max_ttft_penalty_ms: Annotated[float, msgspec.Meta(ge=0)] = msgspec.field(
        default=18_000.0, name="maxTTFTPenaltyMs"
    )
    peak_prefill_throughput: Annotated[float, msgspec.Meta(gt=0)] = 15_928.0
    ttft_source: Literal["prefillThroughput", "latencyPredictor"] = "prefillThroughput"

    def filter(
        self, context: SchedulingContext, candidates: Sequence[Candidate]
    ) -> Sequence[Candidate]:
        """See the class."""
        explore, prompt = self.exploration_probability, context.request.prompt_tokens
        if prompt <= 0 or (explore and context.rng.random() < explore):
            return candidates
        enough = self.affinity_threshold * prompt
        sticky = [c for c in candidates if c.matched_tokens >= enough]
        others = [c.queued_tokens for c in candidates if c.matched_tokens < enough]
        if not sticky or not others or not self.max_ttft_penalty_ms:
            return sticky or candidates
        longer = min(c.queued_tokens for c in sticky) - min(others)
        penalty_ms = longer / self.peak_prefill_throughput * 1000.0
        return candidates if penalty_ms > self.max_ttft_penalty_ms else sticky


class ConversationAffinity(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Keeps the candidates that hold at least `share` of the prompt and are within the budget.

    The estimate is `(Q + u) p`: queued tokens and uncached ones of this request at the learned
    seconds per prompt token; the budget is `base_s + per_token_s L` (SMetric: 1 s and 62.5 ms for
    each thousand tokens). When none holds so much, or no holder is within the budget, all
    stay. A conversation that leaves makes a second copy of its history, which evicts another
    from a cache; that is why a holder may be slower than others and still be kept.

    Attributes:
        share: Of the prompt's tokens that make a holder, 0..1. Half: below it most of the prompt
            is computed anywhere, and a shared system prompt alone must not bind.
        base_s: Budget of an empty prompt (s).
        per_token_s: Budget of each prompt token (s).
    """

    kind: ClassVar[str] = "conversation-affinity"
    needs: ClassVar[frozenset[Signal]] = frozenset({Signal.PREFIX, Signal.QUEUED, Signal.RATES})

    share: float = 0.5
    base_s: float = 1.0
    per_token_s: float = 62.5e-6

    def filter(
        self, context: SchedulingContext, candidates: Sequence[Candidate]
    ) -> Sequence[Candidate]:
        """See the class."""
        tokens = context.request.prompt_tokens
        enough = self.share * tokens
        if not enough:
            return candidates
        holders = [c for c in candidates if c.matched_tokens >= enough]
        if not holders:
            return candidates
        budget = self.base_s + self.per_token_s * tokens
        quick = [
            c
            for c in holders
            if (c.queued_tokens + max(tokens - c.matched_tokens, 1)) * c.rates.prefill_s <= budget
        ]
        return quick or candidates
