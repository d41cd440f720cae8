"""Usage limit: ceilings of saturation from which on requests of a priority are held in the queue.

So capacity is kept for requests of higher priorities that have not arrived yet.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Annotated, Final, Literal

import msgspec

#: Seconds for which a priority counts after its last request, as upstream keeps bands without requests.
MEMORY_S: Final = 600.0


class UsageLimit(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Ceilings of saturation; from its ceiling on, requests of a priority are held in the queue.

    The highest priority has `max_ceiling`, the lowest `min_ceiling`. Priorities count that `bands`
    names, or that requests had in the last ten minutes; a single one has `max_ceiling`.

    Attributes:
        min_ceiling: Ceiling of the lowest priority, such as 0.5 for half of the saturation at which
            priorities below 0 are rejected. 0 holds it while a higher priority counts.
        max_ceiling: Ceiling of the highest priority; that of all where it is `min_ceiling`. 1 is the
            upstream default; above it, the highest priority is held later, as saturation has no bound.
        domain: Spread of the ceilings between: by the `rank` of priorities in equal steps, or by
            their `value`. `rank`: the numbers of most objectives have no meaning but their order.
    """

    min_ceiling: Annotated[float, msgspec.Meta(ge=0)]
    max_ceiling: Annotated[float, msgspec.Meta(gt=0)] = 1.0
    domain: Literal["rank", "value"] = "rank"

    def __post_init__(self) -> None:
        """Refuse ceilings that fall while priorities rise.

        Raises:
            ValueError: `min_ceiling` is above `max_ceiling`.
        """
        if self.min_ceiling > self.max_ceiling:
            raise ValueError(
                f"expected a min_ceiling of at most max_ceiling ({self.max_ceiling:g}), "
                f"got {self.min_ceiling:g}"
            )

    def find_ceilings(self, priorities: Collection[int]) -> Mapping[int, float]:
        """Ceilings of these priorities, at least one.

        c = max - (max - min) d / D, with d the distance of a priority from the highest, in ranks or
        in value, and D that of the lowest.
        """
        ordered = sorted(priorities, reverse=True)
        distances = ordered if self.domain == "value" else range(0, -len(ordered), -1)
        span = max(1, distances[0] - distances[-1])
        fall = (self.max_ceiling - self.min_ceiling) / span
        return {
            priority: self.max_ceiling - fall * (distances[0] - distance)
            for priority, distance in zip(ordered, distances, strict=True)
        }


class PriorityCeilings:
    """Ceilings of the priorities that requests have had lately. Mutable; one owner."""

    def __init__(self) -> None:
        #: Time of the last request, by priority (monotonic seconds).
        self._last: dict[int, float] = {}
        self._limit: UsageLimit | None = None
        self._banded: Collection[int] = ()
        self._ceilings: Mapping[int, float] = {}
        self._valid_until = -math.inf

    def reconfigure(self, limit: UsageLimit | None, banded: Collection[int]) -> None:
        """Replace the limit, None for none, and the priorities that count without requests."""
        self._limit, self._banded = limit, banded
        self._ceilings = {}

    def find(self, priority: int, now: float) -> float:
        """Ceiling of a request of this priority; infinity without a limit."""
        if self._limit is None:
            return math.inf
        self._last[priority] = now
        if priority not in self._ceilings or now >= self._valid_until:
            since = now - MEMORY_S
            self._last = {known: last for known, last in self._last.items() if last > since}
            self._valid_until = min(self._last.values()) + MEMORY_S
            self._ceilings = self._limit.find_ceilings({*self._last, *self._banded})
        return self._ceilings[priority]
