"""Shedding: drops requests of negative priority under saturation."""

from __future__ import annotations

from collections.abc import Sequence

from extproc.endpoint import Candidate
from extproc.scheduling.filters.utilization_detector import UtilizationDetector
from extproc.scheduling.profile import SchedulerProfile

#: What counts as full where the profile has no detector of its own: upstream's defaults, 5 waiting
#: requests or 0.8 of the KV blocks.
_USUAL = UtilizationDetector()


def saturated(profile: SchedulerProfile, candidates: Sequence[Candidate]) -> bool:
    """True if every eligible endpoint is saturated.

    Full is what a saturation detector among the profile's filters says, one of them where there are
    several; else `UtilizationDetector` with its defaults. An endpoint of unknown load is as
    full as the others; while no load is known none is full, so that a scraper in trouble drops
    nothing.

    Args:
        profile: That would choose.
        candidates: Eligible endpoints, at least one.
    """
    return any(
        all(detector.is_saturated(candidate) for candidate in candidates)
        for detector in profile.detectors or (_USUAL,)
    )
