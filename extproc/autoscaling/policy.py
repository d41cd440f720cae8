"""Protocols of a scaling policy and its state."""

from __future__ import annotations

from typing import Any, ClassVar, Protocol, Self

from extproc.autoscaling.demand import Demand, ReplicaBounds
from extproc.autoscaling.interface import ScalingDecision


class PolicyState(Protocol):
    """State of a policy: a frozen value that msgspec encodes to and decodes from JSON."""

    def shift_time(self, by_s: float) -> Self:
        """Return the state with all times moved by `by_s` seconds, for another clock."""


class ScalingPolicy(Protocol):
    """Computes desired replicas from demand. Frozen: the caller keeps its state.

    Attributes:
        kind: Its name in `registry.POLICIES`.
        memory: Class of its state; without arguments the state of a policy that saw nothing.
        interval_s: Seconds between two steps. It is also stepped at once when a request waits and
            there is no replica.
        watch_s: Seconds it must have watched before fewer replicas are believed.
    """

    kind: ClassVar[str]
    memory: ClassVar[type[Any]]

    @property
    def interval_s(self) -> float:
        """See the class."""

    @property
    def watch_s(self) -> float:
        """See the class."""

    def step(
        self, state: Any, demand: Demand, bounds: ReplicaBounds
    ) -> tuple[Any, ScalingDecision]:
        """Decide once.

        Args:
            state: State returned by the last step; of the class `memory`.
            demand: Current demand.
            bounds: Limits that the caller will apply.

        Returns:
            The next state and the desired replicas, which need not be within the bounds:
            `PolicyRunner` enforces them.
        """
