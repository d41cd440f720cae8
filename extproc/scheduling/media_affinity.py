"""Affinity of images, videos and audio to endpoints that have encoded them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Annotated, ClassVar, Final

import msgspec

from extproc.decision import Decision
from extproc.endpoint import Candidate
from extproc.request import MediaSpan
from extproc.scheduling.framework import SchedulingContext, Signal

#: Items that are remembered for all endpoints together (count), some 40 MB.
_MAX_ENTRIES: Final = 262_144


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
    def _sent(self) -> OrderedDict[str, OrderedDict[int, None]]:
        """Digests by address, the longest unused first; so are the addresses."""
        return OrderedDict()

    def score(self, context: SchedulingContext, candidates: Sequence[Candidate]) -> list[float]:
        items = _tokens_by_digest(context.request.media)
        total = sum(items.values())
        if not total:
            return [0.0] * len(candidates)
        scores = []
        for candidate in candidates:
            known = self._sent.get(candidate.endpoint.address, ())
            scores.append(sum([tokens for item, tokens in items.items() if item in known]) / total)
        return scores

    def on_committed(self, decision: Decision, now: float) -> None:
        """Remember the items of a request for its endpoint."""
        items = _tokens_by_digest(decision.request.media)
        if not items:
            return
        address = decision.endpoints[0].address
        known = self._sent.setdefault(address, OrderedDict())
        self._sent.move_to_end(address)
        for item in items:
            known[item] = None
            known.move_to_end(item)
        while len(known) > self.entries_per_server:
            known.popitem(last=False)
        while sum(map(len, self._sent.values())) > _MAX_ENTRIES:
            self._sent.popitem(last=False)


def _tokens_by_digest(media: Sequence[MediaSpan]) -> Mapping[int, int]:
    return {span.digest: span.tokens for span in media if span.digest}
