"""Lints listeners and clusters of an Envoy configuration.

The clusters are those of extproc, and those that routes name (docs/spec/envoy.md#clusters).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from extproc.config import finding
from extproc.config.envoy_tree import (
    REQUESTS,
    YamlTree,
    count,
    effective_processors,
    find_managers,
    is_a,
    mode,
    open_requests,
    seconds,
    walk,
)
from extproc.config.finding import Finding
from extproc.config.settings import Settings
from extproc.protocol import headers

_OVERRIDE_HOST = "override_host.v3.OverrideHost"

#: Envoy's default of `per_connection_buffer_limit_bytes`.
_BUFFER_BYTES = 1024 * 1024

#: Envoy's default of `initial_stream_window_size`, since 1.36.
_WINDOW_BYTES = 16 * 1024 * 1024

#: Room for headers and attributes in a gRPC message beside the body.
_MESSAGE_HEAD_BYTES = 4 * 1024 * 1024

#: vLLM (uvicorn) closes idle connections after this many seconds.
_ENGINE_KEEPS_S = 5.0

#: Fields by one of which a listener is known; Envoy Gateway writes the second one alone.
_LISTENER = frozenset({"filter_chains", "default_filter_chain"})

#: Body modes that buffer the request.
_BUFFERED = frozenset({"BUFFERED", "BUFFERED_PARTIAL"})

#: Circuit breakers that suit a fleet of engines.
BREAKERS = (
    "{thresholds: [{max_connections: 40000, max_pending_requests: 40000, max_requests: 40000}]}"
)


def missing(names: Sequence[str]) -> Iterator[Finding]:
    """Report clusters that are named and not there."""
    for name in names:
        yield finding.cut(
            "missing_cluster",
            f"cluster {name}",
            "no cluster has this name, and there is no cds_config that could bring it: what goes "
            "there is answered with 503",
            wanted="a cluster of this name",
            fix="add it",
        )


def picker(cluster: YamlTree, settings: Settings, *, where: str) -> Iterator[Finding]:
    """Check a cluster by which ext_proc filters reach extproc."""
    place = f"cluster {cluster['name']}"
    yield from _tls(cluster, settings, place=place)
    yield from _breakers(cluster, settings, place=place, where=where)
    yield from _stream_duration(
        cluster, "the stream to extproc ends then", place=place, where=where
    )
    options = next(
        (part["http2_protocol_options"] for part in walk(cluster) if _is_http2(part)), None
    )
    if options is None:
        yield finding.error(
            "http2",
            place,
            "the cluster has no http2_protocol_options: gRPC needs HTTP/2, so no stream opens",
            wanted="HTTP/2",
            fix="write explicit_http_config: {http2_protocol_options: {}} in HttpProtocolOptions of "
            "typed_extension_protocol_options",
        )
    elif not options.get("connection_keepalive"):
        yield finding.note(
            "http2_keepalive",
            place,
            "the cluster has no connection_keepalive: when a replica of extproc or its machine "
            "hangs, streams wait for it until message_timeout or an idle limit",
            wanted="a keepalive",
            fix="write http2_protocol_options: {connection_keepalive: {interval: 5s, timeout: 2s}}",
        )
    if not cluster.get("health_checks"):
        yield finding.note(
            "picker_health",
            place,
            "the cluster has no health_checks: requests still go to a replica of extproc that "
            "drains or is gone",
            wanted="a gRPC health check",
            fix="write health_checks: [{timeout: 1s, interval: 1s, unhealthy_threshold: 2, "
            "healthy_threshold: 1, grpc_health_check: {service_name: "
            "envoy.service.ext_proc.v3.ExternalProcessor}}]",
        )


def _is_http2(message: YamlTree) -> bool:
    return isinstance(message.get("http2_protocol_options"), Mapping)


def _tls(cluster: YamlTree, settings: Settings, *, place: str) -> Iterator[Finding]:
    """Check that both ends speak TLS, or neither; endpoints may differ where there are matches."""
    has_tls = any(is_a(part, "tls.v3.UpstreamTlsContext") for part in walk(cluster))
    is_secure = settings.server.secure_serving
    if has_tls == is_secure or cluster.get("transport_socket_matches"):
        return
    here, there = ("TLS" if is_tls else "plaintext" for is_tls in (has_tls, is_secure))
    yield finding.warning(
        "picker_tls",
        place,
        f"the cluster speaks {here}, and extproc {there} (server.secure_serving): no stream opens",
        wanted=there,
        fix="write transport_socket with an UpstreamTlsContext, a DestinationRule with Istio, or "
        "secure_serving: false"
        if is_secure
        else "remove transport_socket, or write secure_serving: true",
    )


def _breakers(
    cluster: YamlTree, settings: Settings, *, place: str, where: str
) -> Iterator[Finding]:
    """Check circuit breakers: every open request has a stream to extproc, queued ones too."""
    held = settings.flow_control.max_requests if settings.flow_control.enabled else 0
    required = max(held, REQUESTS + 1)
    num_allowed = open_requests(cluster, where=where)
    if num_allowed < required:
        yield Finding(
            "cut" if num_allowed <= held else "warning",
            "picker_breakers",
            place,
            f"circuit_breakers let {num_allowed} requests be open at once, one for every request under "
            f"way; {held} may wait alone",
            wanted=f"{required} or more",
            fix=f"write circuit_breakers: {BREAKERS}",
        )


def engines(clusters: Sequence[YamlTree], settings: Settings, *, where: str) -> Iterator[Finding]:
    """Check the clusters that routes name."""
    following = [cluster for cluster in clusters if _follows_destination(cluster)]
    for cluster in clusters:
        place = f"cluster {cluster['name']}"
        if not _follows_destination(cluster):
            yield Finding(
                "note" if following else "error",
                "destination",
                place,
                f"the cluster does not read {headers.DESTINATION}: Envoy chooses the endpoint "
                "itself",
                wanted="ORIGINAL_DST by that header, or the policy override_host",
                fix="write type: ORIGINAL_DST, lb_policy: CLUSTER_PROVIDED, original_dst_lb_config: "
                f"{{use_http_header: true, http_header_name: {headers.DESTINATION}}}",
            )
        fallbacks = settings.scheduling.fallbacks
        if fallbacks and cluster.get("type") == "ORIGINAL_DST":
            yield finding.error(
                "fallbacks",
                place,
                f"scheduling.fallbacks is {fallbacks}, and ORIGINAL_DST reads one endpoint alone: "
                "it answers requests for which several are named with 503",
                wanted="0",
                fix="write scheduling.fallbacks: 0, or use the policy override_host",
            )
        num_allowed = open_requests(cluster, where=where)
        if num_allowed <= REQUESTS:
            yield finding.warning(
                "engine_breakers",
                place,
                f"circuit_breakers let {num_allowed} requests be open at once",
                wanted=f"more than {REQUESTS}",
                fix=f"write circuit_breakers: {BREAKERS}",
            )
        yield from _stream_duration(cluster, "longer responses are cut", place=place, where=where)
        idle_s = seconds(_common_options(cluster), "idle_timeout", 3600.0, where=where)
        if idle_s >= _ENGINE_KEEPS_S or not idle_s:
            limit = f"{idle_s:g} s" if idle_s else "off"
            yield finding.warning(
                "upstream_idle_timeout",
                place,
                f"idle_timeout of upstream connections is {limit}: vLLM closes them after "
                f"{_ENGINE_KEEPS_S:g} s, and a request on its way then is a 503",
                wanted=f"less than {_ENGINE_KEEPS_S:g} s",
                fix="write common_http_protocol_options: {idle_timeout: 2s} in HttpProtocolOptions",
            )


def _common_options(cluster: YamlTree) -> YamlTree:
    """Return the options of a cluster for HTTP of every version."""
    options = (message.get("common_http_protocol_options") for message in walk(cluster))
    return next((part for part in options if isinstance(part, Mapping)), {})


def _stream_duration(
    cluster: YamlTree, effect: str, *, place: str, where: str
) -> Iterator[Finding]:
    duration_s = seconds(_common_options(cluster), "max_stream_duration", 0.0, where=where)
    if duration_s:
        yield finding.cut(
            "upstream_stream_duration",
            place,
            f"max_stream_duration is {duration_s:g} s: {effect}",
            wanted="none",
            fix="remove max_stream_duration from common_http_protocol_options",
        )


def _follows_destination(cluster: YamlTree) -> bool:
    """Return True if a cluster sends a request to the endpoint that extproc names."""
    if cluster.get("type") == "ORIGINAL_DST":
        original = cluster.get("original_dst_lb_config") or {}
        by_header = original.get("use_http_header") and _is_header(original.get("http_header_name"))
        return bool(by_header) or _is_metadata(original.get("metadata_key"))
    return any(
        _is_header(source.get("header")) or _is_metadata(source.get("metadata"))
        for policy in walk(cluster)
        if is_a(policy, _OVERRIDE_HOST)
        for source in policy.get("override_host_sources") or []
    )


def follows_header(cluster: YamlTree) -> bool:
    """Return True if a cluster takes the endpoint from the header alone, as ORIGINAL_DST may."""
    original = cluster.get("original_dst_lb_config") or {}
    return bool(original.get("use_http_header")) and _is_header(original.get("http_header_name"))


def _is_header(name: object) -> bool:
    """Return True if a header is that of the destination."""
    return str(name).lower() == headers.DESTINATION


def _is_metadata(key: object) -> bool:
    """Return True if a key of dynamic metadata is that of the destination."""
    return (
        isinstance(key, Mapping)
        and key.get("key") == "envoy.lb"
        and key.get("path") == [{"key": headers.DESTINATION}]
    )


def is_override_host(cluster: YamlTree) -> bool:
    """Return True if a cluster lists endpoints, and prefers those that extproc names."""
    return any(is_a(part, _OVERRIDE_HOST) for part in walk(cluster))


def buffers(tree: object, settings: Settings, *, where: str) -> Iterator[Finding]:
    """Check what bounds request bodies."""
    for listener in (part for part in walk(tree) if _LISTENER & part.keys()):
        managers = find_managers(listener)
        place = f"listener {listener.get('name', '')}".rstrip()
        yield from _buffer_filters(managers, settings, place=place, where=where)
        modes = {
            mode(processor, "request_body_mode")
            for manager in managers
            for processor in effective_processors(manager)
        }
        if modes & _BUFFERED:
            yield from _buffer_limit(listener, managers, settings, place=place, where=where)


def _buffer_filters(
    managers: Sequence[YamlTree], settings: Settings, *, place: str, where: str
) -> Iterator[Finding]:
    wanted = settings.limits.max_body_bytes
    for message in _find_buffers(managers):
        size = count(message, "max_request_bytes", wanted, where=where)
        if size < wanted:
            yield finding.warning(
                "max_request_bytes",
                place,
                f"max_request_bytes of a buffer filter is {size}: larger bodies are 413, and extproc "
                f"would take {wanted}",
                wanted=f"{wanted} or more",
                fix=f"write max_request_bytes: {wanted}, or remove the filter",
            )


def _find_buffers(managers: Sequence[YamlTree]) -> Iterator[YamlTree]:
    """Yield the buffer filters, and what routes make of them."""
    for part in walk(list(managers)):
        if is_a(part, "buffer.v3.Buffer"):
            yield part
        elif is_a(part, "buffer.v3.BufferPerRoute") and isinstance(part.get("buffer"), Mapping):
            yield part["buffer"]


def _buffer_limit(
    listener: YamlTree,
    managers: Sequence[YamlTree],
    settings: Settings,
    *,
    place: str,
    where: str,
) -> Iterator[Finding]:
    wanted, longest = settings.limits.max_body_bytes, settings.limits.max_message_bytes
    size = count(listener, "per_connection_buffer_limit_bytes", _BUFFER_BYTES, where=where)
    if size < wanted:
        yield finding.warning(
            "buffer_limit",
            place,
            f"per_connection_buffer_limit_bytes is {size}: larger bodies are 413, and extproc "
            f"would take {wanted}",
            wanted=f"{wanted}",
            fix=f"write per_connection_buffer_limit_bytes: {wanted}",
        )
    # Of a route: it raises the limit of the connection, and never lowers it.
    raised = max(
        count(part, "request_body_buffer_limit", 0, where=where) for part in walk(listener)
    )
    name = "per_connection_buffer_limit_bytes"
    if raised > size:
        name, size = "request_body_buffer_limit", raised
    else:
        yield from _stream_window(managers, min(size, wanted), place=place, where=where)
    if size > longest:
        yield finding.cut(
            "message_bytes",
            place,
            f"{name} is {size}, above limits.max_message_bytes "
            f"({longest}): a larger body breaks the stream",
            wanted=f"{longest} or less",
            fix=f"write limits: {{max_message_bytes: {size + _MESSAGE_HEAD_BYTES}}} for extproc",
        )


def _stream_window(
    managers: Sequence[YamlTree], size: int, *, place: str, where: str
) -> Iterator[Finding]:
    """Check that HTTP/2 streams, which buffer as much as their window, take bodies of a size."""
    for manager in managers:
        options = manager.get("http2_protocol_options") or {}
        window = count(options, "initial_stream_window_size", _WINDOW_BYTES, where=where)
        if window < size and manager.get("codec_type") != "HTTP1":
            yield finding.warning(
                "http2_window",
                place,
                f"initial_stream_window_size is {window}: larger bodies over HTTP/2 are 413, and "
                f"over HTTP/1 {size} bytes pass",
                wanted=f"{size}",
                fix=f"write http2_protocol_options: {{initial_stream_window_size: {size}, "
                f"initial_connection_window_size: {2 * size}}} in the connection manager",
            )
