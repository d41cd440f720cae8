"""Pickers without affinity: Envoy's round robin and least request, and those of the upstream picker.

The upstream picker takes the highest total, draws at random, or draws weighted by totals.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from functools import cached_property
from typing import Annotated, ClassVar

import msgspec

from extproc.decision import Decision
from extproc.endpoint import Candidate
from extproc.scheduling.framework import SchedulingContext, Signal


class RoundRobin(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, dict=True):
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

    max_models: int = 1024

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
        """See the class."""
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


class LeastRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
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
        """See the class."""
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


class MaxScorePicker(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, rename="camel"
):
    """The highest totals in falling order; equal totals in random order.

    Random among ties, because a fixed order would send every request of a burst to one endpoint.
    Upstream: `picker/maxscore/picker.go`.

    Attributes:
        max_num_of_endpoints: Endpoints to name, the first one and its fallbacks; more when the
            server is set to more. 1 is the upstream default.
    """

    kind: ClassVar[str] = "max-score-picker"
    needs: ClassVar[frozenset[Signal]] = frozenset()

    max_num_of_endpoints: Annotated[int, msgspec.Meta(gt=0)] = 1

    def pick(
        self,
        context: SchedulingContext,
        candidates: Sequence[Candidate],
        totals: Sequence[float],
        *,
        count: int,
    ) -> list[int]:
        """See the class."""
        if count == 1:
            best = max(totals)
            ties = [i for i, total in enumerate(totals) if total == best]
            return ties if len(ties) == 1 else [context.rng.choice(ties)]
        order = context.rng.sample(range(len(totals)), len(totals))
        order.sort(key=totals.__getitem__, reverse=True)
        return order[:count]


class RandomPicker(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, rename="camel"
):
    """Every candidate with the same probability; totals are ignored.

    Upstream: `picker/random/picker.go`.

    Attributes:
        max_num_of_endpoints: Endpoints to name, the first one and its fallbacks; more when the
            server is set to more. 1 is the upstream default.
    """

    kind: ClassVar[str] = "random-picker"
    needs: ClassVar[frozenset[Signal]] = frozenset()

    max_num_of_endpoints: Annotated[int, msgspec.Meta(gt=0)] = 1

    def pick(
        self,
        context: SchedulingContext,
        candidates: Sequence[Candidate],
        totals: Sequence[float],
        *,
        count: int,
    ) -> list[int]:
        """See the class."""
        return context.rng.sample(range(len(candidates)), min(count, len(candidates)))


class WeightedRandomPicker(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, rename="camel"
):
    """Draws without replacement, the probability of a candidate proportional to its total.

    The keys are U ** (1 / total) with U uniform in (0, 1], the highest first (A-Res by Efraimidis
    and Spirakis); computed as log(U) / total, which does not underflow. A total of 0 comes after
    all others; when all totals are 0 every candidate is as likely. Several pickers that see the
    same scores do not herd. Upstream: `picker/weightedrandom/picker.go`.

    Attributes:
        max_num_of_endpoints: Endpoints to name, the first one and its fallbacks; more when the
            server is set to more. 1 is the upstream default.
    """

    kind: ClassVar[str] = "weighted-random-picker"
    needs: ClassVar[frozenset[Signal]] = frozenset()

    max_num_of_endpoints: Annotated[int, msgspec.Meta(gt=0)] = 1

    def pick(
        self,
        context: SchedulingContext,
        candidates: Sequence[Candidate],
        totals: Sequence[float],
        *,
        count: int,
    ) -> list[int]:
        """See the class."""
        draw = context.rng.random
        # The second item orders the zeros among themselves.
        keys = [
            (math.log(1.0 - u) / total if total > 0.0 else -math.inf, u)
            for u, total in ((draw(), total) for total in totals)
        ]
        return sorted(range(len(keys)), key=keys.__getitem__, reverse=True)[:count]
