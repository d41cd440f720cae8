"""Objectives and model rewrites in the configuration, for pools without Kubernetes objects."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated

import msgspec

from extproc.config import constraints
from extproc.pool import inference_policy

Priority = Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)]
Weight = Annotated[int, msgspec.Meta(ge=0, le=1_000_000)]


class RewriteTarget(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A model that replaces the requested model.

    Attributes:
        model: Name to write into the body, a base model or an adapter. No default.
        weight: Weight among the targets. Null: if no target has a weight, all are drawn with equal
            probability; otherwise a target without a weight is never drawn.
    """

    model: constraints.BoundedName
    weight: Weight | None = None


class RewriteEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A rewrite of requested models to targets.

    Attributes:
        models: Exact names in requests. None: every name that no other rewrite lists.
        targets: Models to draw from, at least one.
    """

    models: tuple[constraints.BoundedName, ...] = ()
    targets: Annotated[tuple[RewriteTarget, ...], msgspec.Meta(min_length=1)]


def build_policy(
    objectives: Mapping[str, int], rewrites: Sequence[RewriteEntry]
) -> inference_policy.InferencePolicy:
    """Build the policy of a pool from its sections."""
    if not (objectives or rewrites):
        return inference_policy.EMPTY_POLICY
    rules = [
        inference_policy.RewriteRule(
            rewrite.models,
            tuple(
                inference_policy.TargetModel(target.model, target.weight)
                for target in rewrite.targets
            ),
        )
        for rewrite in rewrites
    ]
    return inference_policy.InferencePolicy(objectives, tuple(rules))


def describe_policy(
    objectives: Mapping[str, int], rewrites: Sequence[RewriteEntry]
) -> Iterator[str]:
    """Describe the sections, a line each for `extproc check`."""
    if objectives:
        ranked = sorted(objectives.items(), key=lambda pair: (-pair[1], pair[0]))
        yield "objectives  " + ", ".join(f"{name} {priority}" for name, priority in ranked)
    head = "rewrites    "
    for rewrite in rewrites:
        targets = ", ".join(
            target.model if target.weight is None else f"{target.model} ({target.weight})"
            for target in rewrite.targets
        )
        yield f"{head}{', '.join(rewrite.models) or 'every other model'} to {targets}"
        head = " " * len(head)


def warnings(rewrites: Sequence[RewriteEntry], where: str) -> Iterator[str]:
    """Warn of rewrites that are valid and probably a mistake.

    Args:
        rewrites: In their order.
        where: Where they stand, such as `pool.rewrites`.
    """
    first: dict[str, int] = {}
    for at, rewrite in enumerate(rewrites):
        for model in rewrite.models or ("",):
            before = first.setdefault(model, at)
            if before != at:
                named = model or "every other model"
                yield f"{where}[{at}] is never used for {named}: {where}[{before}] comes first"
        weights = [target.weight for target in rewrite.targets]
        unweighted = [target.model for target in rewrite.targets if target.weight is None]
        if sum(weight or 0 for weight in weights) and unweighted:
            yield f"{where}[{at}] never draws {', '.join(unweighted)}: others have a weight"
        elif 0 in weights and not any(weights):
            yield f"{where}[{at}] has only weights of 0: its targets are drawn alike"
