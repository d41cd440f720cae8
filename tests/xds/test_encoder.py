"""Resources as an independent parser reads them."""

from __future__ import annotations

import datetime as dt

import msgspec
import pytest

from extproc.xds import snapshot_cache
from extproc.xds.resources import (
    ClusterOptions,
    HealthCheck,
    LbEndpoint,
    LbHealth,
    OutlierDetection,
)
from tests.support.xds_peer import clusters, endpoints, least_request, override_host, upstreams

HTTP = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"


def cluster(traits=None):
    data = snapshot_cache.encode_cluster("engines", traits or ClusterOptions(), h2c=False)
    return clusters.Cluster.parse(data)


def assigned(*lb_endpoints):
    return endpoints.ClusterLoadAssignment.parse(
        snapshot_cache.encode_assignment("engines", lb_endpoints)
    )


def only(policy, kind):
    """The one policy of a list, unpacked."""
    (entry,) = policy.policies
    config = entry.typed_extension_config
    package = kind.__module__.rpartition("envoy_data_plane.")[2]
    assert config.typed_config.type_url == f"type.googleapis.com/{package}.{kind.__name__}"
    return kind.parse(config.typed_config.value)


def test_a_cluster_uses_eds_over_ads():
    """Its type is EDS over ADS, which Envoy's bootstrap names already."""
    decoded = cluster()
    assert (decoded.name, decoded.type) == ("engines", clusters.ClusterDiscoveryType.EDS)
    assert decoded.eds_cluster_config.eds_config.ads is not None
    assert decoded.ignore_health_on_host_removal


def test_the_destination_is_read_from_header_then_metadata():
    """EPP protocol 004: header and metadata agree; the served endpoint is in the same namespace."""
    override = only(cluster().load_balancing_policy, override_host.OverrideHost)
    header, metadata = override.override_host_sources
    assert header.header == "x-gateway-destination-endpoint"
    assert metadata.metadata.key == override.selected_host_key.key == "envoy.lb"
    assert [segment.key for segment in metadata.metadata.path] == ["x-gateway-destination-endpoint"]
    assert [segment.key for segment in override.selected_host_key.path] == [
        "x-gateway-destination-endpoint-served"
    ]
    assert only(override.fallback_policy, least_request.LeastRequest) is not None


def test_idle_timeout_is_below_that_of_engines():
    """VLLM closes idle connections after 5 seconds; HTTP/1.1 is what engines speak."""
    options = cluster().typed_extension_protocol_options
    decoded = upstreams.HttpProtocolOptions.parse(options[HTTP].value)
    assert decoded.common_http_protocol_options.idle_timeout == dt.timedelta(seconds=2)
    assert decoded.explicit_http_config.http_protocol_options is not None


def test_h2c_pools_have_http2_clusters():
    """Their answer to health checks is unknown, so there are none; the rest is the same."""
    decoded = clusters.Cluster.parse(
        snapshot_cache.encode_cluster("engines", ClusterOptions(), h2c=True)
    )
    options = upstreams.HttpProtocolOptions.parse(
        decoded.typed_extension_protocol_options[HTTP].value
    )
    assert options.explicit_http_config.http2_protocol_options is not None
    assert options.explicit_http_config.http_protocol_options is None
    assert decoded.health_checks == []
    assert decoded.outlier_detection == cluster().outlier_detection


def test_circuit_breakers_allow_retries():
    """A dead engine under load must not use up the default of 3 retries."""
    (limits,) = cluster().circuit_breakers.thresholds
    assert limits.max_retries >= limits.max_requests > 10_000


def test_health_checks_are_as_configured():
    """Path, pace and patience come from the settings, with or without traffic."""
    check = HealthCheck(path="/live", interval_s=0.5, timeout_s=1.5, unhealthy_threshold=4)
    (check_v3,) = cluster(ClusterOptions(health_check=check)).health_checks
    assert check_v3.http_health_check.path == "/live"
    assert check_v3.interval == check_v3.no_traffic_interval == dt.timedelta(seconds=0.5)
    assert check_v3.timeout == dt.timedelta(seconds=1.5)
    assert (check_v3.unhealthy_threshold, check_v3.healthy_threshold) == (4, 1)


def test_health_checks_can_be_off():
    """Without a path there is no check."""
    assert cluster(ClusterOptions(health_check=HealthCheck(path=""))).health_checks == []


