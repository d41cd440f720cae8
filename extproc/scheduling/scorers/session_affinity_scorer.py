"""Prefers the endpoint that served the session before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import ClassVar

import msgspec

from extproc.decision import Decision
from extproc.endpoint import Candidate, Endpoint
from extproc.scheduling import sessions
from extproc.scheduling.context import SchedulingContext
from extproc.scheduling.framework import Signal


class SessionAffinityScorer(
    msgspec.Struct,
    frozen=True,
    forbid_unknown_fields=True,
    kw_only=True,
    rename="camel",
    dict=True,
):
    """1 for the endpoint the session is bound to, 0 for the others; 0 everywhere without one.

    With `encoded_endpoint_header` a token in the request names the endpoint, and every answer
    brings the token of the one that served; our tokens hold the address, those of the upstream
    picker (`namespace/pod`) are understood. With `session_id` the endpoint is remembered here.

    Attributes:
        strategy: `encoded_endpoint_header` or `session_id`.
        encoded_endpoint_header_config: Parameters of the one.
        session_id_config: Parameters of the other.
    """

    kind: ClassVar[str] = "session-affinity-scorer"
    needs: ClassVar[frozenset[Signal]] = frozenset({Signal.HEADERS})

    strategy: sessions.SessionStrategy = "encoded_endpoint_header"
    encoded_endpoint_header_config: sessions.EncodedEndpointHeader = (
        sessions.EncodedEndpointHeader()
    )
    session_id_config: sessions.SessionId = sessions.SessionId()

    @cached_property
    def _affinity(self) -> sessions.SessionAffinity:
        """The memory, and what to read."""
        return sessions.SessionAffinity(
            self.strategy, self.encoded_endpoint_header_config.header, self.session_id_config
        )

    def score(self, turn: SchedulingContext, candidates: Sequence[Candidate]) -> list[float]:
        """See the class."""
        bound = self._affinity.bound(turn, candidates)
        return [float(c.endpoint.address == bound) for c in candidates]

    def keys(self, turn: SchedulingContext) -> Mapping[str, str]:
        """The session, where it is remembered here."""
        return self._affinity.keys(turn)

    def on_committed(self, decision: Decision, now: float) -> None:
        """Remember where the session went."""
        self._affinity.on_committed(decision, now)

    def answer_headers(
        self, turn: SchedulingContext, chosen: Endpoint
    ) -> Sequence[tuple[str, str]]:
        """The token, where the client carries it."""
        return self._affinity.answer_headers(chosen)
