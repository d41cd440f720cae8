"""Kubernetes objects of autoscaling: paths and JSON, no connection."""

from __future__ import annotations

import datetime as dt
from typing import Any, Final
from urllib.parse import quote

import msgspec

from extproc.config.autoscaling import ScaleTarget

#: What decoding raises on what is no such object: no JSON or another type, text that is no UTF-8, and
#: nesting without end.
DECODE_FAILURES: Final = (msgspec.DecodeError, UnicodeError, RecursionError)

#: An object as it stands in JSON.
Object = dict[str, Any]

#: Media type of a PATCH: fields in it replace those of the object. Custom resources take it as well
#: as built-in ones.
MERGE = "application/merge-patch+json"

#: Longest text of an Event (Kubernetes API, `message` of events.k8s.io).
_MAX_NOTE_LENGTH = 1024


class _ScaleSpec(msgspec.Struct, frozen=True):
    replicas: int = 0


class _Scale(msgspec.Struct, frozen=True):
    spec: _ScaleSpec = _ScaleSpec()


class _ScaleTargetRef(msgspec.Struct, frozen=True):
    kind: str = "Deployment"
    name: str = ""


class _HorizontalAutoscalerSpec(msgspec.Struct, frozen=True):
    scaleTargetRef: _ScaleTargetRef = _ScaleTargetRef()  # noqa: N815 - Kubernetes' spelling


class _ObjectMetadata(msgspec.Struct, frozen=True):
    name: str = ""
    uid: str = ""


class _HorizontalAutoscaler(msgspec.Struct, frozen=True):
    metadata: _ObjectMetadata = _ObjectMetadata()
    spec: _HorizontalAutoscalerSpec = _HorizontalAutoscalerSpec()


class _HorizontalAutoscalers(msgspec.Struct, frozen=True):
    items: tuple[_HorizontalAutoscaler, ...] | None


class _Map(msgspec.Struct, frozen=True):
    data: dict[str, str] | None = None


def api_path(group: str, version: str, *segments: str) -> str:
    """Path of the API, every segment quoted: a name never ends the path or leaves its place.

    Args:
        group: API group; empty for the core one.
        segments: Further path segments, such as `namespaces`, `default`, `events`.
    """
    root = ("apis", group) if group else ("api",)
    return "".join(f"/{quote(segment, safe='')}" for segment in (*root, version, *segments))


def target_path(target: ScaleTarget) -> str:
    """API path of the target."""
    return namespaced_path(
        target.group, target.version, target.namespace, target.resource, target.name
    )


def namespaced_path(group: str, version: str, namespace: str, *segments: str) -> str:
    """Path of a collection or an object in a namespace; arguments as of `api_path`."""
    return api_path(group, version, "namespaces", namespace, *segments)


def format_target(target: ScaleTarget) -> str:
    """Name of the target for messages."""
    return f"{target.kind} {target.namespace}/{target.name}"


def parse_replicas(answer: bytes) -> int | None:
    """Replicas in the spec of a Scale; None for other bytes."""
    try:
        return msgspec.json.decode(answer, type=_Scale).spec.replicas
    except DECODE_FAILURES:
        return None


def build_scale(replicas: int) -> Object:
    """Patch of a Scale."""
    return {"spec": {"replicas": replicas}}


def parse_competing_autoscalers(answer: bytes, target: ScaleTarget) -> tuple[str, ...] | None:
    """Names of the autoscalers in a list that scale the target; None for other bytes."""
    try:
        listed = msgspec.json.decode(answer, type=_HorizontalAutoscalers).items or ()
    except DECODE_FAILURES:
        return None
    return tuple(
        rival.metadata.name
        for rival in listed
        if (rival.spec.scaleTargetRef.kind or "Deployment", rival.spec.scaleTargetRef.name)
        == (target.kind, target.name)
    )


def build_event(
    target: ScaleTarget,
    *,
    uid: str,
    reason: str,
    note: str,
    warning: bool,
    at: dt.datetime,
    reporter: str,
) -> Object:
    """Build an Event about the target.

    Args:
        uid: UID of the target; empty where it is unknown.
        reason: A single word in CamelCase.
    """
    when = at.strftime("%Y-%m-%dT%H:%M:%SZ")
    about = {
        "apiVersion": f"{target.group}/{target.version}" if target.group else target.version,
        "kind": target.kind,
        "name": target.name,
        "namespace": target.namespace,
    }
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"generateName": f"{target.name}.", "namespace": target.namespace},
        "involvedObject": about | ({"uid": uid} if uid else {}),
        "reason": reason,
        "message": note[:_MAX_NOTE_LENGTH],
        "type": "Warning" if warning else "Normal",
        "firstTimestamp": when,
        "lastTimestamp": when,
        "count": 1,
        "source": {"component": "extproc", "host": reporter},
        "reportingComponent": "extproc",
        "reportingInstance": reporter,
    }


def build_config_map(namespace: str, name: str, data: dict[str, str]) -> Object:
    """Build a ConfigMap with our labels."""
    labels = {"app.kubernetes.io/part-of": "extproc"}
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": name, "namespace": namespace, "labels": labels},
        "data": data,
    }


def parse_config_map(answer: bytes) -> dict[str, str]:
    """Data of a ConfigMap; empty for other bytes."""
    try:
        return msgspec.json.decode(answer, type=_Map).data or {}
    except DECODE_FAILURES:
        return {}
