"""Endpoint health: settings of outlier detection, outcomes of requests and health states."""

from __future__ import annotations

import math
from enum import IntEnum
from typing import Annotated

import msgspec

#: Consecutive refused or timed-out scrapes after which an endpoint is out of reach.
UNREACHABLE_AFTER = 2

#: Statuses of 500 and more that tell of the request, not of the engine: method or version unknown.
_REQUESTS_OWN = frozenset({"501", "505"})

_Seconds = Annotated[float, msgspec.Meta(ge=0)]
_PositiveSeconds = Annotated[float, msgspec.Meta(gt=0)]
_Share = Annotated[float, msgspec.Meta(ge=0, le=1)]


class OutlierDetectionSettings(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True
):
    """Outlier detection: when failing endpoints are ejected, and how they return.

    Attributes:
        failures: Consecutive failed requests after which an endpoint is ejected (count); 0 never
            ejects for requests. 3: one may be an accident, and an engine that answers 503 at once
            would attract every request of a strategy that counts open requests.
        failure_share: Share of failed requests within the window above which an endpoint is
            ejected, after at least 8 requests (0..1). 0.5: below it the endpoint serves more
            requests than it fails.
        window_s: Seconds in which evidence decays to a third. 10 contain a few requests of a slow
            engine, and no outdated ones.
        base_s: Seconds until an ejected endpoint is tried again, doubled with each consecutive
            ejection. 5 cost one request each, and an engine takes longer to restart.
        cap_s: Longest ejection (seconds). 60 limits how late a recovery is noticed.
        max_ejection_share: Share of the pool that may be ejected at a time on uncertain evidence
            (0..1); one endpoint always remains. 0.5: when more of them fail, the cause is probably
            the requests or the network. Engines that are certainly down do not count.
        stall_timeout_s: Seconds for which an engine with work may complete no iteration and no
            response. 15 is longer than any iteration, the compilation of a kernel or the loading of
            an adapter; an engine that continues is back at once.
        slow_start_s: Seconds over which the share of a new or returned endpoint rises; 0 for none.
            0, because engines are ready when they report it, and a new one is there to take load.
        slow_start_floor: Share of requests for which such an endpoint is a candidate at first
            (0..1), rising to 1. With 0.1, a tenth of the requests warms it up.
    """

    failures: Annotated[int, msgspec.Meta(ge=0)] = 3
    failure_share: _Share = 0.5
    window_s: _PositiveSeconds = 10.0
    base_s: _PositiveSeconds = 5.0
    cap_s: _PositiveSeconds = 60.0
    max_ejection_share: _Share = 0.5
    stall_timeout_s: _PositiveSeconds = 15.0
    slow_start_s: _Seconds = 0.0
    slow_start_floor: _Share = 0.1


class RequestOutcome(IntEnum):
    """Evidence of one request about the health of its endpoint."""

    SERVED = 0
    FAILED = 1
    CLIENT_ERROR = 2
    """It answered, and refused: the client's fault, or a full queue."""
    NO_RESPONSE = 3
    """The stream ended without response headers."""


def classify_status(status: str) -> RequestOutcome:
    """Classify a response status.

    Args:
        status: HTTP status as text; empty when there was none.
    """
    if status < "4":
        return RequestOutcome.SERVED if status else RequestOutcome.NO_RESPONSE
    if status < "5" or status in _REQUESTS_OWN:
        return RequestOutcome.CLIENT_ERROR
    return RequestOutcome.FAILED


class HealthState(IntEnum):
    """Participation of an endpoint in scheduling."""

    HEALTHY = 0
    SUSPECT = 1
    """It takes part, and its last request failed: others come first for a moment."""
    PROBING = 2
    """It was ejected, and one request is on its way to find out."""
    EJECTED = 3
    """Its requests fail."""
    DOWN = 4
    """Scrapes cannot reach it."""


class HealthStatus(msgspec.Struct, frozen=True, gc=False):
    """Health of one endpoint.

    Attributes:
        state: Participation in scheduling.
        cause: Why not: `errors`, `hung`, `passed-over`, `unreachable`; empty when it does.
        since: Monotonic seconds since when; of one that takes part, when it came or came back.
        until: From when a request may go to it; infinity where only a scrape brings it back.
        times: Ejections in a row (count).
    """

    state: HealthState = HealthState.HEALTHY
    cause: str = ""
    since: float = -math.inf
    until: float = math.inf
    times: int = 0


#: Of an endpoint that was there from the start.
HEALTHY = HealthStatus()
