"""Interfaces of what learns of the requests that a director routes."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from typing import Protocol

from extproc.decision import Decision
from extproc.pool.inflight import Reservation
from extproc.request import HttpRequest


class RequestEventListener(Protocol):
    """Receives the request events that are sent to other replicas."""

    def on_reserved(self, reservation: Reservation, decision: Decision) -> None:
        """A decision was committed."""

    def on_moved(self, reservation: Reservation, blocks: Sequence[int]) -> None:
        """Another endpoint answers than the one that was chosen."""

    def on_released(self, reservation: Reservation, *, answered: bool, ran: bool) -> None:
        """A request is over; `ran` is False where its endpoint did not compute its prompt."""


class PromptListener(Protocol):
    """Reads the prompts of requests."""

    def note(self, decision: Decision, raw: HttpRequest) -> None:
        """Note a routed request."""

    def render_ahead(self, decision: Decision, raw: HttpRequest) -> Awaitable[None] | None:
        """Wait, for a bounded time, until a better choice can be made; None for no wait."""
