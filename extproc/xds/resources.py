"""Pools as Envoy sees them: a cluster, and its endpoint assignment."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

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
        zone: Of the machine, likewise.
    """

    address: str
    health: LbHealth = LbHealth.HEALTHY
    region: str = ""
    zone: str = ""


class XdsResource(msgspec.Struct, frozen=True):
    """One encoded, versioned resource.

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
    """Returns the cluster name of a pool."""
    return pool or UNNAMED


def lb_endpoints(pool: Pool, *, with_health: bool) -> tuple[LbEndpoint, ...]:
    """Returns the endpoints of a pool ordered by address, so that replicas agree.

    Args:
        pool: Snapshot of the pool.
        with_health: Whether endpoints that are not up are sent as unhealthy. When no endpoint is
            up, all count as healthy, as they do for routing: a partition of this replica is then
            more likely.
    """
    blind = not with_health or pool.down == len(pool.members)
    places = [_lb_endpoint(member, healthy=blind or member.up) for member in pool.members]
    return tuple(sorted(places, key=lambda place: place.address))


def _lb_endpoint(member: EndpointSnapshot, *, healthy: bool) -> LbEndpoint:
    where = labels.location_of(member.endpoint) if member.endpoint.labels else {}
    return LbEndpoint(
        member.endpoint.address,
        LbHealth.HEALTHY if healthy else LbHealth.UNHEALTHY,
        where.get("region", ""),
        where.get("zone", ""),
    )
