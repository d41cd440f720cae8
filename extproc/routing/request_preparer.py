"""From a raw request to what is asked of the fleet: parsed, ranked, renamed and hashed."""

from __future__ import annotations

import random
from collections.abc import Sequence

import msgspec

from extproc.decision import Rejection
from extproc.parsing import preparsed, surfaces
from extproc.pool.store import Fleet
from extproc.prefix_cache import blocks
from extproc.request import RawRequest, Request
from extproc.routing import model_rewrite, policy_resolver, routing_config
from extproc.scheduling.framework import Signal


class Prepared(msgspec.Struct, frozen=True, gc=False):
    """A request that only needs an endpoint; it stays as it is while it waits for one.

    Attributes:
        request: What is asked for: the model and adapter to be served, the priority.
        chain: The prompt's block hashes, root first, as engines hash them.
        raw: The request as it came.
        asked: The request as parsed.
        sent: The name to put into the body; empty where it stays.
        whole: Whether parsing `raw` again gives the prompt.
    """

    request: Request
    chain: Sequence[int]
    raw: RawRequest
    asked: Request
    sent: str = ""
    whole: bool = False

    def resting(self) -> Prepared:
        """Without the prompt: it is as large as the body, which tells the opening again."""
        if not (self.whole and self.request.prompt):
            return self
        replace = msgspec.structs.replace
        request = replace(self.request, prompt=b"")
        asked = request if self.asked is self.request else replace(self.asked, prompt=b"")
        # By position: `replace` takes six times as long, and every request that waits rests.
        raw = preparsed.rest(self.raw)
        return Prepared(request, self.chain, raw, asked, self.sent, self.whole)

    def prompted(self) -> Request:
        """The request with its prompt, parsed anew if need be."""
        if self.request.prompt or not self.whole:
            return self.request
        read = surfaces.parse(self.raw)
        if isinstance(read, Rejection):
            return self.request
        return msgspec.structs.replace(self.request, prompt=read.prompt)


class Preparation:
    """Prepares requests for one fleet.

    Args:
        fleet: Knows who serves what, and what was decreed.
        schedule: How prompts are cut into blocks.
        rng: All chance there is.
    """

    def __init__(self, fleet: Fleet, *, schedule: blocks.Schedule, rng: random.Random) -> None:
        self._fleet = fleet
        self._schedule = schedule
        self._rng = rng
        self._decrees = policy_resolver.Decrees()

    def adopt(self, routing: routing_config.Routing) -> None:
        """Go by another configuration from the next request on."""
        self._policy = routing.policy
        self._kubeai_names = routing.settings.kubeai_names
        self._hashing = Signal.PREFIX in routing.needs

    @property
    def names(self) -> frozenset[str]:
        """Models that requests may name because rewrites put others in their place."""
        return self._decreed.names

    @property
    def supplies_model(self) -> bool:
        """Whether a rewrite is for every request, also for one that names no model."""
        return self._decreed.supplies

    def of(self, raw: RawRequest) -> Prepared | Rejection:
        """Prepare a request, or say what is wrong with it."""
        request = surfaces.parse(raw)
        if not isinstance(request, Rejection):
            return self.parsed(request, raw, whole=True)
        decreed = self._decreed
        supplied = decreed.supplied(raw, request, self._rng)
        if supplied is None:
            return request
        return self._named(decreed.ranked(supplied, raw.headers), raw, supplied.model)

    def parsed(self, request: Request, raw: RawRequest, *, whole: bool = False) -> Prepared:
        """Prepare a request that is parsed already; `whole` as of `Prepared`."""
        decreed = self._decreed
        target = decreed.target(request, self._rng)
        return self._named(decreed.ranked(request, raw.headers), raw, target, whole=whole)

    def _named(
        self, request: Request, raw: RawRequest, target: str, *, whole: bool = False
    ) -> Prepared:
        """With the target of a rewrite in place of the model; empty for none."""
        renamed = model_rewrite.of(
            request,
            raw.headers,
            self._fleet.pool.serving,
            decreed=target,
            kubeai_names=self._kubeai_names,
        )
        if renamed is None:
            return Prepared(request, self._chain(request), raw, request, whole=whole)
        chain = self._chain(renamed.hashed)
        return Prepared(renamed.request, chain, raw, request, renamed.sent, whole)

    @property
    def _decreed(self) -> policy_resolver.Decrees:
        """What was decreed, as of now."""
        self._decrees.follow(self._fleet.policy, self._policy)
        return self._decrees

    def _chain(self, request: Request) -> Sequence[int]:
        """The prompt's block hashes; none where no profile reads them."""
        if not self._hashing or not request.prompt:
            return ()
        seed = blocks.seed(request.model, request.adapter)
        return blocks.chain(request.prompt, seed, schedule=self._schedule)
