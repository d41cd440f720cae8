"""Prefers endpoints believed to hold the beginning of the prompt in their prefix cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import msgspec

from extproc.endpoint import Candidate
from extproc.scheduling.context import SchedulingContext
from extproc.scheduling.framework import Signal


class PrefixCache(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`score = min(1, m / t)`, with m the candidate's matched tokens and t the prompt's tokens.

    A share, not a yes or no: a short beginning that every prompt has in common scores little, so
    it does not draw all traffic to the endpoint that served first. An empty prompt scores 0 everywhere.
    """

    kind: ClassVar[str] = "prefix-cache"
    needs: ClassVar[frozenset[Signal]] = frozenset({Signal.PREFIX})

    def score(self, turn: SchedulingContext, candidates: Sequence[Candidate]) -> list[float]:
        """See the class."""
        t = turn.request.prompt_tokens
        if t <= 0:
            return [0.0] * len(candidates)
        # Most candidates match nothing; those that do may match more than an estimated length.
        return [0.0 if not c.matched_tokens else min(1.0, c.matched_tokens / t) for c in candidates]
