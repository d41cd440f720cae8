"""Findings about a running Envoy: configuration, version, clusters and counters."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Final

from extproc.config import envoy_cluster_lint, envoy_lint, envoy_tree, finding
from extproc.config.envoy_tree import YamlTree
from extproc.config.finding import Finding, Severity
from extproc.config.settings import Settings
from extproc.diagnostics.pages import EnvoyPages, read_json
from extproc.endpoint import join_host_port
from extproc.errors import ConfigError
from extproc.scrape.client import FetchedPage

#: Oldest and newest version of Envoy that the end-to-end tests run with.
OLDEST_VERSION: Final = (1, 36)
NEWEST_VERSION: Final = (1, 40)

#: First version that knows `selected_host_key` of the policy override_host.
_SELECTED_HOST_VERSION: Final = (1, 38)

#: Filter of `/stats` that keeps what is judged here.
STATS_FILTER: Final = r"(\.ext_proc\.|circuit_breakers\.default\.rq_(pending_)?open|upstream_rq_(pending|active)_overflow)"

#: Endpoints of a pool that are named when Envoy lacks them (count).
_MAX_NAMED = 3

_VERSION = re.compile(r"/(\d{1,4})\.(\d{1,4})\.(\d{1,4})")
_COUNTER = re.compile(r"([^\s:]+): (\d{1,19})")

#: Counters of ext_proc filters that are 0 in an installation that works: severity, effect, fix.
FILTER_COUNTERS: Final[Mapping[str, tuple[Severity, str, str]]] = {
    "rejected_header_mutations": (
        "error",
        "header changes of extproc were rejected",
        "remove mutation_rules, or allow the headers of the protocol there",
    ),
    "message_timeouts": (
        "warning",
        "answers of extproc came after message_timeout",
        "write message_timeout: 3600s, and give extproc more CPU",
    ),
    "failure_mode_allowed": (
        "warning",
        "requests went on without extproc",
        "see why extproc did not answer: its log, and the health of its cluster here",
    ),
    "streams_failed": (
        "warning",
        "streams to extproc failed",
        "see the log of extproc; each replica that ends without draining costs some",
    ),
    "spurious_msgs_received": (
        "warning",
        "messages of extproc came when none was due",
        "update extproc and Envoy to versions that were tested together",
    ),
}


def diagnose(
    pages: EnvoyPages, settings: Settings, *, endpoints: Collection[str]
) -> Iterator[Finding]:
    """Judge an Envoy.

    Args:
        endpoints: Addresses of the pools, `ip:port`; none if they are unknown.
    """
    place = f"Envoy {pages.url}"
    if pages.server_info.failure:
        yield finding.error(
            "envoy_reachable",
            place,
            f"its admin port does not answer: {pages.server_info.failure}",
            wanted="the admin port of an Envoy",
            fix="name the address under admin of its configuration, or open it with "
            "`kubectl port-forward POD 9901`",
        )
        return
    info = read_json(pages.server_info)
    version = _read_version(info)
    yield from _state(info, version, place=place)
    dump = read_json(pages.config_dump)
    if not dump:
        yield finding.error(
            "config_dump",
            place,
            f"/config_dump cannot be read: {pages.config_dump.failure or 'no JSON'}",
            wanted="the configuration as JSON",
            fix="allow the path in admin.allow_paths of Envoy",
        )
        return
    try:
        yield from list(_running(pages, dump, version, settings, endpoints))
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        yield finding.error(
            "config_dump",
            place,
            f"its pages have another form than those of Envoy ({type(error).__name__})",
            wanted="the admin port of an Envoy",
            fix="name the address under admin of its configuration",
        )


def _running(
    pages: EnvoyPages,
    dump: YamlTree,
    version: tuple[int, ...] | None,
    settings: Settings,
    endpoints: Collection[str],
) -> Iterator[Finding]:
    """Judge the configuration in force, and what came of it."""
    place = f"Envoy {pages.url}"
    tree = envoy_tree.find_running_configuration(dump)
    try:
        yield from envoy_lint.read(tree, settings, where=place)
    except ConfigError as error:
        fix = error.fix if envoy_tree.find_managers(tree) else _NO_FILTER_FIX
        yield finding.error("ext_proc", place, error.got, wanted=error.wanted, fix=fix)
        return
    yield from _selected_host(tree, version, place=place)
    clusters = read_json(pages.clusters)
    managers = envoy_tree.find_managers(tree)
    named = {*envoy_tree.picker_clusters(managers)}
    for manager in managers:
        named.update(envoy_tree.route_clusters(manager))
    yield from _missing_clusters(tree, clusters, warming=frozenset(_warming_clusters(dump)))
    yield from _picker_hosts(tree, clusters)
    yield from _engine_hosts(tree, clusters, endpoints)
    shared = {
        str(manager.get("stat_prefix", ""))
        for manager in managers
        if envoy_tree.has_other_processors(manager)
    }
    yield from _counters(pages.stats, _stat_names(tree, named), shared, place=place)


_NO_FILTER_FIX: Final = (
    "copy http_filters of `extproc envoy-config original-dst` into the connection manager"
)


def _read_version(info: YamlTree) -> tuple[int, ...] | None:
    """Return the version of `/server_info`, such as `(1, 40, 0)`; None if there is none."""
    match = _VERSION.search(str(info.get("version", ""))[:200])
    return tuple(int(part) for part in match.groups()) if match else None


def _state(info: YamlTree, version: tuple[int, ...] | None, *, place: str) -> Iterator[Finding]:
    state = str(info.get("state", ""))
    if state != "LIVE":
        yield finding.error(
            "envoy_state",
            place,
            f"its state is {state or 'unknown'}",
            wanted="LIVE",
            fix="see its log: it waits for xDS, or drains",
        )
    oldest, newest = (".".join(map(str, limit)) for limit in (OLDEST_VERSION, NEWEST_VERSION))
    if version is None:
        yield finding.note("envoy_version", place, "its version is unknown", wanted=oldest, fix="")
        return
    text = ".".join(map(str, version))
    if version[:2] < OLDEST_VERSION:
        yield finding.error(
            "envoy_version",
            place,
            f"its version is {text}: FULL_DUPLEX_STREAMED and destinations may not work",
            wanted=f"{oldest} to {newest}",
            fix=f"update Envoy to {newest}",
        )
    elif version[:2] > NEWEST_VERSION:
        yield finding.note(
            "envoy_version",
            place,
            f"its version is {text}, which was not tested with this extproc",
            wanted=f"{oldest} to {newest}",
            fix="watch streams_failed after an update",
        )
    else:
        yield finding.fine("envoy_version", place, f"its version is {text}")


def _selected_host(
    tree: YamlTree, version: tuple[int, ...] | None, *, place: str
) -> Iterator[Finding]:
    """Check that extproc learns which endpoint answered after a retry."""
    policies = [
        part
        for part in envoy_tree.walk(tree)
        if envoy_tree.is_a(part, "override_host.v3.OverrideHost")
    ]
    if not policies or all("selected_host_key" in policy for policy in policies):
        return
    is_old = version is not None and version[:2] < _SELECTED_HOST_VERSION
    yield finding.warning(
        "selected_host",
        place,
        "override_host has no selected_host_key: after a retry, a response counts for the endpoint "
        "that was named first, and a dead one looks well",
        wanted="selected_host_key",
        fix="update Envoy to 1.38 or newer"
        if is_old
        else "write selected_host_key: {key: envoy.lb, path: [{key: "
        "x-gateway-destination-endpoint-served}]}",
    )


def _hosts(clusters: YamlTree) -> Mapping[str, list[YamlTree]]:
    """Hosts of each cluster, as `/clusters?format=json` lists them."""
    statuses = clusters.get("cluster_statuses")
    hosts: dict[str, list[YamlTree]] = {}
    for status in statuses if isinstance(statuses, list) else ():
        if isinstance(status, dict):
            hosts[str(status.get("name", ""))] = [
                host for host in status.get("host_statuses") or [] if isinstance(host, dict)
            ]
    return hosts


def _is_healthy(host: YamlTree) -> bool:
    health = host.get("health_status") or {}
    is_failing = any(value is True for key, value in health.items() if key.startswith("failed_"))
    return health.get("eds_health_status", "HEALTHY") in ("HEALTHY", "UNKNOWN") and not is_failing


def _address(host: YamlTree) -> str:
    """`ip:port` of a host; empty for a pipe."""
    socket: Any = (host.get("address") or {}).get("socket_address") or {}
    address = str(socket.get("address", ""))
    return join_host_port(address, socket.get("port_value", "")) if address else ""


def _missing_clusters(
    tree: YamlTree, clusters: YamlTree, *, warming: Collection[str]
) -> Iterator[Finding]:
    """Check that xDS brought the named clusters; those that no xDS could bring the lint reports."""
    hosts = _hosts(clusters)
    if not hosts or not envoy_tree.has_cluster_discovery(tree):
        return
    managers = envoy_tree.find_managers(tree)
    called = set(envoy_tree.picker_clusters(managers))
    routed = {name for manager in managers for name in envoy_tree.route_clusters(manager)}
    for name in sorted((called | routed) - hosts.keys()):
        place = f"cluster {name}"
        if name in warming:
            yield finding.note(
                "missing_cluster",
                place,
                "xDS brought it, but Envoy has no endpoints of it yet: what goes there is answered "
                "with 503",
                wanted="an active cluster",
                fix="wait; if it stays so, see whether Envoy reaches the xDS server that has its "
                "endpoints",
            )
            continue
        yield finding.error(
            "missing_cluster",
            place,
            f"Envoy has {', '.join(sorted(hosts)[:_MAX_NAMED])}, but no cluster of this name: what "
            "goes there is answered with 503",
            wanted="a cluster of this name",
            fix="name the cluster of extproc in grpc_service of the ext_proc filter, or add it"
            if name in called
            else "see whether Envoy reaches its xDS server; if that is extproc, the cluster of the "
            "route is pool.name, or engines for a pool without a name",
        )


def _warming_clusters(dump: YamlTree) -> Iterator[str]:
    """Names of the clusters of a config dump that wait for their endpoints."""
    for part in envoy_tree.walk(dump):
        for warming in part.get("dynamic_warming_clusters") or ():
            yield envoy_tree.cluster_name(warming.get("cluster") or {})


def _picker_hosts(tree: YamlTree, clusters: YamlTree) -> Iterator[Finding]:
    """Check that Envoy reaches extproc."""
    hosts = _hosts(clusters)
    managers = envoy_tree.find_managers(tree)
    for name in sorted(set(envoy_tree.picker_clusters(managers))):
        if name not in hosts:
            continue  # a missing cluster is a finding of the lint
        healthy = [host for host in hosts[name] if _is_healthy(host)]
        place = f"cluster {name}"
        got = f"{len(healthy)} of {len(hosts[name])} replicas of extproc are healthy"
        if len(healthy) == len(hosts[name]) and healthy:
            yield finding.fine("picker_hosts", place, got)
            continue
        addresses = [_address(host) for host in hosts[name] if not _is_healthy(host)]
        named = ", ".join(addresses[:_MAX_NAMED])
        yield Finding(
            "warning" if healthy else "error",
            "picker_hosts",
            place,
            f"{got}{f': {named} not' if named else ''}",
            wanted="all of them",
            fix="start extproc at the addresses of this cluster; TLS must be on at both ends or at "
            "none (transport_socket here, --secure-serving there)",
        )


def _engine_hosts(
    tree: YamlTree, clusters: YamlTree, endpoints: Collection[str]
) -> Iterator[Finding]:
    """Check that a cluster that lists endpoints has those of the pools."""
    if not endpoints:
        return
    hosts = _hosts(clusters)
    named = {
        name
        for manager in envoy_tree.find_managers(tree)
        for name in envoy_tree.route_clusters(manager)
    }
    listing = [
        name
        for part in envoy_tree.walk(tree)
        if (name := envoy_tree.cluster_name(part)) in named
        and name in hosts
        and part.get("type") != "ORIGINAL_DST"
    ]
    if not listing:
        return
    listed = {_address(host) for name in listing for host in hosts[name]}
    missing = sorted(set(endpoints) - listed)
    place = f"cluster {', '.join(sorted(set(listing)))}"
    if missing:
        more = f" and {len(missing) - _MAX_NAMED} more" if len(missing) > _MAX_NAMED else ""
        yield Finding(
            "warning" if len(missing) < len(endpoints) else "error",
            "endpoints_listed",
            place,
            f"{len(missing)} of {len(endpoints)} endpoints of the pool are not in the cluster: "
            f"{', '.join(missing[:_MAX_NAMED])}{more}; Envoy skips them",
            wanted="every endpoint of the pool",
            fix="add them to load_assignment, or use `extproc envoy-config override-host-eds`",
        )
    else:
        yield finding.fine("endpoints_listed", place, "the cluster has every endpoint of the pool")


def _stat_names(tree: YamlTree, named: Collection[str]) -> Mapping[str, str]:
    """Names of clusters by the names that their counters have, as Istio sets `alt_stat_name`."""
    return {name: name for name in named} | {
        str(part["alt_stat_name"]): name
        for part in envoy_tree.walk(tree)
        if (name := envoy_tree.cluster_name(part)) in named and part.get("alt_stat_name")
    }


def _counters(
    page: FetchedPage, named: Mapping[str, str], shared: Collection[str], *, place: str
) -> Iterator[Finding]:
    """Check counters of ext_proc filters and of the circuit breakers of named clusters.

    Args:
        named: Names of clusters by the names that their counters have.
        shared: Connection managers whose counters are also those of another ext_proc service.
    """
    if page.failure:
        return
    counters = _COUNTER.findall(page.body.decode("latin-1"))
    owners = (".ext_proc.", *(f"cluster.{name}." for name in named))
    if not any(owner in name for name, _ in counters for owner in owners):
        yield finding.note(
            "counters_recorded",
            place,
            "it keeps no counters of ext_proc and of clusters: none is examined",
            wanted="counters",
            fix="remove stats_matcher; with Istio, add .* to inclusionRegexps of proxyStatsMatcher",
        )
    for name, text in counters:
        count = int(text)
        if not count:
            continue
        owner, _, counter = name.rpartition(".")
        owned = owner.removeprefix("cluster.").removesuffix(".circuit_breakers.default")
        cluster = named.get(owned, "")
        row = FILTER_COUNTERS.get(counter)
        if row is not None and ".ext_proc" in owner:
            severity, effect, fix = row
            manager = owner.removeprefix("http.").partition(".ext_proc")[0]
            place = f"connection manager {manager}"
            got = f"{effect}: {counter} is {count} since Envoy started"
            if manager in shared:
                severity = "note"
                got += ", and counts another ext_proc filter too"
            yield Finding(severity, counter, place, got, wanted="0", fix=fix)
        elif not cluster:
            continue
        elif counter in ("rq_open", "rq_pending_open"):
            yield finding.error(
                "breakers_open",
                f"cluster {cluster}",
                "its circuit breaker is open: further requests get 503 at once",
                wanted="closed",
                fix=f"write circuit_breakers: {envoy_cluster_lint.BREAKERS}",
            )
        elif counter in ("upstream_rq_pending_overflow", "upstream_rq_active_overflow"):
            yield finding.warning(
                "breakers_tripped",
                f"cluster {cluster}",
                f"its circuit breakers refused {count} requests since Envoy started",
                wanted="0",
                fix=f"write circuit_breakers: {envoy_cluster_lint.BREAKERS}",
            )
