"""Picker by a hash of the prompt's prefix, with bounded loads (KubeAI)."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Annotated, ClassVar

import msgspec
import xxhash

from extproc.endpoint import Candidate
from extproc.scheduling import labels
from extproc.scheduling.framework import SchedulingContext, Signal

#: Size of the ring.
_RING_SIZE = 1 << 64

#: Places on stored rings (count), eight bytes each; beyond, rings of absent endpoints are dropped.
_MAX_PLACES = 1 << 22


class PrefixHash(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Consistent hashing with bounded loads (docs/spec/prior-systems.md#prefixhash).

    Every endpoint stands on a ring `replication` times, at the xxhash64 of its name and a decimal
    index. The key is the xxhash64 of the adapter and the first `prefix_chars` characters of the
    first user message. The walk starts at the first place not below the key, goes up and wraps
    around, and takes the first endpoint that serves the adapter and has

        in_flight <= max(min_load_requests, mean_load_factor / 100 * (total + 1) / n)

    or anything while `total`, all requests in flight, is 0; n counts candidates, also those without
    the adapter. Where none passes, the first that serves the adapter does. Fallbacks are those
    that pass in the order of the walk, then the others. Requests without such a text (embeddings,
    rerank, audio) share one key, as they do there. Scrapes and totals of scores are not looked at.

    The adapter is one that the surface names apart from the model, or a model name that engines list
    as an adapter or some candidate is labelled with (`adapter.kubeai.org/NAME`); empty otherwise,
    so that places agree with KubeAI's for the base model. Endpoints of one name go by their addresses.

    Attributes:
        replication: Places of an endpoint on the ring. 256 is KubeAI's since February 2025; 20
            before made shares uneven.
        mean_load_factor: Percent of the mean load that an endpoint may have, 100 or more. 125 is
            KubeAI's.
        prefix_chars: Characters of the text that count. 100 is KubeAI's.
        min_load_requests: Load that is never too much. 0 is KubeAI's: with fewer requests than
            endpoints one running request pushes the next away.
    """

    kind: ClassVar[str] = "prefix-hash"
    needs: ClassVar[frozenset[Signal]] = frozenset(
        {Signal.IN_FLIGHT, Signal.FIRST_USER_MESSAGE, Signal.LABELS}
    )

    replication: Annotated[int, msgspec.Meta(ge=1, le=4096)] = 256
    mean_load_factor: Annotated[float, msgspec.Meta(ge=100)] = 125.0
    prefix_chars: Annotated[int, msgspec.Meta(ge=0, le=4096)] = 100
    min_load_requests: Annotated[float, msgspec.Meta(ge=0)] = 0.0

    def pick(
        self,
        context: SchedulingContext,
        candidates: Sequence[Candidate],
        totals: Sequence[float],
        *,
        count: int,
    ) -> list[int]:
        """See the class."""
        places = _places(candidates)
        adapter = labels.adapter(context, candidates)
        able = {id(c) for c in labels.capable(adapter, candidates)}
        in_flight = [c.in_flight for c in candidates]
        bound = self._bound(sum(in_flight), len(candidates))
        key = xxhash.xxh64_intdigest(
            (adapter + context.first_user_message[: self.prefix_chars]).encode()
        )
        within: list[int] = []
        beyond: list[int] = []
        foreign: list[int] = []
        for at in self._walk(places, key):
            if id(candidates[at]) not in able:
                foreign.append(at)
            elif in_flight[at] <= bound:
                within.append(at)
                if len(within) == count:
                    return within
            else:
                beyond.append(at)
        return ([*within, *beyond] or foreign)[:count]

    def _bound(self, total: int, size: int) -> float:
        """Requests in flight with which an endpoint still takes one more."""
        if not total:
            return 0.0
        return max(self.min_load_requests, self.mean_load_factor / 100 * (total + 1) / size)

    def _walk(self, places: Mapping[str, int], key: int) -> list[int]:
        """Positions in the order in which a walk from a key upwards and around meets them.

        An endpoint is met at the first of its places not below the key, or at its lowest.
        """
        rings = _rings(self.replication)
        met: list[tuple[int, str, int]] = []
        for name, at in places.items():
            ring = rings.get(name)
            if ring is None:
                ring = rings[name] = self._build_ring(name, rings, places)
            next_up = bisect_left(ring, key)
            distance = ring[next_up] - key if next_up < len(ring) else ring[0] - key + _RING_SIZE
            met.append((distance, name, at))
        met.sort()
        return [at for _, _, at in met]

    def _build_ring(
        self, name: str, rings: dict[str, array[int]], places: Mapping[str, int]
    ) -> array[int]:
        if len(rings) * self.replication >= _MAX_PLACES:
            for other in rings.keys() - places.keys():
                del rings[other]
        return array(
            "Q",
            sorted(
                xxhash.xxh64_intdigest(f"{name}{index}".encode())
                for index in range(self.replication)
            ),
        )


@cache
def _rings(replication: int) -> dict[str, array[int]]:
    """Places of endpoints by name, sorted, for all pickers of the process.

    They follow from the name, so a dry run may add some. To lay them out in one ring would cost half
    a second for a thousand endpoints, each time one of them comes or goes.
    """
    del replication
    return {}


def _places(candidates: Sequence[Candidate]) -> dict[str, int]:
    """Position by name; by address for those that share a name or have none."""
    places = {c.endpoint.name or c.endpoint.address: at for at, c in enumerate(candidates)}
    if len(places) == len(candidates):
        return places
    shared = Counter(c.endpoint.name for c in candidates)
    return {
        c.endpoint.name
        if c.endpoint.name and shared[c.endpoint.name] == 1
        else c.endpoint.address: at
        for at, c in enumerate(candidates)
    }
