"""One scheduling turn: the request, the time and the chance that belong to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from random import Random

import msgspec

from extproc.request import Request

#: Headers of a request nobody showed any of.
NO_HEADERS: Mapping[str, str] = {}


def _unread(_: Request) -> str:
    return ""


class Turn(msgspec.Struct, frozen=True, gc=False):
    """What every plugin is given besides the candidates.

    Attributes:
        request: What is asked for.
        now: Monotonic seconds, the same from the first filter to the pick.
        rng: The only source of chance; the same seed gives the same picks.
        headers: Headers of the request, names in lower case.
        blocks: The prompt's chain of prefix-block hashes, root first; empty where nobody reads it.
        read_opening: Reads the beginning of the first user message out of the request.
        adapter: The adapter asked for, named apart from its model or known to be one; empty for a
            base model. Where `request.adapter` is empty, this is `request.model` or empty.
        returning: Share of requests that go on from an earlier one, 0..1; 0 unless a plugin needs
            `Signal.HOMES`.
        growth_tokens: Tokens this conversation will grow by; 0 unless as above.
        others: Share of the requests in the engines that other pickers sent, 0..1; 0 unless as above.
        away: Conversations that will go on and have no request open now, for each open request; 0
            unless as above.
    """

    request: Request
    now: float
    rng: Random
    headers: Mapping[str, str] = NO_HEADERS
    blocks: Sequence[int] = ()
    read_opening: Callable[[Request], str] = _unread
    adapter: str = ""
    returning: float = 0.0
    growth_tokens: float = 0.0
    others: float = 0.0
    away: float = 0.0

    @property
    def opening(self) -> str:
        """Beginning of the first user message; empty unless a plugin needs `Signal.OPENING`.

        Read when it is asked for: most decisions need no tie broken.
        """
        return self.read_opening(self.request)
