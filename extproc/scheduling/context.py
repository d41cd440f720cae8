"""Scheduling context: a request, its time and its source of chance."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from random import Random

import msgspec

from extproc.request import InferenceRequest

#: Headers of a request without any.
NO_HEADERS: Mapping[str, str] = {}


def _unread(_: InferenceRequest) -> str:
    return ""


class SchedulingContext(msgspec.Struct, frozen=True, gc=False):
    """Input of every plugin besides the candidates.

    Attributes:
        request: The parsed request.
        now: Monotonic seconds, the same from the first filter to the pick.
        rng: The only source of chance; the same seed gives the same picks.
        headers: Headers of the request, names in lower case.
        blocks: The prompt's chain of prefix-block hashes, root first; empty where no plugin reads it.
        first_user_message_reader: Reads the beginning of the first user message out of the request.
        adapter: The requested adapter, named apart from its model or known to be one; empty for a
            base model. Where `request.adapter` is empty, this is `request.model` or empty.
        continuation_ratio: Share of requests that go on from an earlier one, 0..1; 0 unless a plugin needs
            `Signal.HOMES`.
        expected_growth_tokens: Tokens this conversation will grow by; 0 unless as above.
        foreign_share: Share of the requests in the engines that other pickers sent, 0..1; 0 unless as above.
        idle_conversations_per_open: Conversations that will go on and have no request open now, for each open request; 0
            unless as above.
    """

    request: InferenceRequest
    now: float
    rng: Random
    headers: Mapping[str, str] = NO_HEADERS
    blocks: Sequence[int] = ()
    first_user_message_reader: Callable[[InferenceRequest], str] = _unread
    adapter: str = ""
    continuation_ratio: float = 0.0
    expected_growth_tokens: float = 0.0
    foreign_share: float = 0.0
    idle_conversations_per_open: float = 0.0

    @property
    def first_user_message(self) -> str:
        """Beginning of the first user message; empty unless a plugin needs `Signal.OPENING`.

        Read at first use: most decisions need no tie broken.
        """
        return self.first_user_message_reader(self.request)
