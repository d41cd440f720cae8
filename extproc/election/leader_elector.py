"""A candidate that asks and writes. A shell, over whoever reaches the Lease."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable
from typing import Protocol

import msgspec

from extproc.election.lease_state import LeaseRecord, LeaseState, LeaseWrite
from extproc.election.settings import ElectionSettings
from extproc.supervision import Supervisor

#: Attempts to release a Lease: one of them may meet a renewal that was still on its way.
_RELEASES = 3


class LeaseRequestFailed(msgspec.Struct, frozen=True):
    """No record.

    Attributes:
        message: Why, for people.
        conflict: Somebody else wrote first: nothing to worry about.
        reason: `unauthorized` or `forbidden`, which people have to mend; empty for what passes.
    """

    message: str
    conflict: bool = False
    reason: str = ""


class LeaseStore(Protocol):
    """Where the Lease is kept. Reads and writes end within half of `renew_s`, in whatever way."""

    async def open(self) -> None:
        """Makes ready to be asked.

        Raises:
            ConfigError: What it takes is missing or broken.
        """

    async def look(self) -> LeaseRecord | LeaseRequestFailed | None:
        """What is stored; None for nothing."""

    async def put(self, put: LeaseWrite) -> LeaseRecord | LeaseRequestFailed:
        """Writes, if the stored version is the one the write names; what is stored then."""

    async def close(self) -> None:
        """Ends all connections."""


class ElectionEvent(msgspec.Struct, frozen=True):
    """Something happened.

    Attributes:
        kind: `elected`, `lost`, `resigned`, `follows`, `failed` or `recovered`.
        detail: For people.
    """

    kind: str
    detail: str


class LeaderElector:
    """Stands for election for as long as `run` runs.

    `is_leader` is a statement about this moment: work that must be single asks before each step that
    changes anything, and its steps are short against `duration_s - renew_s`.

    Args:
        identity: Of this process in this life.
        settings: How patient it is.
        leases: Where the Lease is.
        clock: Monotonic seconds.
        rng: Chance, for spreading attempts.
        stands: Whether this replica would take the Lease if it were free. One that could not do
            the work must not; one that holds it already keeps it.
        on_fact: Called when something happened.
        supervisor: Hears of attempts that raise; None for one of its own.
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
        """Whether this replica, and no other, may act now."""
        return self._term.leads(self._clock())

    async def start(self) -> None:
        """Make ready; `run` comes after it.

        Raises:
            ConfigError: If the API server's address or the credentials are missing or broken.
        """
        await self._leases.open()

    async def run(self) -> None:
        """Stand until resigned; then release the Lease, and end."""
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
        """One step; what it raises says nothing about the Lease, which has to be read again."""
        try:
            pause_s = await self.step()
        except Exception as error:  # noqa: BLE001 - a candidate that gives up would leave nobody
            self._term.invalidate()
            return self._supervisor.failed("election", error)
        self._supervisor.works("election")
        return pause_s

    async def step(self) -> float:
        """One attempt; returns seconds until the next."""
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
        """Lead no more, at once; `run` then releases the Lease."""
        self._term.resign()
        self._resigned.set()

    async def resigned(self, seconds: float) -> None:
        """Wait for the end of `run`, so long at most."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._over.wait(), seconds)

    async def release(self) -> None:
        """Let others lead at once, where the Lease is ours."""
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
        asked_at_s = self._clock()
        record = await self._leases.put(put)
        if isinstance(record, LeaseRequestFailed):
            self._term.invalidate()
            self._stumbled(record)
            return False
        self._went_well()
        self._term.confirm(put, record.version, asked_at_s)
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
