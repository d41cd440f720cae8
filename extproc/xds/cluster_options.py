"""Settings that all clusters share: active health checks and outlier detection."""

from __future__ import annotations

from typing import Annotated

import msgspec

_Seconds = Annotated[float, msgspec.Meta(gt=0)]
_Times = Annotated[int, msgspec.Meta(ge=1)]
_Share = Annotated[float, msgspec.Meta(ge=0, le=1)]


class HealthCheck(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Active health check that every Envoy sends to every engine.

    Attributes:
        path: HTTP path of the GET request; empty for no checks, and Envoy then receives the health
            of endpoints from extproc. vLLM and SGLang answer at `/health` without generating a
            token.
        interval_s: Seconds between two checks of an engine. With 2, an engine that does not answer
            is detected within 10 s; one that refuses connections is detected by requests before.
        timeout_s: Time limit of a check (seconds). 5, because the front end of an engine that is
            flooded with prompts answers late without being dead.
        unhealthy_threshold: Consecutive failed checks after which an engine is ejected (count); a
            status other than 200 counts at once. 3 tolerates a lost packet.
        healthy_threshold: Consecutive successful checks after which it is back (count). 1: engines
            answer once their model is loaded.
    """

    path: Annotated[str, msgspec.Meta(pattern="^(/.*)?$")] = "/health"
    interval_s: _Seconds = 2.0
    timeout_s: _Seconds = 5.0
    unhealthy_threshold: _Times = 3
    healthy_threshold: _Times = 1


class OutlierDetection(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Passive ejection by Envoy of engines whose requests fail.

    Attributes:
        enabled: Eject engines at all. True: requests meet a dead engine before checks do.
        connection_failures: Consecutive connections that fail or are reset, after which an engine
            is ejected (count). 3 is above what one request and its retries cause.
        gateway_failures: Consecutive responses of 502, 503 or 504 after which an engine is ejected
            (count). 5 is Envoy's default; 500 does not count, because one client's bad request may
            cause it on every engine.
        ejection_s: Seconds of an ejection, times the number of consecutive ones. 5 is short,
            because extproc and the health checks detect failures as well.
        max_ejection_time_s: Longest ejection (seconds). 60 limits how late a recovery is noticed.
        max_ejection_share: Share of the engines that may be ejected at a time (0..1), at least one
            engine. 0.5: when more of them fail, the cause is probably the requests.
    """

    enabled: bool = True
    connection_failures: _Times = 3
    gateway_failures: _Times = 5
    ejection_s: _Seconds = 5.0
    max_ejection_time_s: _Seconds = 60.0
    max_ejection_share: _Share = 0.5


class ClusterOptions(msgspec.Struct, frozen=True):
    """Health check and outlier detection together."""

    health_check: HealthCheck = HealthCheck()
    outliers: OutlierDetection = OutlierDetection()
