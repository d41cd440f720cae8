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
        interval_s: Seconds between two checks of an engine. 2 finds a silent one within 10 s; a
            dead one that refuses connections is found by requests before.
        timeout_s: Seconds one check may take. 5, because the front end of an engine that is
            flooded with prompts answers late, and is not dead.
        unhealthy_threshold: Failed checks in a row before an engine is ejected (count); a status
            other than 200 counts at once. 3 forgives a lost packet.
        healthy_threshold: Checks in a row that succeed before it is back (count). 1: engines answer
            once their model is loaded.
    """

    path: Annotated[str, msgspec.Meta(pattern="^(/.*)?$")] = "/health"
    interval_s: _Seconds = 2.0
    timeout_s: _Seconds = 5.0
    unhealthy_threshold: _Times = 3
    healthy_threshold: _Times = 1


class OutlierDetection(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Passive ejection by Envoy of engines whose requests fail.

    Attributes:
        enabled: Do it at all. True: requests meet a dead engine before checks do.
        connection_failures: Connections in a row that fail or are reset before an engine is left
            out (count). 3 is above what one request and its retries cause.
        gateway_failures: Answers of 502, 503 or 504 in a row before an engine is left out (count).
            5, as Envoy counts; 500 does not count, since one client's bad request may cause it on
            engine after engine.
        ejection_s: Seconds an engine is left out, times how often in a row. 5 is short, since the
            endpoint picker and the health checks look as well.
        max_ejection_time_s: Seconds it is left out at most. 60 bounds how late a recovery is seen.
        most_ejected: Share of the engines that may be left out at once (0..1), one of them in any
            case. 0.5: when more of them fail, it is rather the requests that are wrong.
    """

    enabled: bool = True
    connection_failures: _Times = 3
    gateway_failures: _Times = 5
    ejection_s: _Seconds = 5.0
    max_ejection_time_s: _Seconds = 60.0
    most_ejected: _Share = 0.5


class ClusterOptions(msgspec.Struct, frozen=True):
    """Health check and outlier detection together."""

    health_check: HealthCheck = HealthCheck()
    outliers: OutlierDetection = OutlierDetection()
