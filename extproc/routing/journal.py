"""Interface of a listener to the requests that a director charges, moves and releases."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from extproc.decision import Decision
from extproc.pool.inflight import Reservation


class RequestEventListener(Protocol):
    """Receives the request events that are sent to other replicas."""

    def on_reserved(self, ticket: Reservation, decision: Decision) -> None:
        """A decision was committed."""

    def on_moved(self, ticket: Reservation, blocks: Sequence[int]) -> None:
        """Another endpoint answers than the one that was chosen."""

    def on_released(self, ticket: Reservation, *, answered: bool, ran: bool) -> None:
        """A request is over; `ran` is False where its endpoint did not compute its prompt."""
