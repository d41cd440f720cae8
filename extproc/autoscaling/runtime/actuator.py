"""Actuators: how a decision is applied; the advisory one, and one that runs a program.

The table of all actuators is `config.autoscaling.ACTUATORS`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol, Self, cast

import msgspec

from extproc.autoscaling.interface import ScalingDecision
from extproc.config.autoscaling import REPLICAS, ScalingSection
from extproc.server.pool_runtime import PoolRuntime
from extproc.supervision import Supervisor

if TYPE_CHECKING:
    from extproc.autoscaling.runtime.scale_subresource import ScaleClient


class ActuatorError(msgspec.Struct, frozen=True):
    """Failure of an actuator, with a message for people."""

    message: str


class ActuatorContext(msgspec.Struct, frozen=True, kw_only=True):
    """Dependencies of all actuators.

    Attributes:
        cluster: Client of the API server; None where no pool needs one.
        namespace: Namespace of this process, for targets that name none.
    """

    cluster: ScaleClient | None
    namespace: str
    is_leader: Callable[[], bool]
    clock: Callable[[], float]
    supervisor: Supervisor


class Actuator(Protocol):
    """Reads and changes the number of replicas requested of a scale target; a base class.

    Attributes:
        scales: Whether it changes replicas itself; False where others read the number and act.
    """

    scales: bool

    @classmethod
    def from_settings(
        cls, scaling: ScalingSection, pool: PoolRuntime, context: ActuatorContext
    ) -> Self:
        """Build the actuator of a pool."""

    @property
    def can_scale(self) -> bool:
        """True while this process may change the number of replicas: always, without a Lease."""
        return True

    def start(self) -> None:
        """Prepare the pool before the first step of its loop."""

    async def current_replicas(self, available: int) -> int | ActuatorError:
        """Read the number of requested replicas."""

    async def scale(self, desired: ScalingDecision, spec: int) -> ActuatorError | None:
        """Request another number of replicas than `spec`, which was requested until now."""

    def restore(self, replicas: int) -> None:
        """Take over the number that another process requested last, where no object records it."""

    async def run(self) -> None:
        """Run the background work of the actuator until cancelled."""


class AdvisoryActuator(Actuator):
    """Publishes decisions for others to apply, and takes the last one as requested.

    Before the first change as many replicas count as requested as were ready at a time, since the
    target cannot be read: replicas that fail are no decision. Every replica of extproc publishes
    its decision.
    """

    scales = False

    def __init__(self) -> None:
        self._requested: int | None = None
        self._most_available = 0

    @classmethod
    def from_settings(
        cls, scaling: ScalingSection, pool: PoolRuntime, context: ActuatorContext
    ) -> Self:
        """See `Actuator`."""
        del scaling, pool, context
        return cls()

    async def current_replicas(self, available: int) -> int | ActuatorError:
        """See `Actuator`."""
        self._most_available = max(self._most_available, available)
        return self._most_available if self._requested is None else self._requested

    async def scale(self, desired: ScalingDecision, spec: int) -> ActuatorError | None:
        """See `Actuator`."""
        del spec
        self._requested = desired.replicas
        return None

    def restore(self, replicas: int) -> None:
        """See `Actuator`."""
        self._requested = replicas


#: Seconds that the last output of an ended process may take to arrive.
_LAST_OUTPUT_S = 1.0


class ChildProcess(asyncio.SubprocessProtocol):
    """Process of a program, whose output, errors included, is read until its last writer ends.

    `asyncio.subprocess.Process` waits for that end too; a process in the background may delay it.

    Args:
        on_output: Called with each part of the output.

    Attributes:
        transport: Sends signals and knows the status.
        ended: Set once the process ended, also while processes that it started go on.
        is_read: Set once the last writer of its output ended, and all of it was read.
    """

    transport: asyncio.SubprocessTransport

    def __init__(self, on_output: Callable[[bytes], None]) -> None:
        self.ended = asyncio.Event()
        self._on_output = on_output
        self.is_read = asyncio.Event()

    @classmethod
    async def start(
        cls, argv: Sequence[str], on_output: Callable[[bytes], None], *, new_session: bool = False
    ) -> Self:
        """Start a program; raises OSError where that is impossible."""
        _, child = await asyncio.get_running_loop().subprocess_exec(
            lambda: cls(on_output),
            *argv,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=new_session,
        )
        return child

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.SubprocessProtocol`."""
        self.transport = cast("asyncio.SubprocessTransport", transport)

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        """See `asyncio.SubprocessProtocol`."""
        del fd
        self._on_output(data)

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        """See `asyncio.SubprocessProtocol`."""
        del fd, exc
        self.is_read.set()
        self._close_if_done()

    def process_exited(self) -> None:
        """See `asyncio.SubprocessProtocol`."""
        self.ended.set()
        self._close_if_done()

    def _close_if_done(self) -> None:
        if self.ended.is_set() and self.is_read.is_set():
            self.transport.close()

    async def wait_for_output(self) -> None:
        """Wait for the last output of the ended process, not for that of others in the background."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LAST_OUTPUT_S):
                await self.is_read.wait()


#: Longest part of the output of a failed program that is logged (bytes).
_MAX_OUTPUT_BYTES = 400


class ExecActuator(AdvisoryActuator):
    """Scales without Kubernetes: a program receives the number of replicas.

    Args:
        command: Program and arguments; `{replicas}` becomes the number.
    """

    scales = True

    def __init__(self, command: Sequence[str], *, timeout_s: float) -> None:
        super().__init__()
        self._command = command
        self._timeout_s = timeout_s

    @classmethod
    def from_settings(
        cls, scaling: ScalingSection, pool: PoolRuntime, context: ActuatorContext
    ) -> Self:
        """See `Actuator`."""
        del pool, context
        return cls(scaling.exec, timeout_s=scaling.exec_s)

    async def scale(self, desired: ScalingDecision, spec: int) -> ActuatorError | None:
        """See `Actuator`: run the program."""
        argv = [word.replace(REPLICAS, str(desired.replicas)) for word in self._command]
        last = bytearray()

        def keep_last(output: bytes) -> None:
            last.extend(output)
            del last[:-_MAX_OUTPUT_BYTES]

        try:
            # In a session of its own, so that a signal reaches the processes that it started too.
            child = await ChildProcess.start(argv, keep_last, new_session=True)
        except OSError as error:
            return ActuatorError(f"{argv[0]} cannot be run: {error.strerror}")
        try:
            async with asyncio.timeout(self._timeout_s):
                await child.ended.wait()
        except TimeoutError:
            return ActuatorError(f"{argv[0]} did not end within {self._timeout_s:g} s")
        finally:
            if not child.ended.is_set():
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.transport.get_pid(), signal.SIGKILL)
                await child.ended.wait()
                await child.wait_for_output()
        status = child.transport.get_returncode()
        if status:
            await child.wait_for_output()
            text = last.decode("utf-8", "replace").strip()
            return ActuatorError(f"{argv[0]} ended with {status}: {text}")
        return await super().scale(desired, spec)
