"""API objects, frozen, reduced to the fields that pools depend on, and their decoders.

Unused fields are not decoded: the official client would build some 60 objects of a pod; that is 100
times the work.
"""

from __future__ import annotations

import functools
import ipaddress
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Generic, TypeVar

import msgspec

from extproc.discovery.kubernetes import settings, watch_plan
from extproc.endpoint import NO_LABELS, LabelExpression
from extproc.pool import inference_policy
from extproc.request import MAX_NAME_BYTES

#: What msgspec raises on bytes that are no such object: no JSON or another type, text that is no
#: UTF-8, and nesting without end.
BROKEN = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

#: kubectl's copy of the complete object.
_IGNORED_ANNOTATION = "kubectl.kubernetes.io/last-applied-configuration"

#: Addresses whose reading is remembered (count): pods keep theirs from event to event.
_ADDRESSES_KEPT = 16_384

_ENDED_PHASES = frozenset({"Succeeded", "Failed"})

_SpecT = TypeVar("_SpecT")
_PortNumber = Annotated[int, msgspec.Meta(ge=1, le=65535)]
_Priority = Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)]
_Weight = Annotated[int, msgspec.Meta(ge=1, le=1_000_000)]
_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME_BYTES)]
_NameOrEmpty = Annotated[str, msgspec.Meta(max_length=MAX_NAME_BYTES)]
#: The API server takes no longer name of any object.
_ObjectName = Annotated[str, msgspec.Meta(max_length=253)]


