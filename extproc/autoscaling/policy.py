"""What every policy is."""

from __future__ import annotations

from typing import Any, ClassVar, Protocol, Self

from extproc.autoscaling.demand import Demand, ReplicaBounds
from extproc.autoscaling.interface import ScalingDecision


class PolicyState(Protocol):
    """What a policy remembers: a frozen value that msgspec can write as JSON and read again."""

    def shift_time(self, by_s: float) -> Self:
        """The same on a clock that shows so many seconds more."""


class ScalingPolicy(Protocol):
    """From demand to replicas. Frozen: all it remembers is in the state it is given.

    Attributes:
        kind: Its name in the catalogue.
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
        """One tick.

        Args:
            state: What it remembers; of the class `memory`.
            demand: What is seen now.
            bounds: Of the answer.

        Returns:
            What it remembers from now on, and the replicas it wants, which need not keep the
            bounds: the scaler sees to that.
        """
