"""A program that is run when the number changes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence

from extproc.autoscaling.interface import ScalingDecision
from extproc.autoscaling.runtime.actuator import ActuatorError
from extproc.config.autoscaling import REPLICAS

#: Longest piece of what a program that failed said (bytes).
_MAX_OUTPUT_BYTES = 400


class ExecActuator:
    """The hands of a machine without Kubernetes: whoever keeps the engines is told the number.

    Args:
        command: Program and arguments; `{replicas}` becomes the number.
        timeout_s: For the program.
    """

    scales = True

    def __init__(self, command: Sequence[str], *, timeout_s: float) -> None:
        self._command = command
        self._timeout_s = timeout_s
        self._requested: int | None = None

    @property
    def acts(self) -> bool:
        """Always: there is no Lease without Kubernetes."""
        return True

    async def current_replicas(self, available: int) -> int | ActuatorError:
        """See `Hands`: what was told, or at first what is there."""
        return available if self._requested is None else self._requested

    async def scale(self, desired: ScalingDecision, spec: int) -> ActuatorError | None:
        """See `Hands`: run the program."""
        del spec
        argv = [word.replace(REPLICAS, str(desired.replicas)) for word in self._command]
        try:
            process = await asyncio.create_subprocess_exec(
                *argv,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
            )
        except OSError as error:
            return ActuatorError(f"{argv[0]} cannot be run: {error.strerror}")
        try:
            output, _ = await asyncio.wait_for(process.communicate(), self._timeout_s)
        except TimeoutError:
            return ActuatorError(f"{argv[0]} did not end within {self._timeout_s:g} s")
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
        if process.returncode:
            last = output[-_MAX_OUTPUT_BYTES:].decode("utf-8", "replace").strip()
            return ActuatorError(f"{argv[0]} ended with {process.returncode}: {last}")
        self._requested = desired.replicas
        return None

    def restore(self, replicas: int) -> None:
        """See `Hands`: engines that outlive a picker are still starting, or still there."""
        self._requested = replicas

    async def run(self) -> None:
        """Nothing."""
