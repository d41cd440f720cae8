"""Source of a KV cache: the endpoint from which another one pulls the cached beginning of a prompt.

vLLM's offloading connector with a secondary tier `p2p` can pull blocks of a KV cache from another engine,
which llm-d's sidecar asks for where the header `x-kv-cache-source-host-port` names that engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar, Final

import msgspec

from extproc.decision import Decision
from extproc.endpoint import Candidate
from extproc.scheduling.framework import SchedulingContext, Signal

#: Cached tokens by which a source may be behind the best one: a block, so that not every request that
#: shares a prefix pulls it from one engine.
_BAND_TOKENS: Final = 64


class KvCacheSource(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Names an endpoint that has more of a prompt cached than the one that computes it.

    Among those that have most, one is drawn by chance, with weights of 1 / (1 + waiting requests), as
    upstream's `p2psource/producer.go` does.

    Attributes:
        min_cached_token_delta: Cached prompt tokens that the source has more at least. 1, as upstream:
            every token that need not be computed.
    """

    needs: ClassVar[frozenset[Signal]] = frozenset({Signal.PREFIX})

    min_cached_token_delta: Annotated[int, msgspec.Meta(ge=1)] = 1

    def add_source(
        self, context: SchedulingContext, candidates: Sequence[Candidate], decision: Decision
    ) -> Decision:
        """Add the source to a decision; the same decision where none has enough more."""
        stages = decision.disaggregation
        computing = decision if stages is None or stages.prefill is None else stages.prefill
        most = max([c.matched_tokens for c in candidates], default=0)
        least = max(most - _BAND_TOKENS, computing.matched_tokens + self.min_cached_token_delta)
        own = computing.endpoints[0].host_port
        sources = [
            c for c in candidates if c.matched_tokens >= least and c.endpoint.host_port != own
        ]
        if not sources:
            return decision
        weights = [1.0 / (1.0 + (c.load.waiting or 0.0)) for c in sources]
        (source,) = context.rng.choices(sources, weights)
        return msgspec.structs.replace(decision, kv_cache_source=source.endpoint)
