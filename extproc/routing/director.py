"""Director: turns an HTTP request into an outcome and keeps the accounts of the endpoint."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from extproc.decision import Decision, Outcome, Rejection
from extproc.endpoint import Endpoint
from extproc.pool import conversations, snapshot
from extproc.pool.conversations import ConversationTracker
from extproc.pool.endpoint_health import RequestOutcome, classify_status
from extproc.pool.inflight import Reservation
from extproc.pool.queued_work import Stage
from extproc.pool.request_tokens import CachedTokens, PromptSize
from extproc.pool.store import PoolStore
from extproc.prefix_cache import blocks
from extproc.prefix_cache.cache_model import CacheModel
from extproc.prefix_cache.exact_prefixes import ExactPrefixes
from extproc.prefix_cache.index import PrefixIndex
from extproc.request import HttpRequest
from extproc.routing import eligibility, request_preparer, usage_feedback
from extproc.routing.request_listeners import PromptListener, RequestEventListener
from extproc.routing.request_preparer import PreparedRequest, RequestPreparer
from extproc.routing.routing_config import RoutingConfig
from extproc.routing.scheduler import Scheduler
from extproc.scheduling import disaggregation, plugin_guard

# Globals, where every request passes: they cost less than the look-up in the enum.
_SERVED, _FAILED = RequestOutcome.SERVED, RequestOutcome.FAILED
_NO_RESPONSE = RequestOutcome.NO_RESPONSE


class Director:
    """Routes requests over one pool.

    Args:
        routing: Profiles and settings; `reconfigure` replaces them.
        counts: Where exceptions of plugins that remember go; None keeps them to the director.
        exact: What engines publish of their blocks; None where they are not subscribed to.

    Attributes:
        preparer: Parses, ranks, renames and hashes requests.
        pending_load: Load of queued requests on their preferred endpoints.
        prompt_listener: Receives requests with their bodies; None where nothing reads them.
    """

    def __init__(
        self,
        *,
        store: PoolStore,
        routing: RoutingConfig,
        index: PrefixIndex,
        cache_model: CacheModel,
        schedule: blocks.Schedule,
        rng: random.Random,
        counts: plugin_guard.PluginCounters | None = None,
        exact: ExactPrefixes | None = None,
    ) -> None:
        self._store = store
        self._exact = exact
        self.prompt_listener: PromptListener | None = None
        self._cache_model = cache_model
        self._tokens = schedule.tokens
        self._counts = counts or plugin_guard.PluginCounters()
        self._event_listener: RequestEventListener | None = None
        self._conversation_tracker = ConversationTracker()
        self.pending_load = conversations.PendingLoad(
            store, self._conversation_tracker, self._tokens, counted=routing.tracks_conversations
        )
        self.scheduler = Scheduler(
            store,
            index,
            self._conversation_tracker,
            routing=routing,
            schedule=schedule,
            rng=rng,
            exact=exact,
        )
        self.preparer = RequestPreparer(store, routing=routing, schedule=schedule, rng=rng)
        self._serving_bits: eligibility.ModelBitsets | None = None
        self.routing = routing

    @property
    def pool(self) -> snapshot.Pool:
        """The current snapshot of the pool."""
        return self._store.pool

    def has_endpoint(self, address: str) -> bool:
        """True if an endpoint of the pool has this address, `ip:port`."""
        return address in self._store.pool.positions

    @property
    def serving_bits(self) -> eligibility.ModelBitsets:
        """Endpoints that can serve each request, as bits; the same object until they change."""
        pool, known = self._store.pool, self._serving_bits
        if known is None or known.serving is not pool.serving:
            known = self._serving_bits = eligibility.ModelBitsets(
                pool,
                respect_subset=self.routing.settings.respect_subset,
                reject_unlisted=self.routing.settings.reject_unlisted,
            )
        return known

    @property
    def has_listener(self) -> bool:
        """True if requests are reported to a listener."""
        return self._event_listener is not None

    def set_event_listener(self, listener: RequestEventListener) -> None:
        """Report requests to a listener from now on, such as other pickers."""
        self._event_listener = listener

    def set_prompt_listener(self, listener: PromptListener) -> None:
        """Show requests to a listener from now on."""
        self.prompt_listener = listener

    def reconfigure(self, routing: RoutingConfig) -> None:
        """Route by another configuration from the next request on."""
        self.routing = routing
        self._serving_bits = None
        self.preparer.reconfigure(routing)
        self.scheduler.reconfigure(routing)
        self.pending_load.reconfigure(counted=routing.tracks_conversations)

    def route(self, raw: HttpRequest, now: float) -> Outcome:
        """Choose an endpoint without charging it."""
        prepared = self.preparer.prepare(raw)
        return prepared if isinstance(prepared, Rejection) else self.decide(prepared, now)

    def decide(self, prepared: PreparedRequest, now: float, *, may_defer: bool = True) -> Outcome:
        """Choose an endpoint for a prepared request, without charging it.

        Args:
            may_defer: Whether it may wait for an endpoint while another one has a place.
        """
        raw = prepared.raw
        outcome = self.scheduler.schedule(
            prepared.request,
            now,
            chain=prepared.chain,
            headers=raw.headers,
            may_defer=may_defer,
            with_prompt=prepared.with_prompt,
        )
        if "prefer" in raw.headers:
            outcome = request_preparer.reject_uncached(outcome, raw)
        model = prepared.upstream_model
        if not model:
            return outcome
        return request_preparer.attach_model_rewrite(outcome, raw, prepared.parsed, model)

    def route_fallback(self, raw: HttpRequest, *, why: str) -> Outcome:
        """Choose the endpoint with least requests in flight, after `route` failed with a bug.

        Args:
            why: Name of what was raised; put into the decision.
        """
        subset = raw.subset if self.routing.settings.respect_subset else None
        return eligibility.choose_rescue(self._store.pool.eligible(subset), raw, why=why)

    def reserve(self, decision: Decision, now: float) -> Reservation:
        """Charge a decision to its endpoint and predict its prompt as cached there.

        Args:
            decision: Result of `route` or `route_fallback`, from the same turn of the event loop.

        Raises:
            LookupError: The endpoint is not in the pool; `reserve` was not called in the same turn.
        """
        split, endpoint = decision.disaggregation, decision.endpoints[0]
        stage: Stage = "" if split is None else disaggregation.find_serving_stage(split)
        reservation = self._reserve_stage(decision, endpoint, stage, now)
        try:
            observers, notify = self.routing.observers, self._counts.notify_committed
            notify(observers.get(decision.profile, ()), decision, now)
            if len(decision.endpoints) > 1:
                reservation.allow_fallbacks(decision.endpoints[1:])
            if self.routing.shadow is not None:
                self.routing.shadow.on_routed(decision)
            if split is not None:
                for stage, part in split.parts.items():
                    for endpoint in part.endpoints:
                        reserved = self._reserve_stage(part, endpoint, stage, now)
                        reservation.add_part(reserved)
                        if stage == "prefill" and split.encode is None:
                            reserved.watch()
                    notify(observers.get(part.profile, ()), part, now)
        except BaseException:
            self.unreserve(reservation, now)  # no other object holds it
            raise
        return reservation

    def _reserve_stage(
        self, decision: Decision, endpoint: Endpoint, stage: Stage, now: float
    ) -> Reservation:
        """Charge a decision to one of its endpoints; see `reserve`."""
        member = self._store.pool.find(endpoint.address)
        if member is None:
            raise LookupError(f"{endpoint.address} left the pool; commit in the turn of route")
        request = decision.request
        reservation = self.charge(
            member,
            decision.block_hashes,
            target=request.target,
            size=PromptSize.from_request(request),
            cached_tokens=self._cached_tokens(decision, member),
            max_tokens=request.max_tokens,
            now=now,
            stage=stage,
        )
        try:
            if member.condition.state:
                self._store.record_sent(endpoint, now)
            if self._event_listener is not None:
                self._event_listener.on_reserved(reservation, decision)
        except BaseException:
            reservation.close(now, answered=False)  # no other object holds it
            raise
        return reservation

    def _cached_tokens(self, decision: Decision, member: snapshot.EndpointSnapshot) -> CachedTokens:
        """Cached tokens of a decision on its first endpoint, of its prompt at most."""
        request = decision.request
        tokens = decision.matched_tokens
        if tokens > request.prompt_tokens:  # noqa: PLR1730 - a call
            tokens = request.prompt_tokens
        if decision.match_source == "estimate":
            return CachedTokens(tokens, tokens)
        size = PromptSize.from_request(request)
        estimated = self.estimate_cached_tokens(
            member, decision.block_hashes, target=request.target, size=size
        )
        return CachedTokens(tokens, estimated)

    def charge(  # noqa: PLR0913 - requests of other pickers arrive as single values
        self,
        member: snapshot.EndpointSnapshot,
        chain: Sequence[int],
        *,
        target: str,
        size: PromptSize,
        cached_tokens: CachedTokens,
        max_tokens: int | None = None,
        now: float,
        from_peers: bool = False,
        stage: Stage = "",
    ) -> Reservation:
        """Charge a request to an endpoint and predict its prompt as cached there.

        Args:
            cached_tokens: Of its tokens, those predicted as cached there.
            max_tokens: Longest answer that the request allows (tokens); None for any.
            stage: What the endpoint computes of the request; empty for all.
        """
        endpoint, account = member.endpoint, member.account
        prompt_tokens = size.tokens
        if self.routing.hashes_prompts and prompt_tokens:
            usual = member.rates.output_tokens
            self._cache_model.record_sent(
                endpoint,
                chain,
                prompt_tokens=prompt_tokens,
                cached_tokens=cached_tokens.estimated,
                answer_tokens=usual if max_tokens is None else min(usual, max_tokens),
                bytes_per_token=self._store.bytes_per_token.mean_ratio(target, size),
            )
        last_turn = None
        if self.routing.tracks_conversations and chain and stage != "prefill":
            last_turn = self._conversation_tracker.record_sent(
                chain, account, prompt_tokens=prompt_tokens, now=now
            )
        reservation = account.open(
            target,
            prompt_tokens,
            cached_tokens=cached_tokens.tokens if self.routing.credits_prefixes else 0,
            now=now,
            prompt_bytes=size.prompt_bytes,
            blocks=chain,
            from_peers=from_peers,
            stage=stage,
        )
        if size.has_media:
            reservation.note_media()
        if chain and self._exact is not None:
            self._exact.record_sent(chain, reservation, now)
        if cached_tokens.estimated != prompt_tokens - reservation.uncached_tokens:
            reservation.set_estimated_tokens(cached_tokens.estimated)
        if last_turn is not None:
            reservation.track_turn(last_turn)
            try:
                growth = self._conversation_tracker.expected_growth_tokens(prompt_tokens)
                account.track_context(reservation, chain, self._tokens, growth=growth)
            except BaseException:
                reservation.close(now, answered=False)  # no other object holds it
                raise
        return reservation

    @property
    def conversation_stats(self) -> tuple[float, float] | None:
        """Share of continued requests, and idle conversations per open conversation.

        None where no profile needs to know.
        """
        if not self.routing.tracks_conversations:
            return None
        known = self._conversation_tracker
        return known.continuation_ratio, known.idle_per_open(self._store.foreign_traffic.share)

    @property
    def max_blocks(self) -> int:
        """Blocks of the longest chain (count)."""
        return len(self._tokens) - 1

    def estimate_cached_tokens(
        self,
        member: snapshot.EndpointSnapshot,
        chain: Sequence[int],
        *,
        target: str,
        size: PromptSize,
    ) -> int:
        """Tokens of a prompt that are predicted as cached on an endpoint.

        Args:
            member: Member of the current pool.
            chain: The prompt's block hashes, root first, `max_blocks` at most.
        """
        ratio = self._store.bytes_per_token.mean_ratio(target, size)
        cached = self.scheduler.estimate_cached_tokens(member, chain, bytes_per_token=ratio)
        return min(cached, size.tokens)

    def on_response_headers(
        self,
        reservation: Reservation,
        status: str,
        now: float,
        *,
        served: str = "",
        decision: Decision | None = None,
    ) -> None:
        """Record response headers: the endpoint's health and its prefix cache.

        Args:
            status: HTTP status as text.
            served: Address of the endpoint that answered, where the data plane says so.
            decision: Decision of the reservation; without it, plugins learn of no move.
        """
        chosen = reservation.endpoint
        outcome = classify_status(status)
        known, fallbacks = served == chosen.host_port, reservation.fallbacks
        # An unknown name is an address that the data plane writes in another way.
        other = None if known else self.pool.find_served(served, chosen.rank, fallbacks=fallbacks)
        # A sidecar answers with the failure of another stage: those endpoints are blamed first.
        of_part = bool(reservation.parts) and outcome is _FAILED
        result, sent_at = (_NO_RESPONSE, now) if of_part else (outcome, reservation.at)
        if other is None:
            sole = known or not (fallbacks or served)
            self._store.record_outcome(chosen, result, sent_at=sent_at, now=now, sole=sole)
        else:
            self._move(reservation, other, result, sent_at, now)
            if decision is not None:
                observers = self.routing.observers.get(decision.profile, ())
                self._counts.notify_moved(observers, decision, other.endpoint, now)
        if outcome is not _SERVED:
            reservation.refuse(not_found=status == "404")
            self._retract_prefix(reservation)
        if reservation.parts:
            self._release_parts(reservation, now, outcome)
        reservation.forget_blocks()

    def _move(
        self,
        reservation: Reservation,
        served: snapshot.EndpointSnapshot,
        outcome: RequestOutcome,
        sent_at: float,
        now: float,
    ) -> None:
        """The data plane could not use the chosen endpoint, and another one answered."""
        self._store.record_outcome(
            reservation.endpoint, _FAILED, sent_at=reservation.at, now=now, cause="passed-over"
        )
        self._retract_prefix(reservation)
        chain, target, size = reservation.blocks, reservation.target, reservation.prompt_size
        cached, is_member = 0, self.pool.has_incarnation(served.endpoint)
        if is_member:
            cached = self.estimate_cached_tokens(served, chain, target=target, size=size)
        credited = cached if self.routing.credits_prefixes else 0
        context = reservation.context
        reservation.move(served.account, now, cached_tokens=credited)
        reservation.set_estimated_tokens(cached)
        if context is not None:
            served.account.track_context(
                reservation, context.blocks, self._tokens, growth=context.growth
            )
        if is_member and self.routing.hashes_prompts and size.tokens:
            self._cache_model.record_sent(
                served.endpoint,
                chain,
                prompt_tokens=size.tokens,
                cached_tokens=cached,
                answer_tokens=served.rates.output_tokens,
                bytes_per_token=self._store.bytes_per_token.mean_ratio(target, size),
            )
        self._store.record_outcome(served.endpoint, outcome, sent_at=sent_at, now=now)
        if self._event_listener is not None:
            self._event_listener.on_moved(reservation, chain)

    def _retract_prefix(self, reservation: Reservation) -> None:
        """Nothing of the request ran on its endpoint: its prompt is not cached there."""
        if not reservation.prompt_tokens:
            return
        ratio = self._store.bytes_per_token.mean_ratio(reservation.target, reservation.prompt_size)
        self._cache_model.record_cancelled(
            reservation.endpoint,
            reservation.blocks,
            prompt_tokens=reservation.prompt_tokens,
            cached_tokens=reservation.cached_tokens,
            bytes_per_token=ratio,
        )

    def on_usage(self, decision: Decision, usage: Mapping[str, int], *, served: Endpoint) -> None:
        """Compare predictions with the reported usage: prompt tokens and cached tokens.

        Args:
            usage: Tokens by kind, as `parsing.usage.read` gives them.
            served: The endpoint that answered, as `Reservation.endpoint` has it.
        """
        usage_feedback.compare_sizes(self._store, decision, usage)
        if self.routing.hashes_prompts:
            usage_feedback.compare_prefixes(
                self._store,
                self._cache_model,
                decision,
                usage,
                served=served,
                exact=self._exact,
            )

    def _release_parts(self, reservation: Reservation, now: float, outcome: RequestOutcome) -> None:
        """Close the accounts of the stages that other endpoints did: they end before the response.

        Args:
            outcome: Of the request.
        """
        answered, silent = outcome is _SERVED, outcome is _NO_RESPONSE
        ran = answered or silent
        for part in reservation.take_parts(now):
            if part.is_open:
                part.close(now, answered=answered)
            sent_at = now if silent else part.at
            self._store.record_outcome(part.endpoint, outcome, sent_at=sent_at, now=now, sole=False)
            if not ran:
                self._retract_prefix(part)
            elif not answered:
                self._cache_model.record_abandoned(
                    part.endpoint, part.prompt_tokens, part.cached_tokens
                )
            part.forget_blocks()
            if self._event_listener is not None:
                self._event_listener.on_released(part, answered=answered, ran=ran)

    def unreserve(self, reservation: Reservation, now: float) -> None:
        """Close the accounts of a request that was never sent, and retract its prediction."""
        try:
            if reservation.is_open:  # pages may have shown that its engine has it no more
                reservation.close(now, answered=False)
            self._retract_prefix(reservation)
            reservation.forget_blocks()
        finally:
            for part in reservation.take_parts(now):
                self.unreserve(part, now)
            if self._event_listener is not None:
                self._event_listener.on_released(reservation, answered=False, ran=False)

    def release(
        self, reservation: Reservation, now: float, *, answered: bool = True, evicted: bool = False
    ) -> None:
        """Close the accounts of a request that ended, whatever the reason.

        Args:
            answered: Whether response headers were seen.
            evicted: Whether it was ended for another one, which says nothing of its endpoint.
        """
        ran, endpoint = not reservation.refused, reservation.endpoint
        try:
            reservation.close(now, answered=answered and ran)
            if not answered:
                # While another endpoint may still be at a stage, its silence says nothing.
                sent_at = now if evicted else min(reservation.entered_at, now)
                self._store.record_outcome(endpoint, _NO_RESPONSE, sent_at=sent_at, now=now)
                if ran:
                    cached = reservation.cached_tokens
                    self._cache_model.record_abandoned(endpoint, reservation.prompt_tokens, cached)
        finally:
            if reservation.parts:
                self._release_parts(reservation, now, _NO_RESPONSE)
            if self._event_listener is not None:
                self._event_listener.on_released(reservation, answered=answered and ran, ran=ran)
