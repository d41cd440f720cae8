"""Pools and their sources of endpoints, as text of `extproc check`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from extproc.config import (
    autoscaling,
    discovered_matches,
    discovered_scaling,
    kubernetes_plan,
    loader,
    policy_schema,
    pool_schema,
    pools,
)
from extproc.config.settings import Settings
from extproc.discovery import endpoint_list, file, static_discovery
from extproc.routing import pool_match


def lines(settings: Settings) -> Iterator[str]:
    """One paragraph for each pool, and one for those that Kubernetes brings.

    Raises:
        ConfigError: An endpoints file cannot be read, or an election is not possible.
    """
    before: list[pools.PoolPlan] = []
    for plan in pools.pool_plans(settings):
        if settings.pools:
            yield f"pool        {plan.name}, for {pool_match.described(plan.claim)}"
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
    named = f" of pool {pool.name}" if pool.name else ""
    if pool.autoscaling is not None and pool.autoscaling.launch is not None:
        yield f"endpoints   started here{named}: {' '.join(pool.autoscaling.launch.command)}"
        return
    if pool.kubernetes is not None:
        yield f"endpoints   from Kubernetes: {_object(pool.kubernetes)}{named}"
        return
    if pool.endpoints_file:
        listed = file.load(
            Path(pool.endpoints_file),
            limit_bytes=static_discovery.StaticDiscoverySettings().limit_bytes,
        )
        source = f"in {pool.endpoints_file}, watched"
    else:
        listed = loader.entries(pool, where="pool")
        source = "listed"
    yield f"endpoints   {len(listed)} {source}{named}"
    yield from (f"            {_entry(entry)}" for entry in listed)


def _object(wanted: pool_schema.KubernetesSection) -> str:
    place = f" in namespace {wanted.namespace}" if wanted.namespace else ""
    if wanted.inference_pool:
        return f"InferencePool {wanted.inference_pool} ({wanted.group}){place}"
    if wanted.service:
        port = f", port {wanted.port}" if wanted.port else ""
        return f"EndpointSlices of Service {wanted.service}{port}{place}"
    labels = ",".join(f"{key}={value}" for key, value in sorted(wanted.selector.items()))
    ports = ", ".join(map(str, wanted.ports)) or "of their annotations"
    return f"pods with {labels}, ports {ports}{place}"


def _entry(entry: endpoint_list.EndpointListEntry) -> str:
    host = f"[{entry.host}]" if ":" in entry.host else entry.host
    words = [f"{host}:{entry.port}"]
    if not entry.literal:
        words.append("(every address of this name)")
    if entry.name:
        words.append(entry.name)
    words += [f"{key}={value}" for key, value in sorted(entry.labels.items())]
    return "  ".join(words)
