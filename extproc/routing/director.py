"""From a raw request to an outcome, and the accounts that follow from it."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from extproc.decision import Decision, Outcome, Rejection
from extproc.endpoint import Endpoint
from extproc.pool import snapshot
from extproc.pool.conversations import Recurrence
from extproc.pool.inflight import Ticket
from extproc.pool.store import Fleet
from extproc.prefix_cache import blocks, cache_model
from extproc.prefix_cache.index import PrefixIndex
from extproc.request import RawRequest, Request
from extproc.routing import model_rewrite, pending_load, response_feedback, routing_config
from extproc.routing.journal import Journal
from extproc.routing.model_bitsets import ServingBits
from extproc.routing.request_preparer import Preparation, Prepared
from extproc.routing.scheduler import Choice
from extproc.scheduling import plugin_guard
from extproc.scheduling.framework import Signal

#: Surfaces whose answers say nothing a picker could use; their streams end after the pick
#: (docs/spec/protocol.md#response-flow).
UNWATCHED = frozenset({"count_tokens", "grpc"})


class Dispatcher:
    """Routes requests over one fleet.

    Args:
        fleet: Endpoints, loads and accounts.
        routing: Profiles and settings; `adopt` replaces them.
        index: Who is believed to hold which prefix block.
        belief: Keeps the index near what engines hold.
        schedule: How prompts are cut into blocks.
        rng: All chance there is.
        counts: Where exceptions of plugins that remember go; None keeps them to the dispatcher.

    Attributes:
        journal: Where to tell other pickers of requests; None where pickers do not talk.
        promises: What requests that wait for an endpoint will hold there.
    """

    def __init__(
        self,
        *,
        fleet: Fleet,
        routing: routing_config.Routing,
        index: PrefixIndex,
        belief: cache_model.Beliefs,
        schedule: blocks.Schedule,
        rng: random.Random,
        counts: plugin_guard.Counts | None = None,
    ) -> None:
        self._fleet = fleet
        self._index = index
        self._belief = belief
        self._evidence = response_feedback.Evidence(fleet=fleet, index=index, belief=belief)
        self._schedule = schedule
        self._counts = counts or plugin_guard.Counts()
        self.journal: Journal | None = None
        self._recurrence = Recurrence()
        self.promises = pending_load.Promises(fleet, self._recurrence, schedule.tokens)
        self._choice = Choice(fleet, index, self._recurrence, schedule=schedule, rng=rng)
        self._preparation = Preparation(fleet, schedule=schedule, rng=rng)
        self._serving_bits: ServingBits | None = None
        self.adopt(routing)

    @property
    def pool(self) -> snapshot.Pool:
        """The current picture of the fleet."""
        return self._fleet.pool

    @property
    def serving_bits(self) -> ServingBits:
        """Which endpoints may serve which request; the same object while that stands."""
        pool, known = self._fleet.pool, self._serving_bits
        if known is None or known.serving is not pool.serving:
            known = self._serving_bits = ServingBits(
                pool,
                honour_subset=self._settings.honour_subset,
                reject_unlisted=self._settings.reject_unlisted,
            )
        return known

    @property
    def decreed_names(self) -> frozenset[str]:
        """Models that requests may name because rewrites put others in their place."""
        return self._preparation.names

    @property
    def supplies_model(self) -> bool:
        """Whether a rewrite names the model of requests that name none."""
        return self._preparation.supplies_model

    @property
    def routing(self) -> routing_config.Routing:
        """What requests are routed by now."""
        return self._routing

    def adopt(self, routing: routing_config.Routing) -> None:
        """Route by another configuration from the next request on."""
        self._routing = routing
        self._settings = routing.settings
        self._serving_bits = None
        self._preparation.adopt(routing)
        self._hashing = Signal.PREFIX in routing.needs
        self._choice.adopt(routing)
        self._homing = self.promises.counted = Signal.HOMES in routing.needs
        profiles = (routing.profile, *routing.by_model.values())
        self._observers = {profile.name: profile.observers for profile in profiles}

    def prepare(self, raw: RawRequest) -> Prepared | Rejection:
        """Parse, rank, rename and hash a request, or say what is wrong with it."""
        return self._preparation.of(raw)

    def prepare_parsed(self, request: Request, raw: RawRequest) -> Prepared:
        """The same for a request that is parsed already."""
        return self._preparation.parsed(request, raw)

    def route(self, raw: RawRequest, now: float) -> Outcome:
        """Decide, without charging anybody.

        Args:
            raw: A complete request.
            now: Monotonic seconds.
        """
        prepared = self._preparation.of(raw)
        return prepared if isinstance(prepared, Rejection) else self.decide(prepared, now)

    def decide(self, prepared: Prepared, now: float, *, patient: bool = True) -> Outcome:
        """Decide about a request that is prepared, without charging anybody.

        Args:
            prepared: From `prepare`, now or a while ago.
            now: Monotonic seconds.
            patient: Whether it may wait for an endpoint while another one has a place.
        """
        raw = prepared.raw
        outcome = self._choice.of(
            prepared.request,
            now,
            chain=prepared.chain,
            headers=raw.headers,
            patient=patient,
            prompted=prepared.prompted,
        )
        return (
            model_rewrite.told(outcome, raw, prepared.asked, prepared.sent)
            if prepared.sent
            else outcome
        )

    def choose(
        self,
        request: Request,
        now: float,
        *,
        chain: Sequence[int],
        headers: Mapping[str, str],
        patient: bool = True,
    ) -> Outcome:
        """Decide about a request that is parsed and hashed already, without charging anybody.

        Args:
            request: What is asked for.
            now: Monotonic seconds.
            chain: The prompt's block hashes, root first, cut as the schedule cuts.
            headers: Headers of the request, names in lower case.
            patient: Whether it may wait for an endpoint while another one has a place.
        """
        return self._choice.of(request, now, chain=chain, headers=headers, patient=patient)

    def rescue(self, raw: RawRequest, now: float, *, why: str) -> Outcome:
        """Decide when `route` failed with a bug: least in flight, nothing else looked at.

        Args:
            raw: The request.
            now: Monotonic seconds.
            why: Name of what was raised; put into the decision.
        """
        del now
        members = self._fleet.pool.eligible(raw.subset if self._settings.honour_subset else None)
        if not members:
            return Rejection(
                500, f"the decision failed ({why}) and there is no endpoint to fall to"
            )
        chosen = min(members, key=lambda member: member.account.in_flight)
        return Decision(
            request=Request(api="opaque", subset=raw.subset),
            endpoints=(chosen.endpoint,),
            picker="rescue",
            degraded=f"route raised {why}",
        )

    def commit(self, decision: Decision, now: float) -> Ticket:
        """Charge a decision to its endpoint and believe its prompt cached there.

        Args:
            decision: From `route` or `rescue`, in the same turn.
            now: Monotonic seconds.

        Raises:
            LookupError: The endpoint is not in the pool; `commit` was not called in the same turn.
        """
        endpoint = decision.endpoints[0]
        member = self._fleet.pool.find(endpoint.address)
        if member is None:
            raise LookupError(f"{endpoint.address} left the pool; commit in the turn of route")
        self._remember(decision, now)
        request = decision.request
        ticket = self.charge(
            member,
            decision.blocks,
            target=request.target,
            prompt_tokens=request.prompt_tokens,
            cached_tokens=min(decision.matched_tokens, request.prompt_tokens),
            prompt_bytes=request.prompt_bytes,
            now=now,
        )
        ticket.alone = len(decision.endpoints) == 1
        try:
            if member.condition.state:
                self._fleet.sent(endpoint, now)
            if self.journal is not None:
                self.journal.sent(ticket, decision)
        except BaseException:
            ticket.close(now, answered=False)  # nobody else has it
            raise
        return ticket

    def charge(
        self,
        member: snapshot.Member,
        chain: Sequence[int],
        *,
        target: str,
        prompt_tokens: int,
        cached_tokens: int,
        prompt_bytes: int,
        now: float,
    ) -> Ticket:
        """Charge a request to an endpoint and believe its prompt cached there.

        Args:
            member: To whom; of the current pool.
            chain: The prompt's block hashes, root first.
            target: Adapter or model name.
            prompt_tokens: Estimated prompt tokens.
            cached_tokens: Of these, believed cached there.
            prompt_bytes: Bytes of text the tokens are estimated from; 0 when they are exact.
            now: Monotonic seconds.
        """
        endpoint, account = member.endpoint, member.account
        if chain:
            self._index.record(cache_model.key(endpoint), chain)
        if self._hashing and prompt_tokens:
            self._belief.sent(
                endpoint,
                chain,
                prompt_tokens=prompt_tokens,
                cached_tokens=cached_tokens,
                bytes_per_token=self._fleet.tokenisers.of(target, prompt_bytes),
            )
        ticket = account.open(
            target,
            prompt_tokens,
            cached_tokens=cached_tokens,
            now=now,
            prompt_bytes=prompt_bytes,
        )
        ticket.blocks = chain
        if self._homing and chain:
            try:
                known = self._recurrence
                ticket.visit = known.sent(chain, account, prompt_tokens=prompt_tokens, now=now)
                growth = known.growth(prompt_tokens)
                account.hold(ticket, chain, self._schedule.tokens, growth=growth)
            except BaseException:
                ticket.close(now, answered=False)  # nobody else has it
                raise
        return ticket

    @property
    def returning(self) -> tuple[float, float] | None:
        """Share of requests that go on from an earlier one, and conversations away for each open one.

        None where no profile needs to know.
        """
        known = self._recurrence
        return (known.share, known.away(self._fleet.peers.share)) if self._homing else None

    @property
    def deepest(self) -> int:
        """Blocks of the longest chain there can be (count)."""
        return len(self._schedule.tokens) - 1

    def believed(
        self, member: snapshot.Member, chain: Sequence[int], *, target: str, prompt_bytes: int
    ) -> int:
        """Prompt tokens of a chain that are believed cached on an endpoint.

        Args:
            member: Of the current pool.
            chain: A prompt's block hashes, root first, `deepest` at most.
            target: Adapter or model name.
            prompt_bytes: Bytes of text the prompt's tokens are estimated from; 0 when they are exact.
        """
        ratio = self._fleet.tokenisers.of(target, prompt_bytes)
        return self._choice.believed(member, chain, bytes_per_token=ratio)

    def told(self, ticket: Ticket, status: str, now: float, *, served: str = "") -> None:
        """Response headers came: what they say of the endpoint, and of its cache.

        Args:
            ticket: From `commit`.
            status: `:status` as text.
            now: Monotonic seconds.
            served: Address of the endpoint that answered, where the data plane says so.
        """
        chosen, blocks = ticket.endpoint, ticket.blocks
        self._evidence.answered(ticket, status, now, served=served)
        if self.journal is not None and ticket.endpoint is not chosen:
            self.journal.moved(ticket, blocks)

    def learn(self, decision: Decision, usage: Mapping[str, int], *, served: Endpoint) -> None:
        """Hold predictions against what the answer reports: prompt tokens, and cached ones.

        Args:
            decision: That was committed.
            usage: Tokens by kind, as `parsing.usage.read` gives them.
            served: The endpoint that answered, as `Ticket.endpoint` has it.
        """
        prompt, cached = usage.get("prompt"), usage.get("cached")
        request = decision.request
        if prompt:
            self._fleet.tokenisers.told(
                request.target, prompt_bytes=request.prompt_bytes, tokens=prompt
            )
        if not self._hashing or not prompt or cached is None:
            return
        member = self._fleet.pool.find(served.address)
        if member is None or member.endpoint.incarnation != served.incarnation:
            return  # it left, and its belief with it: a late answer makes no new one
        predicted = _predicted(decision, served)
        if predicted is not None:
            self._belief.told(
                served, prompt_tokens=prompt, predicted=min(predicted, prompt), cached=cached
            )

    def withdraw(self, ticket: Ticket, now: float) -> None:
        """Close the accounts of a request that never left: nothing of it is believed.

        Args:
            ticket: From `commit`.
            now: Monotonic seconds.
        """
        try:
            ticket.close(now, answered=False)
            self._evidence.withdrawn(ticket)
        finally:
            if self.journal is not None:
                self.journal.ended(ticket, answered=False, ran=False)

    def complete(self, ticket: Ticket, now: float, *, answered: bool = True) -> None:
        """Close the accounts of a request that is over, however it ended.

        Args:
            ticket: From `commit`.
            now: Monotonic seconds.
            answered: Whether response headers were seen.
        """
        ran = not ticket.refused
        try:
            ticket.close(now, answered=answered and ran)
            if not answered:
                self._evidence.left(ticket, now)
        finally:
            if self.journal is not None:
                self.journal.ended(ticket, answered=answered and ran, ran=ran)

    def response_unwatched(self, decision: Decision) -> bool:
        """Whether nobody needs to see the answer."""
        return decision.request.api in UNWATCHED

    def _remember(self, decision: Decision, now: float) -> None:
        """Tell the plugins with a memory; what one raises must not cost the request."""
        for observer in self._observers.get(decision.profile, ()):
            try:
                observer.chosen(decision, now)
            except Exception:  # noqa: BLE001 - counted, and the request is decided already
                kind = getattr(observer, "kind", type(observer).__name__)
                self._counts.exceptions["observer", kind] += 1


def _predicted(decision: Decision, served: Endpoint) -> int | None:
    """Prompt tokens that a decision took to be cached on an endpoint; None where it did not look."""
    if served is decision.endpoints[0]:
        return decision.matched_tokens
    for c in decision.candidates:
        if c.endpoint.incarnation == served.incarnation and c.endpoint.address == served.address:
            return c.matched_tokens
    return None
