"""Attributes: numbers of an endpoint that a configuration names; their filter and scorer.

The upstream picker's names for what it scrapes, the names of the engine's own metrics, and ours.
`extra.NAME` is the metric NAME of `scrape.extra_metrics`.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from typing import ClassVar, Literal

import msgspec

from extproc.endpoint import Candidate
from extproc.scheduling import framework
from extproc.scheduling.framework import (
    PluginParameters,
    SchedulingContext,
    Signal,
    UpstreamParameters,
)


class Attribute(msgspec.Struct, frozen=True):
    """One number of a candidate.

    Attributes:
        signal: Signal that it is read from.
        read: The number; None when unknown.
        extra_metric: Name in `scrape.extra_metrics`; empty for a built-in number.
    """

    signal: Signal
    read: Callable[[Candidate], float | None]
    extra_metric: str = ""


_WAITING = Attribute(Signal.WAITING, lambda c: c.load.waiting)
_RUNNING = Attribute(Signal.RUNNING, lambda c: c.load.running)
_KV_USAGE = Attribute(Signal.KV_USAGE, lambda c: c.load.kv_usage)

ATTRIBUTES: Mapping[str, Attribute] = {
    "WaitingQueueSize": _WAITING,
    "num_requests_waiting": _WAITING,
    "waiting": _WAITING,
    "RunningRequestsSize": _RUNNING,
    "num_requests_running": _RUNNING,
    "running": _RUNNING,
    "KVCacheUsagePercent": _KV_USAGE,
    "kv_cache_usage_perc": _KV_USAGE,
    "kv_usage": _KV_USAGE,
    "in_flight": Attribute(Signal.IN_FLIGHT, lambda c: float(c.in_flight)),
    "requests": Attribute(Signal.IN_FLIGHT, lambda c: c.estimated_requests),
    "prompt_tokens": Attribute(Signal.IN_FLIGHT, lambda c: float(c.prompt_tokens)),
    "queued_tokens": Attribute(Signal.QUEUED, lambda c: c.queued_tokens),
    "matched_tokens": Attribute(Signal.PREFIX, lambda c: float(c.matched_tokens)),
}


#: Begins names of attributes that are extra metrics.
_EXTRA = "extra."


def find(name: str) -> Attribute:
    """The attribute of that name.

    Raises:
        ValueError: There is none; names the nearest one.
    """
    attribute = ATTRIBUTES.get(name)
    if attribute is None and name.startswith(_EXTRA):
        return _extra_attribute(name.removeprefix(_EXTRA))
    if attribute is None:
        if name.lower().startswith("gpu"):
            raise ValueError(
                f"expected an attribute of {', '.join(ATTRIBUTES)}, got {name}, which "
                "dcgm-data-source and dcgm-extractor would measure: GPU metrics are not scraped"
            )
        near = get_close_matches(name, ATTRIBUTES, n=1, cutoff=0.0)[0]
        raise ValueError(
            f"expected an attribute of {', '.join(ATTRIBUTES)} (nearest: {near}), or extra.NAME of "
            f"scrape.extra_metrics, got {name}"
        )
    return attribute


@functools.cache
def _extra_attribute(metric: str) -> Attribute:
    return Attribute(Signal.EXTRA, lambda c: c.load.extra.get(metric), metric)


_COMPARE: Mapping[str, Callable[[float, float], bool]] = {
    "LessThan": operator.lt,
    "LessThanOrEqual": operator.le,
    "GreaterThan": operator.gt,
    "GreaterThanOrEqual": operator.ge,
    "Equal": operator.eq,
    "NotEqual": operator.ne,
}


class Threshold(UpstreamParameters, frozen=True, kw_only=True):
    """Bound of an endpoint attribute.

    Attributes:
        operator: Comparison of the attribute with `value`.
        value: The bound, in the unit of the attribute.
    """

    operator: Literal[
        "LessThan", "LessThanOrEqual", "GreaterThan", "GreaterThanOrEqual", "Equal", "NotEqual"
    ]
    value: float


class AttributeFilterAlgorithm(UpstreamParameters, frozen=True, kw_only=True):
    """Comparison by which candidates are kept.

    Attributes:
        type: Algorithm: a comparison with a threshold.
        threshold: The bound.
    """

    type: Literal["threshold"]
    threshold: Threshold


class EndpointAttributeFilter(UpstreamParameters, frozen=True, kw_only=True):
    """Keeps a candidate when its number is on the right side of the threshold.

    Numbers there are: see the scorer `endpoint-attribute-scorer`. Upstream:
    `filter/endpointattribute/filter.go`.

    Attributes:
        attribute: Name of the attribute.
        algorithm: The threshold.
        on_missing: Whether a candidate whose own page lacks the number passes. `Pass` is the upstream
            default.
        fallback_on_empty: Keep all when none passes. False, the upstream default, refuses the
            request.
    """

    kind: ClassVar[str] = "endpoint-attribute-filter"

    attribute: str
    algorithm: AttributeFilterAlgorithm
    on_missing: Literal["Pass", "Fail"] = "Pass"
    fallback_on_empty: bool = False

    def __post_init__(self) -> None:
        """Refuse an unknown attribute.

        Raises:
            ValueError: See `attributes.find`.
        """
        find(self.attribute)

    @property
    def needs(self) -> frozenset[Signal]:
        """Signals from which the attribute is read."""
        return frozenset({find(self.attribute).signal})

    @property
    def extra_metrics(self) -> frozenset[str]:
        """See `framework.ExtraMetricReader`."""
        metric = find(self.attribute).extra_metric
        return frozenset({metric}) if metric else frozenset()

    def filter(
        self, context: SchedulingContext, candidates: Sequence[Candidate]
    ) -> Sequence[Candidate]:
        read = find(self.attribute).read
        threshold, unknown_passes = self.algorithm.threshold, self.on_missing == "Pass"
        compare, bound = _COMPARE[threshold.operator], threshold.value
        passing = [
            c
            for c in candidates
            if (
                unknown_passes if (value := read(_as_scraped(c))) is None else compare(value, bound)
            )
        ]
        return candidates if not passing and self.fallback_on_empty else passing


def _as_scraped(c: Candidate) -> Candidate:
    """A candidate with nothing but its own page: a missing value is the subject of `on_missing`."""
    return c if c.page is None else msgspec.structs.replace(c, load=c.page)


class FixedRange(UpstreamParameters, frozen=True, kw_only=True):
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


class AdaptiveRange(PluginParameters, frozen=True):
    """The range from the least to the greatest value among the candidates."""


class Normalization(UpstreamParameters, frozen=True, kw_only=True):
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


class AttributeScorerAlgorithm(UpstreamParameters, frozen=True, kw_only=True):
    """Conversion of a value into a score.

    Attributes:
        type: Direction: the end of the range that scores best.
        normalization: The range.
    """

    type: Literal["linear_lower_is_better", "linear_higher_is_better"]
    normalization: Normalization = Normalization()


class EndpointAttributeScorer(UpstreamParameters, frozen=True, kw_only=True):
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
        find(self.attribute_key)

    @property
    def needs(self) -> frozenset[Signal]:
        """Signals from which the attribute is read."""
        return frozenset({find(self.attribute_key).signal})

    @property
    def extra_metrics(self) -> frozenset[str]:
        """See `framework.ExtraMetricReader`."""
        metric = find(self.attribute_key).extra_metric
        return frozenset({metric}) if metric else frozenset()

    def score(self, context: SchedulingContext, candidates: Sequence[Candidate]) -> list[float]:
        attribute = find(self.attribute_key)
        values = framework.impute_mean([attribute.read(c) for c in candidates])
        if not values:
            return [framework.NEUTRAL] * len(candidates)
        fixed = self.algorithm.normalization.fixed_range
        low, high = (min(values), max(values)) if fixed is None else (fixed.min, fixed.max)
        if low == high:
            return [1.0] * len(values)
        rising = [framework.share(value - low, high - low) for value in values]
        if self.algorithm.type == "linear_higher_is_better":
            return rising
        return [1.0 - score for score in rising]
