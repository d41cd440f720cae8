"""Converts a Lease of `coordination.k8s.io/v1` to a record and back; other fields stay."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote

import msgspec

from extproc.election.lease_state import LeaseRecord, LeaseWrite

_API = "coordination.k8s.io/v1"

#: A DNS subdomain, as names of Leases are (Kubernetes, object names).
_LABEL = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_NAME = re.compile(rf"{_LABEL}(\.{_LABEL})*")
_LONGEST = 253

#: client-go's default, for a Lease without a duration (client-go always writes it).
_DURATION_S = 15

Object = dict[str, Any]


class _Meta(msgspec.Struct, rename={"version": "resourceVersion"}):
    version: str = ""


class _Spec(msgspec.Struct, rename="camel"):
    holder_identity: str | None = None
    lease_duration_seconds: int | None = None
    lease_transitions: int | None = None


class _Lease(msgspec.Struct):
    metadata: _Meta
    spec: _Spec | None = None


class UnreadableLease(msgspec.Struct, frozen=True):
    """A response of the API server that is no Lease.

    Attributes:
        reason: The error as text.
    """

    reason: str


def is_valid_name(name: str) -> bool:
    """Return True if a name is a DNS subdomain, as names of Leases are."""
    return len(name) <= _LONGEST and _NAME.fullmatch(name) is not None


def path(namespace: str, name: str = "") -> str:
    """Return the URL path of a Lease, or without a name that of all Leases of a namespace."""
    where = f"/apis/{_API}/namespaces/{quote(namespace, safe='')}/leases"
    return where + (f"/{quote(name, safe='')}" if name else "")


def read(text: bytes) -> tuple[LeaseRecord, Object] | UnreadableLease:
    """Parse a Lease; return its record and the complete object."""
    try:
        stored: Object = msgspec.json.decode(text, type=dict[str, Any])
        lease = msgspec.convert(stored, _Lease)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return UnreadableLease(str(error))
    if not lease.metadata.version:
        return UnreadableLease("it has no version")
    spec = lease.spec or _Spec()
    record = LeaseRecord(
        spec.holder_identity or "",
        spec.lease_duration_seconds or _DURATION_S,
        spec.lease_transitions or 0,
        lease.metadata.version,
    )
    return record, stored


def write(
    put: LeaseWrite, *, namespace: str, name: str, at: datetime, before: Object | None
) -> Object:
    """Build the object that a write stores.

    Args:
        namespace: Namespace of the Lease.
        name: Name of the Lease.
        at: Time of day, with its zone; read by people and by other implementations only.
        before: The stored object, whose other fields stay; None if there is none.
    """
    now = at.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    before = before if put.version and before is not None else {}
    # The API server owns the list of managed fields.
    preserved = {key: value for key, value in before.get("metadata", {}).items() if key != _MANAGED}
    spec = {
        **(before.get("spec") or {}),
        "holderIdentity": put.holder,
        "leaseDurationSeconds": put.duration_s,
        "leaseTransitions": put.transitions,
        "renewTime": now,
        **({"acquireTime": now} if put.acquired else {}),
    }
    metadata = {**preserved, "namespace": namespace, "name": name}
    if put.version:
        metadata["resourceVersion"] = put.version
    return {"apiVersion": _API, "kind": "Lease", "metadata": metadata, "spec": spec}


_MANAGED = "managedFields"
