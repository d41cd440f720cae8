"""Queries over an Envoy configuration as nested mappings and lists."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from typing import Any

from extproc.errors import ConfigError

#: Any part of it.
YamlTree = Mapping[str, Any]

#: Requests a cluster lets be open at once where its file says nothing (Envoy's default).
REQUESTS = 1024

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
    usual = [
        threshold for threshold in thresholds if threshold.get("priority", "DEFAULT") == "DEFAULT"
    ]
    if not usual:
        return REQUESTS
    first = usual[0]
    return min(
        int(first.get("max_requests", REQUESTS)), int(first.get("max_pending_requests", REQUESTS))
    )


def routes(manager: YamlTree) -> Iterator[YamlTree]:
    """Yield the route actions of a connection manager."""
    for message in walk(manager):
        route = message.get("route")
        if isinstance(route, Mapping) and "match" in message:
            yield route


def route_clusters(manager: YamlTree) -> Iterator[str]:
    """Yield the names of the clusters that routes of a connection manager name."""
    for route in routes(manager):
        if isinstance(route.get("cluster"), str):
            yield route["cluster"]
        for weighted in (route.get("weighted_clusters") or {}).get("clusters") or []:
            yield weighted.get("name", "")


def mode(processor: YamlTree, name: str) -> str:
    """Return a processing mode of an ext_proc filter; Envoy's default if it is not written."""
    usual = "SKIP" if "trailer" in name else "SEND" if "header" in name else "NONE"
    return str((processor.get("processing_mode") or {}).get(name, usual))


def removed_headers(manager: YamlTree) -> frozenset[str]:
    """Lowercase request headers that a connection manager removes before its ext_proc filter."""
    early = manager.get("early_header_mutation_extensions") or []
    ahead = itertools.takewhile(
        lambda extension: (
            not is_a(extension.get("typed_config") or {}, "ext_proc.v3.ExternalProcessor")
        ),
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


def cluster_name(message: YamlTree) -> str:
    """Return the name of a cluster; empty if the mapping is no cluster."""
    return str(message["name"]) if "name" in message and _CLUSTERS & set(message) else ""


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
