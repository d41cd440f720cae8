"""Resolves the Kubernetes objects to watch from settings."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from extproc.config import pool_schema
from extproc.config.settings import Settings
from extproc.discovery.kubernetes.settings import (
    AllPools,
    InferencePoolRef,
    KubernetesSettings,
    KubernetesSource,
    PodSelector,
    ServiceRef,
)
from extproc.errors import ConfigError

#: File with the namespace of a pod.
_OWN = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")

#: Name of a pool without a name in keys of sources.
_UNNAMED = "pool"


class KubernetesPlan(msgspec.Struct, frozen=True):
    """The watched objects, and the pools they belong to.

    Attributes:
        watching: Settings of Kubernetes discovery.
        pools: Names of configured pools by source key; a key without an entry belongs to a
            discovered pool.
    """

    watching: KubernetesSettings
    pools: Mapping[str, str]


def plan(
    settings: Settings, *, where: str, environment: Mapping[str, str]
) -> KubernetesPlan | None:
    """Resolve the objects to watch; None if the settings name none.

    Args:
        settings: All sections.
        where: The file or flags they came from, for errors.
        environment: Environment variables of the process.

    Raises:
        ConfigError: Two pools name the same object.
    """
    here = namespace(environment)
    listed = settings.pools or (settings.pool,)
    sources: list[KubernetesSource] = []
    names: dict[str, str] = {}
    for pool in listed:
        if pool.kubernetes is None:
            continue
        source = _source(pool.kubernetes, pool.name or _UNNAMED, here)
        if source.key in names:
            raise ConfigError(
                where,
                wanted="every object of the cluster in one pool",
                got=f"{source.key} in {names[source.key]} and {pool.name}",
                fix="take it out of one of them",
            )
        names[source.key] = pool.name
        sources.append(source)
    cluster = settings.cluster
    if cluster.discover_pools != "none":
        only = "" if cluster.discover_pools == "cluster" else cluster.namespace or here
        sources.append(AllPools(only))
    if not sources:
        return None
    return KubernetesPlan(
        KubernetesSettings(
            sources=sources,
            kubeconfig=cluster.kubeconfig,
            context=cluster.context,
            policies=cluster.policies,
            override_ip=cluster.override_ip,
        ),
        names,
    )


def namespace(environment: Mapping[str, str]) -> str:
    """Return the namespace of this process; `default` outside of a pod.

    Args:
        environment: Environment variables; NAMESPACE takes precedence over the service account.
    """
    named = environment.get("NAMESPACE", "")
    if named:
        return named
    try:
        return _OWN.read_text(encoding="utf-8").strip() or "default"
    except OSError:
        return "default"


def _source(
    wanted: pool_schema.KubernetesSection, name: str, here: str
) -> InferencePoolRef | PodSelector | ServiceRef:
    place = wanted.namespace or here
    if wanted.inference_pool:
        return InferencePoolRef(place, wanted.inference_pool, wanted.group)
    if wanted.service:
        return ServiceRef(place, wanted.service, wanted.port)
    return PodSelector(place, dict(wanted.selector), wanted.ports, name)
