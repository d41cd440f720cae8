"""Pool selection: finds the pool of a request and routes it there; answers `GET /v1/models`."""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Iterable, Iterator, Sequence
from enum import IntEnum
from typing import Final
from urllib.parse import unquote

import msgspec

from extproc.decision import (
    NO_ENDPOINTS,
    Decision,
    DirectResponse,
    Outcome,
    Rejection,
    model_not_found,
)
from extproc.parsing import envelope, surfaces
from extproc.protocol import messages
from extproc.request import HttpRequest, InferenceRequest
from extproc.routing import pool_match
from extproc.routing.director import Director
from extproc.routing.pool_match import MatchIndex
from extproc.routing.request_preparer import PreparedRequest


class PoolRoute(msgspec.Struct, frozen=True):
    """A pool with its match conditions and its director.

    Attributes:
        match: Conditions on its requests. An empty match takes requests for a model it serves, with a
            subset hint of its endpoints, or that match no other pool.
    """

    name: str
    director: Director
    match: pool_match.PoolMatch = pool_match.PoolMatch()


class RoutingResult(msgspec.Struct, frozen=True, gc=False):
    """Outcome of a request, with the pool and the director that chose it.

    Attributes:
        prepared: The prepared request; None if it was rejected before.
        pool: Name of the pool that decided; empty where none was found.
    """

    outcome: Outcome | DirectResponse
    pool: str = ""
    director: Director | None = None
    prepared: PreparedRequest | None = None

    def render_ahead(self, raw: HttpRequest) -> Awaitable[None] | None:
        """Wait for the tokens of the prompt before the endpoint is chosen; None for no wait."""
        listener = None if self.director is None else self.director.prompt_listener
        if listener is None or not isinstance(self.outcome, Decision) or self.prepared is None:
            return None
        return listener.render_ahead(self.outcome, raw)


class ModelFit(IntEnum):
    """Fit of a pool for a model; higher is better."""

    #: All its endpoints listed their models, without this model.
    NO = 0
    #: It has no endpoints now.
    EMPTY = 1
    #: An endpoint of it did not list its models.
    UNKNOWN = 2
    #: An endpoint of it lists the model.
    LISTED = 3


