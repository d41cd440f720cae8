"""Views of pools over cached objects, each with its own pods or slices.

Merging of InferenceObjectives and InferenceModelRewrites into a policy.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from extproc.discovery import endpoint_list
from extproc.discovery.kubernetes import objects, pod_endpoints
from extproc.endpoint import NO_LABELS, Endpoint
from extproc.pool import inference_policy


class PoolSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Definition of a pool of pods.

    Attributes:
        selector: Labels a pod must carry, all of them.
        ports: Target ports; none when each pod names its own.
        ref: Reference that objectives and rewrites use; None for other than an InferencePool.
        app_protocol: As written.
        annotations: Of the InferencePool.
        created: Creation time of the InferencePool, RFC 3339 in UTC.
    """

    selector: Mapping[str, str]
    ports: tuple[int, ...]
    ref: objects.PoolRef | None = None
    app_protocol: str = ""
    annotations: Mapping[str, str] = NO_LABELS
    created: str = ""


def spec_of(pool: objects.InferencePool) -> PoolSpec:
    """Returns the spec of an InferencePool."""
    return PoolSpec(
        selector=pool.selector,
        ports=pool.ports,
        ref=objects.PoolRef(pool.group, pool.name),
        app_protocol=pool.app_protocol,
        annotations=pool.annotations,
        created=pool.created,
    )


class PodView:
    """View of a pool of pods.

    Args:
        namespace: Of the pods.
        spec: None as long as the object that defines the pool is not there.
        override_ip: See `Settings.override_ip`.

    Attributes:
        namespace: The same.
        spec: The same.
        policy: Policy of its objectives and rewrites.
    """

    def __init__(self, namespace: str, spec: PoolSpec | None, *, override_ip: bool) -> None:
        self.namespace = namespace
        self.spec = spec
        self.policy = inference_policy.EMPTY_POLICY
        self._override_ip = override_ip
        self._members: dict[str, tuple[objects.Pod, tuple[Endpoint, ...]]] = {}

    def set_policy(self, policy: inference_policy.InferencePolicy) -> None:
        """Replaces the policy."""
        self.policy = policy

    def respecify(self, spec: PoolSpec | None, pods: Iterable[objects.Pod]) -> None:
        """Replaces the spec and selects pods again.

        Args:
            spec: How; None if nothing defines it any more.
            pods: All of the namespace.
        """
        self.spec = spec
        self._members = {}
        for pod in pods:
            self.consider(pod.name, pod)

    def consider(self, name: str, pod: objects.Pod | None) -> bool:
        """Applies a changed or deleted pod.

        Returns:
            Whether that changes the pool.
        """
        spec = self.spec
        before = self._members.get(name)
        if pod is None or spec is None or not pod_endpoints.selects(spec.selector, pod.labels):
            self._members.pop(name, None)
            return before is not None and bool(before[1])
        endpoints = pod_endpoints.pod_endpoints(pod, spec.ports, override_ip=self._override_ip)
        if before is not None and before[1] == endpoints:
            # The endpoints known are kept, so that most comparisons of pools end at identity.
            self._members[name] = (pod, before[1])
            return False
        self._members[name] = (pod, endpoints)
        return before is not None or bool(endpoints)

    def to_discovered_pool(self) -> endpoint_list.DiscoveredPool:
        """Returns the pool as discovered."""
        if self.spec is None:
            return endpoint_list.DiscoveredPool(exists=False)
        return endpoint_list.DiscoveredPool(
            pod_endpoints.merge(self._members.values()),
            policy=self.policy,
            app_protocol=self.spec.app_protocol,
            annotations=self.spec.annotations,
            created=self.spec.created,
        )


class SliceView:
    """View of the pool of a Service.

    Args:
        namespace: Of the Service.
        port: See `settings.ServiceRef`.

    Attributes:
        namespace: The same.
        slices: By name.
    """

    def __init__(self, namespace: str, port: str) -> None:
        self.namespace = namespace
        self.slices: dict[str, objects.EndpointSlice] = {}
        self._port = port

    def to_discovered_pool(self) -> endpoint_list.DiscoveredPool:
        """Returns the pool as discovered; a Service without pods has a slice as well."""
        slices = self.slices.values()
        return endpoint_list.DiscoveredPool(
            pod_endpoints.slice_endpoints(slices, self._port),
            exists=bool(slices),
            app_protocol=pod_endpoints.app_protocol(slices, self._port),
        )


View = PodView | SliceView


def policy_of(
    pool: objects.PoolRef,
    objectives: Iterable[objects.ObjectiveObject],
    rewrites: Iterable[objects.RewriteObject],
) -> inference_policy.InferencePolicy:
    """Builds the policy of one pool (docs/spec/protocol.md#inferenceobjective).

    Args:
        pool: Pool of the policy.
        objectives: Of its namespace, in any order.
        rewrites: The same. Of one age, the name decides, so that replicas agree.
    """
    aged = sorted(
        (rewrite for rewrite in rewrites if rewrite.pool == pool),
        key=lambda rewrite: (rewrite.created, rewrite.name),
    )
    named = sorted(
        (objective.name, objective.priority) for objective in objectives if objective.pool == pool
    )
    return inference_policy.InferencePolicy(
        priorities=dict(named), rules=tuple(rule for rewrite in aged for rule in rewrite.rules)
    )
