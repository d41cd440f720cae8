"""Refuses the request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import msgspec

from extproc.endpoint import Candidate
from extproc.scheduling.context import SchedulingContext
from extproc.scheduling.framework import Signal


class DropRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Keeps no candidate, so that the client gets 429: the end of a tree's branch.

    In the middle of a branch it is a failure like any other, and the walk goes on.
    """

    kind: ClassVar[str] = "drop-request"
    needs: ClassVar[frozenset[Signal]] = frozenset()

    def filter(
        self, turn: SchedulingContext, candidates: Sequence[Candidate]
    ) -> Sequence[Candidate]:
        """See the class."""
        return ()
