"""From a raw request to what is asked of the fleet: parsed, ranked, renamed and hashed.

Model rewrite: the model name of a request and the name its engine knows.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import msgspec

from extproc.decision import Outcome, Rejection
from extproc.parsing import envelope, first_user_message, model_edit, surfaces
from extproc.pool.model_index import ModelIndex
from extproc.pool.store import PoolStore
from extproc.prefix_cache import blocks
from extproc.request import HttpRequest, InferenceRequest
from extproc.routing import policy_resolver, routing_config
from extproc.scheduling.framework import Signal


class ModelRewrite(msgspec.Struct, frozen=True, gc=False):
    """A request whose model name differs from the name its engine knows.

    Attributes:
        request: The request with the base model, and the adapter if there is one.
        hashed: The same named as engines hash it, so that it shares blocks with requests that used
            the engine's name from the start.
        upstream_model: The name to put into the body; empty where it stays.
    """

    request: InferenceRequest
    hashed: InferenceRequest
    upstream_model: str = ""


def resolve_model(
    request: InferenceRequest,
    headers: Mapping[str, str],
    serving: ModelIndex,
    *,
    rewrite_target: str,
    kubeai_names: bool,
) -> ModelRewrite | None:
    """Resolve the model name of a request to the name its engine knows.

    A rewrite's target, or else a gateway's header, names the model in place of the body
    (docs/spec/protocol.md#model-rewrite). Then the name may be SGLang's `model:adapter`, or
    KubeAI's `model_adapter`.

    Args:
        request: As parsed.
        headers: Of the request, names in lower case.
        serving: Endpoints by model.
        rewrite_target: Model of a rewrite; empty where there is none.
        kubeai_names: Whether `model_adapter` is understood.

    Returns:
        None where the name is what it seems.
    """
    target = rewrite_target or envelope.model_header(headers)
    request = msgspec.structs.replace(request, model=target) if target else request
    name = request.model
    if not request.adapter:
        if ":" in name and (alias := serving.parse_sglang_name(name)) is not None:
            both = msgspec.structs.replace(request, model=alias.base, adapter=alias.adapter)
            return ModelRewrite(both, both, target)
        if kubeai_names and "_" in name and (alias := serving.parse_kubeai_name(name)) is not None:
            return ModelRewrite(
                msgspec.structs.replace(request, model=alias.base, adapter=alias.adapter),
                msgspec.structs.replace(request, model=alias.adapter),
                alias.adapter,
            )
    return ModelRewrite(request, request, target) if target else None


def attach_model_rewrite(
    outcome: Outcome, raw: HttpRequest, request: InferenceRequest, sent: str
) -> Outcome:
    """Attach the model names for the request body and for the response to an outcome.

    Args:
        outcome: Of the renamed request.
        raw: The request as it came.
        request: As parsed.
        sent: See `ModelRewrite`.
    """
    if not sent or isinstance(outcome, Rejection):
        return outcome
    splice = model_edit.locate_model(raw, sent)
    client_model = ""
    if splice is not None:
        if raw.body[splice.start : splice.stop] == splice.content:
            # The body says so already.
            return outcome
        if splice.start != splice.stop:
            client_model = request.model
        elif request.api == surfaces.OPAQUE.api:
            # A body on an unknown path is looked into, but may be anything: nothing is added.
            splice = None
    return msgspec.structs.replace(
        outcome, model_rewrite=sent, body_edit=splice, client_model=client_model
    )


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
        raw = first_user_message.reduce_preparsed(self.raw)
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
        renamed = resolve_model(
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
