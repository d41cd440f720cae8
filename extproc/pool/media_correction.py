"""Corrects estimated tokens of images, videos and audio by the usage that engines report.

The estimate is by the name of a model (`parsing.media`); deployments rename models, and set other
bounds for images. An answer says how many tokens its prompt had, and vLLM how many of them are media. Of
other engines, what the text does not account for are those of its media.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from extproc.request import MediaKind, MediaSpan

#: Items, fading, from which a model's own factor counts, and the share of the past that an item leaves.
_MIN_ITEMS = 3.5
_DECAY = 0.98

#: Tokens of media that are learned from, for each of the text beside them: beside a longer text, the
#: error of its own estimate would be taken for theirs.
_MIN_MEDIA = 1 / 3

#: Bounds of a factor: above, what was counted is no media; below, they were not read.
_BOUNDS = (1 / 16, 16.0)

#: Models remembered, the least recently learned forgotten first.
_MAX_MODELS = 64

#: A kind, and whether its size was known.
_Key = tuple[MediaKind, bool]


class _ItemSums(msgspec.Struct, gc=False):
    """Fading sums of items of a model and a kind."""

    items: float = 0.0
    estimated: float = 0.0
    observed: float = 0.0

    def add(self, items: int, estimated: float, observed: float) -> None:
        keep = _DECAY**items
        self.items = self.items * keep + items
        self.estimated = self.estimated * keep + estimated
        self.observed = self.observed * keep + observed

    @property
    def is_known(self) -> bool:
        return self.items >= _MIN_ITEMS

    @property
    def factor(self) -> float:
        low, high = _BOUNDS
        return min(high, max(low, self.observed / self.estimated))


class MediaCorrection:
    """Observed over estimated tokens of media, by model and kind."""

    def __init__(self) -> None:
        self._models: dict[str, dict[_Key, _ItemSums]] = {}

    def tokens(self, model: str, media: Sequence[MediaSpan]) -> list[float]:
        """Expected tokens of each item.

        An item of unknown size takes what those of the model took on average: others of unknown size, or
        else those of known size. Before any is known, the estimate stands.
        """
        known = self._models.get(model)
        if known is None:
            return [float(span.tokens) for span in media]
        return [self._item_tokens(known, span) for span in media]

    @staticmethod
    def _item_tokens(known: dict[_Key, _ItemSums], span: MediaSpan) -> float:
        sums = known.get((span.kind, span.is_sized))
        if sums is not None and sums.is_known:
            return span.tokens * sums.factor
        sized = known.get((span.kind, True))
        if not span.is_sized and sized is not None and sized.is_known:
            return span.count * sized.observed / sized.items
        return float(span.tokens)

    @property
    def factors(self) -> dict[tuple[str, MediaKind], float]:
        """Observed over estimated tokens, by model and kind, of those that showed enough."""
        totals: dict[tuple[str, MediaKind], _ItemSums] = {}
        for model, by_key in self._models.items():
            for (kind, _), sums in by_key.items():
                if sums.is_known:
                    total = totals.setdefault((model, kind), _ItemSums())
                    total.estimated += sums.estimated
                    total.observed += sums.observed
        return {key: total.factor for key, total in totals.items()}

    def observe_usage(
        self, model: str, media: Sequence[MediaSpan], *, prompt_tokens: int, text_tokens: float
    ) -> None:
        """Record the prompt tokens that the `usage` of an answer reports.

        Args:
            prompt_tokens: By the engine.
            text_tokens: Estimate for the text beside them.
        """
        estimated = sum([span.tokens for span in media])
        if max(sum(self.tokens(model, media)), estimated) >= _MIN_MEDIA * text_tokens:
            self.observe_tokens(model, media, prompt_tokens - text_tokens)

    def observe_tokens(self, model: str, media: Sequence[MediaSpan], observed: float) -> None:
        """Record the tokens that all media of a prompt took."""
        expected = self.tokens(model, media)
        total = sum(expected)
        low, high = _BOUNDS
        estimated = sum([span.tokens for span in media])
        if not 0.0 < low * estimated <= observed <= high * estimated:
            return
        by_key = self._models.pop(model, None) or {}
        self._models[model] = by_key
        if len(self._models) > _MAX_MODELS:
            del self._models[next(iter(self._models))]
        for span, tokens in zip(media, expected, strict=True):
            sums = by_key.setdefault((span.kind, span.is_sized), _ItemSums())
            sums.add(span.count, span.tokens, observed * tokens / total)
