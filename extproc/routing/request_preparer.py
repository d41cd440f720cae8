"""Request preparer: parses, prioritizes, rewrites and hashes a request.

Objectives give it a priority, rewrite rules another model (`PolicyResolver`); the name that its
engine knows may differ from the name of the client (`resolve_model`).
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from extproc.decision import Decision, Outcome, Rejection
from extproc.parsing import envelope, model_edit, surfaces
from extproc.pool import inference_policy
from extproc.pool.inference_policy import InferencePolicy, RewriteRule, TargetModel
from extproc.pool.snapshot import ModelIndex
from extproc.pool.store import PoolStore
from extproc.prefix_cache import blocks
from extproc.request import HttpRequest, InferenceRequest
from extproc.routing.routing_config import RoutingConfig

#: Headers that name an InferenceObjective; the first one that is there counts
#: (docs/spec/protocol.md#header-names).
OBJECTIVE_HEADERS: Final = ("x-llm-d-inference-objective", "x-gateway-inference-objective")

#: The chosen endpoint has no prefix of a request that is to run only where it is cached
#: (docs/spec/protocol.md#conditional-requests).
NOT_CACHED: Final = Rejection(
    412, "the chosen endpoint is not predicted to have a cached prefix", cause="not-cached"
)


class PolicyResolver:
    """Resolves the priority and the model rewrite of each request.

    Of several rules for a model an exact one counts before one without models, and of these the
    first (docs/spec/protocol.md#inferencemodelrewrite; the policy has them in order of age).

    Attributes:
        is_empty: True without rules and objectives: every request stays as it is.
        known_models: Models that the rules name: those they are for, and targets.
    """

    def __init__(self) -> None:
        self._discovered = self._configured = inference_policy.EMPTY_POLICY
        self._priorities: Mapping[str, int] = {}
        self._exact: dict[str, RewriteRule] = {}
        self._generic: RewriteRule | None = None
        self.is_empty = True
        self.known_models: frozenset[str] = frozenset()

    def update(self, discovered: InferencePolicy, configured: InferencePolicy) -> None:
        """Replace the policy; does nothing if the values are unchanged.

        Args:
            configured: Policy of the configuration, used where discovery has none.
        """
        if discovered is self._discovered and configured is self._configured:
            return
        self._discovered, self._configured = discovered, configured
        both = inference_policy.merged(discovered, configured)
        self._priorities = both.priorities
        self._exact = {}
        self._generic = None
        for rule in both.rules:
            for model in rule.models:
                self._exact.setdefault(model, rule)
            if not rule.models and self._generic is None:
                self._generic = rule
        self.is_empty = not (both.priorities or both.rules)
        targets = (target.model for rule in both.rules for target in rule.targets)
        self.known_models = frozenset([*self._exact, *targets])

    @property
    def names(self) -> frozenset[str]:
        """Models that requests may name because a rule rewrites them."""
        return frozenset(self._exact)

    @property
    def supplies(self) -> bool:
        """True if a rule matches every request, including requests that name no model."""
        return self._generic is not None

    def with_priority(
        self, request: InferenceRequest, headers: Mapping[str, str]
    ) -> InferenceRequest:
        """The request with the priority of its objective; unchanged without an objective."""
        if not self._priorities:
            return request
        name = objective_of(headers)
        priority = self._priorities.get(name)
        if priority is None:
            return request
        return msgspec.structs.replace(request, objective=name, priority=priority)

    def rewrite_target(self, request: InferenceRequest, rng: random.Random) -> str:
        """The model that replaces the model of a request; empty if no rule matches.

        Turns of one conversation get the same one: a request with a session draws by the hash of
        it, in every replica alike, and moves only when the weights do.

        Args:
            rng: Draws for requests without a session.
        """
        rule = self._exact.get(request.model, self._generic)
        if rule is None or not request.model:
            # What names no model, such as GET /health, is no request for one.
            return ""
        return _drawn(rule, request.session, rng)

    def with_default_model(
        self, raw: HttpRequest, refused: Rejection, rng: random.Random
    ) -> InferenceRequest | None:
        """The request with the model of a rule for all requests, if it named no model.

        Returns:
            None where it stays refused.
        """
        rule = self._generic
        if refused != envelope.NO_MODEL or rule is None:
            return None
        # As if the gateway had named one: what else is wrong with it still counts.
        request = surfaces.parse_supplied(raw, rule.targets[0].model)
        if request is None or isinstance(request, Rejection):
            return None
        return msgspec.structs.replace(request, model=_drawn(rule, request.session, rng))


def objective_of(headers: Mapping[str, str]) -> str:
    """The objective the headers name; empty when they name none."""
    for name in OBJECTIVE_HEADERS:
        value = headers.get(name)
        if value:
            return value
    return ""


def weighted_choice(targets: Sequence[TargetModel], share: float) -> TargetModel:
    """Choose a target of a rule by weight.

    Where some have a weight, only those are drawn, in proportion; where none has, or they sum up to
    0, all are drawn alike (docs/spec/protocol.md#model-rewrite).

    Args:
        targets: Targets, at least one.
        share: Position within the sum of all weights, 0 to below 1.
    """
    total = sum([target.weight or 0 for target in targets])
    if not total:
        return targets[int(share * len(targets))]
    left = share * total
    for target in targets:
        left -= target.weight or 0
        if left < 0:
            return target
    # Unreachable by arithmetic of whole numbers below 2**53; the last one with a weight otherwise.
    return max(targets, key=lambda target: target.weight or 0)


def sticky_choice(rule: RewriteRule, session: str) -> TargetModel:
    """Choose the target of a session, equal in all replicas while weights stay.

    Weighted rendezvous: the least `-ln(u) / weight`, u in (0, 1) by the hash of session and target.
    Sessions are spread in proportion; another weight moves only sessions to or from its target.

    Args:
        rule: Rule with at least two targets.
        session: Session of the request, not empty.
    """
    weighted = any(target.weight for target in rule.targets)
    # With the rule in it, since two canaries at once must not hit the same conversations.
    key = "\n".join((session, *rule.models, ""))
    best, least = rule.targets[0], math.inf
    for target in rule.targets:
        weight = (target.weight or 0) if weighted else 1
        if not weight:
            continue
        hashed = hashlib.blake2b((key + target.model).encode("utf-8", "replace"), digest_size=6)
        share = (int.from_bytes(hashed.digest()) + 0.5) / (1 << 48)
        distance = -math.log(share) / weight
        if distance < least:
            best, least = target, distance
    return best


def _drawn(rule: RewriteRule, session: str, rng: random.Random) -> str:
    if len(rule.targets) == 1:
        return rule.targets[0].model
    if not session:
        return weighted_choice(rule.targets, rng.random()).model
    return sticky_choice(rule, session).model


class ModelRewrite(msgspec.Struct, frozen=True, gc=False):
    """A request whose model name differs from the name its engine knows.

    Attributes:
        request: The request with the base model, and the adapter if there is one.
        hashed: The same request named as engines hash it, so that it shares blocks with requests
            that use the engine's name.
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
    """Attach the model names for the request body and for the response to an outcome."""
    if not sent or not isinstance(outcome, Decision):
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


def reject_uncached(outcome: Outcome, raw: HttpRequest) -> Outcome:
    """Replace the decision of a request with `Prefer: if-available` and no cached prefix by 412.

    Requests without a body are no inference, and upstream has no condition for them.
    """
    if not isinstance(outcome, Decision) or outcome.matched_tokens or not raw.body:
        return outcome
    preferences = (part.partition(";")[0] for part in raw.headers.get("prefer", "").split(","))
    is_conditional = any(name.strip().lower() == "if-available" for name in preferences)
    return NOT_CACHED if is_conditional else outcome


class PreparedRequest(msgspec.Struct, frozen=True, gc=False):
    """A request that only needs an endpoint; it stays as it is while it waits for one.

    Attributes:
        request: The request with its model and adapter to be served, and its priority.
        upstream_model: The name to put into the body; empty where it stays.
        reparsable: Whether parsing `raw` again gives the prompt.
    """

    request: InferenceRequest
    chain: Sequence[int]
    raw: HttpRequest
    parsed: InferenceRequest
    upstream_model: str = ""
    reparsable: bool = False

    @property
    def client_model(self) -> str:
        """The client's name for the model, where the engine's is another one; empty elsewhere."""
        return self.parsed.model if self.upstream_model else ""

    def without_prompt(self) -> PreparedRequest:
        """The request without its prompt, which `with_prompt` parses again from the body."""
        if not (self.reparsable and self.request.prompt):
            return self
        replace = msgspec.structs.replace
        request = replace(self.request, prompt=b"")
        parsed = request if self.parsed is self.request else replace(self.parsed, prompt=b"")
        raw = self.raw
        if type(raw) is not HttpRequest:
            raw = surfaces.reduce_preparsed(raw)
        # By position: `replace` takes six times as long, and every request that waits rests.
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
    """Prepares requests for one pool.

    Args:
        routing: Settings and configured policy; `reconfigure` replaces them.
    """

    def __init__(
        self,
        store: PoolStore,
        *,
        routing: RoutingConfig,
        schedule: blocks.Schedule,
        rng: random.Random,
    ) -> None:
        self._store = store
        self._routing = routing
        self._schedule = schedule
        self._rng = rng
        self._policy_resolver = PolicyResolver()

    def reconfigure(self, routing: RoutingConfig) -> None:
        """Go by another configuration from the next request on."""
        self._routing = routing

    @property
    def rewritten_models(self) -> frozenset[str]:
        """Models that requests may name because rewrites put others in their place."""
        return self._current_policy.names

    @property
    def configured_models(self) -> frozenset[str]:
        """Models that rewrites name: those they are for, and targets."""
        return self._current_policy.known_models

    @property
    def supplies_model(self) -> bool:
        """True if a rewrite names a model for requests that name none."""
        return self._current_policy.supplies

    def prepare(self, raw: HttpRequest) -> PreparedRequest | Rejection:
        """Prepare a request, or return the rejection."""
        request = surfaces.parse(raw)
        if not isinstance(request, Rejection):
            return self.prepare_parsed(request, raw, reparsable=True)
        policy = self._current_policy
        supplied = policy.with_default_model(raw, request, self._rng)
        if supplied is None:
            return request
        return self._named(policy.with_priority(supplied, raw.headers), raw, supplied.model)

    def prepare_parsed(
        self, request: InferenceRequest, raw: HttpRequest, *, reparsable: bool = False
    ) -> PreparedRequest:
        """Prepare a request that is parsed already; `reparsable` as of `PreparedRequest`."""
        policy, target = self._current_policy, ""
        if not policy.is_empty:
            target = policy.rewrite_target(request, self._rng)
            request = policy.with_priority(request, raw.headers)
        return self._named(request, raw, target, reparsable=reparsable)

    def _named(
        self, request: InferenceRequest, raw: HttpRequest, target: str, *, reparsable: bool = False
    ) -> PreparedRequest:
        """Prepare a request with its rewrite target as the model; empty for no rewrite."""
        renamed = resolve_model(
            request,
            raw.headers,
            self._store.pool.serving,
            rewrite_target=target,
            kubeai_names=self._routing.settings.kubeai_names,
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
    def _current_policy(self) -> PolicyResolver:
        """The current policy."""
        self._policy_resolver.update(self._store.policy, self._routing.policy)
        return self._policy_resolver

    def _chain(self, request: InferenceRequest) -> Sequence[int]:
        """The prompt's block hashes; empty if no profile reads them."""
        if not self._routing.hashes_prompts or not request.prompt:
            return ()
        seed = blocks.seed(request.model, request.adapter)
        return blocks.chain(request.prompt, seed, schedule=self._schedule)
