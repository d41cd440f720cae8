"""What acts on the number: a protocol, and hands that leave it to others."""

from __future__ import annotations

from typing import Protocol

import msgspec

from extproc.autoscaling.interface import ScalingDecision


class ActuatorError(msgspec.Struct, frozen=True):
    """It could not be done; the text says why, for people."""

    message: str


class Actuator(Protocol):
    """Who reads and changes how many replicas are asked for.

    Attributes:
        scales: Whether it changes replicas itself; False where others read the number and act.
    """

    scales: bool

    @property
    def acts(self) -> bool:
        """Whether this process, and nobody else, may change the number now."""

    async def current_replicas(self, available: int) -> int | ActuatorError:
        """Replicas that are asked for.

        Args:
            available: Replicas that answer.
        """

    async def scale(self, desired: ScalingDecision, spec: int) -> ActuatorError | None:
        """Ask for another number.

        Args:
            desired: How many, and why.
            spec: Replicas asked for until now.
        """

    def restore(self, replicas: int) -> None:
        """Another process asked for so many before; only where nobody else can tell.

        Args:
            replicas: Asked for when that one last looked.
        """

    async def run(self) -> None:
        """Whatever has to go on beside; until cancelled."""


class AdvisoryActuator:
    """Others act on what is told, so what was told is what is asked for.

    At first that is what is there: of a target nobody here may read, nothing else is known.
    """

    scales = False

    def __init__(self) -> None:
        self._requested: int | None = None

    @property
    def acts(self) -> bool:
        """Telling is acting, for everybody who is asked."""
        return True

    async def current_replicas(self, available: int) -> int | ActuatorError:
        """See `Actuator`."""
        return available if self._requested is None else self._requested

    async def scale(self, desired: ScalingDecision, spec: int) -> ActuatorError | None:
        """See `Actuator`."""
        del spec
        self._requested = desired.replicas
        return None

    def restore(self, replicas: int) -> None:
        """See `Actuator`."""
        self._requested = replicas

    async def run(self) -> None:
        """Nothing."""
