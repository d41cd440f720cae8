"""When every endpoint counts as full."""

from __future__ import annotations

import pytest

from extproc.endpoint import Candidate, Endpoint, Load
from extproc.routing import admission
from extproc.scheduling.load_bounds import UtilizationDetector
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
