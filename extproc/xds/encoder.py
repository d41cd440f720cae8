"""Encoder of resources into Envoy's protobuf types (`envoy-data-plane`).

The types take a second and 50 MB to import, so this module is imported only where xDS is served.
"""

from __future__ import annotations

import ipaddress
import itertools
import warnings
from collections.abc import Collection, Iterator, Sequence
from datetime import timedelta

import betterproto2

from extproc.xds.resources import ClusterOptions, HealthCheck, LbEndpoint, OutlierDetection

with warnings.catch_warnings():
    # pydantic deprecates a validator style that the generated classes use.
    warnings.filterwarnings("ignore", message=r"Using `@model_validator`")
    from envoy_data_plane.envoy.config.cluster import v3 as cluster_v3
    from envoy_data_plane.envoy.config.core import v3 as core_v3
    from envoy_data_plane.envoy.config.endpoint import v3 as endpoint_v3
    from envoy_data_plane.envoy.extensions.load_balancing_policies.least_request import (
        v3 as least_request_v3,
    )
    from envoy_data_plane.envoy.extensions.load_balancing_policies.override_host import (
        v3 as override_host_v3,
    )
    from envoy_data_plane.envoy.extensions.upstreams.http import v3 as http_v3
    from envoy_data_plane.envoy.type import v3 as type_v3
    from envoy_data_plane.envoy.type.metadata import v3 as metadata_v3
    from envoy_data_plane.google.protobuf import Any

#: EPP protocol 004: the destination, in a header and in metadata of this namespace; the served
#: endpoint comes back in the same namespace.
NAMESPACE = "envoy.lb"
DESTINATION = "x-gateway-destination-endpoint"
SERVED = "x-gateway-destination-endpoint-served"

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

#: Field numbers of what is put together by hand.
_NAME = 1  # Cluster.name
_ENDPOINTS = 2  # ClusterLoadAssignment.endpoints
_LB_ENDPOINTS = 2  # LocalityLbEndpoints.lb_endpoints
_LB_ENDPOINT, _LB_HEALTH = 1, 2  # LbEndpoint.endpoint, .health_status
_ENDPOINT_ADDRESS = 1  # Endpoint.address
_ADDRESS_SOCKET = 1  # Address.socket_address
_SOCKET_IP, _SOCKET_PORT = 2, 3  # SocketAddress.address, .port_value


class ResourceEncoder:
    """Encodes resources and caches the bytes of single endpoints, which rarely change.

    Args:
        options: Options of every cluster.
    """

    def __init__(self, options: ClusterOptions) -> None:
        self._encoded: dict[LbEndpoint, bytes] = {}
        # Now, and once for all clusters: through the types it takes 10 ms, the first time 100 ms.
        self._common = {h2c: bytes(_cluster(options, h2c=h2c)) for h2c in (False, True)}

    def drop_others(self, lb_endpoints: Collection[LbEndpoint]) -> None:
        """Drops cached bytes of all other endpoints."""
        for lb_endpoint in self._encoded.keys() - lb_endpoints:
            del self._encoded[lb_endpoint]

    def cluster(self, name: str, *, h2c: bool) -> bytes:
        """Encodes an EDS cluster that sends to the endpoints that extproc names, in their order.

        Args:
            name: Name of the cluster.
            h2c: Whether its engines speak HTTP/2 without TLS (appProtocol kubernetes.io/h2c): then
                their answers to health checks are unknown, and there are none.
        """
        return _field(_NAME, name.encode()) + self._common[h2c]

    def assignment(self, name: str, lb_endpoints: Sequence[LbEndpoint]) -> bytes:
        """Encodes all endpoints of a cluster, grouped by zone."""
        parts = [bytes(endpoint_v3.ClusterLoadAssignment(cluster_name=name))]
        ordered = sorted(lb_endpoints, key=_locality)
        for (region, zone), group in itertools.groupby(ordered, key=_locality):
            locality = core_v3.Locality(region=region, zone=zone) if region or zone else None
            head = bytes(endpoint_v3.LocalityLbEndpoints(locality=locality))
            parts.append(_field(_ENDPOINTS, head + b"".join(map(self._endpoint, group))))
        return b"".join(parts)

    def _endpoint(self, lb_endpoint: LbEndpoint) -> bytes:
        """Encodes one `lb_endpoints` field."""
        encoded = self._encoded.get(lb_endpoint)
        if encoded is None:
            encoded = self._encoded[lb_endpoint] = _field(_LB_ENDPOINTS, _lb_endpoint(lb_endpoint))
        return encoded


def _cluster(options: ClusterOptions, *, h2c: bool) -> cluster_v3.Cluster:
    """Builds a cluster without a name."""
    return cluster_v3.Cluster(
        type=cluster_v3.ClusterDiscoveryType.EDS,
        eds_cluster_config=cluster_v3.ClusterEdsClusterConfig(eds_config=_ads_source()),
        connect_timeout=_CONNECT_TIMEOUT,
        load_balancing_policy=_override_host_policy(),
        common_lb_config=cluster_v3.ClusterCommonLbConfig(
            healthy_panic_threshold=type_v3.Percent(value=_PANIC_PERCENT),
            update_merge_window=_UPDATE_MERGE_WINDOW,
        ),
        circuit_breakers=cluster_v3.CircuitBreakers(
            thresholds=[
                cluster_v3.CircuitBreakersThresholds(
                    max_connections=_CIRCUIT_BREAKER_LIMIT,
                    max_pending_requests=_CIRCUIT_BREAKER_LIMIT,
                    max_requests=_CIRCUIT_BREAKER_LIMIT,
                    max_retries=_CIRCUIT_BREAKER_LIMIT,
                )
            ]
        ),
        health_checks=[] if h2c else list(_health_checks(options.health_check)),
        # Otherwise an endpoint that leaves stays until a check of it fails.
        ignore_health_on_host_removal=True,
        outlier_detection=_outlier_detection(options.outliers)
        if options.outliers.enabled
        else None,
        typed_extension_protocol_options={_HTTP: _any(_http_options(h2c=h2c), _HTTP)},
    )


