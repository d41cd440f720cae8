"""Cache of the encoded resources of all pools; rebuilds only those of changed pools.

Clusters and endpoint assignments are Envoy's protobuf messages.
"""

from __future__ import annotations

import ipaddress
import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import lru_cache
from typing import Any

import msgspec
import xxhash

from extproc.pool.snapshot import Pool
from extproc.protocol.headers import DESTINATION
from extproc.wire.pb import xds_pb2
from extproc.wire.protobuf_decoder import BALANCER_NAMESPACE, SERVED_KEY
from extproc.xds import resources
from extproc.xds.resources import (
    ClusterOptions,
    HealthCheck,
    LbEndpoint,
    OutlierDetection,
    XdsResource,
    XdsSnapshot,
)

_TYPES = "type.googleapis.com/"
_HTTP = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"

#: A connection within a cluster takes milliseconds; a machine that is gone takes all of this.
_CONNECT_TIMEOUT = timedelta(seconds=1)

#: vLLM (uvicorn) closes idle connections after 5 s. Above that, about 1 request in 10,000 meets a
#: connection that is being closed and gets a 503.
_IDLE_TIMEOUT = timedelta(seconds=2)

#: The defaults of 1024 connections and requests, and 3 retries, are far below one fleet's load.
_CIRCUIT_BREAKER_LIMIT = 40_000

#: Percent of endpoints that must be well, or Envoy spreads requests over all of them. Below its
#: default of 50: engines that die are dead; only when nearly all seem so, the checks are wrong.
_PANIC_PERCENT = 10.0

#: Changes of health reach the workers together. The default of 1 s lets a thousand requests go to
#: an engine that was left out already.
_UPDATE_MERGE_WINDOW = timedelta(seconds=0.1)


def encode_cluster(name: str, options: ClusterOptions, *, h2c: bool) -> bytes:
    """Encodes an EDS cluster that sends to the endpoints that extproc names, in their order.

    Args:
        h2c: Whether its engines speak HTTP/2 without TLS (appProtocol kubernetes.io/h2c): then
            their answers to health checks are unknown, and there are none.
    """
    limit = {"value": _CIRCUIT_BREAKER_LIMIT}
    cluster = xds_pb2.Cluster(
        name=name,
        type=xds_pb2.Cluster.EDS,
        eds_cluster_config={"eds_config": {"ads": {}, "resource_api_version": xds_pb2.V3}},
        connect_timeout=_CONNECT_TIMEOUT,
        load_balancing_policy=_override_host_policy(),
        common_lb_config={
            "healthy_panic_threshold": {"value": _PANIC_PERCENT},
            "update_merge_window": _UPDATE_MERGE_WINDOW,
        },
        circuit_breakers={
            "thresholds": [
                {
                    "max_connections": limit,
                    "max_pending_requests": limit,
                    "max_requests": limit,
                    "max_retries": limit,
                }
            ]
        },
        health_checks=[] if h2c else list(_health_checks(options.health_check)),
        # Otherwise an endpoint that leaves stays until a check of it fails.
        ignore_health_on_host_removal=True,
        outlier_detection=_outlier_detection(options.outliers)
        if options.outliers.enabled
        else None,
        typed_extension_protocol_options={_HTTP: _any(_http_options(h2c=h2c), _HTTP)},
    )
    return cluster.SerializeToString(deterministic=True)


def encode_assignment(name: str, lb_endpoints: Sequence[LbEndpoint]) -> bytes:
    """Encodes all endpoints of a cluster, grouped by zone."""
    assignment = xds_pb2.ClusterLoadAssignment(cluster_name=name)
    groups = itertools.groupby(sorted(lb_endpoints, key=_locality), key=_locality)
    for (region, zone), group in groups:
        locality = {"region": region, "zone": zone} if region or zone else None
        _add_endpoints(assignment.endpoints.add(locality=locality), group)
    return assignment.SerializeToString(deterministic=True)


def _locality(lb_endpoint: LbEndpoint) -> tuple[str, str]:
    return lb_endpoint.region, lb_endpoint.zone


