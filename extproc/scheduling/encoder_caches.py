"""Images, videos and audio that endpoints were sent last: what their encoders may still have.

Engines keep what their encoder made of an item, and do not publish of which ones.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from extproc.decision import Decision
from extproc.endpoint import Candidate, Endpoint
from extproc.request import InferenceRequest, MediaSpan

#: Items that are remembered for all endpoints together (count), some 40 MB.
MAX_ENTRIES: Final = 262_144

#: Tokens of media that an engine is taken to keep encoded: as many as a step computes
#: (`max_num_batched_tokens`), by the largest default of vLLM.
KEPT_TOKENS: Final = 16_384

#: Tokens by which a cached prefix may end before an image that it covers: its last blocks are not seen.
_TOLERANCE_TOKENS: Final = 128


class _Items:
    """Items of an endpoint, the longest unused first: tokens by digest."""

    __slots__ = ("items", "tokens")

    def __init__(self) -> None:
        self.items: OrderedDict[int, int] = OrderedDict()
        self.tokens = 0

    def add(self, digest: int, tokens: int) -> None:
        self.tokens += tokens - self.items.pop(digest, 0)
        self.items[digest] = tokens

    def remove(self, digests: Iterable[int]) -> int:
        """Forget items; returns how many were known."""
        removed = [self.items.pop(digest) for digest in digests if digest in self.items]
        self.tokens -= sum(removed)
        return len(removed)

    def remove_oldest(self) -> None:
        self.tokens -= self.items.popitem(last=False)[1]


class EncoderCaches:
    """Items that were sent to endpoints, by address; bounded. Mutable: a plugin owns it.

    Args:
        max_items: Most items remembered for an endpoint (count).
        max_tokens: Most tokens of these, though the last item stays in any case; 0 for no limit.
        share: Time that encoding an item takes, for each second of its prefill.
    """

    def __init__(
        self, *, max_items: int = MAX_ENTRIES, max_tokens: int = 0, share: float = 0.0
    ) -> None:
        self._max_items = max_items
        self._max_tokens = max_tokens
        self._share = share
        self._num_items = 0
        #: The address that was sent none for longest first.
        self._by_address: OrderedDict[str, _Items] = OrderedDict()

    def record_sent(self, decision: Decision) -> None:
        """Remember the items of a committed request for its first endpoint."""
        self._add(decision.endpoints[0].address, tokens_by_digest(decision.request.media))

    def record_moved(self, decision: Decision, served: Endpoint) -> None:
        """Remember them for the endpoint that answered instead; the first one may have lost all."""
        items = tokens_by_digest(decision.request.media)
        known = self._by_address.get(decision.endpoints[0].address)
        if known is not None:
            self._num_items -= known.remove(items)
        self._add(served.address, items)

    def _add(self, address: str, items: Mapping[int, int]) -> None:
        if not items:
            return
        known = self._by_address.pop(address, None) or _Items()
        self._by_address[address] = known
        self._num_items -= len(known.items)
        for digest, tokens in items.items():
            known.add(digest, tokens)
        while len(known.items) > self._max_items or (
            0 < self._max_tokens < known.tokens and len(known.items) > 1
        ):
            known.remove_oldest()
        self._num_items += len(known.items)
        while self._num_items > MAX_ENTRIES:
            self._num_items -= len(self._by_address.popitem(last=False)[1].items)

    def known_shares(
        self, request: InferenceRequest, candidates: Sequence[Candidate]
    ) -> list[float]:
        """Share of the tokens of a request's items that each endpoint was sent, 0..1; 0 for none."""
        items = tokens_by_digest(request.media)
        total = sum(items.values())
        shares = []
        for candidate in candidates:
            known = self._by_address.get(candidate.endpoint.address)
            held = 0
            if known is not None:
                held = sum([tokens for item, tokens in items.items() if item in known.items])
            shares.append(held / total if total else 0.0)
        return shares

    def encoding_tokens(
        self, request: InferenceRequest, candidates: Sequence[Candidate]
    ) -> Mapping[str, float]:
        """Prompt tokens that take as long as what each endpoint has to encode, by address.

        Items that a cached prefix covers, and those that it was sent, are not encoded there; an item
        that comes twice is encoded once.
        """
        per_byte = request.prompt_tokens / max(1, request.stable_bytes)
        spans: dict[int, tuple[int, float]] = {}
        for number, span in enumerate(request.media, start=1):
            end = (span.start + span.size) * per_byte - _TOLERANCE_TOKENS
            spans[span.digest or -number] = span.tokens, end  # the end of the last one
        encoding: dict[str, float] = {}
        for candidate in candidates:
            address = candidate.endpoint.address
            # Without a prompt, as where an endpoint encodes alone, no prefix has an item.
            covered = (candidate.matched_tokens if per_byte else 0) or -math.inf
            known = self._by_address.get(address)
            items = known.items if known is not None else {}
            encoding[address] = self._share * sum(
                [
                    tokens
                    for item, (tokens, end) in spans.items()
                    if end > covered and item not in items
                ]
            )
        return encoding


def tokens_by_digest(media: Sequence[MediaSpan]) -> Mapping[int, int]:
    """Tokens of items with an identity; an item that comes twice counts once."""
    return {span.digest: span.tokens for span in media if span.digest}
