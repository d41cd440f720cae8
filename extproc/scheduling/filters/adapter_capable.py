"""Keeps endpoints that are labelled with the requested adapter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import msgspec

from extproc.endpoint import Candidate
from extproc.scheduling import labels
from extproc.scheduling.context import SchedulingContext
from extproc.scheduling.framework import Signal


class AdapterCapable(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Keeps the candidates with the label `adapter.kubeai.org/NAME` of the requested adapter.

    All for the base model, and where no candidate carries such a label; none when others
    are labelled and this adapter is nowhere, because an engine without it answers 404
    (docs/spec/prior-systems.md#adapter-names).
    """

    kind: ClassVar[str] = "adapter-capable"
    needs: ClassVar[frozenset[Signal]] = frozenset({Signal.LABELS})

    def filter(
        self, turn: SchedulingContext, candidates: Sequence[Candidate]
    ) -> Sequence[Candidate]:
        """See the class."""
        wanted = labels.adapter(turn, candidates)
        return labels.capable(wanted, candidates)
