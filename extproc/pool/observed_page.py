"""Scraped pages as the pool records them, with our own counts at the time of the request."""

from __future__ import annotations

import msgspec

from extproc.endpoint import Endpoint, Load
from extproc.pool.engine_counters import IdleTime
from extproc.pool.snapshot import EndpointSnapshot


class ScrapeToken(msgspec.Struct, frozen=True, gc=False):
    """Our own counts at the time a scrape was sent.

    Attributes:
        endpoint: The endpoint in its life then.
        sent: `InflightLoad.sent` when the scrape was requested (tokens).
        written: `InflightLoad.kv_tokens_sent`.
        served: `InflightLoad.served` when the scrape was requested (requests).
        idle: `InflightLoad.idle` then.
    """

    endpoint: Endpoint
    in_flight: int
    sent: float = 0.0
    written: int = 0
    served: int = 0
    idle: IdleTime = IdleTime()


class ObservedPage(msgspec.Struct, frozen=True, gc=False):
    """A page that was taken in: the member before it, what it says, and whether it restarted."""

    before: EndpointSnapshot
    after: Load
    restarted: bool

    @property
    def moved(self) -> bool | None:
        """True if the engine computed anything since the page before.

        None where it has no counter that moves with every iteration: others stand still for as
        long as one answer takes.
        """
        before, after = self.before.load.counters, self.after.counters
        counts = after.steps, after.computed_tokens, after.decoded_tokens
        if counts == (None, None, None):
            return None
        return counts != (before.steps, before.computed_tokens, before.decoded_tokens)

    @property
    def is_idle(self) -> bool:
        """True if there is nothing of ours on it, or nothing at all."""
        return not self.before.account.in_flight or not (self.after.running or self.after.waiting)
