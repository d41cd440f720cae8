"""Scorers of cached prompts: share of the prompt on an endpoint, age of its last new prompt."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from functools import cached_property
from typing import Annotated, ClassVar

import msgspec

from extproc.decision import Decision
from extproc.endpoint import Candidate
from extproc.scheduling import normalization
from extproc.scheduling.framework import SchedulingContext, Signal


class PrefixCacheScorer(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, rename="camel"
):
    """`score = (1 - w) * m / t + w * min(1, m / S) ** 2`, w and S the two parameters.

    m is the candidate's matched tokens and t the prompt's. Range 0 to 1; nothing known of a
    candidate is a match of 0. The score is a share: a short beginning that every prompt has in
    common scores little, so it does not draw all traffic to the endpoint that served first. An
    empty prompt scores 0 everywhere. The upstream picker counts both in blocks of 64 tokens, ours
    in tokens. Upstream: `scorer/prefix/plugin.go`.

    Attributes:
        match_length_weight: w, how much the length of the match counts against its share. 0, the
            upstream default, makes the score the share.
        match_length_scale_tokens: S, the match that counts in full. 8192 is the upstream default.
    """

    kind: ClassVar[str] = "prefix-cache-scorer"
    needs: ClassVar[frozenset[Signal]] = frozenset({Signal.PREFIX})

    match_length_weight: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0
    match_length_scale_tokens: Annotated[int, msgspec.Meta(gt=0)] = 8192

    def score(self, context: SchedulingContext, candidates: Sequence[Candidate]) -> list[float]:
        """See the class."""
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
            (1.0 - w) * normalization.share(m, t) + w * normalization.share(m, scale) ** 2
            if m
            else 0.0
            for m in (c.matched_tokens for c in candidates)
        ]


class NoHitLruScorer(
    msgspec.Struct,
    frozen=True,
    forbid_unknown_fields=True,
    kw_only=True,
    rename="camel",
    dict=True,
):
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
        """See the class."""
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
