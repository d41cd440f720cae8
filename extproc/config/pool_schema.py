"""The `pool`, `pools` and `cluster` sections: sources of endpoints, and request matches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Literal

import msgspec

from extproc.config import scheduling_schema, validation
from extproc.config.autoscaling import ScalingSection
from extproc.config.pool_annotations import MatchRule
from extproc.discovery.kubernetes.settings import MAX_PORTS
from extproc.election.lease_state import ElectionSettings
from extproc.pool import inference_policy
from extproc.routing import pool_match

#: A port number of an engine (TCP).
EnginePort = Annotated[int, msgspec.Meta(ge=1, le=65535)]


Priority = Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)]
Weight = Annotated[int, msgspec.Meta(ge=0, le=1_000_000)]


class RewriteTarget(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A model that replaces the requested model.

    Attributes:
        model: Name to write into the body, a base model or an adapter. No default.
        weight: Weight among the targets. Null: if no target has a weight, all are drawn with equal
            probability; otherwise a target without a weight is never drawn.
    """

    model: validation.BoundedName
    weight: Weight | None = None


class RewriteEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A rewrite of requested models to targets.

    Attributes:
        models: Exact names in requests. None: every name that no other rewrite lists.
        targets: Models to draw from, at least one.
    """

    models: tuple[validation.BoundedName, ...] = ()
    targets: Annotated[tuple[RewriteTarget, ...], msgspec.Meta(min_length=1)]


def build_policy(
    objectives: Mapping[str, int], rewrites: Sequence[RewriteEntry]
) -> inference_policy.InferencePolicy:
    """Build the policy of a pool from its sections."""
    if not (objectives or rewrites):
        return inference_policy.EMPTY_POLICY
    rules = [
        inference_policy.RewriteRule(
            rewrite.models,
            tuple(
                inference_policy.TargetModel(target.model, target.weight)
                for target in rewrite.targets
            ),
        )
        for rewrite in rewrites
    ]
    return inference_policy.InferencePolicy(objectives, tuple(rules))


def describe_policy(
    objectives: Mapping[str, int], rewrites: Sequence[RewriteEntry]
) -> Iterator[str]:
    """Describe the sections, a line each for `extproc check`."""
    if objectives:
        ranked = sorted(objectives.items(), key=lambda pair: (-pair[1], pair[0]))
        yield "objectives  " + ", ".join(f"{name} {priority}" for name, priority in ranked)
    head = "rewrites    "
    for rewrite in rewrites:
        targets = ", ".join(
            target.model if target.weight is None else f"{target.model} ({target.weight})"
            for target in rewrite.targets
        )
        yield f"{head}{', '.join(rewrite.models) or 'every other model'} to {targets}"
        head = " " * len(head)


def warnings(rewrites: Sequence[RewriteEntry], where: str) -> Iterator[str]:
    """Warn of rewrites that are valid and probably a mistake.

    Args:
        where: Where they stand, such as `pool.rewrites`.
    """
    first: dict[str, int] = {}
    for at, rewrite in enumerate(rewrites):
        for model in rewrite.models or ("",):
            before = first.setdefault(model, at)
            if before != at:
                named = model or "every other model"
                yield f"{where}[{at}] is never used for {named}: {where}[{before}] comes first"
        weights = [target.weight for target in rewrite.targets]
        unweighted = [target.model for target in rewrite.targets if target.weight is None]
        if sum(weight or 0 for weight in weights) and unweighted:
            yield f"{where}[{at}] never draws {', '.join(unweighted)}: others have a weight"
        elif 0 in weights and not any(weights):
            yield f"{where}[{at}] has only weights of 0: its targets are drawn alike"


class EndpointEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """An endpoint in the configuration.

    Attributes:
        address: `ip:port`, `[ipv6]:port` or `hostname:port`; a name stands for every address it
            resolves to. No default: an endpoint is its address.
        name: Display name; empty takes the address.
        labels: Labels for filters and scorers, such as hardware, zone or role. None.
    """

    address: validation.Name
    name: str = ""
    labels: Mapping[str, str] = {}


class KubernetesSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The endpoints of a pool in a Kubernetes cluster: exactly one of the first three fields.

    Attributes:
        inference_pool: Name of an InferencePool, whose selector and target ports are used.
        selector: Labels that pods must have, for clusters without the CRD. None.
        service: Name of a Service whose EndpointSlices are used; labels of pods are then unknown.
            Empty for none.
        namespace: Namespace of these objects. Empty: the one this process runs in, from the
            environment variable NAMESPACE or the service account, else `default`.
        group: API group of the InferencePool. `inference.networking.k8s.io` is v1; the older
            `inference.networking.x-k8s.io` is v1alpha2.
        ports: Ports of the pods that `selector` matches, each an endpoint of its own. None: pods
            name their port in the annotation `model-pod-port`, as those of KubeAI do.
        port: Name of the port of the Service, or its number on the pods. Empty: its only port.
    """

    inference_pool: str = ""
    selector: Mapping[validation.Name, str] = {}
    service: str = ""
    namespace: str = ""
    group: Literal["inference.networking.k8s.io", "inference.networking.x-k8s.io"] = (
        "inference.networking.k8s.io"
    )
    ports: Annotated[tuple[EnginePort, ...], msgspec.Meta(max_length=MAX_PORTS)] = ()
    port: str = ""


