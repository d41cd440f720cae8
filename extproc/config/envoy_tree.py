"""Readers of an Envoy configuration: files and config dumps as trees of mappings and lists."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from extproc.errors import ConfigError

#: Any part of it.
YamlTree = Mapping[str, Any]

#: Requests a cluster lets be open at once where its file says nothing (Envoy's default).
REQUESTS = 1024

#: Ends of the `@type` of the filters that matter here.
MANAGER = "http_connection_manager.v3.HttpConnectionManager"
PROCESSOR = "ext_proc.v3.ExternalProcessor"

#: The same of what a route says about such a filter.
_PER_ROUTE: Final = "ext_proc.v3.ExtProcPerRoute"

#: Parts of a config dump that are not in force.
_PENDING: Final = frozenset(
    {"warming_state", "draining_state", "error_state", "dynamic_warming_clusters"}
)

_SECONDS = re.compile(r"-?[0-9]+(\.[0-9]+)?s")

#: Keys only clusters have.
_CLUSTERS = frozenset(
    {
        "load_assignment",
        "lb_policy",
        "original_dst_lb_config",
        "eds_cluster_config",
        "load_balancing_policy",
    }
)


def open_requests(cluster: YamlTree) -> int:
    """Requests that a cluster's circuit breakers allow at once (count)."""
    thresholds = (cluster.get("circuit_breakers") or {}).get("thresholds") or []
    usual = (limit for limit in thresholds if limit.get("priority", "DEFAULT") == "DEFAULT")
    first: YamlTree = next(usual, {})
    return min(int(first.get(key, REQUESTS)) for key in ("max_requests", "max_pending_requests"))


def routes(manager: YamlTree) -> Iterator[YamlTree]:
    """Yield the route actions of a connection manager whose requests an ext_proc filter sees."""
    entries = [
        entry
        for entry in manager.get("http_filters") or []
        if is_a(entry.get("typed_config") or {}, PROCESSOR)
    ]
    # A manager without hosts of its own, such as a part of a file, still has routes.
    hosts = [part for part in walk(manager) if "domains" in part] or [manager]
    for host in hosts:
        for message in walk(host):
            route = message.get("route")
            if isinstance(route, Mapping) and "match" in message:
                overrides = {**_filter_overrides(host), **_filter_overrides(message)}
                if not entries or any(_is_enabled(entry, overrides) for entry in entries):
                    yield route


def _filter_overrides(message: YamlTree) -> YamlTree:
    overrides = message.get("typed_per_filter_config")
    return overrides if isinstance(overrides, Mapping) else {}


def _is_enabled(entry: YamlTree, overrides: YamlTree) -> bool:
    """Return True if a route with these overrides passes requests to an ext_proc filter."""
    override = overrides.get(entry.get("name", ""))
    if not isinstance(override, Mapping):
        return not entry.get("disabled") and not _is_placeholder(entry["typed_config"])
    return not override.get("disabled")


def _is_placeholder(processor: YamlTree) -> bool:
    """Return True if an ext_proc filter shows nothing, so that only routes make use of it."""
    return (
        mode(processor, "request_header_mode") == "SKIP"
        and mode(processor, "request_body_mode") == "NONE"
    )


def effective_processors(manager: YamlTree) -> Iterator[YamlTree]:
    """Yield the ext_proc filters of a connection manager, and what routes make of them."""
    filters = list(find_processors(manager))
    overridden: list[YamlTree] = []
    for message in walk(manager):
        overrides = message.get("overrides") if is_a(message, _PER_ROUTE) else None
        if isinstance(overrides, Mapping) and overrides not in overridden:
            overridden.append(overrides)
    for processor in filters:
        if not (overridden and _is_placeholder(processor)):
            yield processor
        yield from ({**processor, **overrides} for overrides in overridden)


def route_clusters(manager: YamlTree) -> Iterator[str]:
    """Yield the names of the clusters that routes of a connection manager name."""
    for route in routes(manager):
        if isinstance(route.get("cluster"), str):
            yield route["cluster"]
        for weighted in (route.get("weighted_clusters") or {}).get("clusters") or []:
            yield weighted.get("name", "")


def find_managers(tree: object) -> list[YamlTree]:
    """Return the connection managers of a tree that have an ext_proc filter."""
    return [
        message
        for message in walk(tree)
        if is_a(message, MANAGER) and next(find_processors(message), None) is not None
    ]


def picker_clusters(managers: Iterable[YamlTree]) -> Iterator[str]:
    """Yield the names of the clusters to which ext_proc filters connect."""
    for manager in managers:
        for processor in effective_processors(manager):
            service = processor.get("grpc_service") or {}
            name = (service.get("envoy_grpc") or {}).get("cluster_name")
            if name:
                yield str(name)