def _locality(lb_endpoint: LbEndpoint) -> tuple[str, str]:
    return lb_endpoint.region, lb_endpoint.zone


def _field(number: int, body: bytes) -> bytes:
    """Encodes a nested message field: protobuf tag, length, body."""
    return (
        betterproto2.encode_varint(number << 3 | 2) + betterproto2.encode_varint(len(body)) + body
    )


def _number(number: int, value: int) -> bytes:
    """Encodes an integer field of a message."""
    return betterproto2.encode_varint(number << 3) + betterproto2.encode_varint(value)


def _lb_endpoint(lb_endpoint: LbEndpoint) -> bytes:
    """Encodes an `LbEndpoint` by hand: through the types it takes 0.5 ms, times hundreds."""
    host, _, port = lb_endpoint.address.rpartition(":")
    ip = str(ipaddress.ip_address(host.strip("[]"))).encode()
    socket = _field(_SOCKET_IP, ip) + _number(_SOCKET_PORT, int(port))
    endpoint = _field(_ENDPOINT_ADDRESS, _field(_ADDRESS_SOCKET, socket))
    return _field(_LB_ENDPOINT, endpoint) + _number(_LB_HEALTH, lb_endpoint.health.value)


def _any(message: betterproto2.Message, name: str) -> Any:
    return Any(type_url=_TYPES + name, value=bytes(message))


def _ads_source() -> core_v3.ConfigSource:
    return core_v3.ConfigSource(
        ads=core_v3.AggregatedConfigSource(), resource_api_version=core_v3.ApiVersion.V3
    )


def _override_host_policy() -> cluster_v3.LoadBalancingPolicy:
    """Builds the load balancing policy: override host, and least request without a host."""
    return _policy(
        "override_host",
        override_host_v3.OverrideHost(
            override_host_sources=[
                override_host_v3.OverrideHostOverrideHostSource(header=DESTINATION),
                override_host_v3.OverrideHostOverrideHostSource(metadata=_key(DESTINATION)),
            ],
            # Who served reaches extproc again. Envoys that do not know the field skip it.
            selected_host_key=_key(SERVED),
            fallback_policy=_policy("least_request", least_request_v3.LeastRequest()),
        ),
    )


def _policy(name: str, message: betterproto2.Message) -> cluster_v3.LoadBalancingPolicy:
    package = f"envoy.extensions.load_balancing_policies.{name}.v3."
    config = core_v3.TypedExtensionConfig(
        name=f"envoy.load_balancing_policies.{name}",
        typed_config=_any(message, package + type(message).__name__),
    )
    return cluster_v3.LoadBalancingPolicy(
        policies=[cluster_v3.LoadBalancingPolicyPolicy(typed_extension_config=config)]
    )


def _key(name: str) -> metadata_v3.MetadataKey:
    return metadata_v3.MetadataKey(
        key=NAMESPACE, path=[metadata_v3.MetadataKeyPathSegment(key=name)]
    )


def _health_checks(health_check: HealthCheck) -> Iterator[core_v3.HealthCheck]:
    if not health_check.path:
        return
    interval = timedelta(seconds=health_check.interval_s)
    yield core_v3.HealthCheck(
        timeout=timedelta(seconds=health_check.timeout_s),
        interval=interval,
        # The default is 60 s for a cluster that no request went to yet.
        no_traffic_interval=interval,
        # Envoys started together do not check together.
        interval_jitter_percent=20,
        unhealthy_threshold=health_check.unhealthy_threshold,
        healthy_threshold=health_check.healthy_threshold,
        http_health_check=core_v3.HealthCheckHttpHealthCheck(path=health_check.path),
    )


def _outlier_detection(outliers: OutlierDetection) -> cluster_v3.OutlierDetection:
    return cluster_v3.OutlierDetection(
        interval=timedelta(seconds=min(1.0, outliers.ejection_s)),
        base_ejection_time=timedelta(seconds=outliers.ejection_s),
        max_ejection_time=timedelta(seconds=max(outliers.max_ejection_time_s, outliers.ejection_s)),
        max_ejection_percent=round(100 * outliers.max_ejection_share),
        always_eject_one_host=True,
        # An engine may answer checks and refuse requests; it would be back with the next check.
        successful_active_health_check_uneject_host=False,
        split_external_local_origin_errors=True,
        consecutive_local_origin_failure=outliers.connection_failures,
        enforcing_consecutive_local_origin_failure=100,
        consecutive_gateway_failure=outliers.gateway_failures,
        enforcing_consecutive_gateway_failure=100,
        # These count 500 as well, which bad requests cause.
        enforcing_consecutive_5xx=0,
        enforcing_success_rate=0,
        enforcing_local_origin_success_rate=0,
    )


def _http_options(*, h2c: bool) -> http_v3.HttpProtocolOptions:
    protocol_options = http_v3.HttpProtocolOptionsExplicitHttpConfig(
        http2_protocol_options=core_v3.Http2ProtocolOptions() if h2c else None,
        http_protocol_options=None if h2c else core_v3.Http1ProtocolOptions(),
    )
    return http_v3.HttpProtocolOptions(
        common_http_protocol_options=core_v3.HttpProtocolOptions(idle_timeout=_IDLE_TIMEOUT),
        explicit_http_config=protocol_options,
    )
