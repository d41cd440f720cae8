"""Where a dispatcher writes down what other pickers may want to know."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from extproc.decision import Decision
from extproc.pool.inflight import Ticket


class Journal(Protocol):
    """Whoever tells other pickers what became of requests."""

    def sent(self, ticket: Ticket, decision: Decision) -> None:
        """A decision was committed."""

    def moved(self, ticket: Ticket, blocks: Sequence[int]) -> None:
        """Another endpoint answers than the one that was chosen."""

    def ended(self, ticket: Ticket, *, answered: bool, ran: bool) -> None:
        """A request is over; `ran` is False where its endpoint did not compute its prompt."""
