"""Leader election without I/O: a candidate's view of a Lease of Kubernetes, and the Lease object.

The algorithm of client-go's leader election. The elector of the official client
(`kubernetes.aio.leaderelection`, release 37) is not used: it counts its time limits with the wall
clock, which may jump. The store compares and swaps: a write that names an
older version than the stored version is refused. Clocks of two machines are never compared:

- A leader leads until `renew_s` after it *sent* the last write that was confirmed.
- Another candidate may take the Lease after it observed no write for the Lease's duration, counted
  from when it *received* the last write, which is later than when the leader sent it.

So with `renew_s` below the duration two candidates never lead at once, as long as their clocks run
at about the same rate, regardless of lost or late requests and responses.
"""

from __future__ import annotations

import math
import random
import re
from datetime import UTC, datetime
from typing import Annotated, Any
from urllib.parse import quote

import msgspec

#: Shortest pause in seconds: the rest of a wait may be below the resolution of a clock.
_MIN_PAUSE_S = 0.001


class LeaseRecord(msgspec.Struct, frozen=True):
    """The stored record of a Lease.

    Attributes:
        holder: Identity of the holder; empty if the Lease was released.
        version: `resourceVersion` of the object; every write changes it.
    """

    holder: str
    duration_s: float
    transitions: int
    version: str


class LeaseWrite(msgspec.Struct, frozen=True):
    """A conditional write of a Lease.

    Attributes:
        holder: Identity of the new holder; empty releases the Lease.
        duration_s: Seconds for which the write holds the Lease (integer, 1 or more).
        acquired: True if the holder changes.
        version: The version that must be stored; empty if no Lease may exist.
    """

    holder: str
    duration_s: int
    transitions: int
    acquired: bool
    version: str


class LeaseState:
    """Knowledge of one candidate about the Lease.

    Args:
        identity: Unique per process start: writes of a former process may still be on their way.
    """

    def __init__(self, identity: str, settings: ElectionSettings) -> None:
        self.identity = identity
        self._settings = settings
        self._stored: LeaseRecord | None = None
        self._is_fresh = False
        self._leads_until = -math.inf
        self._free_at = -math.inf
        self._version = ""
        self._resigned = False

    def is_leader(self, now: float) -> bool:
        """Return True while no other candidate can hold the Lease."""
        return now < self._leads_until

    @property
    def holder(self) -> str:
        """Identity of the holder in the last record; empty if there is none."""
        return self._stored.holder if self._stored is not None else ""

    @property
    def is_holder(self) -> bool:
        """True if the last record is ours, even if expired: it needs a write, not a read."""
        return self._is_fresh and self.holder == self.identity

    def observe(self, record: LeaseRecord | None, now: float) -> None:
        """Record the result of a read.

        Args:
            record: The stored record; None if there is no Lease.
            now: Monotonic seconds at which it was received.
        """
        self._stored, self._is_fresh = record, True
        if self.holder != self.identity:
            self._leads_until = -math.inf
        # The version, not the time in the record: two writes may carry the same time. And a record
        # that was deleted does not end the wait for its holder.
        if record is not None and record.version != self._version:
            self._version = record.version
            is_foreign = record.holder not in {"", self.identity}
            self._free_at = now + record.duration_s if is_foreign else -math.inf

    def claim(self, now: float) -> LeaseWrite | None:
        """Return the write that takes or renews the Lease; None while we may do neither."""
        if self._resigned or not self._is_fresh:
            return None
        if self.is_holder:
            return self._build_write(acquired=False)
        return self._build_write(acquired=True) if now >= self._free_at else None

    def confirm(self, write: LeaseWrite, version: str, sent_at_s: float) -> None:
        """Record a confirmed write."""
        self._stored = LeaseRecord(write.holder, write.duration_s, write.transitions, version)
        self._is_fresh, self._version, self._free_at = True, version, -math.inf
        if write.holder and not self._resigned:
            self._leads_until = sent_at_s + self._settings.renew_s

    def invalidate(self) -> None:
        """Require a read before the next write: a write was refused or its result is unknown."""
        self._is_fresh = False

    def resign(self) -> None:
        """Stop leading for good."""
        self._resigned = True
        self._leads_until = -math.inf

    def release(self) -> LeaseWrite | None:
        """Return the write that releases the Lease; None if it is not ours."""
        if not self.is_holder or self._stored is None:
            return None
        return LeaseWrite(
            "", 1, self._stored.transitions, acquired=True, version=self._stored.version
        )

    def next_pause_s(self, now: float, rng: random.Random) -> float:
        """Return the pause until the next attempt (seconds), at most `retry_s`.

        Args:
            rng: Seeded randomness, which keeps candidates that started together apart.
        """
        pause = self._settings.retry_s * rng.uniform(0.5, 1.0)
        return max(min(pause, self._free_at - now), _MIN_PAUSE_S) if now < self._free_at else pause

    def _build_write(self, *, acquired: bool) -> LeaseWrite:
        stored = self._stored
        transitions = stored.transitions + int(acquired) if stored is not None else 0
        return LeaseWrite(
            self.identity,
            self._settings.duration_s,
            transitions,
            acquired=acquired,
            version=stored.version if stored is not None else "",
        )


