"""Picker of the highest total; near ties by a hash on which all replicas agree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import mmh3
import msgspec

from extproc.endpoint import Candidate
from extproc.scheduling.framework import SchedulingContext, Signal

#: Open requests of an endpoint that still counts as equal, as a share of the mean: as KubeAI's
#: consistent hashing bounds loads.
_MAX_LOAD_FACTOR = 1.25


class Rendezvous(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The highest totals in falling order; near ties by rendezvous hash.

    Totals within `tie_share` of the best count as equal to it. Among those the winner has the
    highest hash of key and address (Thaler and Ravishankar 1998), so replicas that do not talk
    agree, and endpoints that come and go move only their own keys. The key is what stays the same
    from turn to turn of a conversation: the session hint, else the opening of its first user
    message, else the end of the prompt. A request without any of these is drawn at random, because
    one key for all of them would send them all to one endpoint. Beside requests of others, of
    equals that hold as much of the prompt, a candidate with more than 1.25 m + 1 of this picker's open
    requests, m their mean, is passed over: where much is there already, dozens of requests are within
    `tie_share`, and hashes are uneven.

    Attributes:
        tie_share: How far below the best a total may be, as a share of the best's size. 0.05 is the
            error of what is learned: without it an engine that only seems 2 % faster than its equals
            would get every long prompt while all are idle.
    """

    kind: ClassVar[str] = "rendezvous"
    needs: ClassVar[frozenset[Signal]] = frozenset({Signal.FIRST_USER_MESSAGE})

    tie_share: float = 0.05

    def pick(
        self,
        context: SchedulingContext,
        candidates: Sequence[Candidate],
        totals: Sequence[float],
        *,
        count: int,
    ) -> list[int]:
        """See the class."""
        if len(totals) == 1:
            return [0]
        best = max(totals)
        least = best - self.tie_share * abs(best)
        ties = [i for i, total in enumerate(totals) if total >= least]
        if context.foreign_share and len(ties) > 1:
            ties = _drop_overloaded(candidates, ties, best=totals.index(best))
        if len(ties) > 1:
            ties = self._ordered(context, candidates, ties, count=count)
        if count <= len(ties):
            return ties[:count]
        taken = set(ties)
        rest = [i for i in range(len(totals)) if i not in taken]
        rest.sort(key=totals.__getitem__, reverse=True)
        return [*ties, *rest][:count]

    def _ordered(
        self,
        context: SchedulingContext,
        candidates: Sequence[Candidate],
        ties: Sequence[int],
        *,
        count: int,
    ) -> list[int]:
        """The first `count` of `ties` by hash, or all if they are fewer."""
        seed = context.affinity_seed
        if seed is None:
            if not context.blocks:
                return context.rng.sample(ties, len(ties))
            seed = context.blocks[-1] & 0xFFFFFFFF
        addresses = [candidates[i].endpoint.address for i in ties]
        ranked = [
            (-mmh3.hash(address, seed, signed=False), address, i)
            for address, i in zip(addresses, ties, strict=True)
        ]
        if count == 1:
            return [min(ranked)[2]]
        return [i for _, _, i in sorted(ranked)][:count]


def _drop_overloaded(candidates: Sequence[Candidate], ties: list[int], *, best: int) -> list[int]:
    """Those of `ties` that have not many more open requests than usual; the best one stays.

    All of them where some hold more of the prompt than others: a conversation is not turned away from
    its prefix.
    """
    best_candidate = candidates[best]
    matched, fewest = best_candidate.matched_tokens, best_candidate.in_flight + 1
    uneven = False
    for i in ties:
        c = candidates[i]
        if c.matched_tokens != matched:
            return ties
        if c.in_flight > fewest:
            uneven = True
    if not uneven:
        return ties
    mean = sum([c.in_flight for c in candidates]) / len(candidates)
    most = _MAX_LOAD_FACTOR * mean + 1.0
    return [i for i in ties if i == best or candidates[i].in_flight <= most]
