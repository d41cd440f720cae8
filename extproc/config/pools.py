"""Pools of a configuration: their sources of endpoints, and checks of sections against each other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from extproc.config import autoscaling, epp_handlers, pool_annotations, pool_sections
from extproc.config.settings import Settings
from extproc.config.validation import Place
from extproc.discovery import endpoint_list, static_discovery
from extproc.endpoint import join_host_port
from extproc.errors import ConfigError
from extproc.routing import pool_match
from extproc.scrape import engines


class DiscoverySource(msgspec.Struct, frozen=True, kw_only=True):
    """Row of the table of sources of endpoints.

    Attributes:
        key: Path of the setting in a pool section that selects and configures it.
        describe: Describes a pool for `extproc check`: what the source is, then a line for each
            endpoint; raises ConfigError where it cannot be read.
        check: Rejects a setting that contradicts itself.
        is_static: True if `StaticDiscovery` follows it; of the others, another component sets the
            endpoints.
        in_kubernetes: True if the endpoints come from an API server.
    """

    key: str
    describe: Callable[[pool_sections.PoolSource], Iterator[str]]
    check: Callable[[pool_sections.PoolSource, Place], None] = lambda _, __: None
    is_static: bool = False
    in_kubernetes: bool = False

    def is_configured(self, pool: pool_sections.PoolSource) -> bool:
        """Return True if a pool section selects this source."""
        setting: object = pool
        for name in self.key.split("."):
            setting = getattr(setting, name, None)
        return bool(setting)


def _describe_list(pool: pool_sections.PoolSource) -> Iterator[str]:
    listed = parse_entries(pool, where="pool")
    yield f"{len(listed)} listed{_owner(pool)}"
    yield from map(_describe_entry, listed)


def _describe_file(pool: pool_sections.PoolSource) -> Iterator[str]:
    limit_bytes = static_discovery.StaticDiscoverySettings().limit_bytes
    listed = static_discovery.load_file(Path(pool.endpoints_file), limit_bytes=limit_bytes)
    yield f"{len(listed)} in {pool.endpoints_file}, watched{_owner(pool)}"
    yield from map(_describe_entry, listed)


def _describe_kubernetes(pool: pool_sections.PoolSource) -> Iterator[str]:
    if pool.kubernetes is not None:
        yield f"from Kubernetes: {_describe_object(pool.kubernetes)}{_owner(pool)}"


def _describe_launch(pool: pool_sections.PoolSource) -> Iterator[str]:
    if pool.autoscaling is not None and pool.autoscaling.launch is not None:
        yield f"started here{_owner(pool)}: {' '.join(pool.autoscaling.launch.command)}"


def _check_single_object(pool: pool_sections.PoolSource, place: Place) -> None:
    section = pool.kubernetes
    if section is None:
        return
    named = [
        name
        for name, value in (
            ("inference_pool", section.inference_pool),
            ("selector", section.selector or section.selector_expressions),
            ("service", section.service),
        )
        if value
    ]
    if len(named) != 1:
        raise ConfigError(
            place,
            wanted="one of inference_pool, selector and service",
            got=" and ".join(named) or "none of them",
            fix="name the one object whose endpoints these are",
        )
    misplaced = [
        (name, owner)
        for name, value, owner in (
            ("ports", section.ports, "selector"),
            ("port", section.port, "service"),
        )
        if value and owner not in named
    ]
    for name, owner in misplaced:
        raise ConfigError(
            place,
            wanted=f"{name} only with {owner}",
            got=f"{name} with {named[0]}",
            fix=f"remove {name}; {named[0]} says itself which ports there are",
        )


#: Every source; a pool has at most one. Names in lists and files are resolved by DNS.
#: `kubernetes_plan` collects the objects of all pools, and one `KubernetesDiscovery` watches them.
#: An actuator starts engines, and publishes them itself.
SOURCES = (
    DiscoverySource(key="endpoints", describe=_describe_list, is_static=True),
    DiscoverySource(key="endpoints_file", describe=_describe_file, is_static=True),
    DiscoverySource(
        key="kubernetes",
        describe=_describe_kubernetes,
        check=_check_single_object,
        in_kubernetes=True,
    ),
    DiscoverySource(key="autoscaling.launch", describe=_describe_launch),
)


def configured_sources(pool: pool_sections.PoolSource) -> Sequence[DiscoverySource]:
    """Return the sources that a pool section selects; more than one is an error."""
    return [source for source in SOURCES if source.is_configured(pool)]


def parse_entries(
    pool: pool_sections.PoolSource, *, where: str
) -> tuple[endpoint_list.EndpointListEntry, ...]:
    """Parse the endpoints listed in a pool section, as those of an endpoints file.

    Raises:
        ConfigError: An address is invalid or a duplicate.
    """
    listed = [msgspec.to_builtins(entry) for entry in pool.endpoints]
    return endpoint_list.from_document({"endpoints": listed}, where=where)


def _owner(pool: pool_sections.PoolSource) -> str:
    return f" of pool {pool.name}" if pool.name else ""


def _describe_object(section: pool_sections.KubernetesSection) -> str:
    place = f" in namespace {section.namespace}" if section.namespace else ""
    if section.inference_pool:
        return f"InferencePool {section.inference_pool} ({section.group}){place}"
    if section.service:
        port = f", port {section.port}" if section.port else ""
        return f"EndpointSlices of Service {section.service}{port}{place}"
    pairs = [f"{key}={value}" for key, value in sorted(section.selector.items())]
    labels = ",".join([*pairs, *map(str, section.selector_expressions)])
    ports = ", ".join(map(str, section.ports)) or "of their annotations"
    return f"pods with {labels}, ports {ports}{place}"


def _describe_entry(entry: endpoint_list.EndpointListEntry) -> str:
    words = [join_host_port(entry.host, entry.port)]
    if not entry.literal:
        words.append("(every address of this name)")
    if entry.name:
        words.append(entry.name)
    words += [f"{key}={value}" for key, value in sorted(entry.labels.items())]
    return "  ".join(words)


class PoolPlan(msgspec.Struct, frozen=True):
    """A pool to be built.

    Attributes:
        name: Name in metrics, logs and decisions.
        match: The requests it serves.
        settings: Settings of the process as if it were the only pool.
    """

    name: str
    match: pool_match.PoolMatch
    settings: Settings


def pool_plans(settings: Settings) -> Sequence[PoolPlan]:
    """Return the configured pools; empty if all pools are discovered in Kubernetes."""
    if not settings.pools:
        if settings.cluster.discover_pools != "none" and not has_source(settings.pool):
            return ()
        return (PoolPlan(settings.pool.name, pool_match.PoolMatch(), settings),)
    return [
        PoolPlan(
            pool.name,
            pool.match,
            msgspec.structs.replace(
                settings,
                pool=msgspec.convert(pool, pool_sections.PoolSource, from_attributes=True),
                pools=(),
                scheduling=pool.scheduling or settings.scheduling,
            ),
        )
        for pool in settings.pools
    ]


def discovered_pool_plan(settings: Settings, name: str, match: pool_match.PoolMatch) -> PoolPlan:
    """Return the plan of a pool discovered in Kubernetes."""
    pool = pool_sections.PoolSource(name=name)
    return PoolPlan(name, match, msgspec.structs.replace(settings, pool=pool, pools=()))


def uses_top_scheduling(settings: Settings) -> bool:
    """Return True if a pool has the scheduling rules of the top level."""
    return (
        not settings.pools
        or settings.cluster.discover_pools != "none"
        or any(pool.scheduling is None for pool in settings.pools)
    )


def scheduling_sections(
    settings: Settings,
) -> Iterator[tuple[str, pool_sections.SchedulingSection]]:
    """Yield every section of scheduling rules with its path; pools by their names."""
    yield "scheduling", settings.scheduling
    for pool in settings.pools:
        if pool.scheduling is not None:
            yield f"pools[{pool.name}].scheduling", pool.scheduling


def has_source(pool: pool_sections.PoolSource) -> bool:
    """Return True if a section names a source of endpoints."""
    return bool(configured_sources(pool))


def from_kubernetes(settings: Settings) -> bool:
    """Return True if any pool comes from Kubernetes."""
    pools = settings.pools or (settings.pool,)
    return settings.cluster.discover_pools != "none" or any(
        source.in_kubernetes for pool in pools for source in configured_sources(pool)
    )


def serves_llmd_metrics(settings: Settings) -> bool:
    """Return True if metrics are served under the names of the EPP of llm-d as well."""
    if settings.server.llmd_metrics is not None:
        return settings.server.llmd_metrics
    return follows_inference_pool(settings)


def follows_inference_pool(settings: Settings) -> bool:
    """Return True if the pool is an InferencePool, as of an EPP of llm-d."""
    kubernetes = settings.pool.kubernetes
    return kubernetes is not None and bool(kubernetes.inference_pool)


def scales_kubernetes_objects(settings: Settings) -> bool:
    """Return True if Kubernetes objects are scaled, which only a single replica may do."""
    pools = settings.pools or (settings.pool,)
    if settings.cluster.discover_pools != "none":
        rules = settings.autoscaling.discovered_pools
        if any(rule.target is not None or rule.annotations for rule in rules):
            return True
    return any(
        pool.autoscaling is not None
        and autoscaling.actuator_type(pool.autoscaling).scales_kubernetes
        for pool in pools
    )


def check_compatible(settings: Settings, place: Place) -> None:
    """Reject sections that are valid separately and contradict each other.

    Raises:
        ConfigError: Several sources in one pool, a name twice, a pool besides pools, an extra
            metric without a selector, KV events of several pools on one port, an object scaled for
            two pools, two ways of peer synchronization, or peers that count as gone between lists.
    """
    sections = [(place / "pool", settings.pool)]
    sections += [(place / "pools" / at, pool) for at, pool in enumerate(settings.pools)]
    for spot, pool in sections:
        sources = configured_sources(pool)
        _check_single_source(sources, spot)
        if pool.autoscaling is not None:
            autoscaling.check_section(pool.autoscaling, spot / "autoscaling")
        for source in sources:
            source.check(pool, spot / source.key)
    _check_discovered(settings, place)
    _check_bound_events(settings, place)
    _check_peer_sync(settings, place)
    _check_scale_targets(settings, place)
    for name, selector in settings.scrape.extra_metrics.items():
        engines.series(selector, where=str(place / "scrape" / "extra_metrics" / name))
    scheduling = settings.scheduling
    if scheduling.epp is not None and not scheduling.allow_unsupported:
        epp_handlers.check_supported(scheduling.epp, place)
    if settings.pools and has_source(settings.pool):
        raise ConfigError(
            place / "pools",
            wanted="pool or pools",
            got="both",
            fix="make the one in `pool` the first of `pools`, with a name",
        )
    names: set[str] = set()
    for at, pool in enumerate(settings.pools):
        if pool.name in names:
            raise ConfigError(
                place / "pools" / at / "name",
                wanted="every name once",
                got=f"{pool.name} again",
                fix="give it another name",
            )
        names.add(pool.name)
        if not has_source(pool):
            raise ConfigError(
                place / "pools" / at,
                wanted=_enumerate_keys("or"),
                got="none of them",
                fix="say where its endpoints come from",
            )


def _check_peer_sync(settings: Settings, place: Place) -> None:
    if settings.peer_sync.url and settings.peer_sync.peers:
        raise ConfigError(
            place / "peer_sync",
            wanted="peers or url",
            got="both",
            fix="remove url where replicas reach each other, or else peers",
        )
    least_s = 2 * settings.peer_sync.beat_s
    if settings.peer_sync.silent_s < least_s:
        raise ConfigError(
            place / "peer_sync" / "silent_s",
            wanted=f"at least twice beat_s ({least_s:g})",
            got=f"{settings.peer_sync.silent_s:g}",
            fix="raise it or lower beat_s, or a replica without traffic counts as gone between two lists",
        )


def _check_scale_targets(settings: Settings, place: Place) -> None:
    """Reject an object that two pools scale: each would undo the changes of the other."""
    pool_by_target: dict[tuple[str, str, str, str], str] = {}
    for at, pool in enumerate(settings.pools):
        target = None if pool.autoscaling is None else pool.autoscaling.target
        if target is None:
            continue
        if target.path in pool_by_target:
            raise ConfigError(
                place / "pools" / at / "autoscaling" / "target",
                wanted="another object than that of every other pool",
                got=f"that of pool {pool_by_target[target.path]}",
                fix="scale it for a single pool",
            )
        pool_by_target[target.path] = pool.name


def _check_bound_events(settings: Settings, place: Place) -> None:
    if settings.kv_events.bind and (settings.pools or settings.cluster.discover_pools != "none"):
        raise ConfigError(
            place / "kv_events" / "bind",
            wanted="a single pool, because all would listen on the same port",
            got="pools",
            fix="remove it, so that engines are connected to",
        )


def _check_discovered(settings: Settings, place: Place) -> None:
    rules = settings.autoscaling.discovered_pools
    spot = place / "autoscaling" / "discovered_pools"
    for at, rule in enumerate(rules):
        pool_annotations.check_scaling_rule(rule, spot / at)
    if rules and settings.cluster.discover_pools == "none":
        raise ConfigError(
            spot,
            wanted="pools that Kubernetes brings",
            got="cluster.discover_pools: none",
            fix="set cluster.discover_pools, or write pool.autoscaling",
        )


def _check_single_source(sources: Sequence[DiscoverySource], place: Place) -> None:
    if len(sources) > 1:
        raise ConfigError(
            place,
            wanted=f"one of {_enumerate_keys('and')}",
            got=" and ".join(source.key for source in sources),
            fix="keep one; the file is watched, the list is not",
        )


def _enumerate_keys(conjunction: str) -> str:
    *keys, last = [source.key for source in SOURCES]
    return f"{', '.join(keys)} {conjunction} {last}"