def _add_endpoints(message: Any, lb_endpoints: Iterable[LbEndpoint]) -> None:
    """Adds endpoints to a `LocalityLbEndpoints` in place: thousands may be there."""
    for lb_endpoint in lb_endpoints:
        host, _, port = lb_endpoint.address.rpartition(":")
        socket = {"address": _ip(host), "port_value": int(port)}
        message.lb_endpoints.add(
            endpoint={"address": {"socket_address": socket}},
            health_status=lb_endpoint.health.value,
        )


@lru_cache(maxsize=32_768)
def _ip(host: str) -> str:
    """Reads an IP address as Envoy wants it: one that is none would fail the whole assignment."""
    return str(ipaddress.ip_address(host.strip("[]")))


def _any(message: Any, name: str) -> Any:
    """Packs a message under Envoy's name of its type."""
    return {"type_url": _TYPES + name, "value": message.SerializeToString(deterministic=True)}


def _override_host_policy() -> xds_pb2.LoadBalancingPolicy:
    """Builds the load balancing policy: override host, and least request without a host."""
    override_host = xds_pb2.OverrideHost(
        override_host_sources=[{"header": DESTINATION}, {"metadata": _key(DESTINATION)}],
        # Who served reaches extproc again. Envoys that do not know the field skip it.
        selected_host_key=_key(SERVED_KEY),
        fallback_policy=_policy("least_request", xds_pb2.LeastRequest()),
    )
    return _policy("override_host", override_host)


def _policy(name: str, message: Any) -> xds_pb2.LoadBalancingPolicy:
    type_name = f"envoy.extensions.load_balancing_policies.{name}.v3.{message.DESCRIPTOR.name}"
    config = {
        "name": f"envoy.load_balancing_policies.{name}",
        "typed_config": _any(message, type_name),
    }
    return xds_pb2.LoadBalancingPolicy(policies=[{"typed_extension_config": config}])


def _key(name: str) -> dict[str, object]:
    """Builds a MetadataKey of the namespace of EPP protocol 004."""
    return {"key": BALANCER_NAMESPACE, "path": [{"key": name}]}


def _health_checks(health_check: HealthCheck) -> Iterator[xds_pb2.HealthCheck]:
    if not health_check.path:
        return
    interval = timedelta(seconds=health_check.interval_s)
    yield xds_pb2.HealthCheck(
        timeout=timedelta(seconds=health_check.timeout_s),
        interval=interval,
        # The default is 60 s for a cluster that no request went to yet.
        no_traffic_interval=interval,
        # Envoys started together do not check together.
        interval_jitter_percent=20,
        unhealthy_threshold={"value": health_check.unhealthy_threshold},
        healthy_threshold={"value": health_check.healthy_threshold},
        http_health_check={"path": health_check.path},
    )


def _outlier_detection(outliers: OutlierDetection) -> xds_pb2.OutlierDetection:
    return xds_pb2.OutlierDetection(
        interval=timedelta(seconds=min(1.0, outliers.ejection_s)),
        base_ejection_time=timedelta(seconds=outliers.ejection_s),
        max_ejection_time=timedelta(seconds=max(outliers.max_ejection_time_s, outliers.ejection_s)),
        max_ejection_percent={"value": round(100 * outliers.max_ejection_share)},
        always_eject_one_host={"value": True},
        # An engine may answer checks and refuse requests; it would be back with the next check.
        successful_active_health_check_uneject_host={"value": False},
        split_external_local_origin_errors=True,
        consecutive_local_origin_failure={"value": outliers.connection_failures},
        enforcing_consecutive_local_origin_failure={"value": 100},
        consecutive_gateway_failure={"value": outliers.gateway_failures},
        enforcing_consecutive_gateway_failure={"value": 100},
        # These count 500 as well, which bad requests cause.
        enforcing_consecutive_5xx={"value": 0},
        enforcing_success_rate={"value": 0},
        enforcing_local_origin_success_rate={"value": 0},
    )


def _http_options(*, h2c: bool) -> xds_pb2.HttpProtocolOptions:
    protocol = "http2_protocol_options" if h2c else "http_protocol_options"
    return xds_pb2.HttpProtocolOptions(
        common_http_protocol_options={"idle_timeout": _IDLE_TIMEOUT},
        explicit_http_config={protocol: {}},
    )


