"""Prefers endpoints with few prompt tokens still to compute."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar

import msgspec

from extproc.endpoint import Candidate
from extproc.scheduling import normalization
from extproc.scheduling.context import SchedulingContext
from extproc.scheduling.framework import Signal


class TokenLoadScorer(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, rename="camel"
):
    """`score = 1 - min(t, T) / T`, with T = `queueThresholdTokens`.

    t is the uncached prompt tokens sent to the candidate and not yet computed, plus the tokens of
    this prompt that are not believed cached there. Like the upstream producer's, they are added at
    dispatch and freed at the first token; what scrapes show of others' requests counts besides.

    Attributes:
        queue_threshold_tokens: Tokens that score 0. 4194304, the upstream default, are 128 prompts
            of 32k tokens.
    """

    kind: ClassVar[str] = "token-load-scorer"
    needs: ClassVar[frozenset[Signal]] = frozenset({Signal.QUEUED, Signal.PREFIX})

    queue_threshold_tokens: Annotated[int, msgspec.Meta(gt=0)] = 4_194_304

    def score(self, turn: SchedulingContext, candidates: Sequence[Candidate]) -> list[float]:
        """See the class."""
        prompt, threshold = turn.request.prompt_tokens, self.queue_threshold_tokens
        return [
            1.0
            - normalization.share(c.queued_tokens + max(0, prompt - c.matched_tokens), threshold)
            for c in candidates
        ]
