"""Room for LoRA adapters on an engine, as the engine tells it."""

from __future__ import annotations

from collections.abc import Sequence

from extproc.endpoint import Candidate
from extproc.scheduling import normalization


def free(candidates: Sequence[Candidate]) -> Sequence[float] | None:
    """Adapter slots less adapters in the batch, of each candidate.

    Args:
        candidates: In the order of the answer.

    Returns:
        Counts, the mean of the known ones where an engine says nothing; None when no engine says
        anything.
    """
    return normalization.impute_mean(
        [
            None
            if (active := c.load.adapters) is None or (slots := c.load.adapter_slots) is None
            else float(slots - len(active))
            for c in candidates
        ]
    )


def none_reported(candidates: Sequence[Candidate]) -> bool:
    """True if no engine says which adapters are in its batch."""
    return all(c.load.adapters is None for c in candidates)


def is_loaded(candidate: Candidate, target: str) -> bool:
    """True if an adapter is in the batch; False where the engine does not say."""
    return candidate.load.adapters is not None and target in candidate.load.adapters