class PoolSelector:
    """Routes requests over any number of pools.

    Args:
        routes: The pools, in the order in which their matches are examined.
        list_models: Answer `/v1/models` from what endpoints listed; None does so where there are
            several pools.
        parse_bodies: Parse request bodies; if not, requests are known by their headers only.

    Attributes:
        default_pool: Name of the pool that counts rejections before a pool is selected.
        parses_bodies: Whether `route` parses bodies that are not parsed yet.
    """

    def __init__(
        self,
        routes: Sequence[PoolRoute] = (),
        *,
        list_models: bool | None = None,
        parse_bodies: bool = True,
    ) -> None:
        self._index = MatchIndex(())
        self.reconfigure(routes, list_models=list_models, parse_bodies=parse_bodies)

    def reconfigure(
        self,
        routes: Sequence[PoolRoute],
        *,
        list_models: bool | None = None,
        parse_bodies: bool = True,
    ) -> None:
        """Route over other pools from the next request on."""
        self.parses_bodies = parse_bodies
        self.routes = tuple(routes)
        is_single = len(routes) == 1
        self._only = routes[0] if is_single and routes[0].match.is_empty else None
        self.default_pool = "" if self._only is None else self._only.name
        listed = tuple(route.match for route in routes)
        if listed != self._index.listed:
            self._index = MatchIndex(listed)
        self._open = [route for route in routes if route.match.is_empty]
        self._listing = not is_single if list_models is None else list_models

    def route(self, raw: HttpRequest, now: float) -> RoutingResult:
        """Choose a pool and an endpoint, without charging it."""
        if self._listing and raw.headers.get(":method") == "GET":
            response = self._models_response(raw)
            if response is not None:
                return RoutingResult(response)
        if not self.parses_bodies:
            raw = surfaces.parse_headers(raw)
        only = self._only
        if only is not None:
            director = only.director
            prepared = director.preparer.prepare(raw)
            if isinstance(prepared, Rejection):
                return RoutingResult(prepared, only.name, director)
            return RoutingResult(director.decide(prepared, now), only.name, director, prepared)
        return self._search(raw, now)

    def route_again(self, result: RoutingResult, raw: HttpRequest, now: float) -> RoutingResult:
        """Choose an endpoint for a prepared request anew, in its pool while that is served."""
        if result.director is None or result.prepared is None:
            return result
        if all(route.director is not result.director for route in self.routes):
            return self.route(raw, now)
        outcome: Outcome = result.director.decide(result.prepared, now)
        if isinstance(outcome, Decision) and self._only is None:
            outcome = msgspec.structs.replace(outcome, pool=result.pool)
        return msgspec.structs.replace(result, outcome=outcome)

    def route_fallback(self, raw: HttpRequest, *, why: str) -> RoutingResult:
        """Use the first pool whose headers match, after `route` failed with a bug.

        Args:
            why: Name of what was raised; put into the decision.
        """
        for route in self._matching_routes(raw, self._index.find_routes(raw.headers)):
            outcome = route.director.route_fallback(raw, why=why)
            return RoutingResult(outcome, route.name, route.director)
        return RoutingResult(_no_pool_rejection())

    def _matching_routes(self, raw: HttpRequest, bits: int) -> Iterator[PoolRoute]:
        """Pools in `bits` whose headers match a request, in their order."""
        return (self.routes[at] for at in self._index.positions(bits, raw.headers))

    def _search(self, raw: HttpRequest, now: float) -> RoutingResult:
        """Find the pool of a request; parse the body at most once, if models decide."""
        index = self._index
        routes = index.find_routes(raw.headers) & index.with_conditions
        first = next(self._matching_routes(raw, routes), None)
        if first is not None and not first.match.models:
            return self._route_over(first, raw, now)
        request = surfaces.parse(raw)
        if isinstance(request, Rejection):
            pool = self._find_supplying_pool(request, raw, routes)
            return RoutingResult(request) if pool is None else self._route_over(pool, raw, now)
        model = envelope.model_header(raw.headers) or self._find_target(request)
        route = next(self._matching_routes(raw, routes & index.find_models(model)), None)
        if route is not None:
            return self._route_over(route, raw, now, request)
        candidates = _narrow_by_subset(self._open, raw)
        if len(candidates) == 1:
            return self._route_over(candidates[0], raw, now, request)
        ranked = [(fit(route, model), route) for route in candidates]
        best = max((rank for rank, _ in ranked), default=ModelFit.NO)
        if best is ModelFit.EMPTY:
            return RoutingResult(NO_ENDPOINTS)
        if best is ModelFit.NO:
            known = frozenset().union(*(model_names(route.director) for route in candidates))
            return RoutingResult(
                model_not_found(model, known) if model and known else _no_pool_rejection()
            )
        return self._route_over(
            next(route for rank, route in ranked if rank is best), raw, now, request
        )

    def _find_target(self, request: InferenceRequest) -> str:
        """The name by which a request finds its pool: its adapter, where one is named, or its model.

        An adapter that no pool knows says nothing, as engines that take it in a field of its own need
        not list it: then the model decides.
        """
        adapter = request.adapter
        is_known = adapter and (
            self._index.find_models(adapter) & ~self._index.without_models
            or any(fit(route, adapter) is ModelFit.LISTED for route in self._open)
        )
        return adapter if is_known else request.model

    def _find_supplying_pool(
        self, rejection: Rejection, raw: HttpRequest, routes: int
    ) -> PoolRoute | None:
        """The pool whose rewrite for every request supplies the missing model.

        Any other refusal stands in every pool, so that no body is read again for each of them.
        """
        if rejection != envelope.NO_MODEL:
            return None
        fitting = self._matching_routes(raw, routes & self._index.without_models)
        for pool in itertools.chain(fitting, self._open):
            preparer = pool.director.preparer
            if preparer.supplies_model and not isinstance(preparer.prepare(raw), Rejection):
                return pool
        return None

    def _route_over(
        self,
        route: PoolRoute,
        raw: HttpRequest,
        now: float,
        request: InferenceRequest | None = None,
    ) -> RoutingResult:
        director = route.director
        preparer = director.preparer
        prepared = (
            preparer.prepare(raw) if request is None else preparer.prepare_parsed(request, raw)
        )
        if isinstance(prepared, Rejection):
            return RoutingResult(prepared, route.name, director)
        outcome = director.decide(prepared, now)
        if isinstance(outcome, Decision):
            outcome = msgspec.structs.replace(outcome, pool=route.name)
        return RoutingResult(outcome, route.name, director, prepared)

    def _models_response(self, raw: HttpRequest) -> DirectResponse | None:
        """The list of models, if the request asks for it and any endpoint listed models."""
        model = requested_model(pool_match.request_path(raw.headers))
        if model is None:
            return None
        routes = self._index.find_routes(raw.headers)
        may = [route.director for route in self._matching_routes(raw, routes)]
        return build_models_response(may, model)


