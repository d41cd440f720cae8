"""What settings ask for of Kubernetes, in the words of discovery."""

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

#: Where a pod finds the namespace it runs in.
_OWN = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")

#: What a pool without a name is called towards Kubernetes.
_UNNAMED = "pool"


class KubernetesPlan(msgspec.Struct, frozen=True):
    """What is followed.

    Attributes:
        watching: For the follower.
        pools: Names of written pools by the keys the follower has for them; what has no name here
            is a pool that Kubernetes brings.
    """

    watching: KubernetesSettings
    pools: Mapping[str, str]


def plan(
    settings: Settings, *, where: str, environment: Mapping[str, str]
) -> KubernetesPlan | None:
    """What is to be followed; None for nothing.

    Args:
        settings: All of them.
        where: The file or flags they came from, for errors.
        environment: Variables of the process.

    Raises:
        ConfigError: Two pools mean the same object.
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
                found=f"{source.key} in {names[source.key]} and {pool.name}",
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
    """The namespace this process runs in.

    Args:
        environment: Variables of the process; NAMESPACE comes before the service account.
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
