"""Runs a program when the number of replicas changes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Self

from extproc.autoscaling.interface import ScalingDecision
from extproc.autoscaling.runtime.actuator import ActuatorContext, ActuatorError
from extproc.config.autoscaling import REPLICAS, ScalingSection

#: Longest part of the output of a failed program that is logged (bytes).
_MAX_OUTPUT_BYTES = 400


class ExecActuator:
    """Scales without Kubernetes: a program receives the number of replicas.

    Args:
        command: Program and arguments; `{replicas}` becomes the number.
        timeout_s: Time limit of the program.
    """

    scales = True

    def __init__(self, command: Sequence[str], *, timeout_s: float) -> None:
        self._command = command
        self._timeout_s = timeout_s
        self._requested: int | None = None

    @classmethod
    def from_settings(cls, scaling: ScalingSection, context: ActuatorContext) -> Self:
        """See `Actuator`."""
        del context
        return cls(scaling.exec, timeout_s=scaling.exec_s)

    @property
    def acts(self) -> bool:
        """True: there is no Lease without Kubernetes."""
        return True

    def start(self) -> None:
        """See `Actuator`."""

    async def current_replicas(self, available: int) -> int | ActuatorError:
        """See `Actuator`: the last number, or before it the ready replicas."""
        return available if self._requested is None else self._requested

    async def scale(self, desired: ScalingDecision, spec: int) -> ActuatorError | None:
        """See `Actuator`: run the program."""
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
        """See `Actuator`: engines outlive this process."""
        self._requested = replicas

    async def run(self) -> None:
        """Return at once: there is no background work."""
