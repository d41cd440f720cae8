"""Load that other EPPs put on our endpoints, estimated from scraped metrics.

Replicas need not talk. Each knows from scrapes how much of the engines' work is not its own, and how
much of all prompts the engines find in their caches (`ForeignTraffic`). How long the prompts of
others are no page tells: they are taken to be as long as our own (`TypicalWork`).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable

from extproc.endpoint import Load

#: Weight of a scrape in the share of others. At 0.02 a fleet of eight shows a picker that came or
#: went within some two seconds.
_ALPHA = 0.02

#: Weight of a scrape in the hit ratio. Slow, because caches that are still cold say nothing of how
#: well pickers agree.
_ALPHA_HITS = 0.002

#: Pages without a hit that the hit ratio begins with (count): some seconds of a small fleet. A
#: prefix counts as cached only after hits.
_FIRST_PAGES = 50


class ForeignTraffic:
    """Moving averages of foreign requests and of the prefix hit ratio, over the pool.

    Mutable; owned by `PoolStore`.

    Attributes:
        hit_ratio: Share of all prompt tokens that engines find in their caches, 0..1; the mean of all
            pages at first, and 0 before any.
    """

    __slots__ = ("_others", "_ours", "_pages", "hit_ratio")

    def __init__(self) -> None:
        self._ours = 0.0
        self._others = 0.0
        self._pages = _FIRST_PAGES
        self.hit_ratio = 0.0

    @property
    def share(self) -> float:
        """Share of the requests in the engines that others sent, 0..1."""
        together = self._ours + self._others
        return self._others / together if together else 0.0

    def update(self, own: float, foreign: float, *, before: Load, after: Load) -> None:
        """Fold one scrape of one endpoint into the averages.

        Args:
            own: Our requests there (count).
            foreign: Open requests of others on the endpoint (count).
            before: The load until then.
            after: The load from now on.
        """
        self._ours += _ALPHA * (own - self._ours)
        self._others += _ALPHA * (foreign - self._others)
        queries = (after.prefix_queries or 0.0) - (before.prefix_queries or 0.0)
        hits = (after.prefix_hits or 0.0) - (before.prefix_hits or 0.0)
        if before.prefix_queries is not None and queries > 0.0 <= hits <= queries:
            self._pages += 1
            weight = max(_ALPHA_HITS, 1.0 / self._pages)
            self.hit_ratio += weight * (hits / queries - self.hit_ratio)


#: Answered requests remembered (count): some seconds of a busy pool, and enough for a median that
#: half of them would have to move.
_MAX_REQUESTS = 128

#: Tokens of a request before any was answered.
_DEFAULT_TOKENS = 500


#: Change of the median that is published, as a share of it: all that is priced is priced anew.
_CHANGE = 0.2


class TypicalWork:
    """Median of the uncached prompt tokens of recently answered requests, pool-wide.

    A median, because pages say how many requests of others wait and nothing of their length: a mean
    is whatever the one longest prompt makes of it. Requests that were refused or abandoned do not
    count, since the part of them that ran is unknown.

    Args:
        on_change: Called when `typical` changed.

    Attributes:
        typical: The median in tokens, above 0, within a fifth; `_DEFAULT_TOKENS` before any.
    """

    __slots__ = ("_on_change", "_recent", "_sorted", "typical")

    def __init__(self, on_change: Callable[[], None] = lambda: None) -> None:
        self._on_change = on_change
        self._recent: deque[int] = deque()
        self._sorted: list[int] = []
        self.typical = _DEFAULT_TOKENS

    def add(self, tokens: int) -> None:
        """Take in an answered request.

        Args:
            tokens: Its uncached prompt tokens, above 0.
        """
        recent, ordered = self._recent, self._sorted
        if len(recent) >= _MAX_REQUESTS:
            del ordered[bisect_left(ordered, recent.popleft())]
        recent.append(tokens)
        insort(ordered, tokens)
        median = ordered[len(ordered) // 2]
        if abs(median - self.typical) > _CHANGE * self.typical:
            self.typical = median
            self._on_change()

    def price(self, requests: float, kv_tokens: int | None) -> float:
        """Uncached prompt tokens of requests whose length is unknown.

        Args:
            requests: Requests (count).
            kv_tokens: Size of the engine's KV cache in tokens, which no request exceeds; None while
                unknown.
        """
        return requests * (min(kv_tokens, self.typical) if kv_tokens else self.typical)
