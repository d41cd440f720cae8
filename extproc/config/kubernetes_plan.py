"""Kubernetes objects to watch, and the Lease of leader election, resolved from settings.

An election takes place if `cluster.leader_election` ties readiness to it, or if a pool is scaled in
Kubernetes, which only a single replica may do.
"""

from __future__ import annotations

import secrets
import socket
from collections.abc import Mapping
from pathlib import Path

import msgspec

from extproc import election
from extproc.config import pool_sections, pools
from extproc.config.settings import Settings
from extproc.discovery.kubernetes.settings import (
    AllPools,
    InferencePoolRef,
    KubernetesSettings,
    KubernetesSource,
    PodSelector,
    ServiceRef,
)
from extproc.election import ElectionSettings
from extproc.errors import ConfigError

#: File with the namespace of a pod.
_NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")

#: Name of a pool without a name in keys of sources.
_UNNAMED = "pool"


class KubernetesPlan(msgspec.Struct, frozen=True):
    """The watched objects, and the pools they belong to.

    Attributes:
        pools: Names of configured pools by source key; a key without an entry belongs to a
            discovered pool.
    """

    settings: KubernetesSettings
    pools: Mapping[str, str]


def plan_kubernetes(
    settings: Settings, *, where: str, environment: Mapping[str, str]
) -> KubernetesPlan | None:
    """Resolve the objects to watch; None if the settings name none.

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
        source = _with_namespace(pool.kubernetes, pool.name or _UNNAMED, here)
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
        return _NAMESPACE_FILE.read_text(encoding="utf-8").strip() or "default"
    except OSError:
        return "default"


def is_pod(environment: Mapping[str, str]) -> bool:
    """Return True if this process runs in a pod."""
    return bool(environment.get(_IN_CLUSTER_VARIABLE))


def process_identity(environment: Mapping[str, str]) -> str:
    """Return the name of this process among replicas: pod or host name with a random suffix."""
    return f"{environment.get('POD_NAME') or socket.gethostname()}_{secrets.token_hex(4)}"


def _with_namespace(
    wanted: pool_sections.KubernetesSection, name: str, here: str
) -> InferencePoolRef | PodSelector | ServiceRef:
    place = wanted.namespace or here
    if wanted.inference_pool:
        return InferencePoolRef(place, wanted.inference_pool, wanted.group)
    if wanted.service:
        return ServiceRef(place, wanted.service, wanted.port)
    return PodSelector(
        place, name, dict(wanted.selector), wanted.ports, wanted.selector_expressions
    )


#: Says that this is a pod (Kubernetes sets it in every container).
_IN_CLUSTER_VARIABLE = "KUBERNETES_SERVICE_HOST"

#: client-go's: a leader must be able to try again before its time is up.
_MIN_SLACK_S = 1.2


class ElectionPlan(msgspec.Struct, frozen=True):
    """Resolved settings of an election.

    Attributes:
        lease: The Lease, its name and namespace filled in, and the times of candidates.
        api_settings: Access to the API server; it has no sources.
    """

    lease: ElectionSettings
    api_settings: KubernetesSettings


def plan_election(
    settings: Settings, *, where: str, environment: Mapping[str, str]
) -> ElectionPlan | None:
    """Resolve the election; None if the settings need none.

    Raises:
        ConfigError: No API server is configured, the Lease's name is invalid, or the times
            contradict each other.
    """
    wanted = settings.cluster
    if not (wanted.leader_election or pools.scales_kubernetes_objects(settings)):
        return None
    plan = plan_kubernetes(settings, where=where, environment=environment)
    if plan is None and not wanted.kubeconfig and not is_pod(environment):
        own_identity = "cluster.leader_election" if wanted.leader_election else "autoscaling.target"
        raise ConfigError(
            where,
            wanted=f"a Kubernetes cluster that keeps the Lease of {own_identity}",
            got="no pool from Kubernetes, no kubeconfig and no pod around",
            fix=f"set cluster.kubeconfig, or leave {own_identity} off: every replica can pick",
        )
    _check_lease_times(wanted.lease, where)
    here = namespace(environment)
    name = wanted.lease.name or _lease_name(settings, plan, here)
    if not election.is_lease_name(name):
        raise ConfigError(
            f"{where}, cluster.lease.name",
            wanted="a name as objects of Kubernetes have: up to 253 of a-z, 0-9, - and .",
            got=repr(name),
            fix="name the Lease yourself",
        )
    return ElectionPlan(
        msgspec.structs.replace(wanted.lease, name=name, namespace=wanted.lease.namespace or here),
        _access_settings(settings),
    )


def plan_metrics_auth(
    settings: Settings, *, environment: Mapping[str, str]
) -> KubernetesSettings | None:
    """Resolve the access to the API server that reviews tokens; None if /metrics is open.

    Raises:
        ConfigError: No API server is configured.
    """
    if not settings.server.metrics_endpoint_auth:
        return None
    if not (pools.from_kubernetes(settings) or settings.cluster.kubeconfig or is_pod(environment)):
        raise ConfigError(
            "server.metrics_endpoint_auth (--metrics-endpoint-auth)",
            wanted="a Kubernetes cluster that reviews tokens",
            got="no pool from Kubernetes, no kubeconfig and no pod around",
            fix="set cluster.kubeconfig, or leave it off and restrict who reaches the metrics port",
        )
    return _access_settings(settings)


def _access_settings(settings: Settings) -> KubernetesSettings:
    cluster = settings.cluster
    return KubernetesSettings(sources=(), kubeconfig=cluster.kubeconfig, context=cluster.context)


def _lease_name(settings: Settings, followed: KubernetesPlan | None, here: str) -> str:
    """Return the upstream picker's name of the Lease, or a common name for several pools.

    Source: docs/spec/protocol.md#flags-and-defaults.
    """
    sources = followed.settings.sources if followed is not None else ()
    if len(settings.pools) > 1 or len(sources) > 1:
        return f"epp-{here}-pools.llm-d.ai"
    pool = settings.pools[0] if settings.pools else settings.pool
    place, name = here, pool.name
    for source in sources:
        if isinstance(source, AllPools):
            return f"epp-{here}-pools.llm-d.ai"
        place = source.namespace
        if not isinstance(source, PodSelector):
            name = source.name
    target = pool.autoscaling.target if pool.autoscaling is not None else None
    # Deployments that scale different objects must not share a Lease: only one of them would scale.
    name = name or (target.name if target is not None else "") or _UNNAMED
    return f"epp-{place}-{name}.llm-d.ai"


def _check_lease_times(wanted: ElectionSettings, where: str) -> None:
    if wanted.retry_s * _MIN_SLACK_S < wanted.renew_s < wanted.duration_s:
        return
    raise ConfigError(
        f"{where}, cluster.lease",
        wanted=f"retry_s times {_MIN_SLACK_S:g} below renew_s, and renew_s below duration_s",
        got=f"{wanted.retry_s:g}, {wanted.renew_s:g} and {wanted.duration_s}",
        fix="leave a leader time to try again, and others time after it gave up",
    )
