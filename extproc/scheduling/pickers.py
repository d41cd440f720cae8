"""Pickers: choose the endpoint among scored candidates.

A picker sees the weighted totals and the candidates, and draws chance from the context. Without
affinity pick Envoy's round robin and least request, and the upstream pickers, which take the highest
total, draw at random, or draw weighted by totals. `PrefixHash` is KubeAI's hash of the prompt's
prefix with bounded loads. `Rendezvous` takes the highest total; near ties by a hash on which all
replicas agree.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from functools import cache, cached_property
from typing import Annotated, ClassVar

import mmh3
import msgspec
import xxhash

from extproc.decision import Decision
from extproc.endpoint import Candidate
from extproc.scheduling import labels
from extproc.scheduling.framework import (
    NonNegative,
    PluginParameters,
    SchedulingContext,
    Signal,
    UpstreamParameters,
)

#: Size of the ring of `PrefixHash`.
_RING_SIZE = 1 << 64

#: Places on stored rings (count), eight bytes each; beyond, rings of absent endpoints are dropped.
_MAX_PLACES = 1 << 22

#: Open requests of an endpoint that `Rendezvous` still counts as equal, as a share of the mean: as
#: KubeAI's consistent hashing bounds loads.
_MAX_LOAD_FACTOR = 1.25


class RoundRobin(PluginParameters, frozen=True, kw_only=True, dict=True):
    """The candidate whose address follows the last one chosen for the same model.

    The order is that of the addresses as text and wraps around, so endpoints that come and go
    neither reset the walk nor are visited twice in one. A model seen for the first time starts at
    a random place; otherwise many rarely used models would all begin at one endpoint. Totals are
    ignored. Fallbacks are the next in order and do not advance the walk.

    Attributes:
        max_models: Models whose place is remembered, the least recently used forgotten first.
            1024 is beyond what a pool serves; the bound is against names that clients make up.
    """

    kind: ClassVar[str] = "round-robin"
    needs: ClassVar[frozenset[Signal]] = frozenset()

    max_models: Annotated[int, msgspec.Meta(ge=1)] = 1024

    @cached_property
    def _last(self) -> OrderedDict[str, str]:
        """Address last chosen, by model."""
        return OrderedDict()

    def pick(
        self,
        context: SchedulingContext,
        candidates: Sequence[Candidate],
        totals: Sequence[float],
        *,
        count: int,
    ) -> list[int]:
        addresses = [c.endpoint.address for c in candidates]
        order = sorted(range(len(addresses)), key=addresses.__getitem__)
        last = self._last.get(context.request.target)
        if last is None:
            start = context.rng.randrange(len(order))
        else:
            start = next((at for at, i in enumerate(order) if addresses[i] > last), 0)
        order = order[start:] + order[:start]
        return order[:count]

    def on_committed(self, decision: Decision, now: float) -> None:
        """Continue the walk behind the endpoint that got the request."""
        target = decision.request.target
        self._last[target] = decision.endpoints[0].address
        self._last.move_to_end(target)
        if len(self._last) > self.max_models:
            self._last.popitem(last=False)


class LeastRequest(PluginParameters, frozen=True, kw_only=True):
    """Draws `choices` different candidates and takes the one with the fewest requests in flight.

    Two choices is what Envoy's LEAST_REQUEST does with equal weights: almost as even as looking at
    all, without the herd that several pickers form when all of them see the same least loaded
    endpoint. Totals are ignored. Fallbacks are drawn the same way from the rest.

    Attributes:
        choices: How many to draw. 2 is Envoy's default; more is evener and herds more.
        full_scan: Look at all candidates; equals are drawn at random.
    """

    kind: ClassVar[str] = "least-request"
    needs: ClassVar[frozenset[Signal]] = frozenset({Signal.IN_FLIGHT})

    choices: int = 2
    full_scan: bool = False

    def __post_init__(self) -> None:
        """Refuse a draw of no candidate.

        Raises:
            ValueError: `choices` is below one.
        """
        if self.choices < 1:
            raise ValueError(f"expected choices of at least 1, got {self.choices}")

    def pick(
        self,
        context: SchedulingContext,
        candidates: Sequence[Candidate],
        totals: Sequence[float],
        *,
        count: int,
    ) -> list[int]:
        if len(candidates) == 1:
            return [0]
        remaining: list[int] | range = range(len(candidates))
        order: list[int] = []
        while remaining and len(order) < count:
            size = len(remaining) if self.full_scan else min(self.choices, len(remaining))
            drawn = context.rng.sample(remaining, size)
            best = min(drawn, key=lambda i: candidates[i].in_flight)
            order.append(best)
            if len(order) < count:
                remaining = [i for i in remaining if i != best]
        return order


class _UpstreamPicker(UpstreamParameters, frozen=True, kw_only=True):
    """A picker that the upstream EPP has too.

    Attributes:
        max_num_of_endpoints: Endpoints to name, the first one and its fallbacks; more when the
            server is set to more. 1 is the upstream default.
    """

    needs: ClassVar[frozenset[Signal]] = frozenset()

    max_num_of_endpoints: Annotated[int, msgspec.Meta(gt=0)] = 1


class MaxScorePicker(_UpstreamPicker, frozen=True, kw_only=True):
    """The highest totals in falling order; equal totals in random order.

    Random among ties, because a fixed order would send every request of a burst to one endpoint.
    Upstream: `picker/maxscore/picker.go`.
    """

    kind: ClassVar[str] = "max-score-picker"

    def pick(
        self,
        context: SchedulingContext,
        candidates: Sequence[Candidate],
        totals: Sequence[float],
        *,
        count: int,
    ) -> list[int]:
        if count == 1:
            best = max(totals)
            ties = [i for i, total in enumerate(totals) if total == best]
            return ties if len(ties) == 1 else [context.rng.choice(ties)]
        order = context.rng.sample(range(len(totals)), len(totals))
        order.sort(key=totals.__getitem__, reverse=True)
        return order[:count]


class RandomPicker(_UpstreamPicker, frozen=True, kw_only=True):
    """Every candidate with the same probability; totals are ignored.

    Upstream: `picker/random/picker.go`.
    """

    kind: ClassVar[str] = "random-picker"

    def pick(
        self,
        context: SchedulingContext,
        candidates: Sequence[Candidate],
        totals: Sequence[float],
        *,
        count: int,
    ) -> list[int]:
        return context.rng.sample(range(len(candidates)), min(count, len(candidates)))


class WeightedRandomPicker(_UpstreamPicker, frozen=True, kw_only=True):
    """Draws without replacement, the probability of a candidate proportional to its total.

    The keys are U ** (1 / total) with U uniform in (0, 1], the highest first (A-Res by Efraimidis
    and Spirakis); computed as log(U) / total, which does not underflow. A total of 0 comes after
    all others; when all totals are 0 every candidate is as likely. Several pickers that see the
    same scores do not herd. Refused beside a cost, whose totals are no weights. Upstream:
    `picker/weightedrandom/picker.go`.
    """

    kind: ClassVar[str] = "weighted-random-picker"

    def pick(
        self,
        context: SchedulingContext,
        candidates: Sequence[Candidate],
        totals: Sequence[float],
        *,
        count: int,
    ) -> list[int]:
        draw = context.rng.random
        # The second item orders the zeros among themselves.
        keys = [
            (math.log(1.0 - u) / total if total > 0.0 else -math.inf, u)
            for u, total in ((draw(), total) for total in totals)
        ]
        return sorted(range(len(keys)), key=keys.__getitem__, reverse=True)[:count]


class PrefixHash(PluginParameters, frozen=True, kw_only=True):
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


class Rendezvous(PluginParameters, frozen=True, kw_only=True):
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

    tie_share: NonNegative = 0.05

    def pick(
        self,
        context: SchedulingContext,
        candidates: Sequence[Candidate],
        totals: Sequence[float],
        *,
        count: int,
    ) -> list[int]:
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
        draw = mmh3.hash
        if count == 1:
            best, most = ties[0], -1
            for i in ties:
                hashed = draw(candidates[i].endpoint.address, seed, False)
                if hashed > most:
                    best, most = i, hashed
            return [best]
        addresses = [candidates[i].endpoint.address for i in ties]
        ranked = [
            (-draw(address, seed, signed=False), address, i)
            for address, i in zip(addresses, ties, strict=True)
        ]
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
