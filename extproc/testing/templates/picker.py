"""A picker: chooses among endpoints by their totals, higher is better.

Name the file and the kind in the configuration:

    scheduling:
      plugin_files: [my_picker.py]
      profile:
        scorers:
          - {kind: in-flight}
        picker: {kind: my-picker}

and hold it to the contract: `extproc plugin test my_picker.py`.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import ClassVar

import msgspec

from extproc.decision import Decision
from extproc.endpoint import Candidate
from extproc.scheduling.framework import SchedulingContext, Signal


class MyPicker(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, dict=True):
    """Picks the highest total, except the endpoint of the last pick; ties at random.

    Attributes:
        apart: Whether two requests in a row go to different endpoints.
    """

    kind: ClassVar[str] = "my-picker"
    needs: ClassVar[frozenset[Signal]] = frozenset()

    apart: bool = True

    @cached_property
    def _memory(self) -> dict[str, str]:
        """Mutable state of the plugin instance (`dict=True` makes room for it)."""
        return {}

    def pick(
        self,
        context: SchedulingContext,
        candidates: Sequence[Candidate],
        totals: Sequence[float],
        *,
        count: int,
    ) -> list[int]:
        """Up to `count` different positions, the best first; chance comes from `context.rng`."""
        last = self._memory.get("last") if self.apart else None
        draws = [context.rng.random() for _ in candidates]

        def rank(at: int) -> tuple[bool, float, float]:
            return candidates[at].endpoint.address == last, -totals[at], draws[at]

        return sorted(range(len(candidates)), key=rank)[:count]

    def on_committed(self, decision: Decision, now: float) -> None:
        """Record the pick; state changes only here, because dry runs call `pick` too."""
        self._memory["last"] = decision.endpoints[0].address
