"""Pools as Envoy sees them: a cluster, and its endpoint assignment."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Annotated

import msgspec

from extproc.pool.snapshot import EndpointSnapshot, Pool
from extproc.scheduling import labels

#: Type URLs of the two resources we have.
CLUSTER = "type.googleapis.com/envoy.config.cluster.v3.Cluster"
ASSIGNMENT = "type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment"

#: The cluster of a pool without a name. Not `extproc`: that is what configurations call the
#: cluster of the pickers, and Envoy ignores a served cluster of a name it was started with.
UNNAMED = "engines"


class LbHealth(Enum):
    """Health of an endpoint; values are those of Envoy's `HealthStatus`."""

    #: Up, as far as we know.
    HEALTHY = 1
    #: It takes no part: it is out of reach, or its requests fail.
    UNHEALTHY = 2


class LbEndpoint(msgspec.Struct, frozen=True):
    """One endpoint of an assignment.

    Attributes:
        address: `ip:port`, IPv6 in brackets.
        health: Health status sent to Envoy.
        region: Region of the node; empty without a label.
        zone: Zone of the machine; empty where unknown.
    """

    address: str
    health: LbHealth = LbHealth.HEALTHY
    region: str = ""
    zone: str = ""


class XdsResource(msgspec.Struct, frozen=True):
    """One encoded, versioned resource.

    Attributes:
        name: Name of the cluster, for both types.
        version: Hash of the content: equal bytes have equal versions on every replica.
        body: Serialized resource of Envoy's type.
    """

    name: str
    version: str
    body: bytes


#: All resources at one moment, by type URL and name. Both types are always there.
XdsSnapshot = Mapping[str, Mapping[str, XdsResource]]


def cluster_name(pool: str) -> str:
    """Returns the cluster name of a pool."""
    return pool or UNNAMED


def lb_endpoints(pool: Pool, *, with_health: bool) -> tuple[LbEndpoint, ...]:
    """Returns the endpoints of a pool ordered by address, so that replicas agree.

    The ranks of an engine are one endpoint of Envoy.

    Args:
        with_health: Whether endpoints that are not up are sent as unhealthy. When no endpoint is
            up, all count as healthy, as they do for routing: a partition of this replica is then
            more likely.
    """
    is_health_omitted = not with_health or pool.down == len(pool.members)
    lb_endpoints = [
        _lb_endpoint(member, healthy=is_health_omitted or member.is_up)
        for member in pool.members
        if member.endpoint.rank is None or not member.endpoint.rank.index
    ]
    return tuple(sorted(lb_endpoints, key=lambda place: place.address))


def _lb_endpoint(member: EndpointSnapshot, *, healthy: bool) -> LbEndpoint:
    where = labels.location_of(member.endpoint) if member.endpoint.labels else {}
    return LbEndpoint(
        member.endpoint.host_port,
        LbHealth.HEALTHY if healthy else LbHealth.UNHEALTHY,
        where.get("region", ""),
        where.get("zone", ""),
    )


#: What Envoy's messages can hold: a shorter time would be 0 in them, a longer one or a larger count
#: has no encoding.
_Seconds = Annotated[float, msgspec.Meta(ge=0.001, le=10**9)]
_Times = Annotated[int, msgspec.Meta(ge=1, le=2**32 - 1)]
_Share = Annotated[float, msgspec.Meta(ge=0, le=1)]


class HealthCheck(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Active health check that every Envoy sends to every engine.

    Attributes:
        path: HTTP path of the GET request; empty for no checks, and Envoy then receives the health
            of endpoints from extproc, as it does in pools that speak gRPC (`h2c`). vLLM and SGLang
            answer at `/health` without generating a token.
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
