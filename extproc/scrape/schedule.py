"""Scrape intervals as pure functions, of counts that all scrape loops share.

Fast where traffic goes, since a load there is soon wrong; slow where nothing happens; slower still
when there are many, so that scraping costs a bounded share of a core; and backing off from an
endpoint that does not answer, because a /metrics request is work for a struggling engine.
"""

from __future__ import annotations

import math
import random
from typing import Final

import msgspec


class ScrapeSchedule(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the scrape intervals.

    Attributes:
        fast_s: Interval while requests go to an endpoint. 0.2 s is a few decode steps of an
            engine; in between, our own in-flight count is exact anyway.
        slow_s: Interval while nothing goes there. A load must be kept at least 1.1 times this
            plus the time-out, or idle endpoints flap between known and unknown.
        rest_s: Interval while no endpoint of the process had a request for `REST_AFTER_S`; the same
            holds for it.
        known_s: Interval up to which a load does not turn unknown between two scrapes: that age less
            the time-out, jitter included.
        jitter: Each wait is spread by this share to either side, lest all poll at once.
        scrapes_per_s: Scrapes per second over all endpoints, beyond which every interval is
            stretched (`_intervals_s`). One costs about 0.4 ms of CPU, so 100 are some 4 % of a core.
            Endpoints that fail share as many of their own, and model lists take `LISTS_RATIO` as many
            at most.
        backoff_cap_s: Longest wait after repeated failures, refused connections apart (see
            `wait_s`). It bounds the delay until a recovery is noticed.
        tick_s: Scrapes begin on multiples of this, so that several share one wake-up of the
            event loop: measured 30 % less CPU than one wake-up each at 100 scrapes per second.
    """

    fast_s: float = 0.2
    slow_s: float = 2.0
    rest_s: float = 4.0
    known_s: float = 4.5
    jitter: float = 0.1
    scrapes_per_s: float = 100.0
    backoff_cap_s: float = 10.0
    tick_s: float = 0.025


#: Seconds without a request to any endpoint, after which the process is at rest.
REST_AFTER_S: Final = 30.0

#: Model lists per scrape of the budget (ratio), which are asked for beside it: 200 endpoints may list
#: anew every 5 s.
LISTS_RATIO: Final = 0.4

#: Longest interval of busy endpoints, in multiples of their share of the budget, for loads of idle ones
#: to stay known. 3 is enough for any mix of 500 endpoints, and keeps 10 busy ones of them at 1.8 s.
_MAX_YIELD: Final = 3.0

#: Tick at rest (seconds), where nothing waits for a load, and the waits that it applies to: it would
#: change shorter ones too much. A longer tick would make loads of 500 endpoints unknown, or keep those
#: together for good that have one tick.
_REST_TICK_S: Final = 0.5
_LONG_WAIT_S: Final = 2.0

#: Longest wait for an endpoint that refused the connection, in a fleet that is not stretched. A
#: refusal costs no engine anything, and an endpoint that is back should have traffic again at once.
_MAX_REFUSED_WAIT_S = 2.0


class EndpointCounts:
    """Number of scraped endpoints over all pools, which share one scrape budget."""

    __slots__ = ("_changed", "all", "busy", "failing")

    def __init__(self) -> None:
        self.busy = 0
        self.all = 0
        self.failing = 0
        self._changed = -math.inf

    def change_failing(self, change: int) -> None:
        """Counts an endpoint whose scrapes began to fail (1) or no longer do (-1); 0 for neither."""
        self.failing += change

    def change_busy(self, change: int, now: float) -> None:
        """Counts an endpoint that turned busy (1) or idle (-1); 0 for neither."""
        if change:
            self.busy += change
            self._changed = now

    def change_all(self, change: int, now: float) -> None:
        """Counts endpoints that came, or left (below 0)."""
        self.all += change
        if change > 0:
            self._changed = now

    def is_resting(self, now: float) -> bool:
        """Returns True if no endpoint had a request for `REST_AFTER_S`."""
        return not self.busy and now - self._changed >= REST_AFTER_S


def wait_s(
    settings: ScrapeSchedule,
    *,
    busy: bool,
    counts: EndpointCounts,
    failures: int,
    refused: bool = False,
    resting: bool = False,
    rng: random.Random,
) -> float:
    """Returns seconds until the next scrape of an endpoint, counted from the start of this one.

    The interval is that of `_intervals_s`; after n failures in a row min(cap, fast_s * 2^(n-1) *
    max(1, failing / fast_s / scrapes_per_s)), if that is longer than the interval of busy endpoints:
    when all fail at once, they would otherwise all be scraped again within a fast interval. The cap is
    backoff_cap_s, and for one that refused the connection, if that is shorter, min(2 s, slow_s),
    jitter and tick included, as often as the interval of busy endpoints is fast_s.

    Args:
        busy: Whether requests are or were on the endpoint since its last scrape.
        counts: Endpoints that share the budget, this one included.
        failures: Scrapes in a row that failed (count).
        refused: Whether the last failure was a refused connection.
        resting: Whether the process is at rest: `rest_s` instead of `slow_s`.
    """
    num_busy = max(counts.busy, int(busy))
    fast_s, slow_s = _intervals_s(
        settings,
        num_busy=num_busy,
        num_idle=max(0, counts.all - num_busy),
        slow_s=settings.rest_s if resting else settings.slow_s,
    )
    interval = fast_s if busy else slow_s
    if failures:
        # 2^30 is beyond any cap; the bound keeps the power a float.
        cap = settings.backoff_cap_s
        if refused:
            longest = (min(_MAX_REFUSED_WAIT_S, settings.slow_s) - settings.tick_s) / (
                1.0 + settings.jitter
            )
            cap = min(cap, max(settings.fast_s, longest) * fast_s / settings.fast_s)
        first_s = max(settings.fast_s, counts.failing / settings.scrapes_per_s)
        backoff = min(cap, first_s * 2.0 ** min(failures - 1, 30))
        interval = max(fast_s, backoff)
    return interval * rng.uniform(1.0 - settings.jitter, 1.0 + settings.jitter)


def _intervals_s(
    settings: ScrapeSchedule, *, num_busy: int, num_idle: int, slow_s: float
) -> tuple[float, float]:
    """Returns the intervals of busy and of idle endpoints within the budget (seconds).

    Both are stretched alike: by max(1, (busy / fast_s + idle / slow_s) / scrapes_per_s). Where loads of
    idle endpoints would turn unknown by that, busy ones leave them what they need, up to two thirds
    of their own scrapes and not beyond an even share: an unknown load counts as the mean of the pool,
    so that an idle endpoint would look like a busy one.
    """
    budget = settings.scrapes_per_s
    stretch = max(1.0, (num_busy / settings.fast_s + num_idle / slow_s) / budget)
    fast_s, slow_s = settings.fast_s * stretch, slow_s * stretch
    longest_s = max(settings.known_s, (num_busy + num_idle) / budget)
    if stretch > 1.0 and slow_s > longest_s and num_busy and num_idle:
        busy_per_s = max(budget - num_idle / longest_s, num_busy / (fast_s * _MAX_YIELD))
        fast_s, slow_s = num_busy / busy_per_s, num_idle / (budget - busy_per_s)
    return fast_s, slow_s


def least_list_wait_s(settings: ScrapeSchedule, endpoints: int) -> float:
    """Returns the seconds between two lists of one of so many endpoints that keep to the budget."""
    return endpoints / (settings.scrapes_per_s * LISTS_RATIO)


def align_to_tick(
    now: float, wait: float, *, settings: ScrapeSchedule, resting: bool = False
) -> float:
    """Extends a wait to the next multiple of `tick_s`; at rest, to the nearest one of `_REST_TICK_S`."""
    if resting and wait >= _LONG_WAIT_S:
        return _REST_TICK_S * round((now + wait) / _REST_TICK_S) - now
    return wait + -(now + wait) % settings.tick_s
