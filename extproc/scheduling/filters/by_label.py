"""Keeps endpoints with one of some values of a label; deprecated upstream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar

import msgspec

from extproc.endpoint import Candidate
from extproc.scheduling.context import SchedulingContext
from extproc.scheduling.framework import Signal


class ByLabel(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, rename="camel"
):
    """Keeps a candidate when its label has a valid value, or is missing and that is allowed.

    The upstream picker deprecates it for `label-selector-filter`; here for files that have it.

    Attributes:
        label: The label.
        valid_values: Values that pass.
        allows_no_label: Whether candidates without the label pass.
    """

    kind: ClassVar[str] = "by-label"
    needs: ClassVar[frozenset[Signal]] = frozenset({Signal.LABELS})

    label: Annotated[str, msgspec.Meta(min_length=1)]
    valid_values: tuple[str, ...] = ()
    allows_no_label: bool = False

    def __post_init__(self) -> None:
        """Refuse a filter that keeps no candidate.

        Raises:
            ValueError: There are no valid values, and the label must be there.
        """
        if not self.valid_values and not self.allows_no_label:
            raise ValueError("expected validValues or allowsNoLabel, got neither")

    def filter(
        self, turn: SchedulingContext, candidates: Sequence[Candidate]
    ) -> Sequence[Candidate]:
        """See the class."""
        values, missing = self.valid_values, self.allows_no_label
        return [
            c
            for c in candidates
            if (
                missing if (value := c.endpoint.labels.get(self.label)) is None else value in values
            )
        ]
