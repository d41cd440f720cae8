"""Load that other EPPs put on our endpoints, estimated from scraped metrics.

Replicas need not talk. Each knows from scrapes how much of the engines' work is not its own, and how
much of all prompts the engines find in their caches. How long the prompts of others are no page
tells: they are taken to be as long as our own (`request_tokens.TypicalWork`).
"""

from __future__ import annotations

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
        share: Share of the requests in the engines that others sent, 0..1.
        hit_ratio: Share of all prompt tokens that engines find in their caches, 0..1; the mean of all
            pages at first, and 0 before any.
    """

    __slots__ = ("_others", "_ours", "_pages", "hit_ratio", "share")

    def __init__(self) -> None:
        self._ours = 0.0
        self._others = 0.0
        self._pages = _FIRST_PAGES
        self.share = 0.0
        self.hit_ratio = 0.0

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
        requests = self._ours + self._others
        self.share = self._others / requests if requests else 0.0
        queries = (after.prefix_queries or 0.0) - (before.prefix_queries or 0.0)
        hits = (after.prefix_hits or 0.0) - (before.prefix_hits or 0.0)
        if before.prefix_queries is not None and queries > 0.0 <= hits <= queries:
            self._pages += 1
            weight = max(_ALPHA_HITS, 1.0 / self._pages)
            self.hit_ratio += weight * (hits / queries - self.hit_ratio)
