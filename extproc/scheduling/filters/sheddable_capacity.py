"""Keeps endpoints with capacity to spare for work that may be refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import msgspec

from extproc.endpoint import Candidate
from extproc.scheduling import normalization
from extproc.scheduling.context import SchedulingContext
from extproc.scheduling.framework import Signal


class SheddableCapacity(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Keeps a candidate when `waiting <= max_waiting_requests` and `kv_usage <= max_kv_usage`.

    It reads nothing of the request: a tree sends it those that may be refused. An unknown value
    counts as the mean of the known ones, and passes where none is known.

    Attributes:
        max_waiting_requests: Longest queue that is not yet full use. 5 is the bound of the first
            gateway's filter tree (docs/spec/prior-systems.md#filter-tree).
        max_kv_usage: Highest KV usage, 0..1. 0.8 is its bound there; above, requests that run soon
            push each other out.
    """

    kind: ClassVar[str] = "sheddable-capacity"
    needs: ClassVar[frozenset[Signal]] = frozenset({Signal.WAITING, Signal.KV_USAGE})

    max_waiting_requests: float = 5.0
    max_kv_usage: float = 0.8

    def filter(
        self, turn: SchedulingContext, candidates: Sequence[Candidate]
    ) -> Sequence[Candidate]:
        """See the class."""
        nothing = [0.0] * len(candidates)
        waiting = normalization.impute_mean([c.load.waiting for c in candidates]) or nothing
        usage = normalization.impute_mean([c.load.kv_usage for c in candidates]) or nothing
        return [
            c
            for c, w, u in zip(candidates, waiting, usage, strict=True)
            if w <= self.max_waiting_requests and u <= self.max_kv_usage
        ]
