"""One scheduling turn: the request, the time and the chance that belong to it."""

from __future__ import annotations

from random import Random

import msgspec

from extproc.request import Request


class Turn(msgspec.Struct, frozen=True, gc=False):
    """What every plugin is given besides the candidates.

    Attributes:
        request: What is asked for.
        now: Monotonic seconds, the same from the first filter to the pick.
        rng: The only source of chance; the same seed gives the same picks.
    """

    request: Request
    now: float
    rng: Random
