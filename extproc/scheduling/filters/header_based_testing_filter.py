"""Keeps the endpoints a header names: for conformance tests only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import msgspec

from extproc.endpoint import Candidate
from extproc.scheduling.context import SchedulingContext
from extproc.scheduling.framework import Signal


class HeaderBasedTestingFilter(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True
):
    """Keeps candidates that the header `test-epp-endpoint-selection` names; none without it.

    Tokens are `ip:port` or a bare `ip`, separated by commas. Any client can choose its endpoint
    with it, so it has no place in production. The candidates stay in their order, where the
    upstream filter takes that of the header; the setting `conformance` keeps it.
    """

    kind: ClassVar[str] = "header-based-testing-filter"
    needs: ClassVar[frozenset[Signal]] = frozenset({Signal.HEADERS})

    def filter(
        self, turn: SchedulingContext, candidates: Sequence[Candidate]
    ) -> Sequence[Candidate]:
        """See the class."""
        tokens = turn.headers.get("test-epp-endpoint-selection", "").split(",")
        named = {token.strip() for token in tokens} - {""}
        bare = {token.strip("[]") for token in named}
        return [c for c in candidates if c.endpoint.address in named or c.endpoint.ip in bare]