_PositiveSeconds = Annotated[float, msgspec.Meta(gt=0)]


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
    """A response of the API server that is no Lease."""

    reason: str


def is_lease_name(name: str) -> bool:
    """Return True if a name is a DNS subdomain, as names of Leases are."""
    return len(name) <= _LONGEST and _NAME.fullmatch(name) is not None


def lease_path(namespace: str, name: str = "") -> str:
    """Return the URL path of a Lease, or without a name that of all Leases of a namespace."""
    where = f"/apis/{_API}/namespaces/{quote(namespace, safe='')}/leases"
    return where + (f"/{quote(name, safe='')}" if name else "")


def parse_lease(text: bytes) -> tuple[LeaseRecord, Object] | UnreadableLease:
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


def build_lease(
    update: LeaseWrite, *, namespace: str, name: str, at: datetime, before: Object | None
) -> Object:
    """Build the object that a write stores.

    Args:
        at: Time of day, with its zone; read by people and by other implementations only.
        before: The stored object, whose other fields stay; None if there is none.
    """
    now = at.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    before = before if update.version and before is not None else {}
    # The API server owns the list of managed fields.
    preserved = {key: value for key, value in before.get("metadata", {}).items() if key != _MANAGED}
    spec = {
        **(before.get("spec") or {}),
        "holderIdentity": update.holder,
        "leaseDurationSeconds": update.duration_s,
        "leaseTransitions": update.transitions,
        "renewTime": now,
        **({"acquireTime": now} if update.acquired else {}),
    }
    metadata = {**preserved, "namespace": namespace, "name": name}
    if update.version:
        metadata["resourceVersion"] = update.version
    return {"apiVersion": _API, "kind": "Lease", "metadata": metadata, "spec": spec}


_MANAGED = "managedFields"


class ElectionSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The Lease of `leader_election`. Replicas that share it must agree on name and namespace.

    Attributes:
        name: Name of the Lease. Empty: `epp-<namespace>-<pool>.llm-d.ai`, as in the upstream EPP;
            with several pools `epp-<own namespace>-pools.llm-d.ai`, so two Deployments with several
            pools in one namespace need names. A pool without a name that is no object of
            Kubernetes counts by the name of the object it scales.
        namespace: Namespace of the Lease. Empty: the one this process runs in, where the shipped
            manifests grant the rights.
        duration_s: Whole seconds after which others may take a Lease that is not renewed: the time
            without a leader after a crash. 15, the default of client-go.
        renew_s: Seconds without a renewal after which a leader gives up. 10, the default of
            client-go: 5 less than `duration_s`, for clocks that drift. Requests that scale objects may
            take 0.8 of the difference, 4 s at most.
        retry_s: Longest pause between two attempts (seconds). 2, the default of client-go: the time
            without a leader after an orderly end, at the cost of one read in 2 seconds for each
            replica.
    """

    name: str = ""
    namespace: str = ""
    duration_s: Annotated[int, msgspec.Meta(ge=1)] = 15
    renew_s: _PositiveSeconds = 10.0
    retry_s: _PositiveSeconds = 2.0
