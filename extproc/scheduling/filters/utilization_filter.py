"""Drops endpoints that are above a bound in anything."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar, Literal

import msgspec

from extproc.endpoint import Candidate
from extproc.scheduling import attributes
from extproc.scheduling.context import SchedulingContext
from extproc.scheduling.framework import Signal

_READ: Mapping[str, attributes.Attribute] = {
    "active-requests": attributes.find("in_flight"),
    "running-requests": attributes.find("running"),
    "waiting-queue": attributes.find("waiting"),
    "kv-cache-utilization": attributes.find("kv_usage"),
}


class UtilizationCondition(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, rename="camel"
):
    """One bound.

    Attributes:
        metric: What is bounded: our own open requests, the engine's running or waiting ones, or
            the share of KV blocks held by live requests.
        max_value: Greatest value that passes; a share of at most 1 for the last.
    """

    metric: Literal["active-requests", "running-requests", "waiting-queue", "kv-cache-utilization"]
    max_value: Annotated[float, msgspec.Meta(ge=0)]

    def __post_init__(self) -> None:
        """Refuse a percentage.

        Raises:
            ValueError: A share above 1.
        """
        if self.metric == "kv-cache-utilization" and self.max_value > 1.0:
            raise ValueError(
                f"expected a maxValue of at most 1 for kv-cache-utilization, got {self.max_value}"
            )


class UtilizationFilter(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, rename="camel"
):
    """Keeps a candidate when `value <= maxValue` in every condition.

    An unknown value counts as the mean of the known ones, and passes where none is known.

    Attributes:
        conditions: The bounds, at least one.
        fallback_on_empty: Keep all when none passes. False, the upstream default, refuses the
            request.
    """

    kind: ClassVar[str] = "utilization-filter"

    conditions: Annotated[tuple[UtilizationCondition, ...], msgspec.Meta(min_length=1)]
    fallback_on_empty: bool = False

    @property
    def needs(self) -> frozenset[Signal]:
        """Signals that the conditions read."""
        return frozenset(_READ[condition.metric].signal for condition in self.conditions)

    def filter(
        self, turn: SchedulingContext, candidates: Sequence[Candidate]
    ) -> Sequence[Candidate]:
        """See the class."""
        bounds = [
            (_READ[condition.metric].read, condition.max_value) for condition in self.conditions
        ]
        passing = [
            c
            for c in candidates
            if all((value := read(c)) is None or value <= bound for read, bound in bounds)
        ]
        return candidates if not passing and self.fallback_on_empty else passing
