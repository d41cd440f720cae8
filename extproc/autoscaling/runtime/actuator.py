"""What acts on the number: a protocol, and hands that leave it to others."""

from __future__ import annotations

from typing import Protocol

import msgspec

from extproc.autoscaling.interface import Desired


class Failed(msgspec.Struct, frozen=True):
    """It could not be done; the text says why, for people."""

    message: str


class Hands(Protocol):
    """Who reads and changes how many replicas are asked for.

    Attributes:
        scales: Whether it changes replicas itself; False where others read the number and act.
    """

    scales: bool

    @property
    def acts(self) -> bool:
        """Whether this process, and nobody else, may change the number now."""

    async def look(self, available: int) -> int | Failed:
        """Replicas that are asked for.

        Args:
            available: Replicas that answer.
        """

    async def scale(self, desired: Desired, spec: int) -> Failed | None:
        """Ask for another number.

        Args:
            desired: How many, and why.
            spec: Replicas asked for until now.
        """

    def recall(self, replicas: int) -> None:
        """Another process asked for so many before; only where nobody else can tell.

        Args:
            replicas: Asked for when that one last looked.
        """

    async def run(self) -> None:
        """Whatever has to go on beside; until cancelled."""


class Told:
    """Others act on what is told, so what was told is what is asked for.

    At first that is what is there: of a target nobody here may read, nothing else is known.
    """

    scales = False

    def __init__(self) -> None:
        self._told: int | None = None

    @property
    def acts(self) -> bool:
        """Telling is acting, for everybody who is asked."""
        return True

    async def look(self, available: int) -> int | Failed:
        """See `Hands`."""
        return available if self._told is None else self._told

    async def scale(self, desired: Desired, spec: int) -> Failed | None:
        """See `Hands`."""
        del spec
        self._told = desired.replicas
        return None

    def recall(self, replicas: int) -> None:
        """See `Hands`."""
        self._told = replicas

    async def run(self) -> None:
        """Nothing."""
