"""Result of a policy step: desired replicas and a reason."""

from __future__ import annotations

from enum import StrEnum

import msgspec


class ScalingReason(StrEnum):
    """Reason of a scaling decision; the values are metric labels."""

    STEADY = "steady"  #: Nothing calls for a change.
    WAKE = "wake"  #: A request waits, and there is no replica.
    UP = "up"  #: More demand than replicas for it.
    DOWN = "down"  #: Fewer replicas do.
    IDLE = "idle"  #: No request for long enough.
    BOUNDS = "bounds"  #: The bounds say so.
    INCOMPLETE_DATA = "unread"  #: Fewer might do, but the counters of some picker are missing.
    STABILIZING = "watching"  #: Fewer might do, but it was not watched long enough.


class ScalingDecision(msgspec.Struct, frozen=True):
    """Desired number of replicas, with the reason.

    Attributes:
        replicas: Desired number.
        reason: Category of the decision.
        explanation: Figures behind the decision, as text; empty where the reason suffices.
    """

    replicas: int
    reason: ScalingReason
    explanation: str = ""
