"""Settings of Kubernetes discovery: pool sources and time limits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from extproc.endpoint import LabelExpression

#: API groups of InferencePool; the first serves version v1, the second v1alpha2.
POOL_GROUP = "inference.networking.k8s.io"
OLD_POOL_GROUP = "inference.networking.x-k8s.io"

#: Most target ports of a pool (docs/spec/protocol.md#inferencepool).
MAX_PORTS = 8


class NamedSource(msgspec.Struct, frozen=True):
    """Source of a single pool."""

    namespace: str
    name: str

    @property
    def key(self) -> str:
        """Pool name in `KubernetesDiscovery`."""
        return f"{self.namespace}/{self.name}"


class InferencePoolRef(NamedSource, frozen=True):
    """One InferencePool by name; it becomes the pool `namespace/name`, existing or not.

    Attributes:
        group: `POOL_GROUP` or `OLD_POOL_GROUP`.
    """

    group: str = POOL_GROUP


class PodSelector(NamedSource, frozen=True):
    """Pods by their labels, without any CRD; they become the pool `namespace/name`.

    Attributes:
        labels: All of them must match.
        ports: Each is an endpoint of every pod, at most `MAX_PORTS`. Empty: every pod names its
            one port in the annotation `model-pod-port`, as pods of KubeAI do, and a pod without
            it is no endpoint.
        expressions: Further conditions; at least one without labels.
    """

    labels: Mapping[str, str]
    ports: tuple[int, ...]
    expressions: tuple[LabelExpression, ...] = ()


class AllPools(msgspec.Struct, frozen=True):
    """All InferencePools; each becomes the pool `namespace/name` while it exists.

    Attributes:
        namespace: Namespace of the pools; empty for all, which takes a ClusterRole.
        group: `POOL_GROUP` or `OLD_POOL_GROUP`.
    """

    namespace: str = ""
    group: str = POOL_GROUP


class ServiceRef(NamedSource, frozen=True):
    """EndpointSlices of a Service; they become the pool `namespace/name`.

    Labels of pods are unknown then, but for `namespace`, the host and the zone.

    Attributes:
        port: Name of the Service's port, or number of the port on the pods (the target port:
            slices do not carry the other). Empty: the only port there is.
    """

    port: str = ""


KubernetesSource = InferencePoolRef | PodSelector | AllPools | ServiceRef


class KubernetesSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of Kubernetes discovery.

    Attributes:
        sources: Sources to watch; the keys of their pools must differ.
        kubeconfig: Path of a kubeconfig file. Empty: the service account of the pod, if its files
            are there, else what KUBECONFIG names, else the default place.
        context: Context of the kubeconfig file; empty for its current one.
        policies: Whether InferenceObjectives and InferenceModelRewrites are watched, in the
            namespaces of InferencePools. They take rights of their own; without them every
            request has priority 0.
        start_s: How long `start` waits for the first complete lists. It then gives up waiting,
            not trying: a replica whose API server is down is not ready, and becomes so later. Pools
            wait as long for InferenceObjectives and InferenceModelRewrites whose lists fail.
        request_s: Time limit for one list page, from the request to its last byte (seconds). A page
            of 500 pods is some 5 MB.
        connect_s: Time limit for a connection, TLS included (seconds).
        watch_s: Least length of a watch before the server ends it; each is spread up to twice
            that, so that not all are renewed at once. client-go requests 5 to 10 minutes, too.
        page: Objects per list page (count), as client-go requests.
        coalesce_s: Pause between two reports of changes, so that a burst makes few pools. The
            first change after a quiet time is reported at once.
        retry_s: First pause after a failure; it doubles up to `max_retry_s`. Each is spread
            between half and all of it.
        max_retry_s: Longest pause: how soon pools move again after an outage of the API server.
        absent_s: Longest pause between looks for a CRD that is not installed, and for rights that
            are missing: tools apply a Role and a Deployment in any order.
    """

    sources: Sequence[KubernetesSource]
    kubeconfig: str = ""
    context: str = ""
    policies: bool = True
    start_s: float = 15.0
    request_s: float = 60.0
    connect_s: float = 5.0
    watch_s: float = 300.0
    page: int = 500
    coalesce_s: float = 0.015
    retry_s: float = 0.25
    max_retry_s: float = 5.0
    absent_s: float = 10.0
