"""Separates critical requests from those that may be refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import msgspec

from extproc.endpoint import Candidate
from extproc.scheduling.context import SchedulingContext
from extproc.scheduling.framework import Signal


class CriticalRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Keeps all candidates of a critical request and none of a sheddable one.

    A question for the root of a tree. A request that names an objective of the pool is sheddable
    when its priority is below 0. Another one is sheddable when it says so in a header; without the
    header it is critical, because a request is refused only if its client allows that.

    Attributes:
        header: The header, in lower case. The default is the one by which clients of the upstream
            picker name their objective.
        sheddable: Its value on sheddable requests, in any case of letters.
    """

    kind: ClassVar[str] = "critical-request"
    needs: ClassVar[frozenset[Signal]] = frozenset({Signal.HEADERS})

    header: str = "x-llm-d-inference-objective"
    sheddable: str = "sheddable"

    def filter(
        self, turn: SchedulingContext, candidates: Sequence[Candidate]
    ) -> Sequence[Candidate]:
        """See the class."""
        if turn.request.objective:
            return () if turn.request.priority < 0 else candidates
        value = turn.headers.get(self.header.lower(), "").strip()
        return () if value.lower() == self.sheddable.lower() else candidates
