"""Decoders of API objects to the values of `objects`; unused fields are not decoded.

The official client would build some 60 objects of a pod; that is 100 times the work, and most of it
for fields that extproc does not read.
"""

from __future__ import annotations

import functools
import ipaddress
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import msgspec

from extproc.discovery.kubernetes import objects, settings, watch_plan
from extproc.endpoint import NO_LABELS
from extproc.pool import inference_policy
from extproc.request import MAX_NAME_BYTES

#: What msgspec raises on bytes that are no such object: no JSON or another type, text that is no
#: UTF-8, and nesting without end.
BROKEN = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

#: kubectl's copy of the complete object.
_IGNORED_ANNOTATIONS = "kubectl.kubernetes.io/last-applied-configuration"

#: Addresses whose reading is remembered (count): pods keep theirs from event to event.
_ADDRESSES_KEPT = 16_384

_ENDED_PHASES = frozenset({"Succeeded", "Failed"})

_PortNumber = Annotated[int, msgspec.Meta(ge=1, le=65535)]
_Priority = Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)]
_Weight = Annotated[int, msgspec.Meta(ge=1, le=1_000_000)]
_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME_BYTES)]
#: The API server takes no longer name of any object.
_ObjectName = Annotated[str, msgspec.Meta(max_length=253)]


class Meta(msgspec.Struct, gc=False, rename="camel"):
    """Metadata of every object."""

    name: _ObjectName = ""
    namespace: _ObjectName = ""
    uid: str = ""
    resource_version: str = ""
    creation_timestamp: str | None = None
    deletion_timestamp: str | None = None
    labels: dict[str, str] | None = None


class _Annotated(Meta, gc=False, rename="camel"):
    annotations: dict[str, str] | None = None


class _PodAnnotations(
    msgspec.Struct,
    gc=False,
    rename={
        "active": "llm-d.ai/active-ports",
        "active_before": "inference.networking.k8s.io/active-ports",
        "model_port": "model-pod-port",
        "model_ip": "model-pod-ip",
    },
):
    active: str | None = None
    active_before: str | None = None
    model_port: str = ""
    model_ip: str = ""


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


class _Pool(msgspec.Struct):
    metadata: _Annotated
    spec: _PoolSpec


class _OldPoolSpec(msgspec.Struct, rename="camel"):
    selector: Annotated[dict[str, str], msgspec.Meta(min_length=1)]
    target_port_number: _PortNumber


class _OldPool(msgspec.Struct):
    metadata: _Annotated
    spec: _OldPoolSpec


class _Ref(msgspec.Struct):
    name: _Name
    group: str = settings.POOL_GROUP
    kind: str = "InferencePool"


class _ObjectiveSpec(msgspec.Struct, rename="camel"):
    pool_ref: _Ref
    priority: _Priority | None = None


class _Objective(msgspec.Struct):
    metadata: Meta
    spec: _ObjectiveSpec


class _Model(msgspec.Struct):
    value: _Name
    type: str = "Exact"


class _Match(msgspec.Struct):
    model: _Model | None = None


class _Target(msgspec.Struct, rename="camel"):
    model_rewrite: _Name
    weight: _Weight | None = None


class _Rule(msgspec.Struct):
    targets: Annotated[list[_Target], msgspec.Meta(min_length=1)]
    matches: list[_Match] | None = None


class _RewriteSpec(msgspec.Struct, rename="camel"):
    pool_ref: _Ref
    rules: list[_Rule] | None = None


class _Rewrite(msgspec.Struct):
    metadata: Meta
    spec: _RewriteSpec


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


