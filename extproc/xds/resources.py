"""A pool as Envoy sees it: a cluster, and an assignment of endpoints to it."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

import msgspec

from extproc.pool.snapshot import EndpointSnapshot, Pool
from extproc.scheduling import topology

#: Type URLs of the two resources we have.
CLUSTER = "type.googleapis.com/envoy.config.cluster.v3.Cluster"
ASSIGNMENT = "type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment"

#: The cluster of a pool without a name. Not `extproc`: that is what configurations call the
#: cluster of the pickers, and Envoy ignores a served cluster of a name it was started with.
UNNAMED = "engines"


class LbHealth(Enum):
    """What Envoy is told of an endpoint: numbers of its `HealthStatus`."""

    #: Up, as far as we know.
    HEALTHY = 1
    #: It takes no part: it is out of reach, or its requests fail.
    UNHEALTHY = 2


class LbEndpoint(msgspec.Struct, frozen=True):
    """One endpoint.

    Attributes:
        address: `ip:port`, IPv6 in brackets.
        health: What Envoy is told of it.
        region: Of the machine, empty when no label says.
        zone: Of the machine, likewise.
    """

    address: str
    health: LbHealth = LbHealth.HEALTHY
    region: str = ""
    zone: str = ""


class XdsResource(msgspec.Struct, frozen=True):
    """What is sent.

    Attributes:
        name: Of the cluster, for both types.
        version: Of its content: equal bytes have equal versions, whichever replica made them.
        body: In Envoy's type, serialised.
    """

    name: str
    version: str
    body: bytes


#: All resources at one moment, by type URL and name. Both types are always there.
XdsSnapshot = Mapping[str, Mapping[str, XdsResource]]


def cluster_name(pool: str) -> str:
    """The cluster of a pool."""
    return pool or UNNAMED


def lb_endpoints(pool: Pool, *, with_health: bool) -> tuple[LbEndpoint, ...]:
    """The endpoints of a pool, in the order of addresses so that replicas agree.

    Args:
        pool: Which.
        with_health: Whether those that are not up are told as such. When no endpoint is up, all
            count as healthy, as they do for picks: then it is more likely us who are cut off.
    """
    blind = not with_health or pool.down == len(pool.members)
    places = [_lb_endpoint(member, healthy=blind or member.up) for member in pool.members]
    return tuple(sorted(places, key=lambda place: place.address))


def _lb_endpoint(member: EndpointSnapshot, *, healthy: bool) -> LbEndpoint:
    where = topology.location_of(member.endpoint) if member.endpoint.labels else {}
    return LbEndpoint(
        member.endpoint.address,
        LbHealth.HEALTHY if healthy else LbHealth.UNHEALTHY,
        where.get("region", ""),
        where.get("zone", ""),
    )