class PoolSource(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Source of a pool's endpoints: a list, a file that is watched, or Kubernetes.

    Attributes:
        name: Label of the pool in metrics and logs. Empty: a single pool needs no label.
        endpoints: Addresses, or entries with name and labels. None.
        endpoints_file: YAML or JSON file with the same list under `endpoints`, watched for
            changes; empty for none.
        kubernetes: Objects of a cluster to watch; null for none. At most one of the three sources
            is used.
        dns_refresh_s: Seconds between lookups of host names. 30 is the usual lifetime of a record
            in a cluster.
        objectives: Priority by objective, the name in `x-llm-d-inference-objective`. Requests below
            0 are rejected while every endpoint is saturated. None: every request has priority 0.
        rewrites: Models that replace the requested model, by weight: aliases and canaries. None:
            engines receive the client's model name.
        autoscaling: Scaling of the engines of the pool. Null: others decide how many there are.
    """

    name: str = ""
    endpoints: tuple[validation.Name | EndpointEntry, ...] = ()
    endpoints_file: str = ""
    kubernetes: KubernetesSection | None = None
    dns_refresh_s: validation.PositiveSeconds = 30.0
    objectives: Mapping[validation.BoundedName, Priority] = {}
    rewrites: tuple[RewriteEntry, ...] = ()
    autoscaling: ScalingSection | None = None


class PoolSection(PoolSource, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A pool of several in a process.

    Attributes:
        name: Label of the pool in metrics, logs and decisions. No default: it identifies the pool.
        match: Conditions on requests for the pool. None: it takes requests for models that its
            endpoints list, requests that the subset hint of the data plane directs to them, and
            those that no other pool takes.
        scheduling: Scheduling rules of the pool. Null: the section `scheduling` at the top level.
    """

    name: validation.Name
    match: pool_match.PoolMatch = pool_match.PoolMatch()
    scheduling: scheduling_schema.SchedulingSection | None = None


class ClusterSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Access to the Kubernetes API server, and discovery settings of the process.

    Attributes:
        kubeconfig: Path of a kubeconfig file. Empty: the service account of the pod if there is
            one, else the file in KUBECONFIG, else the usual path.
        context: Context in that file; empty for its current one.
        discover_pools: Serve every InferencePool of a `namespace`, or of the `cluster`, as a pool
            of its own, besides those of the file. `none`: only those of the file.
        namespace: For `discover_pools: namespace`. Empty: the one this process runs in.
        match_rules: Rules for the matches that such pools state in annotations of their InferencePools;
            a match outside of all rules is ignored. None: write access to an InferencePool does not
            suffice to take requests that another pool serves.
        policies: Follow InferenceObjectives and InferenceModelRewrites in the namespaces of
            InferencePools. True; it takes rights to read them, and does nothing without the CRDs.
        override_ip: Let the annotation `model-pod-ip` of a pod replace its IP address, as KubeAI's
            allowPodAddressOverride does. False: anyone who may annotate a pod could direct traffic
            to any address.
        leader_election: Be ready only while this replica holds a Lease, as in the high-availability
            mode of the upstream EPP. False: every replica picks, and a gateway may use any of them.
        lease: Name and times of the Lease; each field has the reason of its default.
    """

    kubeconfig: str = ""
    context: str = ""
    discover_pools: Literal["none", "namespace", "cluster"] = "none"
    namespace: str = ""
    match_rules: tuple[MatchRule, ...] = ()
    policies: bool = True
    override_ip: bool = False
    leader_election: bool = False
    lease: ElectionSettings = ElectionSettings()
