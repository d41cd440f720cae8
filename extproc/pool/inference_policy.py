"""Policy of a pool: priorities of objectives, and model rewrite rules. Values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec


class TargetModel(msgspec.Struct, frozen=True):
    """A model that requests for another are sent to.

    Attributes:
        model: The name to put into the body.
        weight: Its part among the targets of a rule; None when unset.
    """

    model: str
    weight: int | None = None


class RewriteRule(msgspec.Struct, frozen=True):
    """One rule of an InferenceModelRewrite (docs/spec/protocol.md#inferencemodelrewrite).

    Attributes:
        models: Names it is for; empty is every request.
        targets: Targets, at least one.
    """

    models: tuple[str, ...]
    targets: tuple[TargetModel, ...]


class InferencePolicy(msgspec.Struct, frozen=True):
    """Priorities of objectives and rewrite rules of one pool.

    Attributes:
        priorities: Priorities by name of an InferenceObjective; other names have priority 0.
        rules: Older objects first, and in the order of the list within one.
    """

    priorities: Mapping[str, int] = {}
    rules: Sequence[RewriteRule] = ()


#: Policy of a pool without objectives and rewrites.
EMPTY_POLICY = InferencePolicy()


def merged(first: InferencePolicy, second: InferencePolicy) -> InferencePolicy:
    """Two policies as one.

    Args:
        first: Its priorities count before those of `second`, and its rules come first.
    """
    if second is EMPTY_POLICY:
        return first
    if first is EMPTY_POLICY:
        return second
    return InferencePolicy(
        priorities={**second.priorities, **first.priorities},
        rules=(*first.rules, *second.rules),
    )
