"""A scorer: rates every endpoint from 0 to 1, higher is better.

Name the file and the kind in the configuration:

    scheduling:
      plugin_files: [my_scorer.py]
      profile:
        scorers:
          - {kind: my-scorer, weight: 2, params: {soft_requests: 4}}
          - {kind: in-flight}

and hold it to the contract: `extproc plugin test my_scorer.py`.
"""

from collections.abc import Sequence
from typing import ClassVar

import msgspec

from extproc.endpoint import Candidate
from extproc.scheduling.framework import SchedulingContext, Signal


class MyScorer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`score = s / (s + r)` with r the requests open on the endpoint.

    Attributes:
        soft_requests: The s above: requests at which the score is one half (count).
    """

    kind: ClassVar[str] = "my-scorer"
    needs: ClassVar[frozenset[Signal]] = frozenset({Signal.IN_FLIGHT})

    soft_requests: float = 8.0

    def score(self, context: SchedulingContext, candidates: Sequence[Candidate]) -> list[float]:
        """One score for each candidate, in their order; unknown values must be neutral."""
        soft = self.soft_requests
        return [soft / (soft + c.estimated_requests) for c in candidates]
