"""A cost model: prices every endpoint in one unit, lower is better.

It takes the place of the scorers: the picker compares negated costs, and the terms are what
`extproc explain` shows. Name the file and the kind in the configuration:

    scheduling:
      plugin_files: [my_cost.py]
      profile:
        cost: {kind: my-cost, params: {slot_s: 0.02}}

and hold it to the contract: `extproc plugin test my_cost.py`.
"""

from collections.abc import Sequence
from typing import ClassVar

import msgspec

from extproc.decision import CostResult
from extproc.endpoint import Candidate
from extproc.scheduling.framework import SchedulingContext, Signal


class MyCost(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`cost = prefill_s * (queued + max(0, prompt - matched)) + slot_s * r`, in seconds.

    Attributes:
        slot_s: Seconds each of the r open requests adds.
    """

    kind: ClassVar[str] = "my-cost"
    needs: ClassVar[frozenset[Signal]] = frozenset(
        {Signal.QUEUED, Signal.PREFIX, Signal.RATES, Signal.IN_FLIGHT}
    )

    slot_s: float = 0.01

    def cost(self, context: SchedulingContext, candidates: Sequence[Candidate]) -> CostResult:
        """A cost for each candidate, in their order, and what it is made of."""
        prompt = context.request.prompt_tokens
        prefill = [
            c.rates.prefill_s * (c.queued_tokens + max(0, prompt - c.matched_tokens))
            for c in candidates
        ]
        slots = [self.slot_s * c.estimated_requests for c in candidates]
        costs = [p + s for p, s in zip(prefill, slots, strict=True)]
        return CostResult(self.kind, "s", costs, [("prefill", prefill), ("slots", slots)])
