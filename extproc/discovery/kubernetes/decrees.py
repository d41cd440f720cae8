"""Merging of InferenceObjectives and InferenceModelRewrites into a policy."""

from __future__ import annotations

from collections.abc import Iterable

from extproc.discovery.kubernetes import objects
from extproc.pool import inference_policy


def policy_of(
    pool: objects.PoolRef,
    objectives: Iterable[objects.ObjectiveObject],
    rewrites: Iterable[objects.RewriteObject],
) -> inference_policy.InferencePolicy:
    """Builds the policy of one pool (docs/spec/protocol.md#inferenceobjective).

    Args:
        pool: Pool of the policy.
        objectives: Of its namespace, in any order.
        rewrites: The same. Of one age, the name decides, so that replicas agree.
    """
    aged = sorted(
        (rewrite for rewrite in rewrites if rewrite.pool == pool),
        key=lambda rewrite: (rewrite.created, rewrite.name),
    )
    named = sorted(
        (objective.name, objective.priority) for objective in objectives if objective.pool == pool
    )
    return inference_policy.InferencePolicy(
        priorities=dict(named), rules=tuple(rule for rewrite in aged for rule in rewrite.rules)
    )
