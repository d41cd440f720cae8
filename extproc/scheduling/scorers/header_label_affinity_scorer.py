"""Prefers endpoints whose label equals a request header."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar

import msgspec

from extproc.endpoint import Candidate, Endpoint
from extproc.scheduling.context import SchedulingContext
from extproc.scheduling.framework import Signal


class HeaderLabelAffinityScorer(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, rename="camel"
):
    """1 where the label equals the header's value, 0 elsewhere; 0 everywhere without the header.

    Attributes:
        header_name: Request header with the wanted value.
        label_key: Label of endpoints it is compared with.
        stamp_response_header: Send the client the label of the endpoint that served, in a header of
            the same name. True, the upstream default, lets a caller carry it to the next request.
    """

    kind: ClassVar[str] = "header-label-affinity-scorer"
    needs: ClassVar[frozenset[Signal]] = frozenset({Signal.HEADERS, Signal.LABELS})

    header_name: Annotated[str, msgspec.Meta(min_length=1)]
    label_key: Annotated[str, msgspec.Meta(min_length=1)]
    stamp_response_header: bool = True

    def score(self, turn: SchedulingContext, candidates: Sequence[Candidate]) -> list[float]:
        """See the class."""
        header_value = turn.headers.get(self.header_name.lower(), "")
        return [
            float(bool(header_value) and c.endpoint.labels.get(self.label_key) == header_value)
            for c in candidates
        ]

    def answer_headers(
        self, turn: SchedulingContext, chosen: Endpoint
    ) -> Sequence[tuple[str, str]]:
        """The label of the endpoint that serves."""
        label = chosen.labels.get(self.label_key, "")
        return ((self.header_name.lower(), label),) if label and self.stamp_response_header else ()
