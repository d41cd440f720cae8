"""What a policy answers."""

from __future__ import annotations

from enum import StrEnum

import msgspec


class ScalingReason(StrEnum):
    """Why it is that number; the values are metric labels."""

    STEADY = "steady"  #: Nothing calls for a change.
    WAKE = "wake"  #: A request waits, and there is no replica.
    UP = "up"  #: More demand than replicas for it.
    DOWN = "down"  #: Fewer replicas do.
    IDLE = "idle"  #: Nobody asked for long enough.
    BOUNDS = "bounds"  #: The bounds say so.
    INCOMPLETE_DATA = "unread"  #: Fewer might do, but not all pickers could be asked.
    STABILIZING = "watching"  #: Fewer might do, but it was not watched long enough.


class ScalingDecision(msgspec.Struct, frozen=True):
    """How many replicas there should be.

    Attributes:
        replicas: The number.
        reason: In one word.
        explanation: In numbers, for people; empty where the word says it all.
    """

    replicas: int
    reason: ScalingReason
    explanation: str = ""
