"""A filter: keeps eligible endpoints. An empty result rejects the request with 429.

Name the file and the kind in the configuration:

    scheduling:
      plugin_files: [my_filter.py]
      profile:
        filters:
          - {kind: my-filter, params: {max_kv_usage: 0.9}}
        scorers:
          - {kind: in-flight}

and hold it to the contract: `extproc plugin test my_filter.py`.
"""

from collections.abc import Sequence
from typing import ClassVar

import msgspec

from extproc.endpoint import Candidate
from extproc.scheduling.framework import SchedulingContext, Signal


class MyFilter(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Keeps endpoints with `kv_usage <= max_kv_usage`, and those of unknown usage.

    A filter that raises or is bypassed lets everybody pass.

    Attributes:
        max_kv_usage: Share of KV blocks in use up to which an endpoint takes more (0..1).
    """

    kind: ClassVar[str] = "my-filter"
    needs: ClassVar[frozenset[Signal]] = frozenset({Signal.KV_USAGE})

    max_kv_usage: float = 0.95

    def filter(
        self, context: SchedulingContext, candidates: Sequence[Candidate]
    ) -> Sequence[Candidate]:
        """Eligible candidates, in their order."""
        bound = self.max_kv_usage
        return [c for c in candidates if c.load.kv_usage is None or c.load.kv_usage <= bound]
