"""Pools and their sources of endpoints, as text of `extproc check`."""

from __future__ import annotations

import os
from collections.abc import Iterator

from extproc.config import (
    autoscaling,
    discovered_matches,
    discovered_scaling,
    discovery_sources,
    kubernetes_plan,
    policy_schema,
    pool_schema,
    pools,
)
from extproc.config.settings import Settings
from extproc.routing import pool_match


def lines(settings: Settings) -> Iterator[str]:
    """One paragraph for each pool, and one for those that Kubernetes brings.

    Raises:
        ConfigError: An endpoints file cannot be read, or an election is not possible.
    """
    before: list[pools.PoolPlan] = []
    for plan in pools.pool_plans(settings):
        if settings.pools:
            yield f"pool        {plan.name}, for {pool_match.describe(plan.claim)}"
            earlier = next(
                (other for other in before if pool_match.overlap(other.claim, plan.claim)), None
            )
            if earlier is not None and not plan.claim.empty:
                yield f"            pool {earlier.name} comes first where both claim a request"
            before += [plan] if not plan.claim.empty else []
            own = plan.settings.scheduling
            if own is not settings.scheduling:
                yield "            scheduled by rules of its own"
        pool = plan.settings.pool
        yield from _source(pool)
        yield from policy_schema.describe_policy(pool.objectives, pool.rewrites)
        if pool.autoscaling is not None:
            yield from autoscaling.describe_section(pool.autoscaling)
    cluster = settings.cluster
    if cluster.discover_pools != "none":
        place = "the cluster"
        if cluster.discover_pools == "namespace":
            place = f"namespace {cluster.namespace or 'of this process'}"
        yield f"pools       every InferencePool of {place}, as they come and go"
        yield from discovered_matches.describe_rules(cluster.claims)
        for rule in settings.autoscaling.discovered_pools:
            yield from discovered_scaling.describe_rule(rule)
    elected = kubernetes_plan.plan_election(settings, where="cluster", environment=os.environ)
    if elected is not None and cluster.leader_election:
        lease = elected.lease
        yield f"ready       only the holder of Lease {lease.name} in namespace {lease.namespace}"


def _source(pool: pool_schema.PoolSource) -> Iterator[str]:
    sources = discovery_sources.configured_sources(pool) or discovery_sources.SOURCES[:1]
    for source in sources:
        first, *endpoints = source.describe(pool)
        yield f"endpoints   {first}"
        yield from (f"            {line}" for line in endpoints)
