"""Views of pools over cached objects: their pods or slices, and their merged inference policy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from extproc.discovery import endpoint_list
from extproc.discovery.kubernetes import objects
from extproc.endpoint import Endpoint, ServedModels, join_host_port, parse_port
from extproc.pool import inference_policy

#: KubeAI's labels: the model a pod serves, and one per adapter it has loaded.
MODEL_LABEL = "model"
ADAPTER_PREFIX = "adapter.kubeai.org/"


def selects(pool: objects.InferencePool, labels: Mapping[str, str]) -> bool:
    """Returns True if the selector of a pool matches the labels of a pod."""
    if not pool.selector.items() <= labels.items():
        return False
    return not pool.expressions or all(condition.is_met(labels) for condition in pool.expressions)


def pod_endpoints(pod: objects.Pod, ports: Sequence[int]) -> tuple[Endpoint, ...]:
    """Returns the endpoints of a pool's pod; none while it is not ready.

    Args:
        ports: Target ports in their order: with several, each is a rank of its own, called
            `<pod>-rank-<index>` (docs/spec/protocol.md#endpoints-of-a-pod). None: the pod names its
            port.
    """
    if not pod.ready or not pod.ip:
        return ()
    if not ports:
        port = parse_port(pod.model_port)
        ports = (port,) if port else ()
    wanted = _active(pod.active_ports, ports)
    labels = {"namespace": pod.namespace, **pod.labels}
    if pod.node:
        labels.setdefault("kubernetes.io/hostname", pod.node)
    models = _models(pod)
    return tuple(
        Endpoint(
            join_host_port(pod.ip, port),
            name=pod.name if len(ports) == 1 else f"{pod.name}-rank-{rank}",
            labels=labels,
            models=models,
            uid=pod.uid,
        )
        for rank, port in enumerate(ports)
        if port in wanted
    )


def _active(annotation: str | None, ports: Sequence[int]) -> Iterable[int]:
    """Returns the active ports; a port that is no target port is ignored.

    Source: docs/reference/protocol-conformance.md#point-62.
    """
    if annotation is None:
        return ports
    return {parse_port(text.strip()) for text in annotation.split(",")}


def _models(pod: objects.Pod) -> ServedModels | None:
    """Returns the models in the KubeAI labels of a pod; None without them.

    `model` alone is a label anybody may use; KubeAI's pods all carry the port as well.
    """
    model = pod.labels.get(MODEL_LABEL)
    if not model:
        return None
    adapters = frozenset(
        key[len(ADAPTER_PREFIX) :] for key in pod.labels if key.startswith(ADAPTER_PREFIX)
    )
    if not adapters and not pod.model_port:
        return None
    return ServedModels(frozenset({model}), adapters)


def merge(pods: Iterable[tuple[objects.Pod, tuple[Endpoint, ...]]]) -> tuple[Endpoint, ...]:
    """Merges the endpoints of a pool by pod name, without duplicate addresses.

    Every replica of extproc lists them in this order. Of pods that claim one address the
    youngest has it: an IP goes to the next pod before the last word of the one before is heard.
    """
    listed = [pair for pair in pods if pair[1]]
    listed.sort(key=lambda pair: pair[0].name)
    merged = tuple([endpoint for _, endpoints in listed for endpoint in endpoints])
    if len({endpoint.address for endpoint in merged}) == len(merged):
        return merged
    owners: dict[str, tuple[str, str, str]] = {}
    for pod, endpoints in listed:
        for endpoint in endpoints:
            claim = _claim(pod)
            owners[endpoint.address] = max(owners.get(endpoint.address, claim), claim)
    return tuple(
        endpoint
        for pod, endpoints in listed
        for endpoint in endpoints
        if owners[endpoint.address] == _claim(pod)
    )


def _claim(pod: objects.Pod) -> tuple[str, str, str]:
    """Sort key by age, greatest for the youngest; replicas agree among pods of one second."""
    return pod.created, pod.uid, pod.name


def slice_endpoints(slices: Iterable[objects.EndpointSlice], port: str) -> tuple[Endpoint, ...]:
    """Returns the endpoints of a Service by name, without duplicate pods; `port` as configured."""
    by_owner: dict[tuple[str, int], Endpoint] = {}
    # A Service of two families has every pod twice; IPv4 comes first in text order.
    for endpoint_slice in sorted(
        slices, key=lambda endpoint_slice: (endpoint_slice.family, endpoint_slice.name)
    ):
        number = _chosen(endpoint_slice.ports, port)
        for backend in endpoint_slice.backends if number else ():
            if backend.ready and backend.ip:
                owner = backend.uid or backend.name or backend.ip
                by_owner.setdefault((owner, number), _of_backend(endpoint_slice, backend, number))
    by_address = {endpoint.address: endpoint for endpoint in by_owner.values()}
    return tuple(
        sorted(by_address.values(), key=lambda endpoint: (endpoint.name, endpoint.address))
    )


def app_protocol(slices: Iterable[objects.EndpointSlice], port: str) -> str:
    """Returns the appProtocol of the Service port; empty when not set."""
    return next(
        (
            slice_port.app_protocol
            for endpoint_slice in slices
            for slice_port in endpoint_slice.ports
            if slice_port.number == _chosen(endpoint_slice.ports, port) and slice_port.app_protocol
        ),
        "",
    )


def _chosen(ports: Sequence[objects.SlicePort], port: str) -> int:
    """Returns the number of the port by name or number; 0 when absent or ambiguous."""
    if not port:
        return ports[0].number if len(ports) == 1 else 0
    return next(
        (
            candidate.number
            for candidate in ports
            if port in (candidate.name, str(candidate.number))
        ),
        0,
    )


def describe_missing_port(slices: Iterable[objects.EndpointSlice], port: str) -> str:
    """Describes why ready backends are no endpoints; empty where there are endpoints, or no backends."""
    ready = [
        endpoint_slice
        for endpoint_slice in slices
        if any(backend.ready and backend.ip for backend in endpoint_slice.backends)
    ]
    if not ready or any(_chosen(endpoint_slice.ports, port) for endpoint_slice in ready):
        return ""
    ports = {slice_port for endpoint_slice in ready for slice_port in endpoint_slice.ports}
    listed = [f"{slice_port.name} {slice_port.number}".strip() for slice_port in ports]
    return (
        f"its pods are ready, but no port is chosen: expected pool.kubernetes.port to be the name of a "
        f"port, or its number on the pods, of {', '.join(sorted(listed)) or 'none'}, got {port!r}"
    )


def _of_backend(
    endpoint_slice: objects.EndpointSlice, backend: objects.SliceBackend, port: int
) -> Endpoint:
    labels = {"namespace": endpoint_slice.namespace}
    if backend.node:
        labels["kubernetes.io/hostname"] = backend.node
    if backend.zone:
        labels["topology.kubernetes.io/zone"] = backend.zone
    address = join_host_port(backend.ip, port)
    return Endpoint(address, name=backend.name or address, labels=labels, uid=backend.uid)


class PodView:
    """View of a pool of pods.

    Args:
        pool: None as long as the object that defines the pool is not there.
    """

    def __init__(self, namespace: str, pool: objects.InferencePool | None) -> None:
        self.namespace = namespace
        self.pool = pool
        self.policy = inference_policy.EMPTY_POLICY
        self._members: dict[str, tuple[objects.Pod, tuple[Endpoint, ...]]] = {}

    def set_policy(self, policy: inference_policy.InferencePolicy) -> None:
        """Replaces the policy."""
        self.policy = policy

    def set_pool(self, pool: objects.InferencePool | None, pods: Iterable[objects.Pod]) -> None:
        """Replaces the definition, None where no object defines the pool, and selects pods again."""
        self.pool = pool
        self._members = {}
        for pod in pods:
            self.update_pod(pod.name, pod)

    def update_pod(self, name: str, pod: objects.Pod | None) -> bool:
        """Applies a changed or deleted pod; returns whether that changes the pool."""
        pool = self.pool
        before = self._members.get(name)
        if pod is None or pool is None or not selects(pool, pod.labels):
            self._members.pop(name, None)
            return before is not None and bool(before[1])
        endpoints = pod_endpoints(pod, pool.ports)
        if before is not None and before[1] == endpoints:
            # The endpoints known are kept, so that most comparisons of pools end at identity.
            self._members[name] = (pod, before[1])
            return False
        self._members[name] = (pod, endpoints)
        return before is not None or bool(endpoints)

    def to_discovered_pool(self) -> endpoint_list.DiscoveredPool:
        """Returns the pool as discovered."""
        if self.pool is None:
            return endpoint_list.DiscoveredPool(exists=False)
        return endpoint_list.DiscoveredPool(
            merge(self._members.values()),
            policy=self.policy,
            app_protocol=self.pool.app_protocol,
            annotations=self.pool.annotations,
            created=self.pool.created,
        )


class SliceView:
    """View of the pool of a Service."""

    def __init__(self, namespace: str, port: str) -> None:
        self.namespace = namespace
        self.slices: dict[str, objects.EndpointSlice] = {}
        self._port = port

    def to_discovered_pool(self) -> endpoint_list.DiscoveredPool:
        """Returns the pool as discovered; a Service without pods has a slice as well."""
        slices = self.slices.values()
        return endpoint_list.DiscoveredPool(
            slice_endpoints(slices, self._port),
            exists=bool(slices),
            app_protocol=app_protocol(slices, self._port),
        )

    def describe_missing_port(self) -> str:
        """Describes why ready pods are no endpoints; empty where they are, or there are none."""
        return describe_missing_port(self.slices.values(), self._port)


View = PodView | SliceView


def build_policy(
    pool: objects.PoolRef, policy_objects: Iterable[objects.Value]
) -> inference_policy.InferencePolicy:
    """Builds the policy of one pool (docs/spec/protocol.md#inferenceobjective).

    Args:
        policy_objects: Objectives and rewrites of its namespace, in any order; the name decides between
            rewrites of equal age, so that replicas agree.
    """
    priorities: dict[str, int] = {}
    rewrites: list[objects.RewriteObject] = []
    for policy_object in policy_objects:
        match policy_object:
            case objects.ObjectiveObject() if policy_object.pool == pool:
                priorities[policy_object.name] = policy_object.priority
            case objects.RewriteObject() if policy_object.pool == pool:
                rewrites.append(policy_object)
    rewrites.sort(key=lambda rewrite: (rewrite.created, rewrite.name))
    return inference_policy.InferencePolicy(
        priorities=dict(sorted(priorities.items())),
        rules=tuple(rule for rewrite in rewrites for rule in rewrite.rules),
    )
