"""How an endpoint is, what a request says of it, and when it is left out: values of `health`."""

from __future__ import annotations

import math
from enum import IntEnum

import msgspec

#: Statuses of 500 and more that tell of the request, not of the engine: method or version unknown.
_REQUESTS_OWN = frozenset({"501", "505"})


class Settings(msgspec.Struct, frozen=True):
    """When endpoints are left out.

    Attributes:
        failures: Failed requests in a row; 0 never leaves one out for failed requests.
        failure_share: Share of failed requests within the window.
        window_s: Seconds in which evidence fades to 1/e.
        base_s: Seconds of the first ejection.
        cap_s: Seconds of the longest.
        most_share: Share of the pool that may be out.
        hang_s: Seconds with work and without a sign of life.
        slow_start_s: Seconds over which one that is new or back is eased in; 0 for at once.
        slow_start_floor: Share of requests it is a candidate for at first.
    """

    failures: int = 3
    failure_share: float = 0.5
    window_s: float = 10.0
    base_s: float = 5.0
    cap_s: float = 60.0
    most_share: float = 0.5
    hang_s: float = 30.0
    slow_start_s: float = 0.0
    slow_start_floor: float = 0.1


class Verdict(IntEnum):
    """What one request says of its endpoint."""

    SERVED = 0
    FAILED = 1
    NEITHER = 2
    """It answered, and refused: the client's fault, or a full queue."""
    LEFT = 3
    """The stream ended without response headers."""


class State(IntEnum):
    """Whether an endpoint takes part."""

    IN = 0
    EJECTED = 1
    """Its requests fail."""
    PROBING = 2
    """It was ejected, and one request is on its way to find out."""
    DOWN = 3
    """Scrapes cannot reach it."""


class Condition(msgspec.Struct, frozen=True, gc=False):
    """How one endpoint is.

    Attributes:
        state: Whether it takes part.
        cause: Why not: `errors`, `hung`, `passed-over`, `unreachable`; empty when it does.
        since: Monotonic seconds since when; of one that takes part, when it came or came back.
        until: From when a request may try it; infinity where only a scrape brings it back.
        times: Ejections in a row (count).
    """

    state: State = State.IN
    cause: str = ""
    since: float = -math.inf
    until: float = math.inf
    times: int = 0


#: Of an endpoint that was there from the start.
FINE = Condition()


def verdict(status: str) -> Verdict:
    """What a response status says.

    Args:
        status: `:status` as text; empty when there was none.
    """
    if status < "4":
        return Verdict.SERVED if status else Verdict.LEFT
    if status < "5" or status in _REQUESTS_OWN:
        return Verdict.NEITHER
    return Verdict.FAILED
