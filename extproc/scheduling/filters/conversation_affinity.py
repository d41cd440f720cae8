"""Keeps a follow-up turn where its history is, while that is fast enough."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import msgspec

from extproc.endpoint import Candidate
from extproc.scheduling.context import SchedulingContext
from extproc.scheduling.framework import Signal


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
        self, turn: SchedulingContext, candidates: Sequence[Candidate]
    ) -> Sequence[Candidate]:
        """See the class."""
        tokens = turn.request.prompt_tokens
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
