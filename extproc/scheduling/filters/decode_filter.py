"""Keeps endpoints that decode."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import msgspec

from extproc.endpoint import Candidate
from extproc.scheduling.context import SchedulingContext
from extproc.scheduling.framework import Signal

#: Values of the label for engines that do this stage.
ROLES = frozenset({"decode", "prefill-decode", "both", "encode-prefill-decode"})


class DecodeFilter(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Keeps candidates whose label `llm-d.ai/role` is one of `ROLES`, or is missing."""

    kind: ClassVar[str] = "decode-filter"
    needs: ClassVar[frozenset[Signal]] = frozenset({Signal.LABELS})

    def filter(
        self, turn: SchedulingContext, candidates: Sequence[Candidate]
    ) -> Sequence[Candidate]:
        """See the class."""
        return [c for c in candidates if c.endpoint.labels.get("llm-d.ai/role", "decode") in ROLES]
