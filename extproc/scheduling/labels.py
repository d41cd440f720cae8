"""Labels that say which adapters an endpoint serves, as KubeAI sets them on its pods."""

from __future__ import annotations

from collections.abc import Sequence

from extproc.endpoint import Candidate
from extproc.scheduling.context import SchedulingContext

#: Before the name of an adapter that is loaded (docs/spec/prior-systems.md#adapter-names).
PREFIX = "adapter.kubeai.org/"


def adapter(turn: SchedulingContext, candidates: Sequence[Candidate]) -> str:
    """The adapter of a request; empty for the base model.

    A surface that names the adapter in the model field does not say whether it is one: it is, where
    the turn knows it or some candidate is labelled with that name.

    Args:
        turn: The turn.
        candidates: Whose labels count.
    """
    if turn.adapter:
        return turn.adapter
    model = turn.request.model
    return model if any(PREFIX + model in c.endpoint.labels for c in candidates) else ""


def capable(wanted: str, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
    """The candidates that serve an adapter.

    Args:
        wanted: From `adapter`.
        candidates: Endpoints in play.

    Returns:
        All for the base model, and where no candidate carries a label of that kind.
    """
    if not wanted:
        return candidates
    label = PREFIX + wanted
    labelled = [c for c in candidates if label in c.endpoint.labels]
    if labelled:
        return labelled
    spoken = any(name.startswith(PREFIX) for c in candidates for name in c.endpoint.labels)
    return [] if spoken else candidates
