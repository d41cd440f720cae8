"""Keeps endpoints whose labels match a Kubernetes label selector."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar, Literal

import msgspec

from extproc.endpoint import Candidate
from extproc.scheduling.context import SchedulingContext
from extproc.scheduling.framework import Signal


class Requirement(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, rename="camel"
):
    """One condition on one label, as Kubernetes reads it.

    Attributes:
        key: The label.
        operator: `In`: it has one of the values. `NotIn`: it has none of them, or is not there.
            `Exists` and `DoesNotExist`: whether it is there.
        values: For the first two at least one, for the others none.
    """

    key: Annotated[str, msgspec.Meta(min_length=1)]
    operator: Literal["In", "NotIn", "Exists", "DoesNotExist"]
    values: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Refuse values where there can be none, and none where there must be some.

        Raises:
            ValueError: The number of values does not fit the operator.
        """
        wanted = self.operator in {"In", "NotIn"}
        if wanted != bool(self.values):
            raise ValueError(
                f"expected {'values' if wanted else 'no values'} with operator {self.operator}, "
                f"got {len(self.values)}"
            )

    def met(self, labels: Mapping[str, str]) -> bool:
        """True if the labels meet the requirement."""
        match self.operator:
            case "In":
                return labels.get(self.key) in self.values
            case "NotIn":
                return labels.get(self.key) not in self.values
            case "Exists":
                return self.key in labels
            case "DoesNotExist":
                return self.key not in labels


class LabelSelectorFilter(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, rename="camel"
):
    """Keeps a candidate when every label and every expression matches.

    An empty selector matches every endpoint. Labels are those of discovery.

    Attributes:
        match_labels: Labels and the values they must have.
        match_expressions: Further conditions.
    """

    kind: ClassVar[str] = "label-selector-filter"
    needs: ClassVar[frozenset[Signal]] = frozenset({Signal.LABELS})

    match_labels: Mapping[str, str] = {}
    match_expressions: tuple[Requirement, ...] = ()

    def filter(
        self, turn: SchedulingContext, candidates: Sequence[Candidate]
    ) -> Sequence[Candidate]:
        """See the class."""
        wanted = self.match_labels.items()
        return [
            c
            for c in candidates
            if all(c.endpoint.labels.get(key) == value for key, value in wanted)
            and all(requirement.met(c.endpoint.labels) for requirement in self.match_expressions)
        ]
