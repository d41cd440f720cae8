"""Resolves the pools that settings describe, and checks their sections against each other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from extproc.config import (
    autoscaling,
    discovered_scaling,
    epp_config,
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
        claim: The requests it serves.
        settings: Settings of the process as if it were the only pool.
    """

    name: str
    claim: pool_match.PoolMatch
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


def discovered_pool_plan(settings: Settings, name: str, claim: pool_match.PoolMatch) -> PoolPlan:
    """Return the plan of a pool discovered in Kubernetes."""
    pool = pool_schema.PoolSource(name=name)
    return PoolPlan(name, claim, msgspec.structs.replace(settings, pool=pool, pools=()))


def has_source(pool: pool_schema.PoolSource) -> bool:
    """Return True if a section names a source of endpoints."""
    return any(_sources(pool))


def from_kubernetes(settings: Settings) -> bool:
    """Return True if any pool comes from Kubernetes."""
    pools = settings.pools or (settings.pool,)
    return settings.cluster.discover_pools != "none" or any(pool.kubernetes for pool in pools)


def scales_kubernetes_objects(settings: Settings) -> bool:
    """Return True if Kubernetes objects are scaled, which only a single replica may do."""
    pools = settings.pools or (settings.pool,)
    if settings.cluster.discover_pools != "none":
        rules = settings.autoscaling.discovered_pools
        if any(rule.target is not None or rule.annotations for rule in rules):
            return True
    return any(pool.autoscaling is not None and pool.autoscaling.target for pool in pools)


def is_static(pool: pool_schema.PoolSource) -> bool:
    """Return True if endpoints come from the configuration or a file, not from discovery."""
    return bool(pool.endpoints or pool.endpoints_file)


def check_compatible(settings: Settings, *, where: str) -> None:
    """Reject sections that are valid separately and contradict each other.

    Args:
        settings: All sections.
        where: The file or flags they came from, for errors.

    Raises:
        ConfigError: Several sources in one pool, a name twice, a pool besides pools, or an extra
            metric without a selector.
    """
    sections_of: list[tuple[validation.Path, pool_schema.PoolSource]] = [(("pool",), settings.pool)]
    sections_of += [(("pools", at), pool) for at, pool in enumerate(settings.pools)]
    for path, pool in sections_of:
        _check_single_source(pool, validation.location(where, path))
        if pool.autoscaling is not None:
            autoscaling.check_section(
                pool.autoscaling, where=validation.location(where, (*path, "autoscaling"))
            )
        if pool.kubernetes is not None:
            _check_single_object(pool.kubernetes, validation.location(where, (*path, "kubernetes")))
    _check_discovered(settings, where)
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
                wanted="endpoints, endpoints_file, kubernetes or autoscaling.launch",
                got="none of them",
                fix="say where its endpoints come from",
            )


def _check_discovered(settings: Settings, where: str) -> None:
    rules = settings.autoscaling.discovered_pools
    for at, rule in enumerate(rules):
        discovered_scaling.check_rule(
            rule, where=validation.location(where, ("autoscaling", "discovered_pools", at))
        )
    if rules and settings.cluster.discover_pools == "none":
        raise ConfigError(
            validation.location(where, ("autoscaling", "discovered_pools")),
            wanted="pools that Kubernetes brings",
            got="cluster.discover_pools: none",
            fix="set cluster.discover_pools, or write pool.autoscaling",
        )


def _check_single_source(pool: pool_schema.PoolSource, where: str) -> None:
    sources = list(_sources(pool))
    if len(sources) > 1:
        raise ConfigError(
            where,
            wanted="one of endpoints, endpoints_file, kubernetes and autoscaling.launch",
            got=" and ".join(sources),
            fix="keep one; the file is watched, the list is not",
        )


def _sources(pool: pool_schema.PoolSource) -> Iterator[str]:
    if pool.endpoints:
        yield "endpoints"
    if pool.endpoints_file:
        yield "endpoints_file"
    if pool.kubernetes is not None:
        yield "kubernetes"
    if pool.autoscaling is not None and pool.autoscaling.launch is not None:
        yield "autoscaling.launch"


def _check_single_object(section: pool_schema.KubernetesSection, where: str) -> None:
    named = [
        name
        for name, value in (
            ("inference_pool", section.inference_pool),
            ("selector", section.selector),
            ("service", section.service),
        )
        if value
    ]
    if len(named) != 1:
        raise ConfigError(
            where,
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
            where,
            wanted=f"{name} only with {owner}",
            got=f"{name} with {named[0]}",
            fix=f"remove {name}; {named[0]} says itself which ports there are",
        )


def _plain(pool: pool_schema.PoolSection) -> pool_schema.PoolSource:
    """Convert a pool to the section `pool` of a process with a single pool."""
    fields = {name: getattr(pool, name) for name in pool_schema.PoolSource.__struct_fields__}
    return pool_schema.PoolSource(**fields)
