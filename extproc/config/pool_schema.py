"""The `pool`, `pools` and `cluster` sections: sources of endpoints, and request matches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

import msgspec

from extproc.config import constraints, policy_schema, scheduling_schema
from extproc.config.autoscaling import ScalingSection
from extproc.config.discovered_matches import MatchRule
from extproc.discovery.kubernetes.settings import MOST_PORTS
from extproc.election.settings import ElectionSettings
from extproc.routing import pool_match

#: A port number of an engine (TCP).
EnginePort = Annotated[int, msgspec.Meta(ge=1, le=65535)]


class EndpointEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """An endpoint in the configuration.

    Attributes:
        address: `ip:port`, `[ipv6]:port` or `hostname:port`; a name stands for every address it
            resolves to. No default: an endpoint is its address.
        name: Display name; empty takes the address.
        labels: Free labels (hardware, zone, role). None, because nothing needs them.
    """

    address: constraints.Name
    name: str = ""
    labels: Mapping[str, str] = {}


class KubernetesSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The endpoints of a pool in a Kubernetes cluster: exactly one of the first three fields.

    Attributes:
        inference_pool: Name of an InferencePool; its selector and target ports are followed.
        selector: Labels pods must have, for clusters without the CRD. None.
        service: Name of a Service whose EndpointSlices are followed; labels of pods are then
            unknown. Empty for none.
        namespace: Of all these. Empty: the one this process runs in, from the environment variable
            NAMESPACE or the service account, else `default`.
        group: API group of the InferencePool. `inference.networking.k8s.io` is v1; the older
            `inference.networking.x-k8s.io` is v1alpha2.
        ports: Ports of the pods a selector finds, each an endpoint of its own. None: pods name
            theirs in the annotation `model-pod-port`, as those of KubeAI do.
        port: Name of the Service's port, or number of the port on the pods. Empty: its only one.
    """

    inference_pool: str = ""
    selector: Mapping[constraints.Name, str] = {}
    service: str = ""
    namespace: str = ""
    group: Literal["inference.networking.k8s.io", "inference.networking.x-k8s.io"] = (
        "inference.networking.k8s.io"
    )
    ports: Annotated[tuple[EnginePort, ...], msgspec.Meta(max_length=MOST_PORTS)] = ()
    port: str = ""


class PoolSource(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Source of a pool's endpoints: a list, a file that is watched, or Kubernetes.

    Attributes:
        name: Label of the pool in metrics and logs. Empty: a single pool needs no label.
        endpoints: Addresses, or entries with name and labels. None, because there are no usual
            addresses.
        endpoints_file: YAML or JSON file with the same list under `endpoints`, watched for
            changes; empty for none.
        kubernetes: Objects of a cluster to watch; null for none. At most one of the three sources
            is used.
        dns_refresh_s: Seconds between look-ups of host names. 30 is the usual lifetime of a
            record in a cluster.
        objectives: Priority by the name that `x-llm-d-inference-objective` carries; requests below
            0 are dropped while every endpoint is full. None: every request has priority 0.
        rewrites: Other models for requests that name some, by weight: canaries and aliases. None:
            engines get the name the client sent.
        autoscaling: How many replicas there are; null leaves that to others.
    """

    name: str = ""
    endpoints: tuple[constraints.Name | EndpointEntry, ...] = ()
    endpoints_file: str = ""
    kubernetes: KubernetesSection | None = None
    dns_refresh_s: constraints.PositiveSeconds = 30.0
    objectives: Mapping[constraints.BoundedName, policy_schema.Priority] = {}
    rewrites: tuple[policy_schema.RewriteEntry, ...] = ()
    autoscaling: ScalingSection | None = None


class PoolSection(PoolSource, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A pool of several in a process.

    Attributes:
        name: Label of the pool in metrics, logs and decisions. No default: it identifies the pool.
        endpoints: Addresses, or entries with name and labels. None, because there are no usual
            addresses.
        endpoints_file: YAML or JSON file with the same list under `endpoints`, watched for
            changes; empty for none.
        kubernetes: Objects of a cluster to watch; null for none. At most one of the three sources
            is used.
        dns_refresh_s: Seconds between look-ups of host names. 30 is the usual lifetime of a
            record in a cluster.
        objectives: Priority by the name that `x-llm-d-inference-objective` carries. None: every
            request has priority 0.
        rewrites: Other models for requests that name some. None: engines get the client's name.
        autoscaling: How many replicas there are; null leaves that to others.
        match: Conditions on its requests. None: requests that name a model its endpoints list, that
            the data plane hints to them, or that no other pool takes.
        scheduling: Its scheduling rules; null takes the section of that name at the top.
    """

    name: constraints.Name
    match: pool_match.PoolMatch = pool_match.PoolMatch()
    scheduling: scheduling_schema.SchedulingSection | None = None


class ClusterSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Access to the Kubernetes API server, and discovery settings of the process.

    Attributes:
        kubeconfig: Path of a kubeconfig file. Empty: the pod's service account if there is one,
            else what KUBECONFIG names, else the usual place.
        context: Context in that file; empty for its current one.
        discover_pools: Serve every InferencePool of a `namespace`, or of the whole `cluster`, as a pool
            of its own, beside those written out. `none`: only those.
        namespace: For `discover_pools: namespace`. Empty: the one this process runs in.
        claims: Rules for the matches that such pools state by annotations of their InferencePools;
            a match outside of all rules is ignored. None: write access to an InferencePool does
            not suffice to take requests that another pool serves.
        policies: Follow InferenceObjectives and InferenceModelRewrites in the namespaces of
            InferencePools. True; it takes rights to read them, and does nothing without the CRDs.
        override_ip: Let a pod's annotation `model-pod-ip` replace its IP, as KubeAI's
            allowPodAddressOverride does. False: anyone who may annotate a pod could draw traffic to
            any address.
        leader_election: Be ready only while this replica holds a Lease, as the upstream picker's
            high-availability mode. False: every replica picks, and a gateway may use any of them.
        lease: Name and times of that Lease; its own defaults give reasons.
    """

    kubeconfig: str = ""
    context: str = ""
    discover_pools: Literal["none", "namespace", "cluster"] = "none"
    namespace: str = ""
    claims: tuple[MatchRule, ...] = ()
    policies: bool = True
    override_ip: bool = False
    leader_election: bool = False
    lease: ElectionSettings = ElectionSettings()
