"""What open requests hold in an engine's cache, what several of them begin with counted once."""

from __future__ import annotations

from collections.abc import Sequence
from operator import sub

import msgspec

#: Blocks of a chain of which one is followed: it stands for all of them. What is shared is shared
#: from the root, so only the last few blocks of a shared beginning are counted wrongly.
_STRIDE = 4


class Share(msgspec.Struct, frozen=True, gc=False):
    """What one request holds.

    Attributes:
        parts: Blocks that are followed, and the prompt tokens each stands for.
        growth: Tokens its conversation will grow by.
    """

    parts: Sequence[tuple[int, int]]
    growth: float


class Held:
    """All that open requests hold on one endpoint. Mutable; its account owns it.

    Attributes:
        tokens: Prompt tokens, and what young conversations among them will grow by.
    """

    __slots__ = ("_users", "tokens")

    def __init__(self) -> None:
        self.tokens = 0.0
        self._users: dict[int, int] = {}

    def take(self, blocks: Sequence[int], tokens: Sequence[int], *, growth: float) -> Share:
        """A request was opened.

        Args:
            blocks: Its prompt's chain of block hashes, root first; not empty.
            tokens: Prompt tokens by depth of a chain.
            growth: Tokens its conversation will grow by.
        """
        users = self._users
        begins = tokens[: len(blocks) : _STRIDE]
        sizes = map(sub, (*begins[1:], tokens[len(blocks)]), begins)
        parts = tuple(zip(blocks[::_STRIDE], sizes, strict=True))
        if parts[-1][0] in users:
            growth = 0.0  # where another open prompt goes on from this one, it has grown already
        self.tokens += growth
        for block, size in parts:
            if block in users:
                users[block] += 1
            else:
                users[block] = 1
                self.tokens += size
        return Share(parts, growth)

    def give_back(self, share: Share) -> None:
        """A request is over.

        Args:
            share: From `take`; once.
        """
        users = self._users
        self.tokens -= share.growth
        for block, size in share.parts:
            left = users[block] - 1
            if left:
                users[block] = left
            else:
                del users[block]
                self.tokens -= size
        if not users:
            self.tokens = 0.0  # what rounding left
