"""Prefers endpoints believed to hold the beginning of the prompt, by the upstream formula."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar

import msgspec

from extproc.endpoint import Candidate
from extproc.scheduling import normalization
from extproc.scheduling.context import SchedulingContext
from extproc.scheduling.framework import Signal


class PrefixCacheScorer(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, rename="camel"
):
    """`score = (1 - w) * m / t + w * min(1, m / S) ** 2`, w and S the two parameters.

    m is the candidate's matched tokens and t the prompt's. The upstream picker counts both in
    blocks of 64 tokens, ours in tokens. An empty prompt scores 0 everywhere.

    Attributes:
        match_length_weight: w, how much the length of the match counts against its share. 0, the
            upstream default, makes the score the share.
        match_length_scale_tokens: S, the match that counts in full. 8192 is the upstream default.
    """

    kind: ClassVar[str] = "prefix-cache-scorer"
    needs: ClassVar[frozenset[Signal]] = frozenset({Signal.PREFIX})

    match_length_weight: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0
    match_length_scale_tokens: Annotated[int, msgspec.Meta(gt=0)] = 8192

    def score(self, turn: SchedulingContext, candidates: Sequence[Candidate]) -> list[float]:
        """See the class."""
        t, w, scale = (
            turn.request.prompt_tokens,
            self.match_length_weight,
            self.match_length_scale_tokens,
        )
        if t <= 0:
            return [0.0] * len(candidates)
        return [
            (1.0 - w) * normalization.share(m, t) + w * normalization.share(m, scale) ** 2
            if m
            else 0.0
            for m in (c.matched_tokens for c in candidates)
        ]
