"""Leader election: runs a candidate over a store of the Lease, and reads and writes that Lease."""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import logging
import os
import random
import sys
import time
from collections.abc import Callable
from typing import Protocol

import msgspec

from extproc import election
from extproc.config import kubernetes_plan
from extproc.config.settings import Settings
from extproc.discovery.kubernetes import api_responses
from extproc.discovery.kubernetes.request_client import ApiRequestClient
from extproc.election import ElectionSettings, LeaseRecord, LeaseState, LeaseWrite
from extproc.supervision import Supervisor

_log = logging.getLogger("extproc.server")

#: Attempts to release a Lease: one of them may meet a renewal that was still on its way.
_MAX_RELEASE_ATTEMPTS = 3


class LeaseRequestFailed(msgspec.Struct, frozen=True):
    """A read or write of the Lease that failed.

    Attributes:
        conflict: True if another candidate wrote first, which is no error.
        reason: `unauthorized` or `forbidden`, which need an operator; empty for transient errors.
    """

    message: str
    conflict: bool = False
    reason: str = ""


class LeaseStore(Protocol):
    """Storage of the Lease; reads and writes return or fail within half of `renew_s`."""

    async def open(self) -> None:
        """Prepare for reads and writes.

        Raises:
            ConfigError: The address or credentials are missing or broken.
        """

    async def read(self) -> LeaseRecord | LeaseRequestFailed | None:
        """Read the stored record; None if there is no Lease."""

    async def write(self, write: LeaseWrite) -> LeaseRecord | LeaseRequestFailed:
        """Write if the stored version matches that of the write; return the new record."""

    async def close(self) -> None:
        """End all connections."""


class ElectionEvent(msgspec.Struct, frozen=True):
    """An event of an election, for log and metrics.

    Attributes:
        kind: `elected`, `lost`, `resigned`, `follows`, `failed` or `recovered`.
        detail: Identity of the holder, or an error message.
    """

    kind: str
    detail: str


