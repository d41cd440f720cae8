"""Shadow scheduling: a second profile decides on routed requests, outside of their path.

It sees the candidates and the context of the decision that was taken, later. Its choice is compared
and dropped: endpoints are charged, prefixes recorded and plugins notified by what was routed; of a move
to a fallback its plugins learn nothing, as no decision of it is kept. A queue that is full drops requests,
which are counted.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Literal

import msgspec

from extproc.decision import CostResult, Decision, Rejection
from extproc.endpoint import Candidate, Endpoint
from extproc.scheduling.framework import SchedulingContext, Signal
from extproc.scheduling.profile import SchedulerProfile

#: Requests that may wait for the shadow (count), and bytes of their prompts: they are decided within
#: milliseconds, and what comes faster than that is dropped.
MAX_PENDING: Final = 256
MAX_PENDING_BYTES: Final = 16 * 1024 * 1024

#: Differences that are kept for people (count).
_MAX_DIFFERENCES: Final = 50

#: Unit of costs that can be compared with a clock.
_SECONDS: Final = "s"

#: Result of the shadow for a request: the same endpoint, another one, none, an exception, or a
#: request that it did not look at because it was behind.
ShadowResult = Literal["agreed", "differed", "rejected", "failed", "dropped"]

#: The profile whose cost model estimates seconds, and the endpoint they are of.
Judge = Literal["strategy", "shadow"]
ShadowChoice = Literal["routed", "preferred"]


class ShadowDifference(msgspec.Struct, frozen=True):
    """A request for which the shadow preferred another endpoint.

    Attributes:
        at: Monotonic seconds of the decision.
        model: Target of the request.
        routed: Address of the endpoint that serves it.
        preferred: Address of the endpoint that the shadow preferred; empty for a rejection.
        saved_s: Seconds that the shadow expects of its choice, by judge; a judge whose cost is no time,
            or that left an endpoint out, has none.
    """

    at: float
    model: str
    routed: str
    preferred: str
    saved_s: Mapping[Judge, float]


class ShadowCounts:
    """Totals of a shadow since it was turned on.

    Attributes:
        results: Requests by result.
        seconds: Expected seconds of the endpoints, by judge and choice; of requests for which the
            judge has both.
        judged: Requests that `seconds` has, by judge.
        cpu_s: Seconds that the shadow computed.
        differences: The last requests with another endpoint.
    """

    def __init__(self) -> None:
        self.results: Counter[ShadowResult] = Counter()
        self.seconds: dict[tuple[Judge, ShadowChoice], float] = {}
        self.judged: Counter[Judge] = Counter()
        self.cpu_s = 0.0
        self.differences: deque[ShadowDifference] = deque(maxlen=_MAX_DIFFERENCES)


class ShadowScheduler:
    """Runs a profile on a sample of the requests that another one routed.

    Args:
        profile: The profile; its plugins belong to it alone.
        sample_ratio: Share of routed requests that it looks at, 0..1.
        rng: Chance of sampling and of the profile; not that of routing.
        stopwatch: Seconds from any start, never going back.
        on_pending: Called when a request is to wait and none did before; `run_pending` is due soon.

    Attributes:
        profile: The profile.
        sample_ratio: See above.
        counts: Totals.
    """

    def __init__(
        self,
        profile: SchedulerProfile,
        *,
        sample_ratio: float,
        rng: random.Random,
        stopwatch: Callable[[], float],
        on_pending: Callable[[], None],
    ) -> None:
        self.profile = profile
        self.sample_ratio = sample_ratio
        self.counts = ShadowCounts()
        self._rng = rng
        self._stopwatch = stopwatch
        self._on_pending = on_pending
        self._context: SchedulingContext | None = None
        self._pending: deque[tuple[SchedulingContext, Decision]] = deque()
        self._pending_bytes = 0

    @property
    def needs(self) -> frozenset[Signal]:
        """Every signal the profile reads."""
        return self.profile.needs

    def note_context(self, context: SchedulingContext) -> None:
        """Keep the input of the decision that is being taken, until it is routed or another is."""
        self._context = context

    def on_routed(self, decision: Decision) -> None:
        """Queue a request whose decision was taken last, if it is of the sample.

        An exception is counted and goes no further: the request must not depend on the shadow.
        """
        context, self._context = self._context, None
        if context is None or context.request is not decision.request:
            return
        try:
            self._enqueue(context, decision)
        except Exception:  # noqa: BLE001 - counted; the request is routed
            self.counts.results["failed"] += 1

    def _enqueue(self, context: SchedulingContext, decision: Decision) -> None:
        if self.sample_ratio < 1.0 and self._rng.random() >= self.sample_ratio:
            return
        size = context.request.prompt_bytes
        if len(self._pending) >= MAX_PENDING or self._pending_bytes + size > MAX_PENDING_BYTES:
            self.counts.results["dropped"] += 1
            return
        if not self._pending:
            self._on_pending()
        self._pending.append((context, decision))
        self._pending_bytes += size

    def run_pending(self, limit_s: float) -> bool:
        """Decide on the requests that wait.

        Args:
            limit_s: Seconds after which no further request is begun.

        Returns:
            True if requests still wait.
        """
        started = self._stopwatch()
        while self._pending and self._stopwatch() - started < limit_s:
            context, decision = self._pending.popleft()
            self._pending_bytes -= context.request.prompt_bytes
            try:
                self._decide(context, decision)
            except Exception:  # noqa: BLE001 - counted; the request was routed long ago
                self.counts.results["failed"] += 1
        self.counts.cpu_s += self._stopwatch() - started
        return bool(self._pending)

    def _decide(self, context: SchedulingContext, decision: Decision) -> None:
        """Decide on a request, notify the plugins of what was routed, and compare."""
        counts, routed = self.counts, decision.endpoints[0]
        outcome = self.profile.run(
            msgspec.structs.replace(context, rng=self._rng), decision.candidates
        )
        committed = self._describe_routed(context, decision, outcome)
        for observer in self.profile.observers:
            observer.on_committed(committed, context.now)
        if not isinstance(outcome, Decision):
            counts.results["rejected"] += 1
            self._record(context, routed, preferred=None, saved_s={})
            return
        preferred = outcome.endpoints[0]
        judges: Mapping[Judge, Decision] = {"strategy": decision, "shadow": outcome}
        saved_s = {
            judge: seconds[0] - seconds[1]
            for judge, judged in judges.items()
            if (seconds := self._add_seconds(judge, judged, routed, preferred)) is not None
        }
        if preferred is routed:
            counts.results["agreed"] += 1
        else:
            counts.results["differed"] += 1
            self._record(context, routed, preferred=preferred, saved_s=saved_s)

    def _describe_routed(
        self, context: SchedulingContext, decision: Decision, outcome: Decision | Rejection
    ) -> Decision:
        """The routed decision for the plugins of the shadow, also of a request that it rejected."""
        replace = msgspec.structs.replace
        if isinstance(outcome, Decision):
            endpoints, matched_tokens = decision.endpoints, decision.matched_tokens
            return replace(outcome, endpoints=endpoints, matched_tokens=matched_tokens)
        return replace(
            decision,
            profile=self.profile.name,
            scored_candidates=decision.candidates,
            scores=(),
            cost=None,
            totals=(),
            plugin_keys=self.profile.find_keys(context, []),
        )

    def _record(
        self,
        context: SchedulingContext,
        routed: Endpoint,
        *,
        preferred: Endpoint | None,
        saved_s: Mapping[Judge, float],
    ) -> None:
        self.counts.differences.append(
            ShadowDifference(
                context.now,
                context.request.target,
                routed.address,
                "" if preferred is None else preferred.address,
                saved_s,
            )
        )

    def _add_seconds(
        self, judge: Judge, judged: Decision, routed: Endpoint, preferred: Endpoint
    ) -> tuple[float, float] | None:
        """Add what a profile expects of both endpoints; None where it does not know one of them."""
        cost = judged.cost
        if cost is None or cost.unit != _SECONDS:
            return None
        routed_s = _find_cost(cost, judged.scored_candidates, routed)
        preferred_s = _find_cost(cost, judged.scored_candidates, preferred)
        if routed_s is None or preferred_s is None:
            return None
        seconds = self.counts.seconds
        seconds[judge, "routed"] = seconds.get((judge, "routed"), 0.0) + routed_s
        seconds[judge, "preferred"] = seconds.get((judge, "preferred"), 0.0) + preferred_s
        self.counts.judged[judge] += 1
        return routed_s, preferred_s


def _find_cost(
    cost: CostResult, candidates: Sequence[Candidate], endpoint: Endpoint
) -> float | None:
    """Cost of an endpoint; None where it was filtered out."""
    for candidate, value in zip(candidates, cost.costs, strict=True):
        if candidate.endpoint is endpoint:
            return value
    return None
