"""Filters that read the request alone: criticality, refusal, a test header."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import msgspec

from extproc.endpoint import Candidate
from extproc.scheduling.framework import SchedulingContext, Signal


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
        self, context: SchedulingContext, candidates: Sequence[Candidate]
    ) -> Sequence[Candidate]:
        """See the class."""
        if context.request.objective:
            return () if context.request.priority < 0 else candidates
        value = context.headers.get(self.header.lower(), "").strip()
        return () if value.lower() == self.sheddable.lower() else candidates


class DropRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Keeps no candidate, so that the client gets 429: the end of a tree's branch.

    In the middle of a branch it is a failure like any other, and the walk goes on.
    """

    kind: ClassVar[str] = "drop-request"
    needs: ClassVar[frozenset[Signal]] = frozenset()

    def filter(
        self, context: SchedulingContext, candidates: Sequence[Candidate]
    ) -> Sequence[Candidate]:
        """See the class."""
        return ()


class HeaderBasedTestingFilter(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True
):
    """Keeps candidates that the header `test-epp-endpoint-selection` names; none without it.

    Tokens are `ip:port` or a bare `ip`, separated by commas. Any client can choose its endpoint
    with it, so it has no place in production. Upstream: `test/filter/request_header_based_filter.go`. The candidates stay in their order, where the
    upstream filter takes that of the header; the setting `conformance` keeps it.
    """

    kind: ClassVar[str] = "header-based-testing-filter"
    needs: ClassVar[frozenset[Signal]] = frozenset({Signal.HEADERS})

    def filter(
        self, context: SchedulingContext, candidates: Sequence[Candidate]
    ) -> Sequence[Candidate]:
        """See the class."""
        tokens = context.headers.get("test-epp-endpoint-selection", "").split(",")
        named = {token.strip() for token in tokens} - {""}
        bare = {token.strip("[]") for token in named}
        return [c for c in candidates if c.endpoint.address in named or c.endpoint.ip in bare]