def fit(route: PoolRoute, model: str) -> ModelFit:
    """Rate an open pool for a model; a request without a model fits every pool."""
    pool = route.director.pool
    if not pool.members:
        return ModelFit.EMPTY
    if not model:
        return ModelFit.UNKNOWN
    serving = pool.serving
    if model in serving.names or model in route.director.preparer.rewritten_models:
        return ModelFit.LISTED
    if serving.parse_kubeai_name(model) is not None or serving.parse_sglang_name(model) is not None:
        return ModelFit.LISTED
    split = serving.match(model)
    return ModelFit.UNKNOWN if split is None or split.positions else ModelFit.NO


def _narrow_by_subset(open_routes: Sequence[PoolRoute], raw: HttpRequest) -> Sequence[PoolRoute]:
    """Pools with endpoints in the subset hint; all pools without a hint or a match."""
    if not raw.subset or len(open_routes) < 2:
        return open_routes
    return [
        route for route in open_routes if route.director.pool.eligible(raw.subset)
    ] or open_routes


def _no_pool_rejection() -> Rejection:
    return Rejection(
        404,
        "no pool takes this request; see `pools` in the configuration for the hosts, paths, "
        "headers and models that are taken",
        cause="no-pool",
    )


#: Where engines list their models.
MODELS_PATH: Final = "/v1/models"


class ModelCard(msgspec.Struct, frozen=True):
    """An entry of the list of models.

    Attributes:
        id: Model name in requests.
        object: Always `model`.
        created: Unix seconds; 0, because engines do not agree.
        owned_by: Always the name of this server.
        parent: The base model of an adapter; None for a base model.
        max_model_len: Longest context in tokens, the least of its endpoints; None where none lists it,
            and for an adapter, as in vLLM's list.
    """

    id: str
    object: str = "model"
    created: int = 0
    owned_by: str = "extproc"
    root: str = ""
    parent: str | None = None
    max_model_len: int | None = None


def requested_model(path: str) -> str | None:
    """The model that a path names: empty for the list, None for any other path."""
    path = path.rstrip("/")
    if path == MODELS_PATH:
        return ""
    # The OpenAI SDK writes a slash in a name as %2F.
    return (
        unquote(path.removeprefix(MODELS_PATH + "/"))
        if path.startswith(MODELS_PATH + "/")
        else None
    )


def build_models_response(directors: Sequence[Director], name: str) -> DirectResponse | None:
    """Build the response to a request for the list of models or for a single model.

    Returns:
        None while no endpoint listed anything: an engine is asked then.
    """
    entries = _model_cards(directors)
    if not entries:
        return None
    if not name:
        return _json({"object": "list", "data": [entries[model] for model in sorted(entries)]})
    if name in entries:
        return _json(entries[name])
    return DirectResponse(404, messages.error_body(model_not_found(name, entries)))


def model_names(director: Director) -> frozenset[str]:
    """Model names that requests to a pool may use: served models and rewritten models."""
    return director.pool.serving.names | director.preparer.rewritten_models


def _model_cards(directors: Iterable[Director]) -> dict[str, ModelCard]:
    entries: dict[str, ModelCard] = {}
    for director in directors:
        for member in director.pool.members:
            models = member.serves
            if models is None:
                continue
            for base in models.bases:
                card = entries.get(base)
                known = None if card is None else card.max_model_len
                lengths = [length for length in (known, models.max_model_len) if length is not None]
                entries[base] = ModelCard(base, root=base, max_model_len=min(lengths, default=None))
            parent = min(models.bases, default=None)
            for adapter in models.adapters:
                entries.setdefault(adapter, ModelCard(adapter, root=adapter, parent=parent))
        for other in model_names(director):
            entries.setdefault(other, ModelCard(other, root=other))
    return entries


def _json(content: object) -> DirectResponse:
    return DirectResponse(200, msgspec.json.encode(content))
