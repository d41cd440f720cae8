"""Actuators apply a scaling decision: the protocol, and one that leaves it to others."""

from __future__ import annotations

from typing import Protocol

import msgspec

from extproc.autoscaling.interface import ScalingDecision


class ActuatorError(msgspec.Struct, frozen=True):
    """Failure of an actuator, with a message for people."""

    message: str


class Actuator(Protocol):
    """Reads and changes the number of replicas requested of a scale target.

    Attributes:
        scales: Whether it changes replicas itself; False where others read the number and act.
    """

    scales: bool

    @property
    def acts(self) -> bool:
        """True while this process may change the number of replicas."""

    async def current_replicas(self, available: int) -> int | ActuatorError:
        """Read the number of requested replicas.

        Args:
            available: Ready replicas.
        """

    async def scale(self, desired: ScalingDecision, spec: int) -> ActuatorError | None:
        """Request another number of replicas.

        Args:
            desired: Replicas and reason.
            spec: Replicas requested until now.
        """

    def restore(self, replicas: int) -> None:
        """Take over the number another process requested, where no object records it.

        Args:
            replicas: Number that process requested last.
        """

    async def run(self) -> None:
        """Run the background work of the actuator until cancelled."""


class AdvisoryActuator:
    """Publishes decisions for others to apply, and takes the last one as requested.

    Before the first decision the ready replicas count as requested, since the target cannot be
    read.
    """

    scales = False

    def __init__(self) -> None:
        self._requested: int | None = None

    @property
    def acts(self) -> bool:
        """True: every replica may publish its decision."""
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
        """Return at once: there is no background work."""