class LeaderElector:
    """A candidate that competes for the Lease while `run` runs.

    `is_leader` holds only for the present moment: a leader's task must check it before every step
    with an effect, and its steps must be short against `duration_s - renew_s`.

    Args:
        identity: Unique per process start.
        can_lead: Returns True if this replica may take a free Lease. A replica that could not do the
            work must not; a holder keeps the Lease regardless.
        supervisor: Receives attempts that raise; None creates a private supervisor.
    """

    def __init__(
        self,
        identity: str,
        settings: ElectionSettings,
        store: LeaseStore,
        *,
        clock: Callable[[], float],
        rng: random.Random,
        can_lead: Callable[[], bool] = lambda: True,
        on_event: Callable[[ElectionEvent], None] = lambda _: None,
        supervisor: Supervisor | None = None,
    ) -> None:
        self._state = LeaseState(identity, settings)
        self._store = store
        self._clock = clock
        self._rng = rng
        self._can_lead = can_lead
        self._on_event = on_event
        self._supervisor = supervisor or Supervisor(clock=clock)
        self._resigned = asyncio.Event()
        self._ended = asyncio.Event()
        self._ended.set()
        self._was_leader = False
        self._reported_holder = ""
        #: Reason of the failure that was reported last; None while nothing fails.
        self._reported_failure: str | None = None

    @property
    def is_leader(self) -> bool:
        """True while this replica, and no other, may act."""
        return self._state.is_leader(self._clock())

    async def start(self) -> None:
        """Prepare the store; call it before `run`.

        Raises:
            ConfigError: If the API server's address or the credentials are missing or broken.
        """
        await self._store.open()

    async def run(self) -> None:
        """Compete until resigned; then release the Lease, and return."""
        self._ended.clear()
        try:
            while not self._resigned.is_set():
                pause = await self._attempt_supervised()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(pause):
                        await self._resigned.wait()
            await self._supervisor.attempt("election", self.release())
        finally:
            self._ended.set()
            await self._store.close()

    async def _attempt_supervised(self) -> float:
        """Run a step, return the pause until the next (seconds); errors force a new read."""
        try:
            pause_s = await self.step()
        except Exception as error:  # noqa: BLE001 - a candidate that gives up would leave none
            self._state.invalidate()
            return self._supervisor.record_failure("election", error)
        self._supervisor.record_success("election")
        return pause_s

    async def step(self) -> float:
        """Run an attempt, report changes, and return the pause until the next (seconds)."""
        await self._attempt()
        is_leader = self.is_leader
        if is_leader != self._was_leader:
            self._was_leader = is_leader
            identity = self._state.identity
            self._report(*(("elected", identity) if is_leader else ("lost", self._state.holder)))
        holder = self._state.holder
        if holder != self._reported_holder:
            self._reported_holder = holder
            if holder not in {"", self._state.identity}:
                self._report("follows", holder)
        return self._state.next_pause_s(self._clock(), self._rng)

    def resign(self) -> None:
        """Stop leading at once; `run` then releases the Lease."""
        self._state.resign()
        self._resigned.set()

    async def wait_ended(self, timeout_s: float) -> None:
        """Wait for the end of `run` where it runs, at most `timeout_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._ended.wait()

    async def release(self) -> None:
        """Release the Lease if it is ours, so that another candidate can lead at once."""
        for _ in range(_MAX_RELEASE_ATTEMPTS):
            if not self._state.is_holder and not await self._read():
                return
            write = self._state.release()
            if write is None or await self._write(write):
                if write is not None:
                    self._report("resigned", self._state.identity)
                return

    async def _attempt(self) -> None:
        if not self._state.is_holder and not await self._read():
            return
        if self._state.is_holder or self._can_lead():
            write = self._state.claim(self._clock())
            if write is not None:
                await self._write(write)
                return
        self._on_success()

    async def _read(self) -> bool:
        record = await self._store.read()
        if isinstance(record, LeaseRequestFailed):
            self._on_failure(record)
            return False
        # Only an attempt that also wrote what it had to is a success.
        self._state.observe(record, self._clock())
        return True

    async def _write(self, write: LeaseWrite) -> bool:
        sent_at_s = self._clock()
        record = await self._store.write(write)
        if isinstance(record, LeaseRequestFailed):
            self._state.invalidate()
            self._on_failure(record)
            return False
        self._on_success()
        self._state.confirm(write, record.version, sent_at_s)
        return True

    def _on_failure(self, failure: LeaseRequestFailed) -> None:
        first = self._reported_failure is None
        if not failure.conflict and (first or failure.reason not in {"", self._reported_failure}):
            self._reported_failure = failure.reason
            self._report("failed", failure.message)

    def _on_success(self) -> None:
        if self._reported_failure is not None:
            self._reported_failure = None
            self._report("recovered", "the Lease can be read and written again")

    def _report(self, kind: str, detail: str) -> None:
        self._on_event(ElectionEvent(kind, detail))


#: Facts of an election that are logged as information only.
_INFO_EVENTS = frozenset({"elected", "follows", "recovered", "resigned"})

#: Status of a write that lost a race: 404 for a deleted Lease, else 409.
_CONFLICT_STATUSES = frozenset({404, 409})


class LeaseClient(ApiRequestClient):
    """Reads and writes a Lease."""

    def __init__(self, plan: kubernetes_plan.ElectionPlan) -> None:
        super().__init__(plan.api_settings)
        self._lease = plan.lease
        # Two calls, a read and a write, fit in the time that a leader has.
        self._timeout_s = plan.lease.renew_s / 2.0
        self._stored: election.Object | None = None
        self._denials = api_responses.Denials()

    async def read(self) -> LeaseRecord | LeaseRequestFailed | None:
        """Read the Lease; None where it does not exist."""
        answer = await self._send(
            "GET", election.lease_path(self._lease.namespace, self._lease.name)
        )
        if isinstance(answer, api_responses.ApiError) and answer.status == 404:
            self._denials.is_missing("get", answer)
            self._stored = None
            return None
        return self._read_answer(answer)

    async def write(self, write: LeaseWrite) -> LeaseRecord | LeaseRequestFailed:
        """Write the Lease if its stored version is the version of the write."""
        namespace, name = self._lease.namespace, self._lease.name
        body = election.build_lease(
            write, namespace=namespace, name=name, at=dt.datetime.now(dt.UTC), before=self._stored
        )
        if write.version:
            answer = await self._send("PUT", election.lease_path(namespace, name), body)
        else:
            answer = await self._send("POST", election.lease_path(namespace), body)
        return self._read_answer(answer, write=write)

    def _read_answer(
        self, answer: bytes | api_responses.ApiError, write: LeaseWrite | None = None
    ) -> LeaseRecord | LeaseRequestFailed:
        if isinstance(answer, api_responses.ApiError):
            is_conflict = write is not None and answer.status in _CONFLICT_STATUSES
            # A namespace that is not there answers 404 to a create.
            is_conflict = is_conflict and (answer.status == 409 or bool(write and write.version))
            verb = "get" if write is None else "update" if write.version else "create"
            is_denied = self._denials.is_missing(verb, answer)
            reason = "forbidden" if is_denied else "unauthorized" if answer.status == 401 else ""
            message = self._error_text(answer, is_denied=is_denied)
            return LeaseRequestFailed(message, conflict=is_conflict, reason=reason)
        for verb in ("get",) if write is None else ("update", "create"):
            self._denials.is_missing(verb, answer)
        read = election.parse_lease(answer)
        if isinstance(read, election.UnreadableLease):
            return LeaseRequestFailed(f"{self._title}: {read.reason}")
        record, self._stored = read
        return record

    async def _send(
        self, method: str, path: str, body: election.Object | None = None
    ) -> bytes | api_responses.ApiError:
        # Tokens are rotated under our feet; the next attempt has the new one.
        return await self.send_once(method, path, body, seconds=self._timeout_s)

    @property
    def _title(self) -> str:
        return f"Lease {self._lease.namespace}/{self._lease.name}"

    def _error_text(self, error: api_responses.ApiError, *, is_denied: bool) -> str:
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
) -> LeaderElector | None:
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
    return LeaderElector(
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


def _log_event(event: ElectionEvent) -> None:
    level = logging.INFO if event.kind in _INFO_EVENTS else logging.WARNING
    _log.log(level, "election: %s: %s", event.kind, event.detail or "none")


def _clock() -> float:
    """Monotonic seconds that go on while the machine sleeps, where the system counts them.

    Others' clocks go on as well: a leader that wakes up must know that its time is over.
    """
    if sys.platform == "linux":
        return time.clock_gettime(time.CLOCK_BOOTTIME)
    return time.monotonic()