def test_outlier_detection_counts_gateway_failures():
    """Connections and 502 to 504 count; 500, which bad requests cause, does not."""
    outliers = OutlierDetection(connection_failures=2, gateway_failures=7, max_ejection_share=0.25)
    decoded = cluster(ClusterOptions(outliers=outliers)).outlier_detection
    assert decoded.split_external_local_origin_errors
    assert decoded.consecutive_local_origin_failure == 2
    assert decoded.consecutive_gateway_failure == 7
    assert decoded.enforcing_consecutive_gateway_failure == 100
    assert decoded.enforcing_consecutive_5xx == decoded.enforcing_success_rate == 0
    assert decoded.max_ejection_percent == 25
    assert decoded.successful_active_health_check_uneject_host is False


def test_the_longest_ejection_is_not_shorter_than_the_first():
    """Envoy refuses a cluster where it is."""
    decoded = cluster(
        ClusterOptions(outliers=OutlierDetection(ejection_s=90, max_ejection_time_s=60))
    ).outlier_detection
    assert decoded.max_ejection_time >= decoded.base_ejection_time == dt.timedelta(seconds=90)


#: Around every bound, and far outside.
NUMBERS = (1e-9, 1e-7, 0.001, 0.5, 1, 2**32 - 1, 2**32, 1e9, 10**10, 1e12, 1e15, float("inf"))


@pytest.mark.parametrize(
    ("section", "kind"), [("health_check", HealthCheck), ("outliers", OutlierDetection)]
)
def test_every_number_that_settings_may_hold_is_encoded(section, kind):
    """Otherwise a pool would have no cluster; Envoy refuses a duration of 0."""
    for field in msgspec.structs.fields(kind):
        if not isinstance(field.default, float | int) or isinstance(field.default, bool):
            continue
        accepted = 0
        for value in NUMBERS:
            try:
                options = msgspec.convert({field.name: value}, kind)
            except msgspec.ValidationError:
                continue
            accepted += 1
            decoded = cluster(ClusterOptions(**{section: options}))
            durations = [
                value
                for message in (decoded.health_checks[0], decoded.outlier_detection)
                for value in vars(message).values()
                if isinstance(value, dt.timedelta)
            ]
            assert min(durations) > dt.timedelta(0), (field.name, value)
        assert accepted, field.name


def test_outlier_detection_can_be_off():
    """Nothing is left out then."""
    assert (
        cluster(ClusterOptions(outliers=OutlierDetection(enabled=False))).outlier_detection is None
    )


def test_every_endpoint_has_its_address_and_health():
    """IPv6 loses its brackets; an endpoint that is down is marked as such."""
    decoded = assigned(
        LbEndpoint("10.0.0.1:8000"), LbEndpoint("[fd00::1]:8001", LbHealth.UNHEALTHY)
    )
    assert decoded.cluster_name == "engines"
    (group,) = decoded.endpoints
    assert group.locality is None
    read = [
        (
            endpoint.endpoint.address.socket_address.address,
            endpoint.endpoint.address.socket_address.port_value,
            endpoint.health_status.name,
        )
        for endpoint in group.lb_endpoints
    ]
    assert read == [("10.0.0.1", 8000, "HEALTHY"), ("fd00::1", 8001, "UNHEALTHY")]


def test_endpoints_are_grouped_by_zone():
    """Each zone is one group, and those without a label are one of their own."""
    decoded = assigned(
        LbEndpoint("10.0.0.1:8000", zone="a", region="r"),
        LbEndpoint("10.0.0.2:8000"),
        LbEndpoint("10.0.0.3:8000", zone="b", region="r"),
        LbEndpoint("10.0.0.4:8000", zone="a", region="r"),
    )
    groups = {
        (endpoint.locality.region, endpoint.locality.zone) if endpoint.locality else None: len(
            endpoint.lb_endpoints
        )
        for endpoint in decoded.endpoints
    }
    assert groups == {None: 1, ("r", "a"): 2, ("r", "b"): 1}


@pytest.mark.parametrize("count", [0, 1, 300])
def test_assignments_are_reproducible(count):
    """Envoy's types write the same bytes again: replicas agree on versions."""
    lb_endpoints = [
        LbEndpoint(f"10.0.{at // 250}.{at % 250}:8000", zone=f"z{at % 3}") for at in range(count)
    ]
    data = snapshot_cache.encode_assignment("engines", lb_endpoints)
    decoded = endpoints.ClusterLoadAssignment.parse(data)
    assert bytes(decoded) == data
    assert sum(len(group.lb_endpoints) for group in decoded.endpoints) == count
    assert snapshot_cache.encode_assignment("engines", lb_endpoints) == data


def test_an_address_that_is_no_ip_is_refused():
    """Envoy would refuse the whole assignment."""
    with pytest.raises(ValueError, match="does not appear to be an IPv4 or IPv6 address"):
        snapshot_cache.encode_assignment("engines", [LbEndpoint("engine.local:8000")])
