import datetime

from google.protobuf import any_pb2 as _any_pb2
from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import wrappers_pb2 as _wrappers_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ApiVersion(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    AUTO: _ClassVar[ApiVersion]
    V2: _ClassVar[ApiVersion]
    V3: _ClassVar[ApiVersion]

class HealthStatus(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    UNKNOWN: _ClassVar[HealthStatus]
    HEALTHY: _ClassVar[HealthStatus]
    UNHEALTHY: _ClassVar[HealthStatus]
    DRAINING: _ClassVar[HealthStatus]
    TIMEOUT: _ClassVar[HealthStatus]
    DEGRADED: _ClassVar[HealthStatus]
AUTO: ApiVersion
V2: ApiVersion
V3: ApiVersion
UNKNOWN: HealthStatus
HEALTHY: HealthStatus
UNHEALTHY: HealthStatus
DRAINING: HealthStatus
TIMEOUT: HealthStatus
DEGRADED: HealthStatus

class DiscoveryRequest(_message.Message):
    __slots__ = ("node", "resource_names", "type_url", "response_nonce", "error_detail")
    NODE_FIELD_NUMBER: _ClassVar[int]
    RESOURCE_NAMES_FIELD_NUMBER: _ClassVar[int]
    TYPE_URL_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_NONCE_FIELD_NUMBER: _ClassVar[int]
    ERROR_DETAIL_FIELD_NUMBER: _ClassVar[int]
    node: Node
    resource_names: _containers.RepeatedScalarFieldContainer[str]
    type_url: str
    response_nonce: str
    error_detail: Status
    def __init__(self, node: _Optional[_Union[Node, _Mapping]] = ..., resource_names: _Optional[_Iterable[str]] = ..., type_url: _Optional[str] = ..., response_nonce: _Optional[str] = ..., error_detail: _Optional[_Union[Status, _Mapping]] = ...) -> None: ...

class DiscoveryResponse(_message.Message):
    __slots__ = ("version_info", "resources", "type_url", "nonce")
    VERSION_INFO_FIELD_NUMBER: _ClassVar[int]
    RESOURCES_FIELD_NUMBER: _ClassVar[int]
    TYPE_URL_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    version_info: str
    resources: _containers.RepeatedCompositeFieldContainer[_any_pb2.Any]
    type_url: str
    nonce: str
    def __init__(self, version_info: _Optional[str] = ..., resources: _Optional[_Iterable[_Union[_any_pb2.Any, _Mapping]]] = ..., type_url: _Optional[str] = ..., nonce: _Optional[str] = ...) -> None: ...

class DeltaDiscoveryRequest(_message.Message):
    __slots__ = ("node", "type_url", "resource_names_subscribe", "resource_names_unsubscribe", "initial_resource_versions", "response_nonce", "error_detail")
    class InitialResourceVersionsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    NODE_FIELD_NUMBER: _ClassVar[int]
    TYPE_URL_FIELD_NUMBER: _ClassVar[int]
    RESOURCE_NAMES_SUBSCRIBE_FIELD_NUMBER: _ClassVar[int]
    RESOURCE_NAMES_UNSUBSCRIBE_FIELD_NUMBER: _ClassVar[int]
    INITIAL_RESOURCE_VERSIONS_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_NONCE_FIELD_NUMBER: _ClassVar[int]
    ERROR_DETAIL_FIELD_NUMBER: _ClassVar[int]
    node: Node
    type_url: str
    resource_names_subscribe: _containers.RepeatedScalarFieldContainer[str]
    resource_names_unsubscribe: _containers.RepeatedScalarFieldContainer[str]
    initial_resource_versions: _containers.ScalarMap[str, str]
    response_nonce: str
    error_detail: Status
    def __init__(self, node: _Optional[_Union[Node, _Mapping]] = ..., type_url: _Optional[str] = ..., resource_names_subscribe: _Optional[_Iterable[str]] = ..., resource_names_unsubscribe: _Optional[_Iterable[str]] = ..., initial_resource_versions: _Optional[_Mapping[str, str]] = ..., response_nonce: _Optional[str] = ..., error_detail: _Optional[_Union[Status, _Mapping]] = ...) -> None: ...

class DeltaDiscoveryResponse(_message.Message):
    __slots__ = ("resources", "type_url", "nonce", "removed_resources")
    RESOURCES_FIELD_NUMBER: _ClassVar[int]
    TYPE_URL_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    REMOVED_RESOURCES_FIELD_NUMBER: _ClassVar[int]
    resources: _containers.RepeatedCompositeFieldContainer[Resource]
    type_url: str
    nonce: str
    removed_resources: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, resources: _Optional[_Iterable[_Union[Resource, _Mapping]]] = ..., type_url: _Optional[str] = ..., nonce: _Optional[str] = ..., removed_resources: _Optional[_Iterable[str]] = ...) -> None: ...

class Resource(_message.Message):
    __slots__ = ("version", "resource", "name")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    RESOURCE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    version: str
    resource: _any_pb2.Any
    name: str
    def __init__(self, version: _Optional[str] = ..., resource: _Optional[_Union[_any_pb2.Any, _Mapping]] = ..., name: _Optional[str] = ...) -> None: ...

class Node(_message.Message):
    __slots__ = ("id",)
    ID_FIELD_NUMBER: _ClassVar[int]
    id: str
    def __init__(self, id: _Optional[str] = ...) -> None: ...

class Status(_message.Message):
    __slots__ = ("code", "message")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    code: int
    message: str
    def __init__(self, code: _Optional[int] = ..., message: _Optional[str] = ...) -> None: ...

class Cluster(_message.Message):
    __slots__ = ("name", "type", "eds_cluster_config", "connect_timeout", "health_checks", "circuit_breakers", "outlier_detection", "common_lb_config", "ignore_health_on_host_removal", "typed_extension_protocol_options", "load_balancing_policy")
    class DiscoveryType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        STATIC: _ClassVar[Cluster.DiscoveryType]
        STRICT_DNS: _ClassVar[Cluster.DiscoveryType]
        LOGICAL_DNS: _ClassVar[Cluster.DiscoveryType]
        EDS: _ClassVar[Cluster.DiscoveryType]
        ORIGINAL_DST: _ClassVar[Cluster.DiscoveryType]
    STATIC: Cluster.DiscoveryType
    STRICT_DNS: Cluster.DiscoveryType
    LOGICAL_DNS: Cluster.DiscoveryType
    EDS: Cluster.DiscoveryType
    ORIGINAL_DST: Cluster.DiscoveryType
    class EdsClusterConfig(_message.Message):
        __slots__ = ("eds_config",)
        EDS_CONFIG_FIELD_NUMBER: _ClassVar[int]
        eds_config: ConfigSource
        def __init__(self, eds_config: _Optional[_Union[ConfigSource, _Mapping]] = ...) -> None: ...
    class CommonLbConfig(_message.Message):
        __slots__ = ("healthy_panic_threshold", "update_merge_window")
        HEALTHY_PANIC_THRESHOLD_FIELD_NUMBER: _ClassVar[int]
        UPDATE_MERGE_WINDOW_FIELD_NUMBER: _ClassVar[int]
        healthy_panic_threshold: Percent
        update_merge_window: _duration_pb2.Duration
        def __init__(self, healthy_panic_threshold: _Optional[_Union[Percent, _Mapping]] = ..., update_merge_window: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...
    class TypedExtensionProtocolOptionsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: _any_pb2.Any
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[_any_pb2.Any, _Mapping]] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    TYPE_FIELD_NUMBER: _ClassVar[int]
    EDS_CLUSTER_CONFIG_FIELD_NUMBER: _ClassVar[int]
    CONNECT_TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    HEALTH_CHECKS_FIELD_NUMBER: _ClassVar[int]
    CIRCUIT_BREAKERS_FIELD_NUMBER: _ClassVar[int]
    OUTLIER_DETECTION_FIELD_NUMBER: _ClassVar[int]
    COMMON_LB_CONFIG_FIELD_NUMBER: _ClassVar[int]
    IGNORE_HEALTH_ON_HOST_REMOVAL_FIELD_NUMBER: _ClassVar[int]
    TYPED_EXTENSION_PROTOCOL_OPTIONS_FIELD_NUMBER: _ClassVar[int]
    LOAD_BALANCING_POLICY_FIELD_NUMBER: _ClassVar[int]
    name: str
    type: Cluster.DiscoveryType
    eds_cluster_config: Cluster.EdsClusterConfig
    connect_timeout: _duration_pb2.Duration
    health_checks: _containers.RepeatedCompositeFieldContainer[HealthCheck]
    circuit_breakers: CircuitBreakers
    outlier_detection: OutlierDetection
    common_lb_config: Cluster.CommonLbConfig
    ignore_health_on_host_removal: bool
    typed_extension_protocol_options: _containers.MessageMap[str, _any_pb2.Any]
    load_balancing_policy: LoadBalancingPolicy
    def __init__(self, name: _Optional[str] = ..., type: _Optional[_Union[Cluster.DiscoveryType, str]] = ..., eds_cluster_config: _Optional[_Union[Cluster.EdsClusterConfig, _Mapping]] = ..., connect_timeout: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., health_checks: _Optional[_Iterable[_Union[HealthCheck, _Mapping]]] = ..., circuit_breakers: _Optional[_Union[CircuitBreakers, _Mapping]] = ..., outlier_detection: _Optional[_Union[OutlierDetection, _Mapping]] = ..., common_lb_config: _Optional[_Union[Cluster.CommonLbConfig, _Mapping]] = ..., ignore_health_on_host_removal: _Optional[bool] = ..., typed_extension_protocol_options: _Optional[_Mapping[str, _any_pb2.Any]] = ..., load_balancing_policy: _Optional[_Union[LoadBalancingPolicy, _Mapping]] = ...) -> None: ...

class ConfigSource(_message.Message):
    __slots__ = ("ads", "resource_api_version")
    ADS_FIELD_NUMBER: _ClassVar[int]
    RESOURCE_API_VERSION_FIELD_NUMBER: _ClassVar[int]
    ads: AggregatedConfigSource
    resource_api_version: ApiVersion
    def __init__(self, ads: _Optional[_Union[AggregatedConfigSource, _Mapping]] = ..., resource_api_version: _Optional[_Union[ApiVersion, str]] = ...) -> None: ...

class AggregatedConfigSource(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Percent(_message.Message):
    __slots__ = ("value",)
    VALUE_FIELD_NUMBER: _ClassVar[int]
    value: float
    def __init__(self, value: _Optional[float] = ...) -> None: ...

class CircuitBreakers(_message.Message):
    __slots__ = ("thresholds",)
    class Thresholds(_message.Message):
        __slots__ = ("max_connections", "max_pending_requests", "max_requests", "max_retries")
        MAX_CONNECTIONS_FIELD_NUMBER: _ClassVar[int]
        MAX_PENDING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
        MAX_REQUESTS_FIELD_NUMBER: _ClassVar[int]
        MAX_RETRIES_FIELD_NUMBER: _ClassVar[int]
        max_connections: _wrappers_pb2.UInt32Value
        max_pending_requests: _wrappers_pb2.UInt32Value
        max_requests: _wrappers_pb2.UInt32Value
        max_retries: _wrappers_pb2.UInt32Value
        def __init__(self, max_connections: _Optional[_Union[_wrappers_pb2.UInt32Value, _Mapping]] = ..., max_pending_requests: _Optional[_Union[_wrappers_pb2.UInt32Value, _Mapping]] = ..., max_requests: _Optional[_Union[_wrappers_pb2.UInt32Value, _Mapping]] = ..., max_retries: _Optional[_Union[_wrappers_pb2.UInt32Value, _Mapping]] = ...) -> None: ...
    THRESHOLDS_FIELD_NUMBER: _ClassVar[int]
    thresholds: _containers.RepeatedCompositeFieldContainer[CircuitBreakers.Thresholds]
    def __init__(self, thresholds: _Optional[_Iterable[_Union[CircuitBreakers.Thresholds, _Mapping]]] = ...) -> None: ...

class HealthCheck(_message.Message):
    __slots__ = ("timeout", "interval", "unhealthy_threshold", "healthy_threshold", "http_health_check", "no_traffic_interval", "interval_jitter_percent")
    class HttpHealthCheck(_message.Message):
        __slots__ = ("path",)
        PATH_FIELD_NUMBER: _ClassVar[int]
        path: str
        def __init__(self, path: _Optional[str] = ...) -> None: ...
    TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    INTERVAL_FIELD_NUMBER: _ClassVar[int]
    UNHEALTHY_THRESHOLD_FIELD_NUMBER: _ClassVar[int]
    HEALTHY_THRESHOLD_FIELD_NUMBER: _ClassVar[int]
    HTTP_HEALTH_CHECK_FIELD_NUMBER: _ClassVar[int]
    NO_TRAFFIC_INTERVAL_FIELD_NUMBER: _ClassVar[int]
    INTERVAL_JITTER_PERCENT_FIELD_NUMBER: _ClassVar[int]
    timeout: _duration_pb2.Duration
    interval: _duration_pb2.Duration
    unhealthy_threshold: _wrappers_pb2.UInt32Value
    healthy_threshold: _wrappers_pb2.UInt32Value
    http_health_check: HealthCheck.HttpHealthCheck
    no_traffic_interval: _duration_pb2.Duration
    interval_jitter_percent: int
    def __init__(self, timeout: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., interval: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., unhealthy_threshold: _Optional[_Union[_wrappers_pb2.UInt32Value, _Mapping]] = ..., healthy_threshold: _Optional[_Union[_wrappers_pb2.UInt32Value, _Mapping]] = ..., http_health_check: _Optional[_Union[HealthCheck.HttpHealthCheck, _Mapping]] = ..., no_traffic_interval: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., interval_jitter_percent: _Optional[int] = ...) -> None: ...

class OutlierDetection(_message.Message):
    __slots__ = ("interval", "base_ejection_time", "max_ejection_percent", "enforcing_consecutive_5xx", "enforcing_success_rate", "consecutive_gateway_failure", "enforcing_consecutive_gateway_failure", "split_external_local_origin_errors", "consecutive_local_origin_failure", "enforcing_consecutive_local_origin_failure", "enforcing_local_origin_success_rate", "max_ejection_time", "successful_active_health_check_uneject_host", "always_eject_one_host")
    INTERVAL_FIELD_NUMBER: _ClassVar[int]
    BASE_EJECTION_TIME_FIELD_NUMBER: _ClassVar[int]
    MAX_EJECTION_PERCENT_FIELD_NUMBER: _ClassVar[int]
    ENFORCING_CONSECUTIVE_5XX_FIELD_NUMBER: _ClassVar[int]
    ENFORCING_SUCCESS_RATE_FIELD_NUMBER: _ClassVar[int]
    CONSECUTIVE_GATEWAY_FAILURE_FIELD_NUMBER: _ClassVar[int]
    ENFORCING_CONSECUTIVE_GATEWAY_FAILURE_FIELD_NUMBER: _ClassVar[int]
    SPLIT_EXTERNAL_LOCAL_ORIGIN_ERRORS_FIELD_NUMBER: _ClassVar[int]
    CONSECUTIVE_LOCAL_ORIGIN_FAILURE_FIELD_NUMBER: _ClassVar[int]
    ENFORCING_CONSECUTIVE_LOCAL_ORIGIN_FAILURE_FIELD_NUMBER: _ClassVar[int]
    ENFORCING_LOCAL_ORIGIN_SUCCESS_RATE_FIELD_NUMBER: _ClassVar[int]
    MAX_EJECTION_TIME_FIELD_NUMBER: _ClassVar[int]
    SUCCESSFUL_ACTIVE_HEALTH_CHECK_UNEJECT_HOST_FIELD_NUMBER: _ClassVar[int]
    ALWAYS_EJECT_ONE_HOST_FIELD_NUMBER: _ClassVar[int]
    interval: _duration_pb2.Duration
    base_ejection_time: _duration_pb2.Duration
    max_ejection_percent: _wrappers_pb2.UInt32Value
    enforcing_consecutive_5xx: _wrappers_pb2.UInt32Value
    enforcing_success_rate: _wrappers_pb2.UInt32Value
    consecutive_gateway_failure: _wrappers_pb2.UInt32Value
    enforcing_consecutive_gateway_failure: _wrappers_pb2.UInt32Value
    split_external_local_origin_errors: bool
    consecutive_local_origin_failure: _wrappers_pb2.UInt32Value
    enforcing_consecutive_local_origin_failure: _wrappers_pb2.UInt32Value
    enforcing_local_origin_success_rate: _wrappers_pb2.UInt32Value
    max_ejection_time: _duration_pb2.Duration
    successful_active_health_check_uneject_host: _wrappers_pb2.BoolValue
    always_eject_one_host: _wrappers_pb2.BoolValue
    def __init__(self, interval: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., base_ejection_time: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., max_ejection_percent: _Optional[_Union[_wrappers_pb2.UInt32Value, _Mapping]] = ..., enforcing_consecutive_5xx: _Optional[_Union[_wrappers_pb2.UInt32Value, _Mapping]] = ..., enforcing_success_rate: _Optional[_Union[_wrappers_pb2.UInt32Value, _Mapping]] = ..., consecutive_gateway_failure: _Optional[_Union[_wrappers_pb2.UInt32Value, _Mapping]] = ..., enforcing_consecutive_gateway_failure: _Optional[_Union[_wrappers_pb2.UInt32Value, _Mapping]] = ..., split_external_local_origin_errors: _Optional[bool] = ..., consecutive_local_origin_failure: _Optional[_Union[_wrappers_pb2.UInt32Value, _Mapping]] = ..., enforcing_consecutive_local_origin_failure: _Optional[_Union[_wrappers_pb2.UInt32Value, _Mapping]] = ..., enforcing_local_origin_success_rate: _Optional[_Union[_wrappers_pb2.UInt32Value, _Mapping]] = ..., max_ejection_time: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., successful_active_health_check_uneject_host: _Optional[_Union[_wrappers_pb2.BoolValue, _Mapping]] = ..., always_eject_one_host: _Optional[_Union[_wrappers_pb2.BoolValue, _Mapping]] = ...) -> None: ...

class HttpProtocolOptions(_message.Message):
    __slots__ = ("common_http_protocol_options", "explicit_http_config")
    class ExplicitHttpConfig(_message.Message):
        __slots__ = ("http_protocol_options", "http2_protocol_options")
        HTTP_PROTOCOL_OPTIONS_FIELD_NUMBER: _ClassVar[int]
        HTTP2_PROTOCOL_OPTIONS_FIELD_NUMBER: _ClassVar[int]
        http_protocol_options: Http1ProtocolOptions
        http2_protocol_options: Http2ProtocolOptions
        def __init__(self, http_protocol_options: _Optional[_Union[Http1ProtocolOptions, _Mapping]] = ..., http2_protocol_options: _Optional[_Union[Http2ProtocolOptions, _Mapping]] = ...) -> None: ...
    COMMON_HTTP_PROTOCOL_OPTIONS_FIELD_NUMBER: _ClassVar[int]
    EXPLICIT_HTTP_CONFIG_FIELD_NUMBER: _ClassVar[int]
    common_http_protocol_options: CommonHttpProtocolOptions
    explicit_http_config: HttpProtocolOptions.ExplicitHttpConfig
    def __init__(self, common_http_protocol_options: _Optional[_Union[CommonHttpProtocolOptions, _Mapping]] = ..., explicit_http_config: _Optional[_Union[HttpProtocolOptions.ExplicitHttpConfig, _Mapping]] = ...) -> None: ...

class CommonHttpProtocolOptions(_message.Message):
    __slots__ = ("idle_timeout",)
    IDLE_TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    idle_timeout: _duration_pb2.Duration
    def __init__(self, idle_timeout: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class Http1ProtocolOptions(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Http2ProtocolOptions(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class LoadBalancingPolicy(_message.Message):
    __slots__ = ("policies",)
    class Policy(_message.Message):
        __slots__ = ("typed_extension_config",)
        TYPED_EXTENSION_CONFIG_FIELD_NUMBER: _ClassVar[int]
        typed_extension_config: TypedExtensionConfig
        def __init__(self, typed_extension_config: _Optional[_Union[TypedExtensionConfig, _Mapping]] = ...) -> None: ...
    POLICIES_FIELD_NUMBER: _ClassVar[int]
    policies: _containers.RepeatedCompositeFieldContainer[LoadBalancingPolicy.Policy]
    def __init__(self, policies: _Optional[_Iterable[_Union[LoadBalancingPolicy.Policy, _Mapping]]] = ...) -> None: ...

class TypedExtensionConfig(_message.Message):
    __slots__ = ("name", "typed_config")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TYPED_CONFIG_FIELD_NUMBER: _ClassVar[int]
    name: str
    typed_config: _any_pb2.Any
    def __init__(self, name: _Optional[str] = ..., typed_config: _Optional[_Union[_any_pb2.Any, _Mapping]] = ...) -> None: ...

class OverrideHost(_message.Message):
    __slots__ = ("override_host_sources", "selected_host_key", "fallback_policy")
    class OverrideHostSource(_message.Message):
        __slots__ = ("header", "metadata")
        HEADER_FIELD_NUMBER: _ClassVar[int]
        METADATA_FIELD_NUMBER: _ClassVar[int]
        header: str
        metadata: MetadataKey
        def __init__(self, header: _Optional[str] = ..., metadata: _Optional[_Union[MetadataKey, _Mapping]] = ...) -> None: ...
    OVERRIDE_HOST_SOURCES_FIELD_NUMBER: _ClassVar[int]
    SELECTED_HOST_KEY_FIELD_NUMBER: _ClassVar[int]
    FALLBACK_POLICY_FIELD_NUMBER: _ClassVar[int]
    override_host_sources: _containers.RepeatedCompositeFieldContainer[OverrideHost.OverrideHostSource]
    selected_host_key: MetadataKey
    fallback_policy: LoadBalancingPolicy
    def __init__(self, override_host_sources: _Optional[_Iterable[_Union[OverrideHost.OverrideHostSource, _Mapping]]] = ..., selected_host_key: _Optional[_Union[MetadataKey, _Mapping]] = ..., fallback_policy: _Optional[_Union[LoadBalancingPolicy, _Mapping]] = ...) -> None: ...

class LeastRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class MetadataKey(_message.Message):
    __slots__ = ("key", "path")
    class PathSegment(_message.Message):
        __slots__ = ("key",)
        KEY_FIELD_NUMBER: _ClassVar[int]
        key: str
        def __init__(self, key: _Optional[str] = ...) -> None: ...
    KEY_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    key: str
    path: _containers.RepeatedCompositeFieldContainer[MetadataKey.PathSegment]
    def __init__(self, key: _Optional[str] = ..., path: _Optional[_Iterable[_Union[MetadataKey.PathSegment, _Mapping]]] = ...) -> None: ...

class ClusterLoadAssignment(_message.Message):
    __slots__ = ("cluster_name", "endpoints")
    CLUSTER_NAME_FIELD_NUMBER: _ClassVar[int]
    ENDPOINTS_FIELD_NUMBER: _ClassVar[int]
    cluster_name: str
    endpoints: _containers.RepeatedCompositeFieldContainer[LocalityLbEndpoints]
    def __init__(self, cluster_name: _Optional[str] = ..., endpoints: _Optional[_Iterable[_Union[LocalityLbEndpoints, _Mapping]]] = ...) -> None: ...

class LocalityLbEndpoints(_message.Message):
    __slots__ = ("locality", "lb_endpoints")
    LOCALITY_FIELD_NUMBER: _ClassVar[int]
    LB_ENDPOINTS_FIELD_NUMBER: _ClassVar[int]
    locality: Locality
    lb_endpoints: _containers.RepeatedCompositeFieldContainer[LbEndpoint]
    def __init__(self, locality: _Optional[_Union[Locality, _Mapping]] = ..., lb_endpoints: _Optional[_Iterable[_Union[LbEndpoint, _Mapping]]] = ...) -> None: ...

class Locality(_message.Message):
    __slots__ = ("region", "zone")
    REGION_FIELD_NUMBER: _ClassVar[int]
    ZONE_FIELD_NUMBER: _ClassVar[int]
    region: str
    zone: str
    def __init__(self, region: _Optional[str] = ..., zone: _Optional[str] = ...) -> None: ...

class LbEndpoint(_message.Message):
    __slots__ = ("endpoint", "health_status")
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    HEALTH_STATUS_FIELD_NUMBER: _ClassVar[int]
    endpoint: Endpoint
    health_status: HealthStatus
    def __init__(self, endpoint: _Optional[_Union[Endpoint, _Mapping]] = ..., health_status: _Optional[_Union[HealthStatus, str]] = ...) -> None: ...

class Endpoint(_message.Message):
    __slots__ = ("address",)
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    address: Address
    def __init__(self, address: _Optional[_Union[Address, _Mapping]] = ...) -> None: ...

class Address(_message.Message):
    __slots__ = ("socket_address",)
    SOCKET_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    socket_address: SocketAddress
    def __init__(self, socket_address: _Optional[_Union[SocketAddress, _Mapping]] = ...) -> None: ...

class SocketAddress(_message.Message):
    __slots__ = ("address", "port_value")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    PORT_VALUE_FIELD_NUMBER: _ClassVar[int]
    address: str
    port_value: int
    def __init__(self, address: _Optional[str] = ..., port_value: _Optional[int] = ...) -> None: ...
