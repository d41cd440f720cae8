"""Readers of an Envoy configuration: files and config dumps as trees of mappings and lists."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Final

from extproc.errors import ConfigError

#: Any part of it.
YamlTree = Mapping[str, Any]

#: Requests a cluster lets be open at once where its file says nothing (Envoy's default).
REQUESTS = 1024

#: Part of the names that Envoy AI Gateway gives to the ext_proc filters of endpoint pickers; it adds
#: one of its own service.
_GATEWAY_PICKER: Final = ".ext_proc/endpointpicker/"

#: Ends of the `@type` of the filters that matter here.
MANAGER = "http_connection_manager.v3.HttpConnectionManager"
PROCESSOR = "ext_proc.v3.ExternalProcessor"

#: Name that the shipped files give to the cluster of extproc.
_PICKER: Final = "extproc"

#: The same of the message by which a route enables or disables any filter.
_FILTER_CONFIG: Final = "route.v3.FilterConfig"

#: Parts of a config dump that are not in force.
_PENDING: Final = frozenset(
    {"warming_state", "draining_state", "error_state", "dynamic_warming_clusters"}
)

#: Longest regular expression that is tried.
_MAX_REGEX_CHARS: Final = 200

#: Letter in front of which snake_case has an underscore.
_HUMP = re.compile("(?<=[a-z0-9])[A-Z]")

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


def open_requests(cluster: YamlTree, *, where: str) -> int:
    """Requests that a cluster's circuit breakers allow at once (count).

    Raises:
        ConfigError: A limit is no number.
    """
    thresholds = (cluster.get("circuit_breakers") or {}).get("thresholds") or []
    usual = (limit for limit in thresholds if limit.get("priority", "DEFAULT") == "DEFAULT")
    first: YamlTree = next(usual, {})
    limits = ["max_requests", "max_pending_requests"]
    if not any("http2_protocol_options" in part for part in walk(cluster)):
        limits.append("max_connections")  # each carries one request at a time
    return min(count(first, name, REQUESTS, where=where) for name in limits)


def apply_runtime_limits(tree: object, cluster: YamlTree) -> YamlTree:
    """Return a cluster with the limits of its circuit breakers that static runtime layers set."""
    prefix = f"circuit_breakers.{cluster.get('name', '')}.default."
    limits = {
        name.removeprefix(prefix): value
        for message in walk(tree)
        if isinstance(message.get("static_layer"), Mapping)
        for name, value in _runtime_values(message["static_layer"])
        if name.startswith(prefix)
    }
    if not limits:
        return cluster
    breakers = cluster.get("circuit_breakers") or {}
    thresholds = breakers.get("thresholds") or []
    usual = [limit for limit in thresholds if limit.get("priority", "DEFAULT") == "DEFAULT"]
    first: YamlTree = next(iter(usual), {})
    return {**cluster, "circuit_breakers": {**breakers, "thresholds": [{**first, **limits}]}}


def _runtime_values(layer: YamlTree, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield names and values of a runtime layer; a nested message continues the name."""
    for name, value in layer.items():
        if isinstance(value, Mapping):
            yield from _runtime_values(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def routes(manager: YamlTree) -> Iterator[YamlTree]:
    """Yield the route actions of a connection manager whose requests an ext_proc filter sees."""
    return (route for route, _ in _passing_routes(manager))


def unseen_clusters(manager: YamlTree) -> Iterator[str]:
    """Yield the names of clusters that requests go to which no ext_proc filter sees."""
    entries = _picker_filters(manager)
    for route, overrides in _walk_routes(manager):
        for name, action in _actions(route):
            combined = {**overrides, **_filter_overrides(action)}
            if not any(_is_in_use(entry, combined) for entry in entries):
                yield name


def is_idle(manager: YamlTree) -> bool:
    """Return True if a connection manager has routes, and an ext_proc filter sees none of them."""
    has_routes = next(_walk_routes(manager), None) is not None
    return has_routes and next(routes(manager), None) is None


def _passing_routes(manager: YamlTree) -> Iterator[tuple[YamlTree, YamlTree]]:
    """Yield the route actions of `routes` with their overrides of filters."""
    entries = _picker_filters(manager)
    for route, overrides in _walk_routes(manager):
        if any(_is_in_use(entry, overrides) for entry in entries):
            yield route, overrides


def _walk_routes(
    tree: object, inherited: YamlTree = MappingProxyType({}), retry_policy: object = None
) -> Iterator[tuple[YamlTree, YamlTree]]:
    """Yield route actions with what they inherit: overrides of filters, and the retry policy."""
    if isinstance(tree, list):
        for value in tree:
            yield from _walk_routes(value, inherited, retry_policy)
    elif isinstance(tree, Mapping):
        own = _filter_overrides(tree)
        overrides = {**inherited, **own} if own else inherited
        if "domains" in tree:
            retry_policy = tree.get("retry_policy")
        route = tree.get("route")
        if isinstance(route, Mapping) and "match" in tree:
            yield {**route, "retry_policy": route.get("retry_policy") or retry_policy}, overrides
        for value in tree.values():
            yield from _walk_routes(value, overrides, retry_policy)


def _filter_overrides(message: YamlTree) -> YamlTree:
    """Return the overrides of filters that a message has of its own, by the name of the filter."""
    overrides = message.get("typed_per_filter_config")
    return overrides if isinstance(overrides, Mapping) else {}


def _override(entry: YamlTree, overrides: YamlTree) -> YamlTree | None:
    """Return the override of a filter without its wrapper; None if there is none."""
    override = overrides.get(entry.get("name", ""))
    if isinstance(override, Mapping) and is_a(override, _FILTER_CONFIG):
        return override if override.get("disabled") else override.get("config") or {}
    return override if isinstance(override, Mapping) else None


def _is_enabled(entry: YamlTree, overrides: YamlTree) -> bool:
    """Return True if a route with these overrides passes requests to a filter."""
    override = _override(entry, overrides)
    return not (entry if override is None else override).get("disabled")


def _is_in_use(entry: YamlTree, overrides: YamlTree) -> bool:
    """Return True if an ext_proc filter shows extproc the requests of such a route."""
    is_overridden = _override(entry, overrides) is not None
    return _is_enabled(entry, overrides) and (is_overridden or not _is_placeholder(entry))


def _is_placeholder(entry: YamlTree) -> bool:
    """Return True if an ext_proc filter shows nothing, so that only routes make use of it."""
    processor = entry["typed_config"]
    return (
        mode(processor, "request_header_mode") == "SKIP"
        and mode(processor, "request_body_mode") == "NONE"
    )


def _picker_filters(tree: object) -> list[YamlTree]:
    """Return the ext_proc filters that call extproc: all, unless some have exactly its name.

    Those of Envoy AI Gateway for InferencePools count as such. Other names that only contain it may be those of others: gateways call any ext_proc service so.
    """
    entries = [part for part in walk(tree) if is_a(part.get("typed_config") or {}, PROCESSOR)]
    named = [
        entry
        for entry in entries
        if _PICKER in (entry.get("name"), _service(entry["typed_config"]))
        or _GATEWAY_PICKER in str(entry.get("name"))
    ]
    return named or entries


def has_other_processors(manager: YamlTree) -> bool:
    """Return True if a connection manager has ext_proc filters that call another service."""
    entries = [part for part in walk(manager) if is_a(part.get("typed_config") or {}, PROCESSOR)]
    return len(entries) > len(_picker_filters(manager))


def _service(processor: YamlTree) -> str:
    """Return the name of the cluster to which an ext_proc filter connects; empty without one."""
    service = processor.get("grpc_service") or {}
    return str((service.get("envoy_grpc") or {}).get("cluster_name") or "")


def effective_processors(manager: YamlTree) -> Iterator[YamlTree]:
    """Yield the ext_proc filters of a connection manager, and what routes make of them."""
    for entry in _picker_filters(manager):
        processor = entry["typed_config"]
        overridden: list[YamlTree] = []
        for message in walk(manager):
            override = _override(entry, _filter_overrides(message)) or {}
            overrides = override.get("overrides")
            if isinstance(overrides, Mapping) and overrides not in overridden:
                overridden.append(overrides)
        if not (overridden and (_is_placeholder(entry) or entry.get("disabled"))):
            yield processor
        yield from (_overridden(processor, overrides) for overrides in overridden)


def _overridden(processor: YamlTree, overrides: YamlTree) -> YamlTree:
    """Return an ext_proc filter with the overrides of a route.

    Of `metadata_options`, namespaces to forward and namespaces to receive are overridden apart.
    """
    both = [part.get("metadata_options") or {} for part in (processor, overrides)]
    return {**processor, **overrides, "metadata_options": {**both[0], **both[1]}}


def route_clusters(manager: YamlTree) -> Iterator[str]:
    """Yield the names of the clusters that routes of a connection manager name."""
    for route in routes(manager):
        yield from (name for name, _ in _actions(route))


def _actions(route: YamlTree) -> Iterator[tuple[str, YamlTree]]:
    """Yield the names of the clusters that a route action names, and what it says of each of them."""
    if isinstance(route.get("cluster"), str):
        yield route["cluster"], {}
    for weighted in (route.get("weighted_clusters") or {}).get("clusters") or []:
        yield weighted.get("name", ""), weighted


def divided_clusters(manager: YamlTree) -> Iterator[set[str]]:
    """Yield the clusters over which each route divides the requests of one picker.

    Clusters of weight 0 get none, those with an ext_proc service of their own another picker, and those
    where the filter is disabled no picker.
    """
    entries = _picker_filters(manager)
    for route in routes(manager):
        yield {
            name
            for name, action in _actions(route)
            if action.get("weight") != 0
            and not any(_leaves_picker(entry, _filter_overrides(action)) for entry in entries)
        }


def _leaves_picker(entry: YamlTree, overrides: YamlTree) -> bool:
    """Return True if overrides disable an ext_proc filter, or name another service for it to call."""
    override = _override(entry, overrides) or {}
    return bool(override.get("disabled")) or "grpc_service" in (override.get("overrides") or {})


def find_managers(tree: object) -> list[YamlTree]:
    """Return the connection managers of a tree that have an ext_proc filter."""
    return [
        message for message in walk(tree) if is_a(message, MANAGER) and _picker_filters(message)
    ]


def picker_clusters(managers: Iterable[YamlTree]) -> Iterator[str]:
    """Yield the names of the clusters to which ext_proc filters connect."""
    for manager in managers:
        for processor in effective_processors(manager):
            if name := _service(processor):
                yield name


def mode(processor: YamlTree, name: str) -> str:
    """Return a processing mode of an ext_proc filter; Envoy's default if it is not written."""
    usual = "SKIP" if "trailer" in name else "SEND" if "header" in name else "NONE"
    return str((processor.get("processing_mode") or {}).get(name, usual))


def removed_headers(manager: YamlTree, names: Collection[str]) -> frozenset[str]:
    """Return those of some lowercase request headers that never reach the ext_proc filter."""
    early = manager.get("early_header_mutation_extensions") or []
    pickers = _picker_filters(manager)
    ahead = itertools.takewhile(
        lambda extension: extension not in pickers, manager.get("http_filters") or []
    )
    passing = [overrides for _, overrides in _passing_routes(manager)] or [{}]
    removed: set[str] = set()
    for extension in (*early, *ahead):
        config = extension.get("typed_config") or {}
        if not is_a(config, "header_mutation.v3.HeaderMutation"):
            continue
        if not all(_is_enabled(extension, overrides) for overrides in passing):
            continue
        # The early extension has its list in `mutations`, the filter one level below.
        mutations = config.get("mutations") or []
        if isinstance(mutations, Mapping):
            mutations = mutations.get("request_mutations") or []
        for change in mutations:
            matcher = (change.get("remove_on_match") or {}).get("key_matcher") or {}
            removed |= {name for name in names if is_match(matcher, name)}
            removed.add(str(change.get("remove", "")).lower())
    return frozenset(names) & removed


def is_match(matcher: YamlTree, text: str) -> bool:
    """Return True if a string matcher of Envoy matches a lowercase text."""
    ignores_case = bool(matcher.get("ignore_case"))
    tests: Mapping[str, Callable[[str], bool]] = {
        "exact": text.__eq__,
        "prefix": text.startswith,
        "suffix": text.endswith,
        "contains": text.__contains__,
    }
    for kind, test in tests.items():
        if isinstance(wanted := matcher.get(kind), str):
            return test(wanted.lower() if ignores_case else wanted)
    return is_regex_match(matcher.get("safe_regex"), text)


def is_regex_match(matcher: object, text: str) -> bool:
    """Return True if a regular expression of Envoy matches a text."""
    regex = matcher.get("regex") if isinstance(matcher, Mapping) else None
    if not isinstance(regex, str) or len(regex) > _MAX_REGEX_CHARS:
        return False
    try:
        return re.fullmatch(regex, text) is not None
    except re.error:
        return False


def is_a(message: YamlTree, kind: str) -> bool:
    """Return True if the `@type` of a mapping ends with `kind`."""
    return str(message.get("@type", "")).endswith(kind)


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


def count(tree: YamlTree, name: str, usual: int, *, where: str) -> int:
    """Read a whole number as Envoy's JSON writes it: 40000, 4e4 or either as text.

    Raises:
        ConfigError: The value is no number.
    """
    value = tree.get(name)
    if value is None:
        return usual
    try:
        return int(float(value))
    except (OverflowError, TypeError, ValueError):
        raise ConfigError(
            where,
            wanted=f"{name} as a whole number, such as 40000",
            got=str(value),
            fix="correct it",
        ) from None


def name_as_proto(tree: object) -> object:
    """Copy a tree with the names of fields in snake_case, as Envoy also reads lowerCamelCase.

    Keys of `typed_per_filter_config` are names of filters, and stay as they are.
    """
    if isinstance(tree, list):
        return [name_as_proto(item) for item in tree]
    if not isinstance(tree, Mapping):
        return tree
    copy: dict[str, object] = {}
    for key, value in tree.items():
        name = str(key)
        if "." not in name and not name.startswith("@"):
            name = _HUMP.sub(lambda match: f"_{match[0].lower()}", name)
        if name == "typed_per_filter_config" and isinstance(value, Mapping):
            copy[name] = {inner: name_as_proto(message) for inner, message in value.items()}
        else:
            copy[name] = name_as_proto(value)
    return copy


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
