"""Drops endpoints that are not for prompts of this length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import msgspec

from extproc.endpoint import Candidate
from extproc.scheduling import labels
from extproc.scheduling.context import SchedulingContext
from extproc.scheduling.framework import Signal


class ContextLengthAwareFilter(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, rename="camel"
):
    """Keeps candidates whose range holds the prompt's tokens, and those without the label.

    Only with `enableFiltering`; otherwise all are kept. A label that is no range is dropped. The
    plugin is also the scorer of the same kind.

    Attributes:
        label: Label of endpoints with the range, `min-max` in tokens.
        enable_filtering: Whether to filter at all. False is the upstream default.
    """

    kind: ClassVar[str] = "context-length-aware"
    needs: ClassVar[frozenset[Signal]] = frozenset({Signal.LABELS})

    label: str = labels.LABEL
    enable_filtering: bool = False

    def filter(
        self, turn: SchedulingContext, candidates: Sequence[Candidate]
    ) -> Sequence[Candidate]:
        """See the class."""
        if not self.enable_filtering:
            return candidates
        length = turn.request.prompt_tokens
        return [c for c in candidates if _fits(length, c.endpoint.labels.get(self.label))]


def _fits(length: int, label: str | None) -> bool:
    """True if an endpoint with that label takes such a prompt."""
    if label is None:
        return True
    lengths = labels.parse_context_range(label)
    return lengths is not None and length in lengths
