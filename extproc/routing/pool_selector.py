"""From a request to the pool it is for, and from there to an outcome."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from enum import IntEnum

import msgspec

from extproc import decision as outcomes
from extproc.decision import Answer, Decision, Outcome, Rejection
from extproc.parsing import envelope, surfaces
from extproc.request import RawRequest, Request
from extproc.routing import models_endpoint, pool_match
from extproc.routing.claim_index import ClaimIndex
from extproc.routing.director import Dispatcher
from extproc.routing.request_preparer import Prepared


class Claimant(msgspec.Struct, frozen=True):
    """A pool and what it claims.

    Attributes:
        name: Of the pool.
        dispatcher: Routes over it.
        claim: The requests it is for. An empty claim takes those that name a model it serves, that
            the data plane hints to its endpoints, or that nobody else is for.
    """

    name: str
    dispatcher: Dispatcher
    claim: pool_match.Claim = pool_match.Claim()


class Routed(msgspec.Struct, frozen=True, gc=False):
    """What becomes of a request.

    Attributes:
        outcome: Where it goes, why nowhere, or what to answer at once.
        prepared: What was decided about, where it came so far.
        pool: Name of the pool that decided; empty where none was found.
        dispatcher: Of that pool.
    """

    outcome: Outcome | Answer
    pool: str = ""
    dispatcher: Dispatcher | None = None
    prepared: Prepared | None = None


class Fit(IntEnum):
    """How well a pool fits a model; higher is better."""

    #: All its endpoints list what they serve, and it is not there.
    NO = 0
    #: It has no endpoints now.
    EMPTY = 1
    #: Somebody in it did not list anything.
    PERHAPS = 2
    #: Somebody in it lists it.
    LISTED = 3


class Switchboard:
    """Routes requests over any number of pools.

    Args:
        claimants: The pools, in the order in which their claims are looked at.
        list_models: Answer `/v1/models` from what endpoints listed; None does so where there are
            several pools.

    Attributes:
        usual: Under which pool to count what is refused before a pool is found.
    """

    def __init__(
        self, claimants: Sequence[Claimant] = (), *, list_models: bool | None = None
    ) -> None:
        self._index = ClaimIndex(())
        self.adopt(claimants, list_models=list_models)

    def adopt(self, claimants: Sequence[Claimant], *, list_models: bool | None = None) -> None:
        """Route over other pools from the next request on."""
        self.claimants = tuple(claimants)
        one = len(claimants) == 1
        self._only = claimants[0] if one and claimants[0].claim.empty else None
        self.usual = "" if self._only is None else self._only.name
        listed = tuple(one.claim for one in claimants)
        if listed != self._index.listed:
            self._index = ClaimIndex(listed)
        self._open = [one for one in claimants if one.claim.empty]
        self._listing = not one if list_models is None else list_models

    def route(self, raw: RawRequest, now: float) -> Routed:
        """Decide, without charging anybody.

        Args:
            raw: A complete request.
            now: Monotonic seconds.
        """
        if self._listing and raw.headers.get(":method") == "GET":
            told = self._told(raw)
            if told is not None:
                return Routed(told)
        only = self._only
        if only is not None:
            dispatcher = only.dispatcher
            prepared = dispatcher.prepare(raw)
            if isinstance(prepared, Rejection):
                return Routed(prepared, only.name, dispatcher)
            return Routed(dispatcher.decide(prepared, now), only.name, dispatcher, prepared)
        return self._search(raw, now)

    def rescue(self, raw: RawRequest, now: float, *, why: str) -> Routed:
        """Decide when `route` failed with a bug: the first pool whose headers fit.

        Args:
            raw: The request.
            now: Monotonic seconds.
            why: Name of what was raised; put into the decision.
        """
        for one in self._fitting(raw, self._index.find_routes(raw.headers)):
            found = one.dispatcher.rescue(raw, now, why=why)
            return Routed(found, one.name, one.dispatcher)
        return Routed(_nobody())

    def _fitting(self, raw: RawRequest, bits: int) -> Iterator[Claimant]:
        """The pools among some whose headers a request has, in their order."""
        return (self.claimants[at] for at in self._index.positions(bits, raw.headers))

    def _search(self, raw: RawRequest, now: float) -> Routed:
        """Parse the request where models decide, once for everybody."""
        index = self._index
        routes = index.find_routes(raw.headers) & index.claiming
        first = next(self._fitting(raw, routes), None)
        if first is not None and not first.claim.models:
            return self._by(first, raw, now)
        request = surfaces.parse(raw)
        if isinstance(request, Rejection):
            pool = self._supplying(request, raw, routes)
            return Routed(request) if pool is None else self._by(pool, raw, now)
        model = envelope.model_header(raw.headers) or request.target
        claimant = next(self._fitting(raw, routes & index.find_models(model)), None)
        if claimant is not None:
            return self._by(claimant, raw, now, request)
        hinted = _hinted(self._open, raw)
        if len(hinted) == 1:
            return self._by(hinted[0], raw, now, request)
        ranked = [(fit(one, model), one) for one in hinted]
        best = max((rank for rank, _ in ranked), default=Fit.NO)
        if best is Fit.EMPTY:
            return Routed(outcomes.no_endpoints())
        if best is Fit.NO:
            known = frozenset().union(*(models_endpoint.names(one.dispatcher) for one in hinted))
            return Routed(outcomes.model_not_found(model, known) if model and known else _nobody())
        return self._by(next(one for rank, one in ranked if rank is best), raw, now, request)

    def _supplying(self, refused: Rejection, raw: RawRequest, routes: int) -> Claimant | None:
        """The pool whose rewrites for every request name the model that is missing.

        Any other refusal stands in every pool, so that no body is read again for each of them.
        """
        if refused != envelope.NO_MODEL:
            return None
        fitting = self._fitting(raw, routes & self._index.without_models)
        for pool in itertools.chain(fitting, self._open):
            dispatcher = pool.dispatcher
            if dispatcher.supplies_model and not isinstance(dispatcher.prepare(raw), Rejection):
                return pool
        return None

    def _by(
        self, one: Claimant, raw: RawRequest, now: float, request: Request | None = None
    ) -> Routed:
        dispatcher = one.dispatcher
        prepared = (
            dispatcher.prepare(raw) if request is None else dispatcher.prepare_parsed(request, raw)
        )
        if isinstance(prepared, Rejection):
            return Routed(prepared, one.name, dispatcher)
        outcome = dispatcher.decide(prepared, now)
        if isinstance(outcome, Decision):
            outcome = msgspec.structs.replace(outcome, pool=one.name)
        return Routed(outcome, one.name, dispatcher, prepared)

    def _told(self, raw: RawRequest) -> Answer | None:
        """The list of models, where that is what is asked for and somebody listed any."""
        asked = models_endpoint.asked(pool_match.path_of(raw.headers))
        if asked is None:
            return None
        routes = self._index.find_routes(raw.headers)
        may = [one.dispatcher for one in self._fitting(raw, routes)]
        return models_endpoint.answer(may, asked)


def fit(one: Claimant, model: str) -> Fit:
    """How well an open pool fits a model; every pool with endpoints may take what names none."""
    pool = one.dispatcher.pool
    if not pool.members:
        return Fit.EMPTY
    if not model:
        return Fit.PERHAPS
    serving = pool.serving
    if model in serving.names or model in one.dispatcher.decreed_names:
        return Fit.LISTED
    if serving.alias(model) is not None or serving.apart(model) is not None:
        return Fit.LISTED
    split = serving.who(model)
    return Fit.PERHAPS if split is None or split.positions else Fit.NO


def _hinted(open_ones: Sequence[Claimant], raw: RawRequest) -> Sequence[Claimant]:
    """Those with endpoints the data plane allows; all where it says nothing, or nobody has any."""
    if not raw.subset or len(open_ones) < 2:
        return open_ones
    return [one for one in open_ones if one.dispatcher.pool.eligible(raw.subset)] or open_ones


def _nobody() -> Rejection:
    return Rejection(
        404,
        "no pool takes this request; see `pools` in the configuration for the hosts, paths, "
        "headers and models that are taken",
    )
