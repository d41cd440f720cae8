"""Agreement: recorded decisions, made again by a strategy on the states that were recorded."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Final

import msgspec

from extproc.config import profile_builder
from extproc.config.settings import Settings
from extproc.decision import Decision, Rejection
from extproc.endpoint import AdapterResidency
from extproc.recording import rows
from extproc.recording.reader import RecordedDecision
from extproc.request import InferenceRequest
from extproc.scheduling.framework import SchedulingContext, Signal
from extproc.scheduling.pickers import PrefixHash
from extproc.scheduling.profile import SchedulerProfile

#: Other draws of chance that are tried where a decision comes out differently (count), of which the first
#: show whether chance has a part in it: of 20 endpoints, two random ones are a certain pair in 190 draws.
_DRAWS: Final = 1024
_FIRST_DRAWS: Final = 16


class AgreementSummary(msgspec.Struct, frozen=True):
    """Number of decisions that came out as recorded.

    Attributes:
        decisions: Decisions that were made again (count).
        agreed: Of these, decisions for the recorded endpoint.
        by_chance: Of these, decisions that came out so with another draw of chance only.
        skipped: Decisions without candidates, or that were degraded.
        unknown: What the strategy reads and recordings do not have; empty for nothing. Its decisions
            are not comparable.
    """

    strategy: str
    decisions: int
    agreed: int
    by_chance: int
    skipped: int
    unknown: str

    @property
    def ratio(self) -> float:
        """Share of the decisions that agreed, 0..1; 1 without any."""
        return self.agreed / self.decisions if self.decisions else 1.0


class AgreementMeter:
    """Makes decisions again, in their order. Mutable; one owner."""

    def __init__(self, strategy: str, settings: Settings) -> None:
        resolved = profile_builder.resolve_all(settings, where=strategy)
        self._strategy = strategy
        self._profile, self._by_model = resolved.profile, resolved.by_model
        by_header = resolved.by_header
        self._by_name = {} if by_header is None else by_header.profiles
        self._count = 1 + settings.scheduling.fallbacks
        self._unknown = _unknown_inputs(self._profile)
        self._decisions = self._agreed = self._by_chance = self._skipped = 0

    def add(self, event: RecordedDecision) -> None:
        """Make a decision again, and compare."""
        row = event.row
        profile = self._by_name.get(row.profile)
        if profile is None:
            profile = self._by_model.get(row.model, self._profile)
        if row.degraded or not event.candidates:
            self._skipped += 1
            decision = Decision(_request_of(row), [event.chosen], matched_tokens=row.matched_tokens)
        else:
            self._unknown = self._unknown or _unknown_inputs(profile)
            decision = self._compare(profile, event)
        for observer in profile.observers:
            observer.on_committed(decision, row.at)

    def summary(self) -> AgreementSummary:
        """Summary of the decisions until now."""
        return AgreementSummary(
            self._strategy,
            self._decisions,
            self._agreed,
            self._by_chance,
            self._skipped,
            self._unknown,
        )

    def _compare(self, profile: SchedulerProfile, event: RecordedDecision) -> Decision:
        """The decision as it was recorded, for the memory of plugins."""
        self._decisions += 1
        wanted = event.chosen.address
        outcome = profile.run(_context_of(event, 0), event.candidates, count=self._count)
        if isinstance(outcome, Decision) and _choice_of(outcome) == wanted:
            self._agreed += 1
            return outcome
        results = {_choice_of(outcome)}
        for draw in range(1, _DRAWS + 1):
            if draw > _FIRST_DRAWS and len(results) == 1:
                break
            again = profile.run(_context_of(event, draw), event.candidates, count=self._count)
            results.add(_choice_of(again))
            if isinstance(again, Decision) and _choice_of(again) == wanted:
                self._agreed += 1
                self._by_chance += 1
                return again
        request = _request_of(event.row)
        return Decision(
            request,
            [event.chosen],
            candidates=event.candidates,
            matched_tokens=event.row.matched_tokens,
        )


def _choice_of(outcome: Decision | Rejection) -> str:
    """Address of the endpoint; empty for a rejection."""
    return outcome.endpoints[0].address if isinstance(outcome, Decision) else ""


def merge_summaries(summaries: Iterable[AgreementSummary]) -> list[AgreementSummary]:
    """Summaries of the same strategy as one, by the first of each."""
    merged: dict[str, AgreementSummary] = {}
    for summary in summaries:
        known = merged.get(summary.strategy)
        if known is not None:
            summary = AgreementSummary(  # noqa: PLW2901 - the sum of both
                summary.strategy,
                known.decisions + summary.decisions,
                known.agreed + summary.agreed,
                known.by_chance + summary.by_chance,
                known.skipped + summary.skipped,
                known.unknown or summary.unknown,
            )
        merged[summary.strategy] = summary
    return [*merged.values()]


def _request_of(row: rows.DecisionRow) -> InferenceRequest:
    return InferenceRequest(
        api=row.api,
        model=row.model,
        adapter=row.adapter,
        prompt_tokens=row.prompt_tokens,
        prompt_bytes=row.prompt_bytes,
        stream=row.is_stream,
        max_tokens=row.max_tokens,
        session=f"{row.session:x}" if row.session else "",
        priority=row.priority,
    )


def _context_of(event: RecordedDecision, draw: int) -> SchedulingContext:
    row = event.row
    adapter = row.adapter
    if not adapter and any(
        _names_adapter(c.load.adapters, c.residency, row) for c in event.candidates
    ):
        adapter = row.model
    continuation_ratio, growth, foreign_share, idle = row.conversation_stats
    return SchedulingContext(
        request=_request_of(row),
        now=row.at,
        rng=random.Random(row.n << 16 | draw),
        blocks=row.chain,
        adapter=adapter,
        continuation_ratio=continuation_ratio,
        expected_growth_tokens=growth,
        foreign_share=foreign_share,
        idle_conversations_per_open=idle,
        known_seed=row.affinity_seed,
    )


def _names_adapter(
    running: frozenset[str] | None, residency: AdapterResidency, row: rows.DecisionRow
) -> bool:
    return residency is not AdapterResidency.RESIDENT or bool(running and row.model in running)


def _unknown_inputs(profile: SchedulerProfile) -> str:
    """Inputs of a profile that recordings do not have; empty for none."""
    if Signal.HEADERS in profile.needs:
        return "request headers"
    if isinstance(profile.picker, PrefixHash):
        return "the text of the first user message"
    return ""
