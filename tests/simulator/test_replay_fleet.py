"""Fleets of recordings: what is learned of engines that are alike is their common mean."""

from __future__ import annotations

import pytest

from extproc.endpoint import Endpoint, StepTimeModel
from extproc.recording.reader import RecordedEndpoint
from extproc.recording.rows import StateRow
from extproc.simulator.replay_fleet import build_fleet, share_step_times


def learned(step_s, *, prefill_s=1e-4, evidence=100.0):
    """Step times of an engine."""
    return StepTimeModel(step_s=step_s, prefill_s=prefill_s, evidence=evidence)


def test_engines_that_are_alike_share_their_step_times():
    """By their evidence; numbers that depend on their requests stay."""
    first, second = share_step_times([learned(0.030, evidence=300.0), learned(0.034)])
    assert first.step_s == second.step_s == pytest.approx(0.031)
    assert (first.evidence, second.evidence) == (300.0, 100.0)


@pytest.mark.parametrize(
    "other", [learned(0.060), learned(0.030, prefill_s=3e-4), learned(0.031, evidence=0.0)]
)
def test_another_kind_of_engine_keeps_its_own(other):
    """A slower machine is no error of what was learned, and defaults are no evidence."""
    *alike, last = share_step_times([learned(0.029), learned(0.030), learned(0.031), other])
    assert [rates.step_s for rates in alike] == pytest.approx([0.030] * 3)
    assert last == other


def test_without_evidence_nothing_is_shared():
    """A recording may begin and end before the first scrape."""
    assert share_step_times([]) == []
    assert share_step_times([StepTimeModel()]) == [StepTimeModel()]


def test_an_engine_runs_as_many_requests_as_it_has_shown():
    """One that has not shown it runs as many as vLLM does by default, unless a limit is given."""
    endpoints = [
        RecordedEndpoint(
            Endpoint("10.0.0.1:8000"), "", StateRow(n=0, rates=StepTimeModel(max_num_seqs=places))
        )
        for places in (64.0, None)
    ]
    shown = [engines.resolved().max_num_seqs for engines in build_fleet(endpoints, {})]
    assert shown == [64, 256]
    limited = build_fleet(endpoints, {"max_num_seqs": 7})
    assert [engines.resolved().max_num_seqs for engines in limited] == [7, 7]
