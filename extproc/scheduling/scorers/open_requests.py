"""Scorers of this picker's own account: open requests and uncomputed prompt tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar

import msgspec

from extproc.endpoint import Candidate
from extproc.scheduling import normalization
from extproc.scheduling.framework import SchedulingContext, Signal


class InFlight(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
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
        """See the class."""
        if not candidates:
            return []
        soft = self.soft_requests
        loads = [c.estimated_requests for c in candidates]
        best = soft + min(loads)
        return [best / (soft + r) for r in loads]


class ActiveRequestScorer(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, rename="camel"
):
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
    max_busy_score: Annotated[float, msgspec.Meta(ge=0, le=1)] = 1.0

    def score(self, context: SchedulingContext, candidates: Sequence[Candidate]) -> list[float]:
        """See the class."""
        counts = [c.in_flight for c in candidates]
        high = max(counts, default=0)
        idle, top = self.idle_threshold, self.max_busy_score
        return [1.0 if c <= idle else (high - c) / high * top for c in counts]


class TokenLoadScorer(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, rename="camel"
):
    """`score = 1 - min(t, T) / T`, with T = `queueThresholdTokens`.

    t is the uncached prompt tokens sent to the candidate and not yet computed, plus the tokens of
    this prompt that are not believed cached there. Range 0 to 1; t is always known. Like those of
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
        """See the class."""
        prompt, threshold = context.request.prompt_tokens, self.queue_threshold_tokens
        return [
            1.0
            - normalization.share(c.queued_tokens + max(0, prompt - c.matched_tokens), threshold)
            for c in candidates
        ]