class _CacheEntry(msgspec.Struct, frozen=True):
    """One pool with the resources built from it."""

    pool: Pool
    h2c: bool
    lb_endpoints: tuple[LbEndpoint, ...]
    assignment: XdsResource
    cluster: XdsResource


class SnapshotCache:
    """Holds the current snapshot and replaces it.

    Health is sent only of clusters without health checks of Envoy's own. Envoy knows that of the others
    sooner, and would eject an engine that recovered while every replica of extproc was down.

    Attributes:
        faults: Exceptions of the last update by pool name; such a pool keeps its resources.
    """

    def __init__(self, options: ClusterOptions) -> None:
        self._options = options
        self._entries: dict[str, _CacheEntry] = {}
        self.faults: dict[str, Exception] = {}
        self.snapshot: XdsSnapshot = {resources.CLUSTER: {}, resources.ASSIGNMENT: {}}

    def is_stale(self, pools: Mapping[str, Pool], h2c: Collection[str] = ()) -> bool:
        """Returns True if the pools may need another snapshot; cheap enough for 20 calls a second.

        Scrapes make a new pool each; only its endpoints, and perhaps who is up, matter here.
        """
        if len(pools) != len(self._entries):
            return True
        for name, pool in pools.items():
            entry = self._entries.get(resources.cluster_name(name))
            if entry is None or entry.h2c is not (name in h2c):
                return True
            if not self._has_same_endpoints(entry.pool, pool, h2c=entry.h2c):
                return True
        return False

    def update(self, pools: Mapping[str, Pool], h2c: Collection[str] = ()) -> bool:
        """Rebuilds resources of changed pools; returns True if the snapshot changed.

        Args:
            h2c: Names of pools whose engines speak HTTP/2 without TLS.
        """
        self.faults.clear()
        entries: dict[str, _CacheEntry] = {}
        for name, pool in pools.items():
            cluster = resources.cluster_name(name)
            try:
                entries[cluster] = self._build_entry(name, pool, h2c=name in h2c)
            except Exception as error:  # noqa: BLE001 - the other pools are published
                self.faults[name] = error
                if cluster in self._entries:
                    entries[cluster] = self._entries[cluster]
        self._entries = entries
        new: XdsSnapshot = {
            resources.CLUSTER: {name: entry.cluster for name, entry in entries.items()},
            resources.ASSIGNMENT: {name: entry.assignment for name, entry in entries.items()},
        }
        if new == self.snapshot:
            return False
        self.snapshot = new
        return True

    def _build_entry(self, pool_name: str, pool: Pool, *, h2c: bool) -> _CacheEntry:
        name = resources.cluster_name(pool_name)
        before = self._entries.get(name)
        if before is None or before.h2c is not h2c:
            cluster = _versioned(name, encode_cluster(name, self._options, h2c=h2c))
        elif self._has_same_endpoints(before.pool, pool, h2c=h2c):
            return before
        else:
            cluster = before.cluster
        lb_endpoints = resources.lb_endpoints(pool, with_health=self._is_health_sent(h2c=h2c))
        if before is not None and before.lb_endpoints == lb_endpoints:
            return _CacheEntry(pool, h2c, lb_endpoints, before.assignment, cluster)
        assignment = _versioned(name, encode_assignment(name, lb_endpoints))
        return _CacheEntry(pool, h2c, lb_endpoints, assignment, cluster)

    def _is_health_sent(self, *, h2c: bool) -> bool:
        """True for clusters that Envoy does not check: a gRPC engine has no HTTP path for it."""
        return h2c or not self._options.health_check.path

    def _has_same_endpoints(self, previous: Pool, current: Pool, *, h2c: bool) -> bool:
        """Returns True if both snapshots of a pool give the same endpoints and health."""
        if previous is current:
            return True
        if previous.positions is not current.positions:
            return False
        if not self._is_health_sent(h2c=h2c) or not (previous.down or current.down):
            return True
        return [member.is_up for member in previous.members] == [
            member.is_up for member in current.members
        ]


def _versioned(name: str, body: bytes) -> XdsResource:
    return XdsResource(name, xxhash.xxh3_128_hexdigest(body), body)
