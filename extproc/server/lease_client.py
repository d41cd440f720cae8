"""Client of the Lease of leader election."""

from __future__ import annotations

import datetime as dt
import logging
import os
import random
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from extproc.config import kubernetes_plan
from extproc.config.settings import Settings
from extproc.discovery.kubernetes import api_errors
from extproc.election import leader_elector, lease_state
from extproc.election.lease_state import LeaseRecord, LeaseWrite
from extproc.errors import ConfigError
from extproc.supervision import Supervisor

if TYPE_CHECKING:
    from extproc.discovery.kubernetes import api_client

_log = logging.getLogger("extproc.server")

#: Facts of an election that are logged as information only.
_INFO_EVENTS = frozenset({"elected", "follows", "recovered", "resigned"})

#: Status of a write that lost a race: 404 for a deleted Lease, else 409.
_CONFLICT_STATUSES = frozenset({404, 409})


class LeaseClient:
    """Reads and writes a Lease."""

    def __init__(self, plan: kubernetes_plan.ElectionPlan) -> None:
        self._plan = plan
        self._lease = plan.lease
        # Two calls, a read and a write, fit in the time that a leader has.
        self._timeout_s = plan.lease.renew_s / 2.0
        self._server: api_client.KubernetesApiClient | None = None
        self._stored: lease_state.Object | None = None
        self._denials = api_errors.Denials()

    async def open(self) -> None:
        """Load the configuration and credentials.

        Raises:
            ConfigError: They are missing or broken.
        """
        from extproc.discovery.kubernetes import api_client  # noqa: PLC0415 - heavy, not for everybody

        self._server = api_client.KubernetesApiClient(self._plan.api_settings)
        await self._server.open()

    async def close(self) -> None:
        """Close all connections."""
        if self._server is not None:
            await self._server.close()

    async def read(self) -> LeaseRecord | leader_elector.LeaseRequestFailed | None:
        """Read the Lease; None where it does not exist."""
        answer = await self._send(
            "GET", lease_state.lease_path(self._lease.namespace, self._lease.name)
        )
        if isinstance(answer, api_errors.ApiError) and answer.status == 404:
            self._denials.is_missing("get", answer)
            self._stored = None
            return None
        return self._read_answer(answer)

    async def write(self, write: LeaseWrite) -> LeaseRecord | leader_elector.LeaseRequestFailed:
        """Write the Lease if its stored version is the version of the write."""
        namespace, name = self._lease.namespace, self._lease.name
        body = lease_state.build_lease(
            write, namespace=namespace, name=name, at=dt.datetime.now(dt.UTC), before=self._stored
        )
        if write.version:
            answer = await self._send("PUT", lease_state.lease_path(namespace, name), body)
        else:
            answer = await self._send("POST", lease_state.lease_path(namespace), body)
        return self._read_answer(answer, write=write)

    def _read_answer(
        self, answer: bytes | api_errors.ApiError, write: LeaseWrite | None = None
    ) -> LeaseRecord | leader_elector.LeaseRequestFailed:
        if isinstance(answer, api_errors.ApiError):
            is_conflict = write is not None and answer.status in _CONFLICT_STATUSES
            # A namespace that is not there answers 404 to a create.
            is_conflict = is_conflict and (answer.status == 409 or bool(write and write.version))
            verb = "get" if write is None else "update" if write.version else "create"
            is_denied = self._denials.is_missing(verb, answer)
            reason = "forbidden" if is_denied else "unauthorized" if answer.status == 401 else ""
            message = self._error_text(answer, is_denied=is_denied)
            return leader_elector.LeaseRequestFailed(message, conflict=is_conflict, reason=reason)
        for verb in ("get",) if write is None else ("update", "create"):
            self._denials.is_missing(verb, answer)
        read = lease_state.parse_lease(answer)
        if isinstance(read, lease_state.UnreadableLease):
            return leader_elector.LeaseRequestFailed(f"{self._title}: {read.reason}")
        record, self._stored = read
        return record

    async def _send(
        self, method: str, path: str, body: lease_state.Object | None = None
    ) -> bytes | api_errors.ApiError:
        if self._server is None:
            return api_errors.ApiError(0, "not connected")
        generation = self._server.generation
        answer = await self._server.send(method, path, body=body, seconds=self._timeout_s)
        if isinstance(answer, api_errors.ApiError) and answer.credentials_expired:
            try:
                # For the next attempt: tokens are rotated under our feet.
                await self._server.renew(generation)
            except ConfigError as error:
                return api_errors.ApiError(0, str(error))
        return answer

    @property
    def _title(self) -> str:
        return f"Lease {self._lease.namespace}/{self._lease.name}"

    def _error_text(self, error: api_errors.ApiError, *, is_denied: bool) -> str:
        text = f"{self._title}: {error.status or 'no answer'} {error.message}"
        if is_denied:
            text += (
                "; add to a Role of the service account there: "
                'apiGroups: ["coordination.k8s.io"], resources: ["leases"], '
                'verbs: ["get", "create", "update"]'
            )
        return text


def build_elector(
    settings: Settings, *, can_lead: Callable[[], bool], supervisor: Supervisor
) -> leader_elector.LeaderElector | None:
    """Build the leader elector; None where election is disabled.

    Args:
        can_lead: Returns True while this replica could serve; otherwise it does not take the Lease.

    Raises:
        ConfigError: There is no Kubernetes to ask, or the section `cluster` contradicts itself.
    """
    plan = kubernetes_plan.plan_election(
        settings, where="the configuration", environment=os.environ
    )
    if plan is None:
        return None
    identity = kubernetes_plan.process_identity(os.environ)
    return leader_elector.LeaderElector(
        identity,
        plan.lease,
        LeaseClient(plan),
        clock=_clock,
        # Not the configured seed: replicas that share it would always send at the same time.
        rng=random.Random(identity),
        can_lead=can_lead,
        on_event=_log_event,
        supervisor=supervisor,
    )


def _log_event(event: leader_elector.ElectionEvent) -> None:
    level = logging.INFO if event.kind in _INFO_EVENTS else logging.WARNING
    _log.log(level, "election: %s: %s", event.kind, event.detail or "none")


def _clock() -> float:
    """Monotonic seconds that go on while the machine sleeps, where the system counts them.

    Others' clocks go on as well: a leader that wakes up must know that its time is over.
    """
    if sys.platform == "linux":
        return time.clock_gettime(time.CLOCK_BOOTTIME)
    return time.monotonic()
