"""Keeps a session on the endpoint that served it before."""

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


class SessionAffinityFilter(
    msgspec.Struct,
    frozen=True,
    forbid_unknown_fields=True,
    kw_only=True,
    rename="camel",
    dict=True,
):
    """Keeps only the endpoint the session is bound to; all when it is none of the candidates.

    The hard form of the scorer `session-affinity-scorer`, with the same two strategies.

    Attributes:
        strategy: `encoded_endpoint_header` or `session_id`.
        encoded_endpoint_header_config: Parameters of the one.
        session_id_config: Parameters of the other.
    """

    kind: ClassVar[str] = "session-affinity-filter"
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

    def filter(
        self, turn: SchedulingContext, candidates: Sequence[Candidate]
    ) -> Sequence[Candidate]:
        """See the class."""
        bound = self._affinity.bound(turn, candidates)
        return [c for c in candidates if c.endpoint.address == bound] or candidates

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
