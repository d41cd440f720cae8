"""Runs a candidate of leader election over a store of the Lease."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable
from typing import Protocol

import msgspec

from extproc.election.lease_state import ElectionSettings, LeaseRecord, LeaseState, LeaseWrite
from extproc.supervision import Supervisor

#: Attempts to release a Lease: one of them may meet a renewal that was still on its way.
_RELEASES = 3


class LeaseRequestFailed(msgspec.Struct, frozen=True):
    """A read or write of the Lease that failed.

    Attributes:
        message: Reason as text for the log.
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

    async def look(self) -> LeaseRecord | LeaseRequestFailed | None:
        """Read the stored record; None if there is no Lease."""

    async def put(self, put: LeaseWrite) -> LeaseRecord | LeaseRequestFailed:
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
        settings: Name and times of the Lease.
        leases: Storage of the Lease.
        rng: Seeded randomness that spreads attempts.
        stands: Returns True if this replica may take a free Lease. A replica that could not do the
            work must not; a holder keeps the Lease regardless.
        on_fact: Called with every event.
        supervisor: Receives attempts that raise; None creates a private supervisor.
    """

    def __init__(
        self,
        identity: str,
        settings: ElectionSettings,
        leases: LeaseStore,
        *,
        clock: Callable[[], float],
        rng: random.Random,
        stands: Callable[[], bool] = lambda: True,
        on_fact: Callable[[ElectionEvent], None] = lambda _: None,
        supervisor: Supervisor | None = None,
    ) -> None:
        self._term = LeaseState(identity, settings)
        self._leases = leases
        self._clock = clock
        self._rng = rng
        self._can_lead = stands
        self._on_fact = on_fact
        self._supervisor = supervisor or Supervisor(clock=clock)
        self._resigned = asyncio.Event()
        self._over = asyncio.Event()
        self._led = False
        self._follows = ""
        #: Reason of the failure that was reported last; None while nothing fails.
        self._failing: str | None = None

    @property
    def is_leader(self) -> bool:
        """True while this replica, and no other, may act."""
        return self._term.leads(self._clock())

    async def start(self) -> None:
        """Prepare the store; call it before `run`.

        Raises:
            ConfigError: If the API server's address or the credentials are missing or broken.
        """
        await self._leases.open()

    async def run(self) -> None:
        """Compete until resigned; then release the Lease, and return."""
        try:
            while not self._resigned.is_set():
                pause = await self._attempted()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._resigned.wait(), pause)
            await self._supervisor.attempt("election", self.release())
        finally:
            self._over.set()
            await self._leases.close()

    async def _attempted(self) -> float:
        """Run a step, return the pause until the next (seconds); errors force a new read."""
        try:
            pause_s = await self.step()
        except Exception as error:  # noqa: BLE001 - a candidate that gives up would leave nobody
            self._term.invalidate()
            return self._supervisor.failed("election", error)
        self._supervisor.works("election")
        return pause_s

    async def step(self) -> float:
        """Run an attempt, report changes, and return the pause until the next (seconds)."""
        await self._attempt()
        leads = self.is_leader
        if leads != self._led:
            self._led = leads
            identity = self._term.identity
            self._tell(*(("elected", identity) if leads else ("lost", self._term.holder)))
        holder = self._term.holder
        if holder != self._follows:
            self._follows = holder
            if holder not in {"", self._term.identity}:
                self._tell("follows", holder)
        return self._term.pause(self._clock(), self._rng)

    def resign(self) -> None:
        """Stop leading at once; `run` then releases the Lease."""
        self._term.resign()
        self._resigned.set()

    async def resigned(self, seconds: float) -> None:
        """Wait for the end of `run`, at most `seconds`."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._over.wait(), seconds)

    async def release(self) -> None:
        """Release the Lease if it is ours, so that another candidate can lead at once."""
        for _ in range(_RELEASES):
            if not self._term.mine and not await self._read():
                return
            put = self._term.release()
            if put is None or await self._write(put):
                if put is not None:
                    self._tell("resigned", self._term.identity)
                return

    async def _attempt(self) -> None:
        if not self._term.mine and not await self._read():
            return
        if self._term.mine or self._can_lead():
            put = self._term.claim(self._clock())
            if put is not None:
                await self._write(put)

    async def _read(self) -> bool:
        record = await self._leases.look()
        if isinstance(record, LeaseRequestFailed):
            self._stumbled(record)
            return False
        self._went_well()
        self._term.observe(record, self._clock())
        return True

    async def _write(self, put: LeaseWrite) -> bool:
        sent_at_s = self._clock()
        record = await self._leases.put(put)
        if isinstance(record, LeaseRequestFailed):
            self._term.invalidate()
            self._stumbled(record)
            return False
        self._went_well()
        self._term.confirm(put, record.version, sent_at_s)
        return True

    def _stumbled(self, failed: LeaseRequestFailed) -> None:
        first = self._failing is None
        if not failed.conflict and (first or failed.reason not in {"", self._failing}):
            self._failing = failed.reason
            self._tell("failed", failed.message)

    def _went_well(self) -> None:
        if self._failing is not None:
            self._failing = None
            self._tell("recovered", "the Lease can be read and written again")

    def _tell(self, kind: str, detail: str) -> None:
        self._on_fact(ElectionEvent(kind, detail))
