"""Keeps endpoints that encode images, sound and video."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import msgspec

from extproc.endpoint import Candidate
from extproc.scheduling.context import SchedulingContext
from extproc.scheduling.framework import Signal

#: Values of the label for engines that do this stage.
ROLES = frozenset({"encode", "encode-prefill", "encode-prefill-decode"})


class EncodeFilter(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Keeps candidates whose label `llm-d.ai/role` is one of `ROLES`, none without that label."""

    kind: ClassVar[str] = "encode-filter"
    needs: ClassVar[frozenset[Signal]] = frozenset({Signal.LABELS})

    def filter(
        self, turn: SchedulingContext, candidates: Sequence[Candidate]
    ) -> Sequence[Candidate]:
        """See the class."""
        return [c for c in candidates if c.endpoint.labels.get("llm-d.ai/role") in ROLES]
