"""Envoy configuration of a gateway with InferencePools and HTTPRoutes.

Per pool one ext_proc filter, switched on by the routes that end in the pool, a cluster of the
pool's endpoints that honors the picker's choice and reports who served (or one that connects
straight to it), and a cluster of the picker. Routes come from files, so that a test may change them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from extproc.demo import stack

_TYPE = "type.googleapis.com/envoy."
_DESTINATION = "x-gateway-destination-endpoint"


class GatewayPool(msgspec.Struct, frozen=True):
    """An InferencePool as its gateway sees it.

    Attributes:
        name: Of the pool.
        endpoints: `ip:port` of all pods and ports.
        picker: Port of its endpoint picker.
        fail_open: failureMode.
        http2: Whether appProtocol is kubernetes.io/h2c.
        direct: Whether the gateway connects to whatever the picker names, as some do, and has no
            list of the endpoints.
    """

    name: str
    endpoints: Sequence[str]
    picker: int
    fail_open: bool = False
    http2: bool = False
    direct: bool = False


class Rule(msgspec.Struct, frozen=True):
    """One rule of an HTTPRoute.

    Attributes:
        host: Its host name.
        path: The prefix it matches.
        backends: Weight by pool; none is a reference to a pool that is not there.
    """

    host: str
    path: str
    backends: dict[str, int] = {}


def configuration(
    admin: int, listeners: dict[str, int], pools: Sequence[GatewayPool], folder: Path
):
    """The configuration of one Envoy.

    Args:
        admin: Its port.
        listeners: Port by name of the gateway.
        pools: All there are.
        folder: Where `routes` writes.
    """
    clusters = [_engines(pool) for pool in pools] + [_picker(pool) for pool in pools]
    return {
        "node": {"id": "gateway", "cluster": "gateway"},
        "admin": {"address": _address("127.0.0.1", admin)},
        "static_resources": {
            "listeners": [
                {
                    "name": name,
                    "address": _address("127.0.0.1", port),
                    "per_connection_buffer_limit_bytes": 1 << 20,
                    "filter_chains": [{"filters": [_manager(name, pools, folder)]}],
                }
                for name, port in listeners.items()
            ],
            "clusters": clusters,
        },
    }


def routes(folder: Path, listener: str, rules: Sequence[Rule]) -> None:
    """Write or rewrite the routes of a listener; a running Envoy takes them up."""
    hosts = [
        {
            "name": host,
            "domains": [host],
            "routes": [_route(rule) for rule in rules if rule.host == host],
        }
        for host in sorted({rule.host for rule in rules})
    ]
    resource = {
        "@type": f"{_TYPE}config.route.v3.RouteConfiguration",
        "name": listener,
        "virtual_hosts": hosts,
    }
    fresh = folder / f"{listener}.new"
    fresh.write_text(json.dumps({"resources": [resource]}))
    fresh.rename(_file(folder, listener))


def _file(folder: Path, listener: str) -> Path:
    return folder / f"{listener}.json"


def _route(rule: Rule) -> dict[str, Any]:
    match = {"match": {"prefix": rule.path}}
    if not rule.backends:
        return {**match, "direct_response": {"status": 500}}
    if len(rule.backends) == 1:
        (name,) = rule.backends
        where = {"cluster": name, "timeout": "0s"}
        return {**match, "route": where, "typed_per_filter_config": _switched_on(name)}
    weighted = [
        {"name": name, "weight": weight, "typed_per_filter_config": _switched_on(name)}
        for name, weight in rule.backends.items()
    ]
    return {**match, "route": {"weighted_clusters": {"clusters": weighted}, "timeout": "0s"}}


def _switched_on(pool: str) -> dict[str, Any]:
    here = {"@type": f"{_TYPE}extensions.filters.http.ext_proc.v3.ExtProcPerRoute", "overrides": {}}
    return {f"picker.{pool}": {"@type": f"{_TYPE}config.route.v3.FilterConfig", "config": here}}


def _manager(listener: str, pools: Sequence[GatewayPool], folder: Path) -> dict[str, Any]:
    source = {
        "path_config_source": {
            "path": str(_file(folder, listener)),
            "watched_directory": {"path": str(folder)},
        },
        "resource_api_version": "V3",
    }
    filters = [_header_guard(), *(_processor(pool) for pool in pools)]
    filters.append(
        {
            "name": "envoy.filters.http.router",
            "typed_config": {"@type": f"{_TYPE}extensions.filters.http.router.v3.Router"},
        }
    )
    kind = "extensions.filters.network.http_connection_manager.v3.HttpConnectionManager"
    return {
        "name": "envoy.filters.network.http_connection_manager",
        "typed_config": {
            "@type": f"{_TYPE}{kind}",
            "stat_prefix": listener,
            "use_remote_address": True,
            "rds": {"route_config_name": listener, "config_source": source},
            "http_filters": filters,
        },
    }


def _header_guard() -> dict[str, Any]:
    removed = [_DESTINATION, f"{_DESTINATION}-subset", f"{_DESTINATION}-served"]
    return {
        "name": "guard",
        "typed_config": {
            "@type": f"{_TYPE}extensions.filters.http.header_mutation.v3.HeaderMutation",
            "mutations": {"request_mutations": [{"remove": name} for name in removed]},
        },
    }


def _processor(pool: GatewayPool) -> dict[str, Any]:
    """As the shipped profiles have it: streamed, or buffered where a body may go unpicked."""
    body, trailers = ("BUFFERED", "SKIP") if pool.fail_open else ("FULL_DUPLEX_STREAMED", "SEND")
    return {
        "name": f"picker.{pool.name}",
        "disabled": True,
        "typed_config": {
            "@type": f"{_TYPE}extensions.filters.http.ext_proc.v3.ExternalProcessor",
            "grpc_service": {"envoy_grpc": {"cluster_name": f"picker.{pool.name}"}},
            "failure_mode_allow": pool.fail_open,
            "processing_mode": {
                "request_header_mode": "SEND",
                "request_body_mode": body,
                "request_trailer_mode": trailers,
                "response_header_mode": "SEND",
                "response_body_mode": "NONE",
                "response_trailer_mode": "SEND",
            },
            "message_timeout": "30s",
            "metadata_options": {
                "forwarding_namespaces": {"untyped": ["envoy.lb", "envoy.lb.subset_hint"]},
                "receiving_namespaces": {"untyped": ["envoy.lb"]},
            },
        },
    }


def _engines(pool: GatewayPool) -> dict[str, Any]:
    if pool.direct:
        return {
            "name": pool.name,
            "type": "ORIGINAL_DST",
            "lb_policy": "CLUSTER_PROVIDED",
            "connect_timeout": "2s",
            "original_dst_lb_config": {"use_http_header": True, "http_header_name": _DESTINATION},
            "typed_extension_protocol_options": _protocol(http2=pool.http2),
        }
    policies = "extensions.load_balancing_policies"
    fallback = {
        "name": "envoy.load_balancing_policies.round_robin",
        "typed_config": {"@type": f"{_TYPE}{policies}.round_robin.v3.RoundRobin"},
    }
    override = {
        "@type": f"{_TYPE}{policies}.override_host.v3.OverrideHost",
        "override_host_sources": [
            {"header": _DESTINATION},
            {"metadata": {"key": "envoy.lb", "path": [{"key": _DESTINATION}]}},
        ],
        "selected_host_key": {"key": "envoy.lb", "path": [{"key": f"{_DESTINATION}-served"}]},
        "fallback_policy": {"policies": [{"typed_extension_config": fallback}]},
    }
    policy = {"name": "envoy.load_balancing_policies.override_host", "typed_config": override}
    return {
        "name": pool.name,
        "type": "STATIC",
        "connect_timeout": "2s",
        "load_balancing_policy": {"policies": [{"typed_extension_config": policy}]},
        "load_assignment": stack.assignment(pool.name, pool.endpoints),
        "typed_extension_protocol_options": _protocol(http2=pool.http2),
    }


def _picker(pool: GatewayPool) -> dict[str, Any]:
    name = f"picker.{pool.name}"
    tls = "extensions.transport_sockets.tls.v3.UpstreamTlsContext"
    return {
        "name": name,
        "type": "STATIC",
        "connect_timeout": "2s",
        "load_assignment": stack.assignment(name, [f"127.0.0.1:{pool.picker}"]),
        "typed_extension_protocol_options": _protocol(http2=True),
        # The picker's own certificate, which is not verified.
        "transport_socket": {
            "name": "envoy.transport_sockets.tls",
            "typed_config": {
                "@type": f"{_TYPE}{tls}",
                "common_tls_context": {"alpn_protocols": ["h2"]},
            },
        },
    }


def _protocol(*, http2: bool) -> dict[str, Any]:
    options = {"http2_protocol_options": {}} if http2 else {"http_protocol_options": {}}
    kind = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
    return {
        kind: {
            "@type": f"type.googleapis.com/{kind}",
            "explicit_http_config": options,
        }
    }


def _address(host: str, port: int) -> dict[str, Any]:
    return {"socket_address": {"address": host, "port_value": port}}
