"""Filter by a threshold on a named number of an endpoint."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, Literal

import msgspec

from extproc.endpoint import Candidate
from extproc.scheduling import attributes
from extproc.scheduling.framework import SchedulingContext, Signal

_COMPARE: Mapping[str, Callable[[float, float], bool]] = {
    "LessThan": operator.lt,
    "LessThanOrEqual": operator.le,
    "GreaterThan": operator.gt,
    "GreaterThanOrEqual": operator.ge,
    "Equal": operator.eq,
    "NotEqual": operator.ne,
}


class Threshold(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, rename="camel"
):
    """Bound of an endpoint attribute.

    Attributes:
        operator: Comparison of the attribute with `value`.
        value: The bound, in the unit of the attribute.
    """

    operator: Literal[
        "LessThan", "LessThanOrEqual", "GreaterThan", "GreaterThanOrEqual", "Equal", "NotEqual"
    ]
    value: float


class AttributeFilterAlgorithm(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, rename="camel"
):
    """Comparison by which candidates are kept.

    Attributes:
        type: Algorithm: a comparison with a threshold.
        threshold: The bound.
    """

    type: Literal["threshold"]
    threshold: Threshold


class EndpointAttributeFilter(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, rename="camel"
):
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
        attributes.find(self.attribute)

    @property
    def needs(self) -> frozenset[Signal]:
        """Signals from which the attribute is read."""
        return frozenset({attributes.find(self.attribute).signal})

    @property
    def extra_metrics(self) -> frozenset[str]:
        """See `framework.ExtraMetricReader`."""
        metric = attributes.find(self.attribute).extra_metric
        return frozenset({metric}) if metric else frozenset()

    def filter(
        self, context: SchedulingContext, candidates: Sequence[Candidate]
    ) -> Sequence[Candidate]:
        """See the class."""
        read = attributes.find(self.attribute).read
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
