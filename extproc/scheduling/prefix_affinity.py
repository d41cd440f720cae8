"""Affinity to caches: scorers of cached prompts and media, and filters that keep a prompt there.

Scorers judge the share of the prompt that is cached on an endpoint, the age of its last new prompt, and
the media that it has encoded; filters keep a prompt where its prefix is cached within a bound of time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from functools import cached_property
from typing import Annotated, ClassVar, Final, Literal

import msgspec

from extproc.decision import Decision
from extproc.endpoint import Candidate, Endpoint
from extproc.scheduling import framework
from extproc.scheduling.encoder_caches import EncoderCaches
from extproc.scheduling.framework import (
    NonNegative,
    PluginParameters,
    SchedulingContext,
    Share,
    Signal,
    UpstreamParameters,
)


class PrefixCacheScorer(UpstreamParameters, frozen=True, kw_only=True):
    """`score = (1 - w) * m / t + w * min(1, m / S) ** 2`, w and S the two parameters.

    m is the candidate's matched tokens and t the prompt's. Range 0 to 1; nothing known of a
    candidate is a match of 0. The score is a share: a short beginning that every prompt has in
    common scores little, so it does not draw all traffic to the endpoint that served first. An
    empty prompt scores 0 everywhere. The upstream picker counts both in blocks of 64 tokens, ours
    in tokens. Upstream: `scorer/prefix/plugin.go`.

    Attributes:
        match_length_weight: w, how much the length of the match counts against its share. 0, the
            upstream default, makes the score the share.
        match_length_scale_tokens: S, the match that counts in full. 8192 is the upstream default. 0 or
            less only where w is 0, which does not read it.
    """

    kind: ClassVar[str] = "prefix-cache-scorer"
    needs: ClassVar[frozenset[Signal]] = frozenset({Signal.PREFIX})

    match_length_weight: Share = 0.0
    match_length_scale_tokens: int = 8192

    def __post_init__(self) -> None:
        """Refuse a scale of nothing, where upstream reads it.

        Raises:
            ValueError: `match_length_scale_tokens` is not above 0, and `match_length_weight` is.
        """
        if self.match_length_weight and self.match_length_scale_tokens <= 0:
            raise ValueError(
                f"expected matchLengthScaleTokens above 0, got {self.match_length_scale_tokens}"
            )

    def score(self, context: SchedulingContext, candidates: Sequence[Candidate]) -> list[float]:
        t, w, scale = (
            context.request.prompt_tokens,
            self.match_length_weight,
            self.match_length_scale_tokens,
        )
        if t <= 0:
            return [0.0] * len(candidates)
        # Most candidates match nothing; those that do may match more than an estimated length.
        if not w:
            return [
                0.0 if not c.matched_tokens else min(1.0, c.matched_tokens / t) for c in candidates
            ]
        return [
            (1.0 - w) * framework.share(m, t) + w * framework.share(m, scale) ** 2 if m else 0.0
            for m in (c.matched_tokens for c in candidates)
        ]


class NoHitLruScorer(UpstreamParameters, frozen=True, kw_only=True, dict=True):
    """`score = 1 - rank / (n - 1)` when no candidate has any of the prompt cached, else 0.5.

    Ranked first are the candidates that never got such a prompt, by address, then the others by
    when they last got such a prompt, longest ago first. Alone, a candidate scores 1. Range 0 to 1.
    So caches grow evenly: a prompt that is new to all goes where the last new prompt is oldest.
    Upstream: `scorer/nohitlru/no_hit_lru.go`.

    Attributes:
        lru_size: Endpoints whose last new prompt is remembered. 1024 is the upstream default.
    """

    kind: ClassVar[str] = "no-hit-lru-scorer"
    needs: ClassVar[frozenset[Signal]] = frozenset({Signal.PREFIX})

    lru_size: Annotated[int, msgspec.Meta(gt=0)] = 1024

    @cached_property
    def _last(self) -> OrderedDict[str, None]:
        """Addresses that got a new prompt, longest ago first."""
        return OrderedDict()

    def score(self, context: SchedulingContext, candidates: Sequence[Candidate]) -> list[float]:
        if any(c.matched_tokens for c in candidates):
            return [0.5] * len(candidates)
        if len(candidates) == 1:
            return [1.0]
        places = {address: at for at, address in enumerate(self._last)}
        addresses = [c.endpoint.address for c in candidates]
        order = sorted(addresses, key=lambda address: (places.get(address, -1), address))
        ranks = {address: rank for rank, address in enumerate(order)}
        return [1.0 - ranks[address] / (len(addresses) - 1) for address in addresses]

    def on_committed(self, decision: Decision, now: float) -> None:
        """Remember the endpoint of a prompt that was new to all."""
        if any(c.matched_tokens for c in decision.scored_candidates):
            return
        self._last[decision.endpoints[0].address] = None
        self._last.move_to_end(decision.endpoints[0].address)
        if len(self._last) > self.lru_size:
            self._last.popitem(last=False)


#: Upstream's default: prompt tokens that an idle engine computes in a second.
_PEAK_PREFILL_THROUGHPUT: Final = 15_928.0


class PrefixCacheAffinityFilter(UpstreamParameters, frozen=True, kw_only=True):
    """Keeps sticky candidates, those with `m / t >= affinityThreshold`; all if there are none.

    m is the candidate's matched tokens, t the prompt's. All are kept, too, when the best sticky one
    would take `maxTTFTPenaltyMs` longer than the best other one, where the time is
    `1000 * q / peakPrefillThroughput` ms and q the uncached prompt tokens sent to the candidate and
    not yet computed; and with probability `explorationProbability`, so that others learn prompts.
    Upstream: `filter/prefixcacheaffinity/plugin.go`.

    Attributes:
        affinity_threshold: Share of the prompt that makes a candidate sticky, at most 1; all are kept
            with 0 or less.
        exploration_probability: Chance of keeping all; 0 draws nothing.
        max_ttft_penalty_ms: Milliseconds a cached prompt may cost; 0 for any.
        peak_prefill_throughput: Prompt tokens an idle engine computes in a second. 15928, the
            upstream default, is a Qwen3-32B on two H100; it has to be measured for others. 0 takes
            that default, and only where upstream does not read it: with `latencyPredictor`, or
            without a penalty.
        ttft_source: Without effect: there is no latency predictor, so either word estimates by
            throughput.
    """

    kind: ClassVar[str] = "prefix-cache-affinity-filter"
    needs: ClassVar[frozenset[Signal]] = frozenset({Signal.PREFIX, Signal.QUEUED})

    affinity_threshold: Annotated[float, msgspec.Meta(le=1)] = 0.80
    exploration_probability: Share = 0.0
    max_ttft_penalty_ms: NonNegative = msgspec.field(default=18_000.0, name="maxTTFTPenaltyMs")
    peak_prefill_throughput: NonNegative = _PEAK_PREFILL_THROUGHPUT
    ttft_source: Literal["prefillThroughput", "latencyPredictor"] = "prefillThroughput"

    def __post_init__(self) -> None:
        """Refuse an estimate without a throughput.

        Raises:
            ValueError: `peak_prefill_throughput` is 0 where upstream estimates by it.
        """
        is_read = self.ttft_source == "prefillThroughput" and self.max_ttft_penalty_ms > 0
        if is_read and not self.peak_prefill_throughput:
            raise ValueError("expected peakPrefillThroughput above 0, got 0")

    def filter(
        self, context: SchedulingContext, candidates: Sequence[Candidate]
    ) -> Sequence[Candidate]:
        explore, prompt = self.exploration_probability, context.request.prompt_tokens
        if prompt <= 0 or (explore and context.rng.random() < explore):
            return candidates
        enough = self.affinity_threshold * prompt
        sticky = [c for c in candidates if c.matched_tokens >= enough]
        others = [c.queued_tokens for c in candidates if c.matched_tokens < enough]
        if not sticky or not others or not self.max_ttft_penalty_ms:
            return sticky or candidates
        longer = min(c.queued_tokens for c in sticky) - min(others)
        throughput = self.peak_prefill_throughput or _PEAK_PREFILL_THROUGHPUT
        penalty_ms = longer / throughput * 1000.0
        return candidates if penalty_ms > self.max_ttft_penalty_ms else sticky


class ConversationAffinity(PluginParameters, frozen=True, kw_only=True):
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

    share: Share = 0.5
    base_s: NonNegative = 1.0
    per_token_s: NonNegative = 62.5e-6

    def filter(
        self, context: SchedulingContext, candidates: Sequence[Candidate]
    ) -> Sequence[Candidate]:
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


class MmEmbeddingsCacheScorer(UpstreamParameters, frozen=True, kw_only=True, dict=True):
    """`score = e / t`, of an endpoint that was sent e of the t tokens of the request's media lately.

    Media are images, videos and audio; an item counts once, by its content. Range 0 to 1, 0 for a
    request without any. It is for images behind texts that differ: where they follow the same text,
    the prefix cache has more than the encoder's (docs/concepts/media.md#encoder-caches). Items within
    tool results have no identity here. Upstream: `scorer/mmcacheaffinity/scorer.go`, which weighs all
    items alike.

    Attributes:
        entries_per_server: Items that are remembered for an endpoint. 2048 is what upstream's 4096 MiB
            come to; vLLM's encoder cache holds as many tokens as a step (`max_num_batched_tokens`),
            some 16 images of 1,000 tokens, and its processor cache holds more.
    """

    kind: ClassVar[str] = "mm-embeddings-cache-scorer"
    needs: ClassVar[frozenset[Signal]] = frozenset()

    entries_per_server: Annotated[int, msgspec.Meta(gt=0)] = 2048

    @cached_property
    def _caches(self) -> EncoderCaches:
        return EncoderCaches(max_items=self.entries_per_server)

    def score(self, context: SchedulingContext, candidates: Sequence[Candidate]) -> list[float]:
        return self._caches.known_shares(context.request, candidates)

    def on_committed(self, decision: Decision, now: float) -> None:
        """Remember the items of a request for its endpoint."""
        del now
        self._caches.record_sent(decision)

    def on_moved(self, decision: Decision, served: Endpoint, now: float) -> None:
        """Remember them for the endpoint that answered."""
        del now
        self._caches.record_moved(decision, served)
