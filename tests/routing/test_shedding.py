"""When every endpoint counts as full."""

from __future__ import annotations

import pytest

from extproc.endpoint import Candidate, Endpoint, Load
from extproc.routing import admission
from extproc.scheduling.load_bounds import (
    ConcurrencyDetector,
    SaturationRules,
    UtilizationDetector,
)
from extproc.scheduling.pickers import RandomPicker
from extproc.scheduling.profile import SchedulerProfile


def candidates(*waiting: float | None) -> list[Candidate]:
    return [
        Candidate(Endpoint(f"10.0.0.{at}:8000"), load=Load(at=0.0, waiting=depth))
        for at, depth in enumerate(waiting, 1)
    ]


@pytest.mark.parametrize(
    ("thresholds", "waiting", "is_full"),
    [
        ((), (5.0, 9.0), True),
        ((), (5.0, 4.0), False),
        ((), (5.0, None), False),
        ((), (None, None), False),
        ((3,), (3.0, 4.0), True),
        ((100, 3), (3.0, 4.0), True),
        ((3, 100), (3.0, 4.0), True),
        ((100, 99), (3.0, 4.0), False),
    ],
)
def test_a_pool_is_saturated_if_a_detector_saturates_all_endpoints(thresholds, waiting, is_full):
    """Upstream's defaults count where the profile has no detector."""
    detectors = tuple(
        UtilizationDetector(queue_depth_threshold=threshold) for threshold in thresholds
    )
    profile = SchedulerProfile("p", detectors, (), RandomPicker())
    assert admission.is_saturated(profile, candidates(*waiting)) is is_full


@pytest.mark.parametrize(
    ("rules", "waiting", "is_full"),
    [
        (SaturationRules(), (99.0, 99.0), False),
        (SaturationRules(utilization=UtilizationDetector()), (10.0, 0.0), True),
        (SaturationRules(utilization=UtilizationDetector()), (9.0, 0.0), False),
        (SaturationRules(utilization=UtilizationDetector(headroom=9.0)), (5.0, 5.0), True),
        (SaturationRules(utilization=UtilizationDetector()), (None, None), False),
        (SaturationRules(concurrency=ConcurrencyDetector()), (99.0, 99.0), False),
    ],
)
def test_rules_take_the_mean_in_place_of_the_profile(rules, waiting, is_full):
    """As upstream does, without the headroom; a detector of the profile does not count then."""
    detector = UtilizationDetector(queue_depth_threshold=1 if not is_full else 100)
    profile = SchedulerProfile("p", (detector,), (), RandomPicker())
    assert admission.is_saturated(profile, candidates(*waiting), rules) is is_full


@pytest.mark.parametrize(
    ("mode", "saturation"), [("requests", 0.5), ("tokens", 0.25), ("hybrid", 0.5)]
)
def test_saturation_of_an_endpoint_by_what_is_open(mode, saturation):
    """Open requests, uncomputed tokens or the larger, each over its bound."""
    detector = ConcurrencyDetector(
        concurrency_mode=mode, max_concurrency=4, max_token_concurrency=40, headroom=1.0
    )
    candidate = Candidate(Endpoint("10.0.0.1:8000"), in_flight=2, queued_tokens=10)
    assert detector.saturation(candidate) == saturation


@pytest.mark.parametrize(("waiting", "kv_usage", "saturation"), [(4.0, 0.4, 0.8), (1.0, 0.8, 1.0)])
def test_saturation_of_an_endpoint_by_its_load(waiting, kv_usage, saturation):
    """The larger of waiting requests and KV cache usage, each over its threshold."""
    load = Load(at=0.0, waiting=waiting, kv_usage=kv_usage)
    candidate = Candidate(Endpoint("10.0.0.1:8000"), load=load)
    assert UtilizationDetector().saturation(candidate) == pytest.approx(saturation)