class Pod(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """A pod.

    Attributes:
        name: Unique there at one time.
        uid: Unique for ever.
        created: RFC 3339 in UTC, so that text order is time order.
        ip: IP address in its shortest form; empty while it has none.
        ready: Condition Ready is True, it is not being deleted and has not ended.
        active_ports: Annotation `llm-d.ai/active-ports`; None without it.
        model_port: Annotation `model-pod-port` of KubeAI.
    """

    namespace: str
    name: str
    uid: str = ""
    created: str = ""
    ip: str = ""
    ready: bool = False
    labels: Mapping[str, str] = NO_LABELS
    node: str = ""
    active_ports: str | None = None
    model_port: str = ""


class PoolRef(msgspec.Struct, frozen=True):
    """Reference of an objective or rewrite to a pool of its namespace."""

    group: str
    name: str


class InferencePool(msgspec.Struct, frozen=True, kw_only=True):
    """An InferencePool of either API group, or pods that the configuration selects as one.

    Attributes:
        namespace: Namespace of the object and of its pods.
        group: API group it was read from; empty for pods that the configuration selects.
        selector: Labels a pod must carry, all of them.
        expressions: Further conditions on its labels; an InferencePool has none.
        ports: Target ports in their order; none when each pod names its own.
        app_protocol: `appProtocol` of the pool; empty when not set.
        annotations: All but what kubectl leaves behind.
        created: RFC 3339 in UTC.
    """

    namespace: str
    name: str
    group: str
    selector: Mapping[str, str]
    ports: tuple[int, ...]
    expressions: tuple[LabelExpression, ...] = ()
    app_protocol: str = ""
    annotations: Mapping[str, str] = NO_LABELS
    created: str = ""

    @property
    def ref(self) -> PoolRef | None:
        """Reference that objectives and rewrites use; None for other than an InferencePool."""
        return PoolRef(self.group, self.name) if self.group else None


class ObjectiveObject(msgspec.Struct, frozen=True, kw_only=True):
    """An InferenceObjective.

    Attributes:
        name: Name of the object, which requests state in their header.
        pool: InferencePool of the requests; None for a reference to another kind.
        priority: 0 when not set; below 0 may be shed.
    """

    namespace: str
    name: str
    pool: PoolRef | None
    priority: int = 0


class RewriteObject(msgspec.Struct, frozen=True, kw_only=True):
    """An InferenceModelRewrite.

    Attributes:
        pool: InferencePool of the requests; None for a reference to another kind.
        created: RFC 3339 in UTC.
    """

    namespace: str
    name: str
    pool: PoolRef | None
    created: str = ""
    rules: tuple[inference_policy.RewriteRule, ...] = ()


class SliceBackend(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """One endpoint of an EndpointSlice.

    Attributes:
        ip: IP address in its shortest form; empty for an invalid address.
        ready: Ready, and not terminating.
        name: Name of its pod; empty for none.
    """

    ip: str
    ready: bool
    name: str = ""
    uid: str = ""
    node: str = ""
    zone: str = ""


class SlicePort(msgspec.Struct, frozen=True):
    """A port of an EndpointSlice, on its pods."""

    name: str
    number: int
    app_protocol: str = ""


class EndpointSlice(msgspec.Struct, frozen=True, kw_only=True):
    """An EndpointSlice.

    Attributes:
        family: `IPv4`, `IPv6` or `FQDN`.
        ports: TCP ports with a number.
    """

    namespace: str
    name: str
    service: str
    family: str
    ports: tuple[SlicePort, ...] = ()
    backends: tuple[SliceBackend, ...] = ()


Value = Pod | InferencePool | ObjectiveObject | RewriteObject | EndpointSlice


class Meta(msgspec.Struct, gc=False, rename="camel"):
    """Metadata of every object."""

    name: _ObjectName = ""
    namespace: _ObjectName = ""
    uid: str = ""
    resource_version: str = ""
    creation_timestamp: str | None = None
    deletion_timestamp: str | None = None
    labels: dict[str, str] | None = None


class _AnnotatedMeta(Meta, gc=False, rename="camel"):
    annotations: dict[str, str] | None = None


class _CustomResource(msgspec.Struct, Generic[_SpecT]):
    """A custom resource."""

    metadata: _AnnotatedMeta
    spec: _SpecT


class _PodAnnotations(
    msgspec.Struct,
    gc=False,
    rename={
        "active": "llm-d.ai/active-ports",
        "active_before": "inference.networking.k8s.io/active-ports",
        "model_port": "model-pod-port",
    },
):
    active: str | None = None
    active_before: str | None = None
    model_port: str = ""


class _PodMeta(Meta, gc=False, rename="camel"):
    annotations: _PodAnnotations | None = None


class _PodSpec(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    node_name: str = ""


class _Condition(msgspec.Struct, gc=False):
    type: str = ""
    status: str = ""


class _PodStatus(msgspec.Struct, frozen=True, gc=False, rename={"pod_ip": "podIP"}):
    phase: str = ""
    pod_ip: str = ""
    conditions: list[_Condition] | None = None


class _Pod(msgspec.Struct, gc=False):
    metadata: _PodMeta
    spec: _PodSpec = _PodSpec()
    status: _PodStatus = _PodStatus()


class _Selector(msgspec.Struct, rename="camel"):
    match_labels: Annotated[dict[str, str], msgspec.Meta(min_length=1)]


class _TargetPort(msgspec.Struct):
    number: _PortNumber


class _PoolSpec(msgspec.Struct, rename="camel"):
    selector: _Selector
    target_ports: Annotated[list[_TargetPort], msgspec.Meta(min_length=1)]
    app_protocol: str = ""


class _OldPoolSpec(msgspec.Struct, rename="camel"):
    selector: Annotated[dict[str, str], msgspec.Meta(min_length=1)]
    target_port_number: _PortNumber


class _Ref(msgspec.Struct):
    name: _Name
    group: str = settings.POOL_GROUP
    kind: str = "InferencePool"


class _ObjectiveSpec(msgspec.Struct, rename="camel"):
    pool_ref: _Ref
    priority: _Priority | None = None


class _Model(msgspec.Struct):
    value: _Name
    type: str = "Exact"


class _Match(msgspec.Struct):
    model: _Model | None = None


class _Target(msgspec.Struct, rename="camel"):
    model_rewrite: _NameOrEmpty
    weight: _Weight | None = None


class _Rule(msgspec.Struct):
    targets: list[_Target] | None = None
    matches: list[_Match] | None = None


class _RewriteSpec(msgspec.Struct, rename="camel"):
    pool_ref: _Ref
    rules: list[_Rule] | None = None


class _TargetRef(msgspec.Struct, frozen=True, gc=False):
    kind: str = ""
    name: str = ""
    uid: str = ""


class _Conditions(msgspec.Struct, frozen=True, gc=False):
    ready: bool | None = None
    terminating: bool | None = None


class _Backend(msgspec.Struct, rename="camel"):
    addresses: list[str]
    conditions: _Conditions = _Conditions()
    target_ref: _TargetRef | None = None
    node_name: str | None = None
    zone: str | None = None


class _SlicePort(msgspec.Struct, rename="camel"):
    name: str | None = None
    port: _PortNumber | None = None
    protocol: str | None = None
    app_protocol: str | None = None


class _Slice(msgspec.Struct, rename="camel"):
    metadata: Meta
    address_type: str = "IPv4"
    endpoints: list[_Backend] | None = None
    ports: list[_SlicePort] | None = None


def decode_pod(raw: _Pod) -> Pod:
    """Converts a pod; `Pod` defines readiness.

    Source: docs/reference/protocol-conformance.md#point-60.
    """
    meta, status = raw.metadata, raw.status
    ready = (
        meta.deletion_timestamp is None
        and status.phase not in _ENDED_PHASES
        and any(
            condition.type == "Ready" and condition.status == "True"
            for condition in status.conditions or ()
        )
    )
    notes = meta.annotations or _NO_NOTES
    return Pod(
        namespace=meta.namespace,
        name=meta.name,
        uid=meta.uid,
        created=meta.creation_timestamp or "",
        ip=normalize_address(status.pod_ip),
        ready=ready,
        labels=meta.labels or NO_LABELS,
        node=raw.spec.node_name,
        active_ports=notes.active_before if notes.active is None else notes.active,
        model_port=notes.model_port,
    )


_NO_NOTES = _PodAnnotations()


def _decode_pool(raw: _CustomResource[_PoolSpec]) -> InferencePool:
    spec = raw.spec
    ports = tuple(dict.fromkeys(port.number for port in spec.target_ports))
    selector = spec.selector.match_labels
    return _build_pool(raw.metadata, settings.POOL_GROUP, selector, ports, spec.app_protocol)


def _decode_old_pool(raw: _CustomResource[_OldPoolSpec]) -> InferencePool:
    spec = raw.spec
    ports = (spec.target_port_number,)
    return _build_pool(raw.metadata, settings.OLD_POOL_GROUP, spec.selector, ports)


def _build_pool(
    meta: _AnnotatedMeta,
    group: str,
    selector: Mapping[str, str],
    ports: tuple[int, ...],
    app_protocol: str = "",
) -> InferencePool:
    annotations = dict(meta.annotations or {})
    annotations.pop(_IGNORED_ANNOTATION, None)
    return InferencePool(
        namespace=meta.namespace,
        name=meta.name,
        group=group,
        selector=selector,
        ports=ports,
        app_protocol=app_protocol,
        annotations=annotations,
        created=meta.creation_timestamp or "",
    )


def _decode_ref(raw: _Ref) -> PoolRef | None:
    return PoolRef(raw.group, raw.name) if raw.kind == "InferencePool" else None


def _decode_objective(raw: _CustomResource[_ObjectiveSpec]) -> ObjectiveObject:
    return ObjectiveObject(
        namespace=raw.metadata.namespace,
        name=raw.metadata.name,
        pool=_decode_ref(raw.spec.pool_ref),
        priority=raw.spec.priority or 0,
    )


def _decode_rewrite(raw: _CustomResource[_RewriteSpec]) -> RewriteObject:
    return RewriteObject(
        namespace=raw.metadata.namespace,
        name=raw.metadata.name,
        pool=_decode_ref(raw.spec.pool_ref),
        created=raw.metadata.creation_timestamp or "",
        rules=tuple(
            rule
            for raw_rule in raw.spec.rules or ()
            if (rule := _decode_rule(raw_rule)) is not None
        ),
    )


def _decode_rule(raw: _Rule) -> inference_policy.RewriteRule | None:
    """Converts a rule; None if it has no target, which the API allows.

    None too if all its matches are unknown, lest it match every request.
    """
    matches = raw.matches or []
    targets = [target for target in raw.targets or () if target.model_rewrite]
    generic = not matches or any(match.model is None for match in matches)
    models = [match.model.value for match in matches if match.model and match.model.type == "Exact"]
    if not targets or not (generic or models):
        return None
    return inference_policy.RewriteRule(
        models=() if generic else tuple(dict.fromkeys(models)),
        targets=tuple(
            inference_policy.TargetModel(target.model_rewrite, target.weight) for target in targets
        ),
    )


def _decode_slice(raw: _Slice) -> EndpointSlice:
    labels = raw.metadata.labels or NO_LABELS
    return EndpointSlice(
        namespace=raw.metadata.namespace,
        name=raw.metadata.name,
        service=labels.get("kubernetes.io/service-name", ""),
        family=raw.address_type,
        ports=tuple(
            SlicePort(port.name or "", port.port, port.app_protocol or "")
            for port in raw.ports or ()
            if port.port is not None and port.protocol in {None, "TCP"}
        ),
        backends=tuple(_decode_backend(endpoint) for endpoint in raw.endpoints or ()),
    )


def _decode_backend(raw: _Backend) -> SliceBackend:
    """Converts an endpoint; of several equivalent addresses the first counts, as in kube-proxy."""
    target = raw.target_ref if raw.target_ref and raw.target_ref.kind == "Pod" else _TargetRef()
    return SliceBackend(
        ip=normalize_address(raw.addresses[0]) if raw.addresses else "",
        # The API defines an unknown condition as ready.
        ready=raw.conditions.ready is not False and raw.conditions.terminating is not True,
        name=target.name,
        uid=target.uid,
        node=raw.node_name or "",
        zone=raw.zone or "",
    )


@functools.lru_cache(maxsize=_ADDRESSES_KEPT)
def normalize_address(text: str) -> str:
    """Returns an IP address in canonical form; empty for any other text."""
    if not text:
        return ""
    try:
        return str(ipaddress.ip_address(text))
    except ValueError:
        return ""


class DecodedForm(msgspec.Struct, frozen=True):
    """Decoding type and converter of a resource."""

    raw: Any
    value: Callable[[Any], Value]


FORMS: Mapping[watch_plan.ResourceType, DecodedForm] = {
    watch_plan.PODS: DecodedForm(_Pod, decode_pod),
    watch_plan.SLICES: DecodedForm(_Slice, _decode_slice),
    watch_plan.POOLS: DecodedForm(_CustomResource[_PoolSpec], _decode_pool),
    watch_plan.OLD_POOLS: DecodedForm(_CustomResource[_OldPoolSpec], _decode_old_pool),
    watch_plan.OBJECTIVES: DecodedForm(_CustomResource[_ObjectiveSpec], _decode_objective),
    watch_plan.OLD_OBJECTIVES: DecodedForm(_CustomResource[_ObjectiveSpec], _decode_objective),
    watch_plan.REWRITES: DecodedForm(_CustomResource[_RewriteSpec], _decode_rewrite),
    watch_plan.OLD_REWRITES: DecodedForm(_CustomResource[_RewriteSpec], _decode_rewrite),
}
