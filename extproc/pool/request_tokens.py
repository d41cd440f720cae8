"""Prompt tokens of requests: those that open ones share, and those of a typical one.

Shared prefixes of open requests are in the cache once, and count once (`SharedContext`). A typical
request stands for those whose length is unknown (`TypicalWork`).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Sequence
from operator import sub

import msgspec

#: Blocks of a chain of which one is followed: it stands for all of them. What is shared is shared
#: from the root, so only the last few blocks of a shared beginning are counted wrongly.
_STRIDE = 4


class ContextShare(msgspec.Struct, frozen=True, gc=False):
    """Prompt blocks that one open request holds.

    Attributes:
        blocks: Those that are followed.
        tokens: That all of its blocks are.
        growth: Tokens its conversation will grow by.
    """

    blocks: Sequence[int]
    tokens: int
    growth: float


class SharedContext:
    """Prompt tokens of all open requests on one endpoint. Mutable; its account owns it.

    Attributes:
        tokens: Prompt tokens, and what young conversations among them will grow by.
        shared: Prompt tokens that are not counted, because another open request has them.
    """

    __slots__ = ("_counted", "_depths", "_sizes", "_users", "shared", "tokens")

    def __init__(self) -> None:
        self.tokens = 0.0
        self.shared = 0
        self._users: dict[int, int] = {}
        # Tokens a block was counted for: the last one of a prompt stands for fewer than the same one
        # of a prompt that goes on from it, and the order in which they end is unknown.
        self._counted: dict[int, int] = {}
        self._depths: Sequence[int] = ()
        self._sizes: Sequence[int] = ()

    def open(self, blocks: Sequence[int], tokens: Sequence[int], *, growth: float) -> ContextShare:
        """Add an opened request.

        Args:
            blocks: Its prompt's chain of block hashes, root first; not empty.
            tokens: Prompt tokens by depth of a chain.
            growth: Tokens its conversation will grow by.
        """
        if tokens is not self._depths:
            begins = tokens[::_STRIDE]
            self._depths, self._sizes = tokens, tuple(map(sub, begins[1:], begins))
        users, counted = self._users, self._counted
        followed = blocks[::_STRIDE]
        last = len(followed) - 1
        rest = tokens[len(blocks)] - tokens[last * _STRIDE]
        if counted.get(followed[last], 0) >= rest:
            growth = 0.0  # where another open prompt goes on from this one, it has grown already
        prompt_tokens = tokens[len(blocks)]
        self.tokens += growth
        self.shared += prompt_tokens
        for block, size in zip(followed, (*self._sizes[:last], rest), strict=True):
            more = size
            if block in users:
                users[block] += 1
                more -= counted[block]
                if more <= 0:
                    continue  # all of it is counted
            else:
                users[block] = 1
            counted[block] = size
            self.tokens += more
            self.shared -= more
        return ContextShare(followed, prompt_tokens, growth)

    def close(self, share: ContextShare) -> None:
        """Remove a request that ended.

        Args:
            share: Result of `open`; closed once.
        """
        users, counted = self._users, self._counted
        self.tokens -= share.growth
        self.shared -= share.tokens
        for block in share.blocks:
            left = users[block] - 1
            if left:
                users[block] = left
            else:
                del users[block]
                size = counted.pop(block)
                self.tokens -= size
                self.shared += size
        if not users:
            self.tokens = 0.0  # what rounding left


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
