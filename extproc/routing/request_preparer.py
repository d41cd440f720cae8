"""From a raw request to what is asked of the fleet: parsed, ranked, renamed and hashed."""

from __future__ import annotations

import random
from collections.abc import Sequence

import msgspec

from extproc.decision import Rejection
from extproc.parsing import preparsed, surfaces
from extproc.pool.store import PoolStore
from extproc.prefix_cache import blocks
from extproc.request import HttpRequest, InferenceRequest
from extproc.routing import model_rewrite, policy_resolver, routing_config
from extproc.scheduling.framework import Signal


class PreparedRequest(msgspec.Struct, frozen=True, gc=False):
    """A request that only needs an endpoint; it stays as it is while it waits for one.

    Attributes:
        request: The request with its model and adapter to be served, and its priority.
        chain: The prompt's block hashes, root first, as engines hash them.
        raw: The request as it came.
        parsed: The request as parsed.
        upstream_model: The name to put into the body; empty where it stays.
        reparsable: Whether parsing `raw` again gives the prompt.
    """

    request: InferenceRequest
    chain: Sequence[int]
    raw: HttpRequest
    parsed: InferenceRequest
    upstream_model: str = ""
    reparsable: bool = False

    def without_prompt(self) -> PreparedRequest:
        """Without the prompt: it is as large as the body, which tells the opening again."""
        if not (self.reparsable and self.request.prompt):
            return self
        replace = msgspec.structs.replace
        request = replace(self.request, prompt=b"")
        parsed = request if self.parsed is self.request else replace(self.parsed, prompt=b"")
        # By position: `replace` takes six times as long, and every request that waits rests.
        raw = preparsed.rest(self.raw)
        return PreparedRequest(
            request, self.chain, raw, parsed, self.upstream_model, self.reparsable
        )

    def with_prompt(self) -> InferenceRequest:
        """The request with its prompt, parsed anew if need be."""
        if self.request.prompt or not self.reparsable:
            return self.request
        read = surfaces.parse(self.raw)
        if isinstance(read, Rejection):
            return self.request
        return msgspec.structs.replace(self.request, prompt=read.prompt)


class RequestPreparer:
    """Prepares requests for one fleet.

    Args:
        fleet: Pool with its models and its inference policy.
        schedule: How prompts are cut into blocks.
        rng: All chance there is.
    """

    def __init__(self, fleet: PoolStore, *, schedule: blocks.Schedule, rng: random.Random) -> None:
        self._fleet = fleet
        self._schedule = schedule
        self._rng = rng
        self._policy_resolver = policy_resolver.PolicyResolver()

    def adopt(self, routing: routing_config.RoutingConfig) -> None:
        """Go by another configuration from the next request on."""
        self._policy = routing.policy
        self._kubeai_names = routing.settings.kubeai_names
        self._hashing = Signal.PREFIX in routing.needs

    @property
    def names(self) -> frozenset[str]:
        """Models that requests may name because rewrites put others in their place."""
        return self._current_policy.names

    @property
    def supplies_model(self) -> bool:
        """True if a rewrite names a model for requests that name none."""
        return self._current_policy.supplies

    def prepare(self, raw: HttpRequest) -> PreparedRequest | Rejection:
        """Prepare a request, or return the rejection."""
        request = surfaces.parse(raw)
        if not isinstance(request, Rejection):
            return self.parsed(request, raw, reparsable=True)
        policy = self._current_policy
        supplied = policy.with_default_model(raw, request, self._rng)
        if supplied is None:
            return request
        return self._named(policy.with_priority(supplied, raw.headers), raw, supplied.model)

    def parsed(
        self, request: InferenceRequest, raw: HttpRequest, *, reparsable: bool = False
    ) -> PreparedRequest:
        """Prepare a request that is parsed already; `reparsable` as of `PreparedRequest`."""
        policy = self._current_policy
        target = policy.rewrite_target(request, self._rng)
        return self._named(
            policy.with_priority(request, raw.headers), raw, target, reparsable=reparsable
        )

    def _named(
        self, request: InferenceRequest, raw: HttpRequest, target: str, *, reparsable: bool = False
    ) -> PreparedRequest:
        """Prepare a request with its rewrite target as the model; empty for no rewrite."""
        renamed = model_rewrite.resolve_model(
            request,
            raw.headers,
            self._fleet.pool.serving,
            rewrite_target=target,
            kubeai_names=self._kubeai_names,
        )
        if renamed is None:
            return PreparedRequest(
                request, self._chain(request), raw, request, reparsable=reparsable
            )
        chain = self._chain(renamed.hashed)
        return PreparedRequest(
            renamed.request, chain, raw, request, renamed.upstream_model, reparsable
        )

    @property
    def _current_policy(self) -> policy_resolver.PolicyResolver:
        """The current policy."""
        self._policy_resolver.update(self._fleet.policy, self._policy)
        return self._policy_resolver

    def _chain(self, request: InferenceRequest) -> Sequence[int]:
        """The prompt's block hashes; empty if no profile reads them."""
        if not self._hashing or not request.prompt:
            return ()
        seed = blocks.seed(request.model, request.adapter)
        return blocks.chain(request.prompt, seed, schedule=self._schedule)
