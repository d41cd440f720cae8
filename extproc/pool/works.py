"""Typical uncached prompt length, which estimates the work of foreign requests."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable

#: Answered requests remembered (count): some seconds of a busy pool, and enough for a median that
#: half of them would have to move.
_MOST = 128

#: Tokens of a request before any was answered.
_USUAL = 500


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
        typical: The median in tokens, above 0, within a fifth; `_USUAL` before any.
    """

    __slots__ = ("_on_change", "_recent", "_sorted", "typical")

    def __init__(self, on_change: Callable[[], None] = lambda: None) -> None:
        self._on_change = on_change
        self._recent: deque[int] = deque()
        self._sorted: list[int] = []
        self.typical = _USUAL

    def add(self, tokens: int) -> None:
        """Take in an answered request.

        Args:
            tokens: Its uncached prompt tokens, above 0.
        """
        recent, ordered = self._recent, self._sorted
        if len(recent) >= _MOST:
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
            requests: How many (count).
            kv_tokens: What the engine's KV cache holds, which no request exceeds; None while unknown.
        """
        return requests * (min(kv_tokens, self.typical) if kv_tokens else self.typical)
