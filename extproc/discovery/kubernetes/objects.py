"""Decoded API objects, frozen, reduced to the fields that pools depend on."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from extproc.endpoint import NO_LABELS
from extproc.pool import inference_policy


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
        model_ip: Annotation `model-pod-ip` of KubeAI.
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
    model_ip: str = ""


class InferencePool(msgspec.Struct, frozen=True, kw_only=True):
    """An InferencePool of either API group.

    Attributes:
        namespace: Namespace of the object and of its pods.
        group: API group it was read from.
        selector: Labels a pod must carry, all of them.
        ports: Target ports in their order.
        app_protocol: `appProtocol` of the pool; empty when not set.
        annotations: All but what kubectl leaves behind.
        created: RFC 3339 in UTC.
    """

    namespace: str
    name: str
    group: str
    selector: Mapping[str, str]
    ports: tuple[int, ...]
    app_protocol: str = ""
    annotations: Mapping[str, str] = NO_LABELS
    created: str = ""


class PoolRef(msgspec.Struct, frozen=True):
    """Reference of an objective or rewrite to a pool of its namespace."""

    group: str
    name: str


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
