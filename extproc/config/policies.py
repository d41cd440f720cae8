"""Objectives and rewrites in the configuration, for pools that no Kubernetes object describes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import msgspec

from extproc.config import bounds
from extproc.pool import policy as policies

Priority = Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)]
Weight = Annotated[int, msgspec.Meta(ge=0, le=1_000_000)]


class RewriteTarget(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A model that requests for another are sent to.

    Attributes:
        model: The name to put into the body, a base model or an adapter. No default: a target is
            its name.
        weight: Its part among the targets. Null: where nobody has one all are drawn alike, and
            where somebody has one those without are not drawn.
    """

    model: bounds.Name
    weight: Weight | None = None


class Rewrite(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Requests for these models go to others.

    Attributes:
        models: Names in requests, exactly. None: every request that no other rewrite names.
        targets: Who is drawn from, at least one.
    """

    models: tuple[bounds.Name, ...] = ()
    targets: Annotated[tuple[RewriteTarget, ...], msgspec.Meta(min_length=1)]


def policy(objectives: Mapping[str, int], rewrites: tuple[Rewrite, ...]) -> policies.Policy:
    """The sections as a value."""
    if not (objectives or rewrites):
        return policies.NONE
    rules = [
        policies.Rule(
            each.models, tuple(policies.Target(one.model, one.weight) for one in each.targets)
        )
        for each in rewrites
    ]
    return policies.Policy(objectives, tuple(rules))