def mode(processor: YamlTree, name: str) -> str:
    """Return a processing mode of an ext_proc filter; Envoy's default if it is not written."""
    usual = "SKIP" if "trailer" in name else "SEND" if "header" in name else "NONE"
    return str((processor.get("processing_mode") or {}).get(name, usual))


def removed_headers(manager: YamlTree) -> frozenset[str]:
    """Lowercase request headers that a connection manager removes before its ext_proc filter."""
    early = manager.get("early_header_mutation_extensions") or []
    ahead = itertools.takewhile(
        lambda extension: not is_a(extension.get("typed_config") or {}, PROCESSOR),
        manager.get("http_filters") or [],
    )
    removed: set[str] = set()
    for extension in (*early, *ahead):
        config = extension.get("typed_config") or {}
        if not is_a(config, "header_mutation.v3.HeaderMutation"):
            continue
        # The early extension has its list in `mutations`, the filter one level below.
        mutations = config.get("mutations") or []
        if isinstance(mutations, Mapping):
            mutations = mutations.get("request_mutations") or []
        removed |= {str(change["remove"]).lower() for change in mutations if "remove" in change}
    return frozenset(removed)


def is_a(message: YamlTree, kind: str) -> bool:
    """Return True if the `@type` of a mapping ends with `kind`."""
    return str(message.get("@type", "")).endswith(kind)


def find_processors(tree: object) -> Iterator[YamlTree]:
    """Yield the ext_proc filters in a tree."""
    return (message for message in walk(tree) if is_a(message, PROCESSOR))


def cluster_name(message: YamlTree) -> str:
    """Return the name of a cluster; empty if the mapping is no cluster."""
    is_cluster = "name" in message and (
        is_a(message, "config.cluster.v3.Cluster") or bool(_CLUSTERS & set(message))
    )
    return str(message["name"]) if is_cluster else ""


def has_cluster_discovery(tree: object) -> bool:
    """Return True if clusters may come over xDS."""
    return any("cds_config" in part or "dynamic_active_clusters" in part for part in walk(tree))


def walk(tree: object) -> Iterator[YamlTree]:
    """Yield every mapping in a tree, parents before children."""
    if isinstance(tree, Mapping):
        yield tree
        for value in tree.values():
            yield from walk(value)
    elif isinstance(tree, list):
        for value in tree:
            yield from walk(value)


def seconds(tree: YamlTree, name: str, usual: float, *, where: str) -> float:
    """Read a duration as Envoy's JSON writes it, in seconds; 0 is off, `usual` the default.

    Raises:
        ConfigError: The value is no duration.
    """
    text = tree.get(name)
    if text is None:
        return usual
    if not isinstance(text, str) or not _SECONDS.fullmatch(text):
        raise ConfigError(
            where, wanted=f"{name} in seconds, such as 60s", got=str(text), fix="correct it"
        )
    return float(text[:-1])


def find_running_configuration(dump: YamlTree) -> YamlTree:
    """Return what is in force of a config dump, in the form of a file.

    The static resources of the bootstrap stand in it twice; routes of RDS and filters of ECDS stand
    apart from the connection managers that use them.
    """
    tables: dict[str, YamlTree] = {}
    filters: dict[str, YamlTree] = {}
    for message in walk(dump):
        table, extension = message.get("route_config"), message.get("ecds_filter")
        if isinstance(table, Mapping) and not is_a(message, MANAGER):
            tables[str(table.get("name", ""))] = table
        if isinstance(extension, Mapping):
            filters[str(extension.get("name", ""))] = extension.get("typed_config") or {}
    running: YamlTree = _resolve(dump, tables, filters)
    return running


def _resolve(node: Any, tables: Mapping[str, YamlTree], filters: Mapping[str, YamlTree]) -> Any:
    """Copy a part of a config dump with its references to routes and filters replaced."""
    if isinstance(node, list):
        return [_resolve(item, tables, filters) for item in node]
    if not isinstance(node, Mapping):
        return node
    if is_a(node, "BootstrapConfigDump"):
        bootstrap = node.get("bootstrap") or {}
        return {key: value for key, value in bootstrap.items() if key != "static_resources"}
    copy = {
        key: _resolve(value, tables, filters) for key, value in node.items() if key not in _PENDING
    }
    rds = node.get("rds")
    if isinstance(rds, Mapping):
        copy["route_config"] = tables.get(str(rds.get("route_config_name", "")), {})
    if "config_discovery" in node and "typed_config" not in node:
        copy["typed_config"] = filters.get(str(node.get("name", "")), {})
    return copy
