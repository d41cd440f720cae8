"""Strategies compared on recorded decisions."""

from __future__ import annotations

import random

import msgspec
import pytest

from extproc.endpoint import Candidate, Endpoint, Load
from extproc.pool.inflight import InflightLoad
from extproc.pool.snapshot import EndpointSnapshot
from extproc.request import HttpRequest, InferenceRequest
from extproc.routing import eligibility
from extproc.scheduling import registry
from extproc.scheduling.framework import SchedulingContext
from extproc.scheduling.labels import DecodeFilter
from extproc.telemetry.decision_log import COMPARED, DecisionRecord, StrategyComparison

IDLE, BUSY = Endpoint("10.0.0.1:8000"), Endpoint("10.0.0.2:8000")


def record(number, *, strategy):
    """A request whose prompt the busy endpoint caches, decided by a strategy."""
    request = InferenceRequest("chat", prompt_tokens=1000)
    candidates = [
        Candidate(IDLE, load=Load(at=0.0, waiting=0.0, running=0.0, kv_usage=0.0)),
        Candidate(
            BUSY,
            load=Load(at=0.0, waiting=0.0, running=8.0, kv_usage=0.2),
            in_flight=8,
            estimated_requests=8.0,
            matched_tokens=900,
        ),
    ]
    context = SchedulingContext(request, 0.0, random.Random(1), blocks=(1,))
    decision = registry.profiles()[strategy].run(context, candidates)
    return DecisionRecord(f"id-{number}", float(number), decision)


@pytest.mark.parametrize("strategy", ["least-request", "adaptive"])
def test_the_recorded_choices_stand_before_every_strategy(strategy):
    """They have the name of their profile, which may have other weights than the strategy of that name."""
    comparison = StrategyComparison()
    for number in range(6):
        comparison.add(record(number, strategy=strategy))
    first, *others = comparison.results()
    assert (first.name, first.is_as_routed, first.agreement_ratio) == (strategy, True, 1.0)
    assert tuple(result.name for result in others) == COMPARED
    assert not any(result.is_as_routed for result in others)


def test_recorded_choices_of_several_profiles_have_all_their_names():
    """A reload changes the strategy between two requests; neither is taken for the one in force."""
    comparison = StrategyComparison()
    for number, strategy in enumerate(("adaptive", "adaptive", "least-request")):
        comparison.add(record(number, strategy=strategy))
    first, *others = comparison.results()
    assert (first.name, first.agreement_ratio) == ("adaptive, least-request", 1.0)
    assert tuple(result.name for result in others) == COMPARED


def test_results_say_what_another_strategy_would_have_chosen():
    """A strategy that counts caches predicts an earlier first token, on the endpoint with the prompt."""
    comparison = StrategyComparison()
    for number in range(6):
        comparison.add(record(number, strategy="least-request"))
    least, *others = comparison.results()
    by_name = {result.name: result for result in others}
    adaptive = by_name["adaptive"]
    assert (least.cached_ratio, adaptive.cached_ratio) == (0.0, 0.9)
    assert (adaptive.agreement_ratio, adaptive.num_endpoints, adaptive.max_share) == (0.0, 1, 1.0)
    assert adaptive.first_token_s < least.first_token_s
    turns = by_name["round-robin"]
    assert (turns.num_endpoints, turns.agreement_ratio, turns.max_share) == (2, 0.5, 0.5)


def test_engines_of_another_stage_are_no_candidates_of_a_comparison():
    """A strategy without a filter of roles would take its turn on the engine that only prefills."""
    plain = registry.profiles()["adaptive"]
    profile = msgspec.structs.replace(plain, filters=(DecodeFilter(), *plain.filters))
    candidates = [
        Candidate(
            Endpoint(f"10.0.0.{number}:8000", labels={"llm-d.ai/role": role}),
            load=Load(at=0.0, waiting=0.0, running=running, kv_usage=0.1),
            in_flight=int(running),
            estimated_requests=running,
        )
        for number, role, running in ((1, "prefill", 0.0), (2, "decode", 8.0), (3, "both", 9.0))
    ]
    request = InferenceRequest("chat", prompt_tokens=1000)
    context = SchedulingContext(request, 0.0, random.Random(1), blocks=(1,))
    comparison = StrategyComparison()
    for number in range(6):
        decision = profile.run(context, candidates)
        comparison.add(DecisionRecord(f"id-{number}", float(number), decision))
    by_name = {result.name: result for result in comparison.results()[1:]}
    assert by_name["round-robin"].num_endpoints == 2


def test_without_requests_there_is_nothing_to_compare():
    """No strategy has a row."""
    assert StrategyComparison().results() == []


def test_a_rescued_request_is_left_out():
    """After a bug in routing only its endpoint is known, and the others are still compared."""
    member = EndpointSnapshot(IDLE, InflightLoad(IDLE))
    rescued = eligibility.choose_rescue([member], HttpRequest({}, b""), why="KeyError")
    comparison = StrategyComparison()
    comparison.add(DecisionRecord("rescued", 0.0, rescued))
    assert (comparison.num_requests, comparison.results()) == (0, [])
    comparison.add(record(1, strategy="adaptive"))
    assert comparison.num_requests == 1
    assert comparison.results()[0].num_endpoints == 1
