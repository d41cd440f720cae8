"""Strategies compared on recorded decisions: what each would have chosen in the same state.

Estimates: a request counts in the state in which it arrived, so what another strategy would have
done to caches and queues before is not in them. A record has no prompt and no headers; strategies
that choose by these are not compared.
"""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Final

import msgspec

from extproc.decision import Decision
from extproc.scheduling import registry
from extproc.scheduling.costs import EstimatedTime
from extproc.scheduling.framework import SchedulingContext
from extproc.scheduling.profile import SchedulerProfile
from extproc.telemetry.request_recorder import DecisionRecord

#: Strategies that need neither prompt nor headers; `adaptive` reads the first message to settle ties.
COMPARED: Final = ("adaptive", "balanced", "weighted", "lmetric", "least-request", "round-robin")

#: Blocks of a prompt whose cached part is known: costs read that there are some.
_KNOWN_BLOCKS: Final = (0,)


class StrategyResult(msgspec.Struct, frozen=True, kw_only=True):
    """Choices of one strategy.

    Attributes:
        name: Name of the strategy; of the profile for what was chosen in fact.
        is_in_force: Whether these are the recorded choices.
        agreement_ratio: Share of requests for which it names the endpoint that was chosen, 0..1.
        first_token_s: Mean predicted seconds from the choice to the first token.
        cached_ratio: Share of prompt tokens predicted as cached on its choices, 0..1.
        max_share: Share of requests on the endpoint that it names most often, 0..1.
        num_endpoints: Endpoints that it names.
    """

    name: str
    is_in_force: bool
    agreement_ratio: float
    first_token_s: float
    cached_ratio: float
    max_share: float
    num_endpoints: int


class _Tally:
    """Sums over the choices of one strategy."""

    def __init__(self) -> None:
        self.choices: Counter[str] = Counter()
        self.agreed = 0
        self.first_token_s = 0.0
        self.cached_tokens = 0
        self.prompt_tokens = 0

    def add(
        self, address: str, decision: Decision, first_token_s: float, cached_tokens: int
    ) -> None:
        self.choices[address] += 1
        self.agreed += address == decision.endpoints[0].address
        self.first_token_s += first_token_s
        self.cached_tokens += cached_tokens
        self.prompt_tokens += decision.request.prompt_tokens

    def result(self, name: str, *, is_in_force: bool) -> StrategyResult:
        count = max(1, self.choices.total())
        return StrategyResult(
            name=name,
            is_in_force=is_in_force,
            agreement_ratio=self.agreed / count,
            first_token_s=self.first_token_s / count,
            cached_ratio=self.cached_tokens / max(1, self.prompt_tokens),
            max_share=max(self.choices.values(), default=0) / count,
            num_endpoints=len(self.choices),
        )


class StrategyComparison:
    """Comparison of strategies on decisions that are added in their order."""

    def __init__(self) -> None:
        profiles = registry.profiles()
        self._profiles = {name: profiles[name] for name in COMPARED}
        self._tallies = {name: _Tally() for name in COMPARED}
        self._actual = _Tally()
        self._names: Counter[str] = Counter()
        self._cost, self._rng = EstimatedTime(), Random(0)

    def add(self, record: DecisionRecord) -> None:
        """Decide a recorded request by each strategy."""
        decision = record.decision
        context = SchedulingContext(
            request=decision.request,
            now=record.at,
            rng=self._rng,
            blocks=_KNOWN_BLOCKS,
            adapter=decision.request.adapter,
        )
        predict = self._cost.cost(context, decision.candidates).predict_ttft
        if predict is None:
            return
        by_address = {
            candidate.endpoint.address: (predict(candidate), candidate.matched_tokens)
            for candidate in decision.candidates
        }
        chosen = decision.endpoints[0].address
        if chosen not in by_address:
            return
        self._names[decision.profile] += 1
        self._actual.add(chosen, decision, *by_address[chosen])
        for name, profile in self._profiles.items():
            address = _choose(profile, context, decision)
            if address:
                self._tallies[name].add(address, decision, *by_address[address])

    def results(self) -> list[StrategyResult]:
        """Results of the recorded choices, then of the other strategies; none without requests."""
        if not self._names:
            return []
        in_force = self._names.most_common(1)[0][0]
        actual = self._actual.result(in_force, is_in_force=True)
        others = [
            tally.result(name, is_in_force=False)
            for name, tally in self._tallies.items()
            if name != in_force
        ]
        return [actual, *others]


def _choose(profile: SchedulerProfile, context: SchedulingContext, decision: Decision) -> str:
    """Address that a strategy chooses; empty where it refuses the request."""
    outcome = profile.run(context, decision.candidates)
    if not isinstance(outcome, Decision):
        return ""
    for observer in profile.observers:
        observer.on_committed(outcome, context.now)
    return outcome.endpoints[0].address
