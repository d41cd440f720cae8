"""Inference policy of a pool: priorities by objective, and model rewrites."""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from extproc.decision import Rejection
from extproc.parsing import envelope, surfaces
from extproc.pool import inference_policy
from extproc.pool.inference_policy import InferencePolicy, RewriteRule, TargetModel
from extproc.request import HttpRequest, InferenceRequest

#: Headers that name an InferenceObjective; the first one that is there counts
#: (docs/spec/protocol.md#header-names).
OBJECTIVE_HEADERS: Final = ("x-llm-d-inference-objective", "x-gateway-inference-objective")


class PolicyResolver:
    """Resolves the priority and the model rewrite of each request.

    Of several rules for a model an exact one counts before one without models, and of these the
    first (docs/spec/protocol.md#inferencemodelrewrite; the policy has them in order of age).
    """

    def __init__(self) -> None:
        self._discovered = self._configured = inference_policy.EMPTY_POLICY
        self._priorities: Mapping[str, int] = {}
        self._exact: dict[str, RewriteRule] = {}
        self._generic: RewriteRule | None = None

    def update(self, discovered: InferencePolicy, configured: InferencePolicy) -> None:
        """Replace the policy; does nothing if the values are unchanged.

        Args:
            discovered: Policy from discovery.
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
        """The request with the priority of its objective; unchanged without an objective.

        Args:
            request: As parsed.
            headers: Of the request, names in lower case.
        """
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
            request: As parsed.
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

        Args:
            raw: As it came.
            refused: Rejection from parsing.
            rng: As for `rewrite_target`.

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
        targets: At least one.
        share: Where on the way through all weights, 0 to below 1.
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
        rule: With two targets or more.
        session: Not empty.
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
