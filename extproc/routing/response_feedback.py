"""Response feedback: endpoint health from responses, and retraction without a response."""

from __future__ import annotations

from extproc.pool.endpoint_health import RequestOutcome
from extproc.pool.inflight import Reservation
from extproc.pool.outlier_detection import classify_status
from extproc.pool.snapshot import EndpointSnapshot
from extproc.pool.store import PoolStore
from extproc.prefix_cache.cache_model import CacheModel, index_key
from extproc.prefix_cache.index import PrefixIndex


class ResponseFeedback:
    """Records responses and failures. Mutable; its director owns it.

    Args:
        store: Decides about health.
        index: Predicted prefix blocks per endpoint.
        cache_model: Predictions of cache hits.
    """

    def __init__(self, *, store: PoolStore, index: PrefixIndex, cache_model: CacheModel) -> None:
        self._store = store
        self._index = index
        self._cache_model = cache_model

    def on_response_headers(
        self, ticket: Reservation, status: str, now: float, *, served: str
    ) -> None:
        """Response headers came.

        Args:
            ticket: Of the request.
            status: `:status` as text.
            now: Monotonic seconds.
            served: Address of the endpoint that answered; empty if unknown.
        """
        outcome = classify_status(status)
        known = served == ticket.endpoint.address
        # An unknown name is an address that the data plane writes in another way.
        other = self._store.pool.find(served) if served and not known else None
        if other is None:
            sole = known or (ticket.sole_endpoint and not served)
            self._store.record_outcome(
                ticket.endpoint, outcome, sent_at=ticket.at, now=now, sole=sole
            )
        else:
            self._served_elsewhere(ticket, outcome, now, other)
        if outcome is not RequestOutcome.SERVED:
            ticket.refuse()
            self._retract_prefix(ticket)
        ticket.forget_blocks()

    def on_unreserved(self, ticket: Reservation) -> None:
        """The request was never sent."""
        self._retract_prefix(ticket)
        ticket.forget_blocks()

    def on_no_response(self, ticket: Reservation, now: float) -> None:
        """The stream ended before response headers came."""
        self._store.record_outcome(
            ticket.endpoint, RequestOutcome.NO_RESPONSE, sent_at=ticket.at, now=now
        )

    def _served_elsewhere(
        self, ticket: Reservation, outcome: RequestOutcome, now: float, served: EndpointSnapshot
    ) -> None:
        """The data plane could not use the chosen endpoint, and another one answered."""
        self._store.record_outcome(
            ticket.endpoint, RequestOutcome.FAILED, sent_at=ticket.at, now=now, cause="passed-over"
        )
        self._retract_prefix(ticket)
        ticket.move(served.account, now)
        if ticket.blocks:
            self._index.record(index_key(served.endpoint), ticket.blocks)
        self._store.record_outcome(served.endpoint, outcome, sent_at=ticket.at, now=now)

    def _retract_prefix(self, ticket: Reservation) -> None:
        """Nothing of the request ran on its endpoint: its prompt is not cached there."""
        if not ticket.prompt_tokens:
            return
        ratio = self._store.bytes_per_token.ratio_for(ticket.target, ticket.prompt_bytes)
        self._cache_model.record_cancelled(
            ticket.endpoint,
            ticket.blocks,
            prompt_tokens=ticket.prompt_tokens,
            cached_tokens=ticket.cached_tokens,
            bytes_per_token=ratio,
        )