def decode_pod(raw: _Pod) -> objects.Pod:
    """Converts a pod; `objects.Pod` defines readiness.

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
    return objects.Pod(
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
        model_ip=normalize_address(notes.model_ip),
    )


_NO_NOTES = _PodAnnotations()


def _decode_pool(raw: _Pool) -> objects.InferencePool:
    spec = raw.spec
    return objects.InferencePool(
        namespace=raw.metadata.namespace,
        name=raw.metadata.name,
        group=settings.POOL_GROUP,
        selector=spec.selector.match_labels,
        ports=tuple(dict.fromkeys(port.number for port in spec.target_ports)),
        app_protocol=spec.app_protocol,
        annotations=_read_pod_annotations(raw.metadata),
        created=raw.metadata.creation_timestamp or "",
    )


def _decode_old_pool(raw: _OldPool) -> objects.InferencePool:
    return objects.InferencePool(
        namespace=raw.metadata.namespace,
        name=raw.metadata.name,
        group=settings.OLD_POOL_GROUP,
        selector=raw.spec.selector,
        ports=(raw.spec.target_port_number,),
        annotations=_read_pod_annotations(raw.metadata),
        created=raw.metadata.creation_timestamp or "",
    )


def _read_pod_annotations(meta: _Annotated) -> Mapping[str, str]:
    return {
        key: text for key, text in (meta.annotations or {}).items() if key != _IGNORED_ANNOTATIONS
    }


def _decode_ref(raw: _Ref) -> objects.PoolRef | None:
    return objects.PoolRef(raw.group, raw.name) if raw.kind == "InferencePool" else None


def _decode_objective(raw: _Objective) -> objects.ObjectiveObject:
    return objects.ObjectiveObject(
        namespace=raw.metadata.namespace,
        name=raw.metadata.name,
        pool=_decode_ref(raw.spec.pool_ref),
        priority=raw.spec.priority or 0,
    )


def _decode_rewrite(raw: _Rewrite) -> objects.RewriteObject:
    return objects.RewriteObject(
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
    """Converts a rule; None if all its matches are unknown, lest it match every request."""
    matches = raw.matches or []
    generic = not matches or any(match.model is None for match in matches)
    models = [match.model.value for match in matches if match.model and match.model.type == "Exact"]
    if not generic and not models:
        return None
    return inference_policy.RewriteRule(
        models=() if generic else tuple(dict.fromkeys(models)),
        targets=tuple(
            inference_policy.TargetModel(target.model_rewrite, target.weight)
            for target in raw.targets
        ),
    )


def _decode_slice(raw: _Slice) -> objects.EndpointSlice:
    labels = raw.metadata.labels or NO_LABELS
    return objects.EndpointSlice(
        namespace=raw.metadata.namespace,
        name=raw.metadata.name,
        service=labels.get("kubernetes.io/service-name", ""),
        family=raw.address_type,
        ports=tuple(
            objects.SlicePort(port.name or "", port.port, port.app_protocol or "")
            for port in raw.ports or ()
            if port.port is not None and port.protocol in {None, "TCP"}
        ),
        backends=tuple(_decode_backend(endpoint) for endpoint in raw.endpoints or ()),
    )


def _decode_backend(raw: _Backend) -> objects.SliceBackend:
    """Converts an endpoint; of several equivalent addresses the first counts, as in kube-proxy."""
    target = raw.target_ref if raw.target_ref and raw.target_ref.kind == "Pod" else _TargetRef()
    return objects.SliceBackend(
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
    value: Callable[[Any], objects.Value]


FORMS: Mapping[watch_plan.ResourceType, DecodedForm] = {
    watch_plan.PODS: DecodedForm(_Pod, decode_pod),
    watch_plan.SLICES: DecodedForm(_Slice, _decode_slice),
    watch_plan.POOLS: DecodedForm(_Pool, _decode_pool),
    watch_plan.OLD_POOLS: DecodedForm(_OldPool, _decode_old_pool),
    watch_plan.OBJECTIVES: DecodedForm(_Objective, _decode_objective),
    watch_plan.OLD_OBJECTIVES: DecodedForm(_Objective, _decode_objective),
    watch_plan.REWRITES: DecodedForm(_Rewrite, _decode_rewrite),
    watch_plan.OLD_REWRITES: DecodedForm(_Rewrite, _decode_rewrite),
}
