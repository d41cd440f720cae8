"""Scorer of expected latency by KV cache, queue and prefix, as upstream without predictions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

import msgspec

from extproc.endpoint import Candidate
from extproc.scheduling import normalization
from extproc.scheduling.framework import SchedulingContext, Signal

Weight = Annotated[float, msgspec.Meta(ge=0)]


class LatencyScorer(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, rename="camel"
):
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

    composite_kv_weight: Weight = msgspec.field(default=1.0, name="compositeKVWeight")
    composite_queue_weight: Weight = 1.0
    composite_prefix_weight: Weight = 1.0
    ttft_weight: Weight = 0.8
    tpot_weight: Weight = 0.2
    headroom_selection_strategy: Literal["least", "most"] = "least"

    def score(self, context: SchedulingContext, candidates: Sequence[Candidate]) -> list[float]:
        """See the class."""
        a, b, c = (
            self.composite_kv_weight,
            self.composite_queue_weight,
            self.composite_prefix_weight,
        )
        if not a + b + c:
            a = 1.0
        size, t = len(candidates), context.request.prompt_tokens
        usage = (
            normalization.impute_mean([candidate.load.kv_usage for candidate in candidates])
            or [0.5] * size
        )
        waiting = (
            normalization.impute_mean([candidate.load.waiting for candidate in candidates])
            or [0.0] * size
        )
        high = max(waiting, default=0.0)
        return [
            _hundredths(
                (
                    a * (1.0 - normalization.share(u, 1.0))
                    + b * (normalization.share(high - w, high) if high else 1.0)
                    + c * normalization.share(candidate.matched_tokens, t)
                )
                / (a + b + c)
            )
            for candidate, u, w in zip(candidates, usage, waiting, strict=True)
        ]


def _hundredths(score: float) -> float:
    """To the nearest hundredth, halves up."""
    return math.floor(score * 100.0 + 0.5) / 100.0
