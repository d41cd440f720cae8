"""Scorers of load: scraped from the engine, or of this picker's own account.

Scraped are waiting and running requests and KV cache usage; the account has open requests and uncomputed
prompt tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

import msgspec

from extproc.endpoint import Candidate
from extproc.scheduling import framework
from extproc.scheduling.framework import (
    NonNegative,
    PluginParameters,
    SchedulingContext,
    Share,
    Signal,
    UpstreamParameters,
)


class QueueScorer(PluginParameters, frozen=True, kw_only=True):
    """`score = 1 - (w - low) / max(high - low, min_span_requests)`, w the engine's waiting requests.

    low and high are the least and greatest w among the candidates; all equal scores 1. Range 0 to
    1. Unknown w counts as the mean of the known ones, none known scores 0.5; the upstream picker
    takes 0 for unknown. Upstream: `scorer/queuedepth/queue.go`.

    Attributes:
        min_span_requests: Spread of queues below which differences fade. 1 is the upstream
            formula `(high - w) / (high - low)`, in which one waiting request more costs the whole
            score.
    """

    kind: ClassVar[str] = "queue-scorer"
    needs: ClassVar[frozenset[Signal]] = frozenset({Signal.WAITING})

    min_span_requests: float = 1.0

    def __post_init__(self) -> None:
        """Refuse a span that could divide by zero.

        Raises:
            ValueError: `min_span_requests` is not above zero.
        """
        if not self.min_span_requests > 0:
            raise ValueError(f"expected min_span_requests above 0, got {self.min_span_requests}")

    def score(self, context: SchedulingContext, candidates: Sequence[Candidate]) -> list[float]:
        waiting = framework.impute_mean([c.load.waiting for c in candidates])
        if not waiting:
            return [framework.NEUTRAL] * len(candidates)
        low = min(waiting)
        span = max(max(waiting) - low, self.min_span_requests)
        return [1.0 - (w - low) / span for w in waiting]


class RunningRequestsSizeScorer(PluginParameters, frozen=True, kw_only=True):
    """`score = (high - x) / (high - low)`, x the engine's running requests; all equal scores 1.

    low and high are the least and greatest x among the candidates. Range 0 to 1. Unknown x counts
    as the mean of the known ones, none known scores 0.5; the upstream picker takes 0 for unknown.
    Upstream: `scorer/runningrequests/runningrequest.go`.
    """

    kind: ClassVar[str] = "running-requests-size-scorer"
    needs: ClassVar[frozenset[Signal]] = frozenset({Signal.RUNNING})

    def score(self, context: SchedulingContext, candidates: Sequence[Candidate]) -> list[float]:
        return framework.min_max_inverted([c.load.running for c in candidates])


class LoadAwareScorer(UpstreamParameters, frozen=True, kw_only=True):
    """`score = 0.5 * (1 - min(w, threshold) / threshold)`, with w the engine's waiting requests.

    An absolute measure: an empty queue scores 0.5, `threshold` or more 0. Unknown w counts as the
    mean of the known ones, none known scores 0.5; the upstream picker takes 0 for unknown.
    Upstream: `scorer/loadaware/load_aware.go`.

    Attributes:
        threshold: Waiting requests at which an engine counts as overloaded. 128 is the upstream
            default.
    """

    kind: ClassVar[str] = "load-aware-scorer"
    needs: ClassVar[frozenset[Signal]] = frozenset({Signal.WAITING})

    threshold: Annotated[int, msgspec.Meta(gt=0)] = 128

    def score(self, context: SchedulingContext, candidates: Sequence[Candidate]) -> list[float]:
        waiting = framework.impute_mean([c.load.waiting for c in candidates])
        if waiting is None:
            return [framework.NEUTRAL] * len(candidates)
        return [0.5 * (1.0 - framework.share(w, self.threshold)) for w in waiting]


class KvCacheUtilizationScorer(PluginParameters, frozen=True, kw_only=True):
    """`score = 1 - u`, with u the share of KV blocks held by live requests, cut to 0..1.

    Range 0 to 1. Unknown u counts as the mean of the known ones, none known scores 0.5; the
    upstream picker takes 0 for unknown, which makes an endpoint without a scrape look free.
    Upstream: `scorer/kvcacheutilization/kvcache_utilization.go`.
    """

    kind: ClassVar[str] = "kv-cache-utilization-scorer"
    needs: ClassVar[frozenset[Signal]] = frozenset({Signal.KV_USAGE})

    def score(self, context: SchedulingContext, candidates: Sequence[Candidate]) -> list[float]:
        usage = framework.impute_mean([c.load.kv_usage for c in candidates])
        if usage is None:
            return [framework.NEUTRAL] * len(candidates)
        return [1.0 - u if 0.0 <= u <= 1.0 else float(u < 0.0) for u in usage]


class LatencyScorer(UpstreamParameters, frozen=True, kw_only=True):
    """`score = (a * (1 - u) + b * (high - w) / high + c * m / t) / (a + b + c)`, in hundredths.

    u is the share of KV blocks held by live requests, w the engine's waiting requests and high the
    most among the candidates (a high of 0 gives all of them 1), m the matched tokens and t the
    prompt's. a, b and c are the three composite weights; when all are 0, a counts as 1. It is what
    the upstream scorer does while no prediction is there; here it is all, since there is no
    latency predictor. Range 0 to 1. Unknown u or w counts as the mean of the known ones, none known
    as u 0.5 and w 0; upstream takes 0. Upstream: `scorer/latency/plugin.go`.

    Attributes:
        composite_kv_weight: a.
        composite_queue_weight: b.
        composite_prefix_weight: c.
        ttft_weight: No effect without predictions.
        tpot_weight: No effect without predictions.
        headroom_selection_strategy: No effect without predictions.
    """

    kind: ClassVar[str] = "latency-scorer"
    needs: ClassVar[frozenset[Signal]] = frozenset({Signal.KV_USAGE, Signal.WAITING, Signal.PREFIX})

    composite_kv_weight: NonNegative = msgspec.field(default=1.0, name="compositeKVWeight")
    composite_queue_weight: NonNegative = 1.0
    composite_prefix_weight: NonNegative = 1.0
    ttft_weight: NonNegative = 0.8
    tpot_weight: NonNegative = 0.2
    headroom_selection_strategy: Literal["least", "most"] = "least"

    def score(self, context: SchedulingContext, candidates: Sequence[Candidate]) -> list[float]:
        a, b, c = (
            self.composite_kv_weight,
            self.composite_queue_weight,
            self.composite_prefix_weight,
        )
        if not a + b + c:
            a = 1.0
        size, t = len(candidates), context.request.prompt_tokens
        usage = (
            framework.impute_mean([candidate.load.kv_usage for candidate in candidates])
            or [0.5] * size
        )
        waiting = (
            framework.impute_mean([candidate.load.waiting for candidate in candidates])
            or [0.0] * size
        )
        high = max(waiting, default=0.0)
        return [
            _hundredths(
                (
                    a * (1.0 - framework.share(u, 1.0))
                    + b * (framework.share(high - w, high) if high else 1.0)
                    + c * framework.share(candidate.matched_tokens, t)
                )
                / (a + b + c)
            )
            for candidate, u, w in zip(candidates, usage, waiting, strict=True)
        ]


def _hundredths(score: float) -> float:
    """To the nearest hundredth, halves up."""
    return math.floor(score * 100.0 + 0.5) / 100.0


class InFlight(PluginParameters, frozen=True, kw_only=True):
    """`score = (s + low) / (s + r)`, with s = `soft_requests`.

    r is the candidate's dead-reckoned requests, which are always known, and low the smallest r
    among the candidates. Range above 0 to 1. The least loaded candidate scores 1; the score is the ratio of loads, so a lead of two requests counts when
    there are three and not when there are a hundred, and ten times the load looks like ten times
    the load. The usual (max - r)/(max - min) has neither property: it gives a difference of one
    request the full weight. Dead reckoning makes it right between two scrapes and without any.

    Attributes:
        soft_requests: Requests an engine batches without a noticeable delay. 8 is small against the
            256 sequences of a vLLM batch, and large enough that a lead of one or two requests on
            idle endpoints does not outweigh a cached prompt.
    """

    kind: ClassVar[str] = "in-flight"
    needs: ClassVar[frozenset[Signal]] = frozenset({Signal.IN_FLIGHT})

    soft_requests: float = 8.0

    def __post_init__(self) -> None:
        """Refuse a softening that could divide by zero.

        Raises:
            ValueError: `soft_requests` is not above zero.
        """
        if not self.soft_requests > 0:
            raise ValueError(f"expected soft_requests above 0, got {self.soft_requests}")

    def score(self, context: SchedulingContext, candidates: Sequence[Candidate]) -> list[float]:
        if not candidates:
            return []
        soft = self.soft_requests
        loads = [c.estimated_requests for c in candidates]
        best = soft + min(loads)
        return [best / (soft + r) for r in loads]


class ActiveRequestScorer(UpstreamParameters, frozen=True, kw_only=True):
    """`score = (high - c) / high * maxBusyScore`, and 1 when `c <= idleThreshold`.

    c is the requests this picker has open on the candidate, which are always known, and high the
    most among the candidates. Range 0 to 1. With maxBusyScore below 1 an idle endpoint beats a busy
    endpoint by a gap, which keeps a beginning that all prompts share from drawing all traffic to a
    single endpoint. Unlike `in-flight` it counts neither the engine's own load nor the ratio of
    loads. Upstream: `scorer/activerequest/active_request.go`.

    Attributes:
        idle_threshold: Most open requests that count as idle. 0 is the upstream default.
        max_busy_score: Score below which all busy endpoints stay. 1, the upstream default, makes
            no gap.
    """

    kind: ClassVar[str] = "active-request-scorer"
    needs: ClassVar[frozenset[Signal]] = frozenset({Signal.IN_FLIGHT})

    idle_threshold: Annotated[int, msgspec.Meta(ge=0)] = 0
    max_busy_score: Share = 1.0

    def score(self, context: SchedulingContext, candidates: Sequence[Candidate]) -> list[float]:
        counts = [c.in_flight for c in candidates]
        high = max(counts, default=0)
        idle, top = self.idle_threshold, self.max_busy_score
        return [1.0 if c <= idle else (high - c) / high * top for c in counts]


class TokenLoadScorer(UpstreamParameters, frozen=True, kw_only=True):
    """`score = 1 - min(t, T) / T`, with T = `queueThresholdTokens`.

    t is the uncached prompt tokens sent to the candidate and not yet computed, plus the tokens of
    this prompt that are not predicted as cached there. Range 0 to 1; t is always known. Like those of
    the upstream producer, tokens are added at dispatch and freed at the first token; requests of
    other pickers that scrapes show count besides. Upstream: `scorer/tokenload/token_load.go`.

    Attributes:
        queue_threshold_tokens: Tokens that score 0. 4194304, the upstream default, are 128 prompts
            of 32k tokens.
    """

    kind: ClassVar[str] = "token-load-scorer"
    needs: ClassVar[frozenset[Signal]] = frozenset({Signal.QUEUED, Signal.PREFIX})

    queue_threshold_tokens: Annotated[int, msgspec.Meta(gt=0)] = 4_194_304

    def score(self, context: SchedulingContext, candidates: Sequence[Candidate]) -> list[float]:
        prompt, threshold = context.request.prompt_tokens, self.queue_threshold_tokens
        return [
            1.0 - framework.share(c.queued_tokens + max(0, prompt - c.matched_tokens), threshold)
            for c in candidates
        ]
