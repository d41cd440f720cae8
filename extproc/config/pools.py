"""Resolves the pools that settings describe, and checks their sections against each other."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from extproc.config import (
    autoscaling,
    discovery_sources,
    epp_config,
    pool_annotations,
    pool_schema,
    validation,
)
from extproc.config.settings import Settings
from extproc.errors import ConfigError
from extproc.routing import pool_match
from extproc.scrape import engines


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
                pool=_plain(pool),
                pools=(),
                scheduling=pool.scheduling or settings.scheduling,
            ),
        )
        for pool in settings.pools
    ]


def discovered_pool_plan(settings: Settings, name: str, match: pool_match.PoolMatch) -> PoolPlan:
    """Return the plan of a pool discovered in Kubernetes."""
    pool = pool_schema.PoolSource(name=name)
    return PoolPlan(name, match, msgspec.structs.replace(settings, pool=pool, pools=()))


def has_source(pool: pool_schema.PoolSource) -> bool:
    """Return True if a section names a source of endpoints."""
    return bool(discovery_sources.configured_sources(pool))


def from_kubernetes(settings: Settings) -> bool:
    """Return True if any pool comes from Kubernetes."""
    pools = settings.pools or (settings.pool,)
    return settings.cluster.discover_pools != "none" or any(
        source.in_kubernetes
        for pool in pools
        for source in discovery_sources.configured_sources(pool)
    )


def serves_llmd_metrics(settings: Settings) -> bool:
    """Return True if metrics are served under the names of the EPP of llm-d as well."""
    if settings.server.llmd_metrics is not None:
        return settings.server.llmd_metrics
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


def check_compatible(settings: Settings, *, where: str) -> None:
    """Reject sections that are valid separately and contradict each other.

    Raises:
        ConfigError: Several sources in one pool, a name twice, a pool besides pools, an extra
            metric without a selector, or KV events of several pools on one port.
    """
    sections_of: list[tuple[validation.Path, pool_schema.PoolSource]] = [(("pool",), settings.pool)]
    sections_of += [(("pools", at), pool) for at, pool in enumerate(settings.pools)]
    for path, pool in sections_of:
        sources = discovery_sources.configured_sources(pool)
        _check_single_source(sources, validation.location(where, path))
        if pool.autoscaling is not None:
            autoscaling.check_section(
                pool.autoscaling, where=validation.location(where, (*path, "autoscaling"))
            )
        for source in sources:
            source.check(pool, validation.location(where, (*path, *source.key.split("."))))
    _check_discovered(settings, where)
    _check_bound_events(settings, where)
    for name, selector in settings.scrape.extra_metrics.items():
        path = ("scrape", "extra_metrics", name)
        engines.series(selector, where=validation.location(where, path))
    scheduling = settings.scheduling
    if scheduling.epp is not None and not scheduling.allow_unsupported:
        epp_config.check_supported(scheduling.epp, where=where)
    if settings.pools and has_source(settings.pool):
        raise ConfigError(
            validation.location(where, ("pools",)),
            wanted="pool or pools",
            got="both",
            fix="make the one in `pool` the first of `pools`, with a name",
        )
    names: set[str] = set()
    for at, pool in enumerate(settings.pools):
        if pool.name in names:
            raise ConfigError(
                validation.location(where, ("pools", at, "name")),
                wanted="every name once",
                got=f"{pool.name} again",
                fix="give it another name",
            )
        names.add(pool.name)
        if not has_source(pool):
            raise ConfigError(
                validation.location(where, ("pools", at)),
                wanted=_enumerate_keys("or"),
                got="none of them",
                fix="say where its endpoints come from",
            )


def _check_bound_events(settings: Settings, where: str) -> None:
    if settings.kv_events.bind and (settings.pools or settings.cluster.discover_pools != "none"):
        raise ConfigError(
            validation.location(where, ("kv_events", "bind")),
            wanted="a single pool, because all would listen on the same port",
            got="pools",
            fix="remove it, so that engines are connected to",
        )


def _check_discovered(settings: Settings, where: str) -> None:
    rules = settings.autoscaling.discovered_pools
    for at, rule in enumerate(rules):
        pool_annotations.check_scaling_rule(
            rule, where=validation.location(where, ("autoscaling", "discovered_pools", at))
        )
    if rules and settings.cluster.discover_pools == "none":
        raise ConfigError(
            validation.location(where, ("autoscaling", "discovered_pools")),
            wanted="pools that Kubernetes brings",
            got="cluster.discover_pools: none",
            fix="set cluster.discover_pools, or write pool.autoscaling",
        )


def _check_single_source(sources: Sequence[discovery_sources.DiscoverySource], where: str) -> None:
    if len(sources) > 1:
        raise ConfigError(
            where,
            wanted=f"one of {_enumerate_keys('and')}",
            got=" and ".join(source.key for source in sources),
            fix="keep one; the file is watched, the list is not",
        )


def _enumerate_keys(conjunction: str) -> str:
    *keys, last = [source.key for source in discovery_sources.SOURCES]
    return f"{', '.join(keys)} {conjunction} {last}"


def _plain(pool: pool_schema.PoolSection) -> pool_schema.PoolSource:
    """Convert a pool to the section `pool` of a process with a single pool."""
    fields = {name: getattr(pool, name) for name in pool_schema.PoolSource.__struct_fields__}
    return pool_schema.PoolSource(**fields)
