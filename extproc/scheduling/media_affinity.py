"""Affinity of images, videos and audio to endpoints that have encoded them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Annotated, ClassVar

import msgspec

from extproc.decision import Decision
from extproc.endpoint import Candidate
from extproc.scheduling.encoder_caches import EncoderCaches
from extproc.scheduling.framework import SchedulingContext, Signal


class MmEmbeddingsCacheScorer(
    msgspec.Struct,
    frozen=True,
    forbid_unknown_fields=True,
    kw_only=True,
    rename="camel",
    dict=True,
):
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
