"""What answers say of endpoints, and what must be taken back when there is none."""

from __future__ import annotations

from extproc.pool.condition import Verdict, verdict
from extproc.pool.inflight import Ticket
from extproc.pool.snapshot import Member
from extproc.pool.store import Fleet
from extproc.prefix_cache import cache_model
from extproc.prefix_cache.index import PrefixIndex


class Evidence:
    """Hears what becomes of requests. Mutable; its dispatcher owns it.

    Args:
        fleet: Decides about health.
        index: Who is believed to hold which prefix block.
        belief: Predictions of cache hits.
    """

    def __init__(self, *, fleet: Fleet, index: PrefixIndex, belief: cache_model.Beliefs) -> None:
        self._fleet = fleet
        self._index = index
        self._belief = belief

    def answered(self, ticket: Ticket, status: str, now: float, *, served: str) -> None:
        """Response headers came.

        Args:
            ticket: Of the request.
            status: `:status` as text.
            now: Monotonic seconds.
            served: Address of the endpoint that answered; empty where nobody says so.
        """
        said = verdict(status)
        known = served == ticket.endpoint.address
        # A name that is nobody's is a data plane that spells addresses in another way.
        other = self._fleet.pool.find(served) if served and not known else None
        if other is None:
            sole = known or (ticket.alone and not served)
            self._fleet.told(ticket.endpoint, said, sent_at=ticket.at, now=now, sole=sole)
        else:
            self._passed_over(ticket, said, now, other)
        if said is not Verdict.SERVED:
            ticket.refused = True
            self._disbelieve(ticket)
        ticket.blocks = ()

    def withdrawn(self, ticket: Ticket) -> None:
        """The request was never sent."""
        self._disbelieve(ticket)
        ticket.blocks = ()

    def left(self, ticket: Ticket, now: float) -> None:
        """The stream ended before response headers came."""
        self._fleet.told(ticket.endpoint, Verdict.LEFT, sent_at=ticket.at, now=now)

    def _passed_over(self, ticket: Ticket, said: Verdict, now: float, served: Member) -> None:
        """The data plane could not use the chosen endpoint, and another one answered."""
        self._fleet.told(
            ticket.endpoint, Verdict.FAILED, sent_at=ticket.at, now=now, cause="passed-over"
        )
        self._disbelieve(ticket)
        ticket.move(served.account, now)
        if ticket.blocks:
            self._index.record(cache_model.key(served.endpoint), ticket.blocks)
        self._fleet.told(served.endpoint, said, sent_at=ticket.at, now=now)

    def _disbelieve(self, ticket: Ticket) -> None:
        """Nothing of the request ran on its endpoint: its prompt is not cached there."""
        if not ticket.prompt_tokens:
            return
        ratio = self._fleet.tokenisers.of(ticket.target, ticket.prompt_bytes)
        self._belief.unsent(
            ticket.endpoint,
            ticket.blocks,
            prompt_tokens=ticket.prompt_tokens,
            cached_tokens=ticket.cached_tokens,
            bytes_per_token=ratio,
        )
