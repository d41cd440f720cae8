"""From a raw request to an outcome, and the accounts that follow from it."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import msgspec

from extproc import decision as outcomes
from extproc.decision import Decision, Outcome, Rejection
from extproc.endpoint import Endpoint
from extproc.parsing import parser
from extproc.pool import snapshot
from extproc.pool.accounts import Ticket
from extproc.pool.fleet import Fleet
from extproc.pool.snapshot import Member
from extproc.prefix import blocks
from extproc.prefix.index import PrefixIndex
from extproc.request import RawRequest, Request
from extproc.scheduling.plugins import Signal
from extproc.scheduling.profile import Profile
from extproc.scheduling.turn import Turn

#: Surfaces whose answers say nothing a picker could use; their streams end after the pick
#: (EPP protocol report 1.7, "skip response processing").
UNWATCHED = frozenset({"count_tokens", "grpc"})


class DispatchSettings(msgspec.Struct, frozen=True):
    """How requests are routed.

    Attributes:
        stale_after_s: Age at which a scraped load counts as unknown.
        fallbacks: Further endpoints named after the chosen one.
        honour_subset: Keep to the endpoints the data plane allows. True, because ignoring the hint
            sends requests where they were not allowed.
    """

    stale_after_s: float
    fallbacks: int = 0
    honour_subset: bool = True


class Dispatcher:
    """Routes requests over one fleet.

    Args:
        fleet: Endpoints, loads and accounts.
        profile: Filters, scorers and the picker.
        index: Who is believed to hold which prefix block.
        schedule: How prompts are cut into blocks.
        settings: How requests are routed.
        rng: All chance there is.
    """

    def __init__(
        self,
        *,
        fleet: Fleet,
        profile: Profile,
        index: PrefixIndex,
        schedule: blocks.Schedule,
        settings: DispatchSettings,
        rng: random.Random,
    ) -> None:
        self._fleet = fleet
        self._profile = profile
        self._index = index
        self._schedule = schedule
        self._tokens = schedule.tokens
        self._settings = settings
        self._rng = rng
        self._hashing = Signal.PREFIX in profile.needs
        self._slots: Mapping[str, int] = {}
        self._slots_in_order: Sequence[int] = ()
        self._slots_of: object = None

    def route(self, raw: RawRequest, now: float) -> Outcome:
        """Decide, without charging anybody.

        Args:
            raw: A complete request.
            now: Monotonic seconds.
        """
        request = parser.parse(raw)
        if isinstance(request, Rejection):
            return request
        members = self._eligible(request.subset)
        if not members:
            return outcomes.no_endpoints()
        chain, matched = self._matched(request, members)
        candidates = snapshot.candidates(
            members, matched, now=now, stale_after_s=self._settings.stale_after_s
        )
        return self._profile.run(
            Turn(request, now, self._rng),
            candidates,
            count=1 + self._settings.fallbacks,
            blocks=chain,
        )

    def rescue(self, raw: RawRequest, now: float, *, why: str) -> Outcome:
        """Decide when `route` failed with a bug: least in flight, nothing else looked at.

        Args:
            raw: The request.
            now: Monotonic seconds.
            why: Name of what was raised; put into the decision.
        """
        del now
        members = self._eligible(raw.subset)
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
        del now
        endpoint = decision.endpoints[0]
        member = self._fleet.pool.find(endpoint.address)
        if member is None:
            raise LookupError(f"{endpoint.address} left the pool; commit in the turn of route")
        if decision.blocks:
            self._index.record(key(endpoint), decision.blocks)
        request = decision.request
        return member.account.open(request.target, request.prompt_tokens)

    def complete(self, ticket: Ticket) -> None:
        """Close the accounts of a request that is over, however it ended."""
        ticket.close()

    def response_unwatched(self, decision: Decision) -> bool:
        """Whether nobody needs to see the answer."""
        return decision.request.api in UNWATCHED

    def _eligible(self, subset: Sequence[str] | None) -> Sequence[Member]:
        return self._fleet.pool.eligible(subset if self._settings.honour_subset else None)

    def _matched(
        self, request: Request, members: Sequence[Member]
    ) -> tuple[list[int], Sequence[int]]:
        """The prompt's chain, and per member the prompt tokens believed cached there."""
        if not self._hashing or not request.prompt:
            return [], [0] * len(members)
        seed = blocks.seed(request.model, request.adapter)
        chain = blocks.chain(request.prompt, seed, schedule=self._schedule)
        if not chain:
            return chain, [0] * len(members)
        self._follow_pool()
        depths = self._index.match(chain)
        tokens = self._tokens
        if members is self._fleet.pool.members:
            return chain, [tokens[depths[slot]] for slot in self._slots_in_order]
        slots = self._slots
        return chain, [tokens[depths[slots[member.endpoint.address]]] for member in members]

    def _follow_pool(self) -> None:
        """Look index slots up again when the endpoint set changed."""
        pool = self._fleet.pool
        if self._slots_of is not pool.positions:
            self._slots_of = pool.positions
            self._slots_in_order = [self._index.slot(key(one.endpoint)) for one in pool.members]
            self._slots = dict(zip(pool.positions, self._slots_in_order, strict=True))


def key(endpoint: Endpoint) -> tuple[str, int]:
    """What the prefix index calls an endpoint in one of its lives."""
    return endpoint.address, endpoint.incarnation
