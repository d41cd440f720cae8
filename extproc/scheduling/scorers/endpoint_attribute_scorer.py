"""Scorer of a named number of an endpoint, higher or lower is better."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

import msgspec

from extproc.endpoint import Candidate
from extproc.scheduling import attributes, normalization
from extproc.scheduling.framework import SchedulingContext, Signal


class FixedRange(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, rename="camel"
):
    """Values that score 0 and 1.

    Attributes:
        min: The one end.
        max: The other, greater than `min`.
    """

    min: float
    max: float

    def __post_init__(self) -> None:
        """Refuse an empty range.

        Raises:
            ValueError: `min` is not below `max`.
        """
        if not self.min < self.max:
            raise ValueError(f"expected min below max, got {self.min} and {self.max}")


class AdaptiveRange(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The range from the least to the greatest value among the candidates."""


class Normalization(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, rename="camel"
):
    """Range for normalization; the adaptive one when neither is set.

    Attributes:
        adaptive_range: Range of the candidates' values.
        fixed_range: Range of the configuration.
    """

    adaptive_range: AdaptiveRange | None = None
    fixed_range: FixedRange | None = None

    def __post_init__(self) -> None:
        """Refuse two ranges.

        Raises:
            ValueError: Both are set.
        """
        if self.adaptive_range is not None and self.fixed_range is not None:
            raise ValueError("expected at most one of adaptiveRange and fixedRange, got both")


class AttributeScorerAlgorithm(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, rename="camel"
):
    """Conversion of a value into a score.

    Attributes:
        type: Direction: the end of the range that scores best.
        normalization: The range.
    """

    type: Literal["linear_lower_is_better", "linear_higher_is_better"]
    normalization: Normalization = Normalization()


class EndpointAttributeScorer(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, rename="camel"
):
    """`score = (v - min) / (max - min)` cut to 0..1, or 1 minus that where lower is better.

    In an adaptive range of one value all score 1. Unknown v counts as the mean of the known
    ones, none known scores 0.5; the upstream picker gives 0 for unknown. Upstream:
    `scorer/endpointattribute/endpointattribute.go`. Numbers there are:
    `WaitingQueueSize`, `RunningRequestsSize`, `KVCacheUsagePercent`, the engine's own names of
    these (`num_requests_waiting`, ...), `in_flight`, `requests`, `prompt_tokens`, `queued_tokens`,
    `matched_tokens`, and `extra.NAME` for the metric NAME of `scrape.extra_metrics`.

    Attributes:
        attribute_key: Name of the attribute.
        algorithm: Its conversion into a score.
    """

    kind: ClassVar[str] = "endpoint-attribute-scorer"

    attribute_key: str
    algorithm: AttributeScorerAlgorithm

    def __post_init__(self) -> None:
        """Refuse an unknown attribute.

        Raises:
            ValueError: See `attributes.find`.
        """
        attributes.find(self.attribute_key)

    @property
    def needs(self) -> frozenset[Signal]:
        """Signals from which the attribute is read."""
        return frozenset({attributes.find(self.attribute_key).signal})

    @property
    def extra_metrics(self) -> frozenset[str]:
        """See `framework.ExtraMetricReader`."""
        metric = attributes.find(self.attribute_key).extra_metric
        return frozenset({metric}) if metric else frozenset()

    def score(self, context: SchedulingContext, candidates: Sequence[Candidate]) -> list[float]:
        """See the class."""
        attribute = attributes.find(self.attribute_key)
        values = normalization.impute_mean([attribute.read(c) for c in candidates])
        if not values:
            return [normalization.NEUTRAL] * len(candidates)
        fixed = self.algorithm.normalization.fixed_range
        low, high = (min(values), max(values)) if fixed is None else (fixed.min, fixed.max)
        if low == high:
            return [1.0] * len(values)
        rising = [normalization.share(value - low, high - low) for value in values]
        if self.algorithm.type == "linear_higher_is_better":
            return rising
        return [1.0 - score for score in rising]
