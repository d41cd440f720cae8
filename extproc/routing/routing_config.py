"""Routing configuration: profiles and settings, replaced as a single value."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from extproc.pool import inference_policy
from extproc.scheduling.framework import Signal
from extproc.scheduling.profile import SchedulerProfile


class RoutingSettings(msgspec.Struct, frozen=True):
    """Settings of routing.

    Attributes:
        stale_after_s: Age at which a scraped load counts as unknown.
        fallbacks: Further endpoints named after the chosen one.
        respect_subset: Keep to the endpoints the data plane allows. True, because ignoring the hint
            sends requests where they were not allowed.
        reject_unlisted: Reject requests for models that no endpoint serves, if all served models
            are known. False, because engines answer that themselves.
        busy_s: How long a request may wait on an endpoint before it counts as busy; None never
            looks.
        kubeai_names: Read `model_adapter` as the adapter of a base model, where both are known.
    """

    stale_after_s: float
    fallbacks: int = 0
    respect_subset: bool = True
    reject_unlisted: bool = False
    kubeai_names: bool = True
    busy_s: float | None = None


class RoutingConfig(msgspec.Struct, frozen=True):
    """Routing configuration that a reload replaces as a single value.

    Attributes:
        profile: For models without one of their own.
        by_model: Profiles of single models.
        settings: How requests are routed.
        policy: Objectives and rewrites that the configuration has.
    """

    profile: SchedulerProfile
    by_model: Mapping[str, SchedulerProfile]
    settings: RoutingSettings
    policy: inference_policy.InferencePolicy = inference_policy.EMPTY_POLICY

    @property
    def needs(self) -> frozenset[Signal]:
        """Every signal any profile reads."""
        profiles = (self.profile, *self.by_model.values())
        return frozenset().union(*(profile.needs for profile in profiles))
